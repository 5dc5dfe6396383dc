"""Cores of a node, dealt to its ranks by what they do: one for each that serves, equal shares of the rest for those that compute.

Launchers bind ranks alike: a shard gets as many cores as a learner. So with `binding = "roles"` ranks bind themselves, once their
roles are known, to what the launcher and the batch system have left to all ranks of their node. It is the same under any launcher.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mpisgd.exchange.roles import Roles
from mpisgd.liveness import binding
from mpisgd.liveness.guard import ranges
from mpisgd.liveness.ranks import Ranks

if TYPE_CHECKING:
    from mpisgd.comm.mpi.library import MPI

Domain = tuple[frozenset[int], ...]
"""Cores that share memory of their own (NUMA), in their order; each is the hardware threads of one core."""

Share = tuple[frozenset[int], ...]
"""Cores of one rank; none where it is left as it was."""


def domains(allowed: frozenset[int], root: Path = Path("/sys/devices/system")) -> tuple[Domain, ...]:
    """The cores among these hardware threads, by NUMA domain; all in one where the system does not say."""
    nodes = sorted(root.glob("node/node[0-9]*"), key=lambda path: int(path.name[4:]))
    listed = [_listed(path / "cpulist") & allowed for path in nodes]
    unknown = allowed - frozenset[int]().union(*listed)
    return tuple(_cores(each, root) for each in (*listed, unknown) if each)


def _cores(threads: frozenset[int], root: Path) -> Domain:
    siblings = {_listed(root / f"cpu/cpu{each}/topology/thread_siblings_list") & threads or frozenset({each}) for each in threads}
    return tuple(sorted(siblings, key=min))


def _listed(path: Path) -> frozenset[int]:
    """`0-3,8` of a file of the system's; none where there is none."""
    try:
        parts = [part.split("-") for part in path.read_text().strip().split(",") if part]
        return frozenset(cpu for part in parts for cpu in range(int(part[0]), int(part[-1]) + 1))
    except (OSError, ValueError):
        return frozenset()


def deal(places: Sequence[Domain], computes: Sequence[bool]) -> list[Share]:
    """The share of each rank of a node, in rank order; no rank has any where there are fewer cores than ranks.

    Who serves has one core, each from the domain with most left. Who computes has as many as the others that do, since synchronous
    protocols wait for the slowest; the share does not cross domains where there are at least as many that compute as domains.
    """
    left = [list(domain) for domain in places]
    if sum(map(len, left)) < len(computes):
        return [() for _ in computes]
    shares: list[Share] = [() if computing else (max(left, key=len).pop(0),) for computing in computes]
    count = sum(computes)
    if not count:
        return shares
    if count < sum(map(bool, left)):
        left = [[core for domain in left for core in domain]]
    size = max(size for size in range(1, sum(map(len, left)) + 1) if size == 1 or sum(len(each) // size for each in left) >= count)
    chunks = [tuple(each[start : start + size]) for each in left for start in range(0, len(each) - size + 1, size)]
    computing = iter(chunks)
    return [next(computing) if takes else share for share, takes in zip(shares, computes, strict=True)]


def of_node(allowed: frozenset[int], ranks: Sequence[int], roles: Roles) -> dict[int, Share]:
    """The share of each of these ranks, all of one node, on which any of them may run on `allowed`."""
    alone = {rank for rank in roles.shard_ranks if rank not in roles.computing_ranks}
    working = {*roles.computing_ranks, roles.evaluator_rank}.difference(alone)
    return dict(zip(ranks, deal(domains(allowed), [rank in working for rank in ranks]), strict=True))


def bind(comm: MPI.Intracomm, ranks: Ranks, roles: Roles) -> tuple[Ranks, str]:
    """Bind this rank, and see what became of all: the ranks as they are now, and what is to be told, "" if nothing. Collective."""
    host = ranks.hosts[ranks.rank]
    here = [rank for rank, name in enumerate(ranks.hosts) if name == host]
    share = of_node(ranks.allowed, here, roles)[ranks.rank]
    problem = f"{host} has {ranks.cores} core(s) for {len(here)} ranks, which share them all" if not share else take(share)
    everybody = comm.allgather((binding.own_cores(), len(share) if not problem else 0, problem))
    problems = list(dict.fromkeys(problem for *_, problem in everybody if problem))
    told = f"binding = 'roles': {problems[0]}{f', and {len(problems) - 1} more' * (len(problems) > 1)}" if problems else ""
    cores = tuple(own for own, *_ in everybody)
    changed = dataclasses.replace(
        ranks, own_cores=len(cores[ranks.rank]), shares=tuple(count for _, count, _ in everybody), bound=cores, badly_bound=""
    )
    return changed, told


def take(share: Share) -> str:
    """Bind all threads of this process; why it could not be done, or "": seen by asking the system again."""
    wanted = frozenset[int]().union(*share)
    where = f"process {os.getpid()} could not be bound to core {ranges(sorted(wanted))}"
    for thread in Path("/proc/self/task").glob("[0-9]*"):  # MPI has some, and new ones are bound as the one that makes them
        try:
            os.sched_setaffinity(int(thread.name), wanted)
        except ProcessLookupError:
            continue
        except OSError as error:
            return f"{where}: {error.strerror}"
    found = binding.own_cores()
    return "" if found == wanted else f"{where}: it is on {ranges(sorted(found))}"
