"""Ranks of a job as started: hosts, cores, conduct on a node."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mpisgd.base.errors import ConfigError
from mpisgd.comm.mpi.launch import words
from mpisgd.liveness.guard import RANK_VARIABLES, SIZE_VARIABLES, ranges, said_by_launcher

if TYPE_CHECKING:
    from mpisgd.comm.mpi.library import MPI

MEND = "undo the binding, mpirun --bind-to none or srun --cpu-bind=none, or ask for a core for each rank, --cpus-per-task"
CONTROL_GROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_OPEN_FILES = 128
"""Files of a training rank: log, checkpoints, data, pipes."""


@dataclass(frozen=True)
class Ranks:
    """Facts known to all ranks."""

    size: int
    rank: int
    hosts: tuple[str, ...]
    cores: int
    """Cores of this node that its ranks may use."""
    own_cores: int
    pids: tuple[int, ...]
    badly_bound: str = ""
    """Words on ranks bound to too few cores; "" = none."""
    allowed: frozenset[int] = frozenset()
    """Numbers of this node's usable cores."""
    bound: tuple[frozenset[int], ...] = ()
    """Cores of ranks bound by role (`cores.bind`); empty = not asked."""
    shares: tuple[int, ...] = ()
    """Then, cores that each rank has alone; 0 = it shares the node's."""

    @property
    def ranks_on_node(self) -> int:
        return self.hosts.count(self.hosts[self.rank])

    @property
    def ranks_per_core(self) -> float:
        return self.ranks_on_node / self.cores

    @property
    def oversubscribed(self) -> bool:
        return self.ranks_on_node > self.cores

    @property
    def threads(self) -> int:
        """Fair number of torch threads for this rank (TRAPS 4)."""
        return self.threads_of(self.rank)

    def threads_of(self, rank: int) -> int:
        """Return the number for a rank bound by role, or of this node."""
        if self.shares and self.shares[rank]:
            return self.shares[rank]
        return max(1, min(self.own_cores, self.cores // self.ranks_on_node))

    def threads_beside_gpus(self, servers: Collection[int]) -> int:
        """Return the number for this rank, of `servers`, if others of the node have GPUs, and need a core each."""
        on_node = [rank in servers for rank, host in enumerate(self.hosts) if host == self.hosts[self.rank]]
        free = (self.cores - on_node.count(False)) // on_node.count(True)
        return max(self.threads, min(self.own_cores, free))

    def end(self, ranks: Iterable[int]) -> None:
        """Kill those on this host: the launcher would wait for hanging ranks."""
        for rank in ranks:
            if self.hosts[rank] == self.hosts[self.rank] and rank != self.rank:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pids[rank], signal.SIGKILL)


def place_to_speak(rank: int, hosts: Sequence[str], silent: Collection[int]) -> int:
    """Return how many ranks speak before `rank`: first ranks of nodes first, nodes of silent ranks last."""
    gone, on_node = {hosts[each] for each in silent}, Counter[str]()
    turns = []
    for each, host in enumerate(hosts):
        turns.append((host in gone, on_node[host], each))
        on_node[host] += 1
    return sum(turn < turns[rank] and turn[-1] not in silent for turn in turns)


def look_around(comm: MPI.Intracomm) -> Ranks:
    own = own_cores()
    everybody = comm.allgather((socket.gethostname(), own, os.getpid(), granted_cores()))
    rank = comm.Get_rank()
    host = everybody[rank][0]
    cores = frozenset[int]().union(*(theirs for name, theirs, _, _ in everybody if name == host))
    return Ranks(
        size=comm.Get_size(),
        rank=rank,
        hosts=tuple(name for name, *_ in everybody),
        cores=len(cores),
        allowed=cores,
        own_cores=len(own),
        pids=tuple(pid for _, _, pid, _ in everybody),
        badly_bound=complaint(
            [name for name, *_ in everybody], [theirs for _, theirs, _, _ in everybody], [count for *_, count in everybody]
        ),
    )


def own_cores() -> frozenset[int]:
    return frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def granted_cores(root: Path = CONTROL_GROUPS, membership: Path = MEMBERSHIP) -> int:
    """Return the number of the job's cores here, whatever the binding: its control group's, else the machine's."""
    return len(listed(of_control_group("cpuset.cpus.effective", root, membership))) or os.cpu_count() or 1


def of_control_group(file: str, root: Path = CONTROL_GROUPS, membership: Path = MEMBERSHIP) -> str:
    """Return a file of this process's control group; "" = none."""
    try:
        path = next(line[3:] for line in membership.read_text().splitlines() if line.startswith("0::"))
        return (root / path.strip("/") / file).read_text()
    except (OSError, StopIteration):
        return ""


def listed(text: str) -> frozenset[int]:
    """Return the numbers of "0-3,8"; none = another text."""
    try:
        parts = [part.split("-") for part in text.strip().split(",") if part]
        return frozenset(number for part in parts for number in range(int(part[0]), int(part[-1]) + 1))
    except ValueError:
        return frozenset()


def complaint(hosts: Sequence[str], cores: Sequence[frozenset[int]], granted: Sequence[int]) -> str:
    """Describe ranks bound to too few cores while others idle; "" = none.

    `granted`: number of the job's cores there.
    """
    for host in dict.fromkeys(hosts):
        ranks = [rank for rank, each in enumerate(hosts) if each == host]
        every = frozenset[int]().union(*(cores[rank] for rank in ranks))
        most = max(granted[rank] for rank in ranks)
        if len(ranks) > len(every):
            if most > len(every):
                where = f"core{'s' * (len(every) > 1)} {ranges(sorted(every))} of {host}, where {most} may be used"
                return f"rank {ranges(ranks)}: all {len(ranks)} are bound to {where}"
            continue
        for bound in dict.fromkeys(cores[rank] for rank in ranks):
            alike = [rank for rank in ranks if cores[rank] == bound]
            if len(alike) > len(bound):
                where = f"core{'s' * (len(bound) > 1)} {ranges(sorted(bound))} of {host}"
                return f"rank {ranges(alike)} are bound to {where}, where {len(ranks)} ranks have {len(every)} cores"
    return ""


def connections(rank: int, hosts: Sequence[str], shard_ranks: Collection[int]) -> int:
    """Return how many other nodes' ranks may connect: all to shards and rank 0, else shards and a tree."""
    elsewhere = [each for each, host in enumerate(hosts) if host != hosts[rank]]
    if rank == 0 or rank in shard_ranks:
        return len(elsewhere)
    return min(len(elsewhere), 1 + len(shard_ranks) + 2 * len(hosts).bit_length())


def make_room(connections: int) -> str:
    """Raise the limit of open files to this process's needs; return a shortage, "" = none."""
    needed = len(list(Path("/dev/fd").iterdir())) + _OPEN_FILES + connections if connections else 0
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return ""
    granted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (granted, hard))
    return "" if granted == needed else f"may need {needed:,} open files and connections, and may have {hard:,}"


def refuse_singletons(ranks: Ranks) -> None:
    """Refuse N jobs of one rank instead of a job of N (TRAPS 7). Raises ConfigError."""
    if ranks.size == 1 and "LOCAL_RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            f"this MPI sees 1 rank, but WORLD_SIZE = {os.environ['WORLD_SIZE']}: torchrun, or a similar launcher, starts processes"
            f" unknown to MPI; start the ranks by {words(int(os.environ['WORLD_SIZE']))} mpisgd train ..."
        )
    if ranks.size > 1:
        return
    rank = next(said_by_launcher(RANK_VARIABLES), ("", 0))  # PMIx and ALPS tell no size
    name, number = next((each for each in said_by_launcher(SIZE_VARIABLES) if each[1] > 1), rank)
    if number > 0:
        raise ConfigError(
            f"this MPI sees 1 rank, but {name} = {number}: the launcher and the MPI of mpi4py do not"
            " belong together: every rank believes it is alone; use the mpirun of mpi4py's MPI, or srun --mpi=...;"
            " mpisgd doctor names the launchers that fit"
        )
