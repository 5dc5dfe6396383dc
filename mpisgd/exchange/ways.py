"""Ways in which vectors travel, of the same bits: the program chooses.

    whole      a vector in a message
    in-place   in memory of a node, with headers alone sent (`travel/in_place.py`, `collectives/shared.py`)
    on-gpu     the same in memory of a GPU (`travel/on_gpu.py`)
    streamed   in chunks, both ways at once (`travel/streamed.py`)
    gathered   whole, from all learners at once (`travel/gathering.py`)
    buckets    an allreduce's, in parts, behind both passes (`collectives/bucket_channel.py`)

For measuring, rank 0's variable MPISGD_TRAVEL names another; `messages`: any but in shared memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from mpisgd.base.errors import ConfigError
from mpisgd.config import Config, replace
from mpisgd.exchange.link_load import load_of, sizes_of
from mpisgd.exchange.roles import Roles
from mpisgd.exchange.travel import in_place
from mpisgd.gradient import stages
from mpisgd.vectors.body import PARKED_NBYTES
from mpisgd.vectors.buckets import BUCKET_NBYTES
from mpisgd.vectors.chunks import COARSE, FINE, count_of

AUTO, WHOLE, STREAMED, GATHERED, BUCKETS = "auto", "whole", "streamed", "gathered", "buckets"
ON_GPU, IN_PLACE = IN_MEMORY = "on-gpu", "in-place"
"""Ways in shared memory, the faster first."""
MESSAGES = "messages"
VARIABLE = "MPISGD_TRAVEL"
LEAST_NBYTES = 2**22
"""Least slice to stream."""
# Streamed over whole, 2 nodes, slices of 0.12, 0.6, 1.1, 2.3, 4.6 MB: 1.2, 1.25, 1.2, 1.3, 1.2 at 1 Gbit/s, 1.1, 1.1, 1.1, 1.6, 1.2
# at 10. But the log of a streamed run tells `plan` and `report` less: neither a link's rate nor a shard's service.
# In buckets an MLP of 44 MB on 2, 4 nodes is 1.09, 1.10 times as fast as whole at 1 Gbit/s; 1.02, 0.97 at 2.5; 0.95 at 5 (2 nodes).
# Slices of 2.7, 2, 1 MB at 1 Gbit/s: 1.19, 1.03, 1.00.
SLOW = 2e8
"""Most bytes per second of links where an allreduce's buckets, and finer chunks, gain."""
SMALL_NBYTES = 2**16
"""Least slice to gather."""
UNEVEN = 0.5
"""Most ratio of the slowest to the fastest link where shards gather."""
_ROUNDS = "layers, or vectors ahead, travel by themselves"
_HOST = "vectors are received into the host's memory"


def why_not(config: Config) -> Mapping[str, str]:
    """Return each way's reason to be impossible; "" = none."""
    protocol, collective = config.protocol, config.protocol.collective
    parted, several = not config.plain, config.accumulation > 1 or not stages.pushes_what_it_computes(config)
    no_messages, host = (collective, "learners exchange slices all at once"), (config.shard_device == "cuda", _HOST)
    in_place = [
        (not (collective or (protocol.alike and protocol.streams)), "a learner may compute while its weights change"),
        (parted, _ROUNDS),
        (config.in_groups, "the ranks of a group have different weights"),
        (config.push_format != "float32", "gradients are rounded"),
        (not collective and several, "a gradient is made from several vectors"),
        (config.pull_format != "float32", "learners compute from rounded weights"),
    ]
    computed_on = {config.device, config.shard_device}
    reasons = {
        WHOLE: [],
        ON_GPU: [*in_place, (computed_on != {"cuda"}, "learners or shards compute on the host")],
        IN_PLACE: in_place,
        STREAMED: [
            no_messages,
            (not protocol.streams, "updates do not wait for all begun pushes"),
            (parted, _ROUNDS),
            (config.push_format == "topk", "the largest elements of a slice form no chunks"),
            (config.nonfinite != "stop", "the first chunks are summed before the last have come"),
            (config.agrees, "the first chunks of the new weights leave before the last of the gradients have come"),
            (config.sampling == "dealt", "a learner asks for weights before the gradient has come, and would have two portions"),
            (config.in_groups, "a group's ranks push, then pull, then agree on the answers"),
            host,
        ],
        GATHERED: [no_messages, (protocol.batch, "shards wait for the coordinator's portions"), host],
        BUCKETS: [
            (not collective, "shards are apart from learners"),
            (config.push_format == "topk", "the largest elements of a slice are known when the whole slice is there"),
            (config.micro_batches > 1, "the mean is there after the last backward pass"),
            (config.device == "cuda", "a GPU computes behind the host, which would wait for each part"),
        ],
    }
    return {way: next((why for refused, why in each if refused), "") for way, each in reasons.items()}


def possible(config: Config, roles: Roles, hosts: Sequence[str]) -> Mapping[str, str]:
    """Return `why_not` on these ranks."""
    reasons = dict(why_not(config))
    if roles.tolerant:
        tolerant = {
            **dict.fromkeys(IN_MEMORY, "a learner back late would overwrite what shards sum"),
            STREAMED: "a dying learner would leave a part of a gradient in the weights",
            GATHERED: "a shard does not wait until answers have left, so a hanging learner stays unseen",
        }
        reasons |= {way: reasons[way] or why for way, why in tolerant.items()}
    if len({hosts[rank] for rank in in_place.ranks_of(roles)}) > 1:
        reasons |= {way: reasons[way] or "ranks are on several nodes" for way in IN_MEMORY}
    return reasons


def said(config: Config) -> str:
    """Name the exchange."""
    ahead = f", {config.ahead} ahead" if config.ahead else ""
    return f"exchange {config.way}{ahead}{', layer by layer' * config.per_layer}"


def chunks_of_slices(config: Config, bounds: Sequence[tuple[int, int]]) -> int:
    """Return the number of chunks of each slice; 0 = not streamed."""
    return count_of(bounds, config.chunks) if config.way == STREAMED else 0


def travel_asked() -> str:
    """Return the variable's value, or ""."""
    return os.environ.get(VARIABLE, "")


def choose(
    config: Config,
    roles: Roles,
    hosts: Sequence[str],
    bounds: Sequence[tuple[int, int]],
    rates: Callable[[], tuple[float, float]],
    shares: Callable[[str], bool] = lambda way: True,
    travel: str = "",
    *,
    cuts: bool = True,
) -> Config:
    """Choose the way, and chunks and sizes of streamed slices, on all ranks, unless chosen.

    Args:
        rates: of the slowest and the fastest link, in bytes per second.
        shares: whether ranks can share memory, by way.
        travel: MPISGD_TRAVEL.
        cuts: sizes may be chosen.

    Raises ConfigError: another way, impossible here.
    """
    if config.way != AUTO:
        return config
    config = replace(config, way=_way(config, roles, hosts, bounds, rates, shares, travel))
    if config.way != STREAMED:
        return config
    slow = load_of(config, roles, hosts, bounds)[1] and rates()[0] <= SLOW
    config = replace(config, chunks=FINE if slow else COARSE)
    if not cuts or travel == STREAMED or config.norms_of_slices:
        return config
    return replace(config, slices=sizes_of(config, roles, hosts, bounds[-1][1]))


def _way(
    config: Config,
    roles: Roles,
    hosts: Sequence[str],
    bounds: Sequence[tuple[int, int]],
    rates: Callable[[], tuple[float, float]],
    shares: Callable[[str], bool],
    travel: str,
) -> str:
    reasons = possible(config, roles, hosts)
    if travel not in ("", MESSAGES):
        why = reasons.get(travel, f"the ways are {', '.join((MESSAGES, *reasons))}")
        if travel in IN_MEMORY and not why and not shares(travel):
            why = "ranks cannot share memory here"
        if why:
            raise ConfigError(f"{VARIABLE} = {travel!r}: expected another way, or none: {why}")
        return travel
    shared = (way for way in IN_MEMORY if travel != MESSAGES and not reasons[way] and shares(way))
    if way := next(shared, ""):
        return way
    if not load_of(config, roles, hosts, bounds)[1]:
        return WHOLE
    nbytes = 4 * max(end - start for start, end in bounds)
    return _over_links(config, nbytes, roles.lambda_, reasons, rates)


def _over_links(
    config: Config, nbytes: int, lambda_: int, reasons: Mapping[str, str], rates: Callable[[], tuple[float, float]]
) -> str:
    if config.protocol.collective:
        # rounded shares are logged by bucket
        large = nbytes >= BUCKET_NBYTES and config.push_format == "float32"
        return BUCKETS if large and not reasons[BUCKETS] and rates()[0] <= SLOW else WHOLE
    if not reasons[STREAMED] and nbytes >= LEAST_NBYTES:
        return STREAMED
    if config.protocol.streams or reasons[GATHERED] or nbytes < SMALL_NBYTES or not 1 < lambda_ <= PARKED_NBYTES // nbytes:
        return WHOLE
    slowest, fastest = rates()
    return GATHERED if slowest <= UNEVEN * fastest else WHOLE
