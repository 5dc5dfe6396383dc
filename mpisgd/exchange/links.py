"""What the link of each node carries, by where shards and learners are: the least seconds of an exchange.

In a round each learner pushes one gradient to all shards, and pulls the weights from all of them. What is exchanged within a node
does not come to its link; each other byte leaves one node and enters another. A link is as busy as its busier direction. So one
shard on a node of its own, and lambda learners elsewhere: lambda vectors. S shards, one on each of S nodes, with k learners beside
each: 2 k (S - 1) / S vectors, as a ring would [Zhang16 2.3].
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from mpisgd.base.errors import ConfigError
from mpisgd.config import Config, compatibility, footprint, replace
from mpisgd.exchange.roles import Roles, of_job

GIGABIT = 125e6
"""Bytes per second."""
_WASTE = 1.5
"""So many times what could be is worth a word."""
STREAMED_NBYTES = 4 * 2**21
"""Of a slice, four chunks (`vectors/chunks.py`); of smaller ones little is under way both ways at once."""


def nbytes_each_way(config: Config, parameters: float) -> tuple[float, float]:
    """Bytes of one push and of one pull of so many parameters."""
    push, pull = footprint.of_exchange(vars(config))
    return parameters * push, parameters * pull


@dataclass(frozen=True)
class Carried:
    """What a node has, and the bytes on its link in a round: sent, received, and those that one learner there pushes and pulls."""

    learners: int
    shards: int
    sent: float
    received: float
    pushed_by_each: float
    pulled_by_each: float


def carried(
    learner_hosts: Sequence[str], shard_hosts: Sequence[str], sizes: Sequence[float], push: float, pull: float
) -> dict[str, Carried]:
    """What the link of each node carries in one round.

    Args:
        learner_hosts: the host of each learner.
        shard_hosts: the host of each shard.
        sizes: the share of the parameters that each shard owns, in sum 1.
        push, pull: bytes of a whole push, and of a whole pull.
    """
    learners, shards, held = Counter(learner_hosts), Counter(shard_hosts), defaultdict[str, float](float)
    for host, size in zip(shard_hosts, sizes, strict=True):
        held[host] += size
    found = {}
    for host in dict.fromkeys((*shard_hosts, *learner_hosts)):
        elsewhere, given = len(learner_hosts) - learners[host], max(0.0, 1 - held[host])
        found[host] = Carried(
            learners[host],
            shards[host],
            sent=pull * held[host] * elsewhere + push * given * learners[host],
            received=push * held[host] * elsewhere + pull * given * learners[host],
            pushed_by_each=push * given,
            pulled_by_each=pull * given,
        )
    return found


def busiest(
    learner_hosts: Sequence[str], shard_hosts: Sequence[str], sizes: Sequence[float], push: float, pull: float
) -> tuple[str, float]:
    """The node with the busiest link, and bytes of its busier direction in one round; ("", 0.0) where nothing comes to a link."""
    found = carried(learner_hosts, shard_hosts, sizes, push, pull)
    host, nbytes = max(((host, max(each.sent, each.received)) for host, each in found.items()), key=lambda each: each[1])
    return (host, nbytes) if nbytes > 0 else ("", 0.0)


def said(config: Config, roles: Roles, hosts: Sequence[str], bounds: Sequence[tuple[int, int]]) -> tuple[str, str]:
    """What is said of the links at the start of a run: a part of its first line, and a warning; each may be "".

    Args:
        hosts: of each rank.
        bounds: the slice of each shard.
    """
    if config.in_groups:  # whose ranks exchange with the shards of their stage alone
        return "", ""
    parameters = bounds[-1][1]
    host, nbytes = _of_roles(config, roles, hosts, [end - start for start, end in bounds])
    if not host:
        return "", ""
    carried = f"links carry up to {_megabytes(nbytes)} one way for a push and a pull of each learner ({host}):"
    text = f"{carried} at least {nbytes / GIGABIT:.3g} s at 1 Gbit/s"
    if _may_stream(config, bounds):
        text += ", which --exchange streamed comes nearer to, with the same bits"
    better = _best(config, hosts)
    if better is None:
        return text, ""
    shards = len(better.shard_ranks)
    least = _of_roles(config, better, hosts, [parameters / shards] * shards)[1] * roles.lambda_ / better.lambda_
    if nbytes < _WASTE * least:
        return text, ""
    what = f"a shard beside the learners of each node (--shards {shards} --placement spread) would have {_megabytes(least)}"
    return text, f"the link of {host} carries {_megabytes(nbytes)} one way in each round; {what} for as many learners"


def _may_stream(config: Config, bounds: Sequence[tuple[int, int]]) -> bool:
    """Whether large slices travel whole, and could in chunks, both ways at once."""
    if config.exchange != "whole" or not config.protocol.streams:
        return False
    if 4 * max(end - start for start, end in bounds) < STREAMED_NBYTES:
        return False
    return not compatibility.refused(replace(config, exchange="streamed"))


def _of_roles(config: Config, roles: Roles, hosts: Sequence[str], sizes: Sequence[float]) -> tuple[str, float]:
    learner_hosts, shard_hosts = ([hosts[rank] for rank in ranks] for ranks in (roles.learner_ranks, roles.shard_ranks))
    whole = sum(sizes)
    return busiest(learner_hosts, shard_hosts, [size / whole for size in sizes], *nbytes_each_way(config, whole))


def _best(config: Config, hosts: Sequence[str]) -> Roles | None:
    """The roles with one shard on each node; None where they leave no learner, or learners are shards anyway."""
    if config.protocol.collective:
        return None
    try:
        return of_job(replace(config, shards=len(set(hosts)), placement="spread"), hosts)
    except ConfigError:
        return None


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.4g} MB"
