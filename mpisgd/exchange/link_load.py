"""Load of each node's link by the placement of shards and learners: the least seconds of an exchange.

In a round each learner pushes and pulls a whole vector; traffic within a node is free, and a link's busier direction counts. A
shard alone on a node: lambda vectors. S shards on S nodes, k learners beside each: 2 k (S - 1) / S vectors, as in a ring [Zhang16
2.3].
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from mpisgd.base.errors import ConfigError
from mpisgd.config import Config, footprint, replace
from mpisgd.exchange.roles import Roles, of_job

GIGABIT = 125e6
"""Bytes per second."""
_WASTE = 1.5
"""Ratio to the least possible load from which a warning is due."""
_GAIN = 1.05
"""Ratio of loads from which slices are uneven."""
_LEAST = 0.02
"""Least share of an even slice."""
_HALVINGS = 60


def nbytes_each_way(config: Config, parameters: float) -> tuple[float, float]:
    push, pull = footprint.of_exchange(vars(config))
    return parameters * push, parameters * pull


@dataclass(frozen=True)
class Carried:
    """Ranks of a node, and bytes on its link per round."""

    learners: int
    shards: int
    sent: float
    received: float
    pushed_by_each: float
    pulled_by_each: float


def carried(
    learner_hosts: Sequence[str], shard_hosts: Sequence[str], sizes: Sequence[float], push: float, pull: float
) -> dict[str, Carried]:
    """Return the load of each node's link per round; `sizes`: share of the parameters of each shard, in sum 1."""
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
    """Return the node with the busiest link, and bytes of its busier direction; ("", 0.0) without traffic."""
    found = carried(learner_hosts, shard_hosts, sizes, push, pull)
    host, nbytes = max(((host, max(each.sent, each.received)) for host, each in found.items()), key=lambda each: each[1])
    return (host, nbytes) if nbytes > 0 else ("", 0.0)


def shares_of(learner_hosts: Sequence[str], shard_hosts: Sequence[str], push: float, pull: float) -> list[float]:
    """Return each shard's share for alike links [BytePS 3, Theorem 1]; [] beside half of the learners."""
    learners, shards = Counter(learner_hosts), Counter(shard_hosts)
    ways, most = ((push, pull), (pull, push)), max(learners[host] for host in shards)
    if (len(learner_hosts) - most) * min(push, pull) <= most * max(push, pull):
        return []

    def fitting(host: str, level: float) -> float:
        near, far = learners[host], len(learner_hosts) - learners[host]
        share = min((level - near * one) / (far * other - near * one) for one, other in ways)
        return max(_LEAST / len(shard_hosts), share)

    low, high = 0.0, (push + pull) * len(learner_hosts)
    for _ in range(_HALVINGS):
        level = (low + high) / 2
        low, high = (level, high) if sum(fitting(host, level) for host in shards) < 1 else (low, level)
    shares = [fitting(host, high) / shards[host] for host in shard_hosts]
    return [share / sum(shares) for share in shares]


def sizes_of(config: Config, roles: Roles, hosts: Sequence[str], parameters: int) -> tuple[int, ...]:
    """Return sizes for alike links; () where even slices nearly do."""
    learner_hosts, shard_hosts = _placed(roles, hosts)
    each_way = nbytes_each_way(config, 1)
    shares, even = shares_of(learner_hosts, shard_hosts, *each_way), [1 / len(shard_hosts)] * len(shard_hosts)
    loads = [busiest(learner_hosts, shard_hosts, each, *each_way)[1] for each in (shares or even, even)]
    if loads[1] < _GAIN * loads[0]:
        return ()
    edges = [round(parameters * share) for share in accumulate(shares, initial=0.0)]
    return tuple(end - start for start, end in pairwise(edges))


def said(config: Config, roles: Roles, hosts: Sequence[str], bounds: Sequence[tuple[int, int]]) -> tuple[str, str]:
    """Return a part of the run's first line about links, and a warning; each may be empty."""
    if config.in_groups:  # ranks exchange with the shards of their stage alone
        return "", ""
    parameters = bounds[-1][1]
    host, nbytes = load_of(config, roles, hosts, bounds)
    if not host:
        return "", ""
    carried = f"links carry up to {_megabytes(nbytes)} one way for a push and a pull of each learner ({host}):"
    text = f"{carried} at least {nbytes / GIGABIT:.3g} s at 1 Gbit/s"
    if config.slices:
        text += f", with slices of {_megabytes(4 * min(config.slices))} to {_megabytes(4 * max(config.slices))}"
    better = _best(config, hosts)
    if better is None:
        return text, ""
    shards = len(better.shard_ranks)
    sizes = sizes_of(config, better, hosts, parameters) if config.slices else ()
    least = _of_roles(config, better, hosts, sizes or [parameters / shards] * shards)[1] * roles.lambda_ / better.lambda_
    if nbytes < _WASTE * least:
        return text, ""
    what = f"a shard beside the learners of each node (--shards {shards} --placement spread) would have {_megabytes(least)}"
    return text, f"the link of {host} carries {_megabytes(nbytes)} one way in each round; {what} for as many learners"


def load_of(config: Config, roles: Roles, hosts: Sequence[str], bounds: Sequence[tuple[int, int]]) -> tuple[str, float]:
    return _of_roles(config, roles, hosts, [end - start for start, end in bounds])


def _of_roles(config: Config, roles: Roles, hosts: Sequence[str], sizes: Sequence[float]) -> tuple[str, float]:
    learner_hosts, shard_hosts = _placed(roles, hosts)
    whole = sum(sizes)
    return busiest(learner_hosts, shard_hosts, [size / whole for size in sizes], *nbytes_each_way(config, whole))


def _placed(roles: Roles, hosts: Sequence[str]) -> tuple[list[str], list[str]]:
    return [hosts[rank] for rank in roles.learner_ranks], [hosts[rank] for rank in roles.shard_ranks]


def _best(config: Config, hosts: Sequence[str]) -> Roles | None:
    """Return roles with a shard on each node; None without learners left, or where learners are shards anyway."""
    if config.protocol.collective:
        return None
    try:
        return of_job(replace(config, shards=len(set(hosts)), placement="spread"), hosts)
    except ConfigError:
        return None


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.4g} MB"
