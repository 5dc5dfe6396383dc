"""The ranks of a job as they were started: hosts, cores, and how each should behave on its node."""

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
from mpisgd.liveness import binding
from mpisgd.liveness.guard import SIZE_VARIABLES, launched_rank, launched_rank_variable

if TYPE_CHECKING:
    from mpisgd.comm.mpi.library import MPI

_OPEN_FILES = 128
"""Files that a rank may open while it trains: log, checkpoints, data, pipes of its data's workers."""


@dataclass(frozen=True)
class Ranks:
    """Facts that all ranks know of each other."""

    size: int
    rank: int
    hosts: tuple[str, ...]
    """Host name of each rank."""
    cores: int
    """Cores of this rank's node that any of its ranks may use."""
    own_cores: int
    """Cores that this rank is bound to."""
    pids: tuple[int, ...]
    """Process of each rank, on its host."""
    badly_bound: str = ""
    """Which ranks are bound to too few cores while others are idle; "" where none are."""
    allowed: frozenset[int] = frozenset()
    """Those of this node that any of its ranks may use, by their numbers."""
    bound: tuple[frozenset[int], ...] = ()
    """Where each rank is bound by its role (`cores.bind`); empty where none was asked to be."""
    shares: tuple[int, ...] = ()
    """Then, how many cores each rank has for itself; 0 = it shares those of its node."""

    @property
    def ranks_on_node(self) -> int:
        return self.hosts.count(self.hosts[self.rank])

    @property
    def ranks_per_core(self) -> float:
        """Ranks of this node over the cores that any of them may use."""
        return self.ranks_on_node / self.cores

    @property
    def oversubscribed(self) -> bool:
        """Whether this node has more ranks than cores."""
        return self.ranks_on_node > self.cores

    @property
    def threads(self) -> int:
        """Fair number of torch threads for this rank (TRAPS 4)."""
        return self.threads_of(self.rank)

    def threads_of(self, rank: int) -> int:
        """That of a rank which is bound by its role, or else of one of this node."""
        if self.shares and self.shares[rank]:
            return self.shares[rank]
        return max(1, min(self.own_cores, self.cores // self.ranks_on_node))

    def end(self, ranks: Iterable[int]) -> None:
        """Kill those of these ranks that are on this host: the launcher would wait for one that hangs."""
        for rank in ranks:
            if self.hosts[rank] == self.hosts[self.rank] and rank != self.rank:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pids[rank], signal.SIGKILL)


def place_to_speak(rank: int, hosts: Sequence[str], silent: Collection[int]) -> int:
    """Count the ranks that speak before `rank` of ranks that are silent.

    The first ranks of all nodes speak before the second ones; nodes of silent ranks, which may be gone, come last.
    """
    gone, on_node = {hosts[each] for each in silent}, Counter[str]()
    turns = []
    for each, host in enumerate(hosts):
        turns.append((host in gone, on_node[host], each))
        on_node[host] += 1
    return sum(turn < turns[rank] and turn[-1] not in silent for turn in turns)


def look_around(comm: MPI.Intracomm) -> Ranks:
    """Gather hosts and cores of all ranks."""
    own = binding.own_cores()
    everybody = comm.allgather((socket.gethostname(), own, os.getpid(), binding.granted_cores()))
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
        badly_bound=binding.complaint(
            [name for name, *_ in everybody], [theirs for _, theirs, _, _ in everybody], [count for *_, count in everybody]
        ),
    )


def connections(rank: int, hosts: Sequence[str], shard_ranks: Collection[int]) -> int:
    """Count the other nodes' ranks that may connect to a rank: to shards and rank 0 all, to others shards and a tree of ranks."""
    elsewhere = [each for each, host in enumerate(hosts) if host != hosts[rank]]
    if rank == 0 or rank in shard_ranks:
        return len(elsewhere)
    return min(len(elsewhere), 1 + len(shard_ranks) + 2 * len(hosts).bit_length())


def make_room(connections: int) -> str:
    """Raise this process's limit of open files to what it may need; say what is missing, "" = nothing."""
    needed = len(list(Path("/dev/fd").iterdir())) + _OPEN_FILES + connections if connections else 0
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return ""
    granted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (granted, hard))
    return "" if granted == needed else f"may need {needed:,} open files and connections, and may have {hard:,}"


def refuse_singletons(ranks: Ranks) -> None:
    """N jobs of one rank instead of one job of N (TRAPS 7): a launcher and an MPI that do not know each other.

    Raises ConfigError.
    """
    if ranks.size == 1 and "LOCAL_RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            f"this MPI sees 1 rank, but WORLD_SIZE = {os.environ['WORLD_SIZE']}: torchrun, or a launcher like it, starts processes"
            f" that MPI knows nothing of; start them by {words(int(os.environ['WORLD_SIZE']))} mpisgd train ..."
        )
    if ranks.size > 1:
        return
    said = next((f"{name} = {os.environ[name]}" for name in SIZE_VARIABLES if int("0" + _digits(os.environ.get(name, ""))) > 1), "")
    if not said and launched_rank() > 0:  # PMIx and ALPS say who this is, and not of how many
        said = f"{launched_rank_variable()} = {launched_rank()}"
    if said:
        raise ConfigError(
            f"this MPI sees 1 rank, but {said}: the launcher and the MPI that mpi4py was built for do not"
            " belong together, so every rank believes it is alone; use that MPI's own mpirun, or srun --mpi=...;"
            " mpisgd doctor says which launchers fit"
        )


def _digits(text: str) -> str:
    return text if text.isascii() and text.isdigit() else ""
