"""States of shards on their nodes and on partners' (`records/checkpoint/near.py`): kept, and found again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mpisgd.base.terminal import warn
from mpisgd.comm.mpi.library import MPI
from mpisgd.job import interruption
from mpisgd.job.run.courier import Courier
from mpisgd.records.checkpoint import checkpoint as disk
from mpisgd.records.checkpoint.checkpoint import Account
from mpisgd.records.checkpoint.near import Near, newest
from mpisgd.records.log.reader import Run

_PART, _ACCOUNT = 32_201, 32_202


def partner_of(shard: int, shard_ranks: Sequence[int], hosts: Sequence[str]) -> int:
    """Return the rank on another node that keeps a shard's state: of the next shard there, else any; -1 = none."""
    own, count = hosts[shard_ranks[shard]], len(shard_ranks)
    ring = [shard_ranks[(shard + step) % count] for step in range(1, count)]
    elsewhere = [rank for rank, host in enumerate(hosts) if host != own]
    others = [rank for rank in ring if hosts[rank] != own] or elsewhere[shard % max(1, len(elsewhere)) :]
    return others[0] if others else -1


def said(every_updates: int, hosts: Sequence[str]) -> str:
    if every_updates == 0:
        return ""
    where = "of each shard's node and a partner's" if len(set(hosts)) > 1 else "of the only node (no partner)"
    return f", states in memory {where} every {every_updates:,} updates"


def near_of(run: Path, node: str) -> Near:
    """Return a node's states of a run. Raises DataError without config.toml."""
    environment = Run(run).environment
    first = (environment.get("attempts") or [environment])[0]
    return Near(run, str(first.get("started", "")), node)


class Partners:
    """Keeper of states of this rank's shard, and of shards with this rank as partner; collective over `comm`."""

    def __init__(
        self, comm: MPI.Intracomm, run: Path, hosts: Sequence[str], shard_ranks: Sequence[int], complain: Callable[[str], None]
    ) -> None:
        rank = comm.Get_rank()
        partners = {shard: partner_of(shard, shard_ranks, hosts) for shard in range(len(shard_ranks))}
        self._shards = len(shard_ranks)
        self._partner = next((partners[shard] for shard, each in enumerate(shard_ranks) if each == rank), -1)
        self.near = near_of(run, hosts[rank])
        self.near.forget_replaced()
        sources = {shard_ranks[shard] for shard, partner in partners.items() if partner == rank}
        self._courier = Courier(comm, sources, self.near.take, complain)

    def keep(self, account: Account, told: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
        """Keep a state here and at the partner's. Raises OSError, PeerError."""
        files = self.near.write(account, self._shards, told, tensors)
        partner, self._partner = self._partner, -1  # a partner that fails gets no more
        if partner >= 0:
            self._courier.send(partner, account.clock, account.shard, files)
        self._partner = partner

    def close(self) -> None:
        self._courier.close()

    def forget(self) -> None:
        self.near.forget()


def bring_home(comm: MPI.Intracomm, near: Near, run: Path, hosts: Sequence[str], shard_ranks: Sequence[int]) -> tuple[int, str]:
    """Make a checkpoint of newer states on nodes; collective.

    A shard's rank whose node lacks its state gets it. Returns the clock and a note; -1, "" = nothing newer.
    """
    rank = comm.Get_rank()
    environment = Run(run).environment
    attempt = max([each["attempt"] for each in environment.get("attempts") or ()], default=0)
    own = interruption.newest(run) if rank == 0 else None
    than: int = comm.bcast(-1 if own is None else own, root=0)
    leads = hosts.index(hosts[rank]) == rank
    everywhere = comm.allgather(near.held(attempt) if leads else [])
    for clock, holders in newest(everywhere, than):
        mine = [shard for shard, holder in enumerate(holders) if holder == rank]
        copied = _done(comm, partial(_copy, near, run, clock, mine))
        if not (copied and _done(comm, partial(_seal, rank, run, clock, len(holders), attempt))):
            continue
        if len(shard_ranks) == len(holders):
            _hand_over(comm, near, clock, holders, shard_ranks, hosts, everywhere)
        nodes = sorted({hosts[holder] for holder in holders})
        shown = ", ".join(nodes[:3]) + f" and {len(nodes) - 3} more" * (len(nodes) > 3)
        saved = (
            f"the newest checkpoint in {run / 'checkpoint'} is of clock {than:,}"
            if than >= 0
            else "the run's directory has no checkpoint"
        )
        return clock, f"goes on from clock {clock:,}, whose state was in memory on {shown}; {saved}"
    return -1, ""


def _done(comm: MPI.Intracomm, action: Callable[[], None]) -> bool:
    try:
        action()
    except OSError as error:
        warn(f"mpisgd: a state held by nodes cannot be written to the run's directory: {error}")
        return all(comm.allgather(False))
    return all(comm.allgather(True))


def _copy(near: Near, run: Path, clock: int, shards: Sequence[int]) -> None:
    for shard in shards:
        near.copy_to(run, clock, shard)


def _seal(rank: int, run: Path, clock: int, shards: int, attempt: int) -> None:
    if rank == 0:
        disk.seal(disk.directory_of(run, clock), clock, shards, attempt)


def _hand_over(
    comm: MPI.Intracomm,
    near: Near,
    clock: int,
    holders: Sequence[int],
    shard_ranks: Sequence[int],
    hosts: Sequence[str],
    everywhere: Sequence[Sequence[Any]],
) -> None:
    """Send states to shards' ranks on nodes without; a rank that cannot keep its state reads the run's directory."""
    rank = comm.Get_rank()
    for shard, (holder, taker) in enumerate(zip(holders, shard_ranks, strict=True)):
        holds = [any((each.clock, each.shard) == (clock, shard) for each in held) for held in everywhere]
        if rank not in (holder, taker) or hosts[taker] in {host for host, has in zip(hosts, holds, strict=True) if has}:
            continue
        if rank == holder:
            for path, tag in zip(near.files(clock, shard), (_PART, _ACCOUNT), strict=True):
                comm.Send(np.memmap(path, np.uint8, "r"), taker, tag)
        else:
            part, account = ([_received(comm, holder, tag)] for tag in (_PART, _ACCOUNT))
            with contextlib.suppress(OSError):
                near.take(clock, shard, part, account)


def _received(comm: MPI.Intracomm, source: int, tag: int) -> np.ndarray:
    status = MPI.Status()
    comm.Probe(source, tag, status)
    content = np.empty(status.Get_elements(MPI.BYTE), np.uint8)
    comm.Recv(content, source, tag)
    return content
