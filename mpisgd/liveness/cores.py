"""Cores of a node, dealt by role: one to each serving rank, equal shares of the rest to computing ranks.

With `binding = "roles"` ranks bind themselves once roles are known, within the cores left to their node's ranks.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mpisgd.exchange.roles import Roles
from mpisgd.liveness.guard import ranges
from mpisgd.liveness.ranks import Ranks, listed, own_cores

if TYPE_CHECKING:
    from mpisgd.comm.mpi.library import MPI

Domain = tuple[frozenset[int], ...]
"""Cores of a NUMA domain, each as its hardware threads."""

Share = tuple[frozenset[int], ...]
"""Cores of a rank; empty = left as it was."""


def domains(allowed: frozenset[int], root: Path = Path("/sys/devices/system")) -> tuple[Domain, ...]:
    """Return the cores of these hardware threads by NUMA domain; all in one domain if unknown."""
    nodes = sorted(root.glob("node/node[0-9]*"), key=lambda path: int(path.name[4:]))
    known = [_listed(path / "cpulist") & allowed for path in nodes]
    unknown = allowed - frozenset[int]().union(*known)
    return tuple(_cores(each, root) for each in (*known, unknown) if each)


def _cores(threads: frozenset[int], root: Path) -> Domain:
    siblings = {_listed(root / f"cpu/cpu{each}/topology/thread_siblings_list") & threads or frozenset({each}) for each in threads}
    return tuple(sorted(siblings, key=min))


def _listed(path: Path) -> frozenset[int]:
    try:
        return listed(path.read_text())
    except OSError:
        return frozenset()


def deal(places: Sequence[Domain], computes: Sequence[bool]) -> list[Share]:
    """Return each rank's share, in rank order; all empty with fewer cores than ranks.

    A serving rank gets a core of the fullest domain. Computing ranks get equal shares, across domains only if fewer than domains.
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
    alone = {rank for rank in roles.shard_ranks if rank not in roles.computing_ranks}
    working = {*roles.computing_ranks, roles.evaluator_rank}.difference(alone)
    return dict(zip(ranks, deal(domains(allowed), [rank in working for rank in ranks]), strict=True))


def bind(comm: MPI.Intracomm, ranks: Ranks, roles: Roles) -> tuple[Ranks, str]:
    """Bind this rank (collective); return all ranks' new facts, and a message, "" if none."""
    host = ranks.hosts[ranks.rank]
    here = [rank for rank, name in enumerate(ranks.hosts) if name == host]
    share = of_node(ranks.allowed, here, roles)[ranks.rank]
    problem = f"{host} has {ranks.cores} core(s) for {len(here)} ranks: all ranks share all cores" if not share else take(share)
    everybody = comm.allgather((own_cores(), len(share) if not problem else 0, problem))
    problems = list(dict.fromkeys(problem for *_, problem in everybody if problem))
    told = f"binding = 'roles': {problems[0]}{f', and {len(problems) - 1} more' * (len(problems) > 1)}" if problems else ""
    cores = tuple(own for own, *_ in everybody)
    changed = dataclasses.replace(
        ranks, own_cores=len(cores[ranks.rank]), shares=tuple(count for _, count, _ in everybody), bound=cores, badly_bound=""
    )
    return changed, told


def take(share: Share) -> str:
    """Bind all threads of this process; return why that failed, "" if the system confirms it."""
    wanted = frozenset[int]().union(*share)
    where = f"process {os.getpid()} could not be bound to core {ranges(sorted(wanted))}"
    for thread in Path("/proc/self/task").glob("[0-9]*"):  # MPI has some; new threads are bound as their maker
        try:
            os.sched_setaffinity(int(thread.name), wanted)
        except ProcessLookupError:
            continue
        except OSError as error:
            return f"{where}: {error.strerror}"
    found = own_cores()
    return "" if found == wanted else f"{where}: found core {ranges(sorted(found))}"
