"""`python -m tests.bench crowd`: what each of thousands of ranks sends and keeps at start, heartbeat and end.

The package's own start, heartbeat and end run, one greenlet a rank, over a communicator that counts. A collective call counts as
MPI makes it: a broadcast or gathering as a binomial tree, an allgather of objects as two recursive doublings (sizes, then bytes).
"""

from __future__ import annotations

import math
import pickle
import random
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from greenlet import getcurrent, greenlet

from mpisgd.base.draws import kept
from mpisgd.base.errors import ConfigError
from mpisgd.config import Config, EvaluationOptions, LogOptions, MlpOptions, SyntheticOptions
from mpisgd.job.finish import account, accounts_of, end_of
from mpisgd.job.parts import NO_OBJECTS
from mpisgd.job.run import rank as job
from mpisgd.job.run import start
from mpisgd.liveness import heartbeat, ranks, reaper
from tests.virtual.storm import package
from tests.virtual.storm.machine import Machine
from tests.virtual.storm.mpi import equip
from tests.virtual.storm.package import VIRTUAL

PER_NODE = 64
MOST_NBYTES = 64 << 20
"""Bytes that a rank may send, or keep of what others say."""
MOST_MESSAGES = 64
"""Messages that a rank may send, times log2 of all ranks; rank 0 may send `MOST_OF_RANK_0` to each."""
MOST_OF_RANK_0 = 16
PATIENCE_S = 60.0


class Counts:
    """Of each rank, messages and bytes that it sends, and bytes that it is told, by the part of the job."""

    def __init__(self, size: int) -> None:
        self.size, self.steps = size, max(1, math.ceil(math.log2(size)))
        self.part = "start"
        self.messages: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(size, np.int64))
        self.sent: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(size, np.int64))
        self.told: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(size, np.int64))

    def add(self, rank: int | slice, messages: int, sent: int, told: int) -> None:
        self.messages[self.part][rank] += messages
        self.sent[self.part][rank] += sent
        self.told[self.part][rank] += told

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "ranks": self.size,
                "part": part,
                "messages": int(self.messages[part][1:].max(initial=0)),
                "messages_of_rank_0": int(self.messages[part][0]),
                "most_sent_nbytes": int(self.sent[part].max()),
                "most_told_nbytes": int(self.told[part].max()),
            }
            for part in self.messages
        ]


class Crowd:
    """Greenlets of so many ranks, that wait for each other in collective calls."""

    def __init__(self, size: int, counts: Counts) -> None:
        self.size, self.counts = size, counts
        self.ready: deque[greenlet] = deque()
        self.meetings: dict[tuple[int, int], Meeting] = defaultdict(partial(Meeting, size))
        self.inboxes: list[deque[tuple[int, int, int]]] = [deque() for _ in range(size)]
        self.rank_of: dict[greenlet, int] = {}

    def everywhere(self, action: Callable[[int], Any]) -> list[Any]:
        """Run `action(rank)` on all ranks, each until it waits; what each returned."""
        results: list[Any] = [None] * self.size
        hub = getcurrent()

        def one(rank: int) -> None:
            results[rank] = action(rank)

        for rank in range(self.size):
            new = greenlet(partial(one, rank), parent=hub)
            self.rank_of[new] = rank
            self.ready.append(new)
        while self.ready:
            self.ready.popleft().switch()
        assert all(each.dead for each in self.rank_of), "ranks wait for each other for ever"
        self.rank_of.clear()
        return results

    @property
    def rank(self) -> int:
        return self.rank_of[getcurrent()]


class Meeting:
    """What all ranks of a collective call say, and those that wait for the others."""

    def __init__(self, size: int) -> None:
        self.said: list[Any] = [None] * size
        self.waiting: list[greenlet] = []


class Comm:
    """One rank's communicator of a crowd; the calls of mpi4py's that a start, a heartbeat and an end make."""

    def __init__(self, crowd: Crowd, rank: int, context: int = 0) -> None:
        self._crowd, self.rank, self._context = crowd, rank, context
        self._calls = 0

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self._crowd.size

    def _together(self, said: Any, count: Callable[[list[Any]], None]) -> list[Any]:
        """What all say, one list for all; counted once, by the last to come."""
        self._calls += 1
        meeting = self._crowd.meetings[self._context, self._calls]
        meeting.said[self.rank] = said
        if len(meeting.waiting) < self._crowd.size - 1:
            meeting.waiting.append(getcurrent())
            getcurrent().parent.switch()
        else:
            count(meeting.said)
            self._crowd.ready.extend(meeting.waiting)
            del self._crowd.meetings[self._context, self._calls]
        return meeting.said

    def allgather(self, value: Any) -> list[Any]:
        counts = self._crowd.counts

        def count(values: list[Any]) -> None:
            nbytes = sum(len(pickle.dumps(each)) for each in values)
            counts.add(slice(None), 2 * counts.steps, nbytes + 4 * counts.size, nbytes + 4 * counts.size)

        return self._together(value, count)

    def bcast(self, value: Any, root: int = 0) -> Any:
        counts = self._crowd.counts

        def count(values: list[Any]) -> None:
            nbytes = len(pickle.dumps(values[root]))
            counts.add(slice(None), 2 * counts.steps, counts.steps * nbytes, nbytes)

        return self._together(value, count)[root]

    def Igather(self, said: np.ndarray, table: np.ndarray, root: int) -> Any:
        counts = self._crowd.counts

        def count(values: list[Any]) -> None:
            counts.add(slice(None), 1, said.nbytes * counts.size // 2, 0)  # at most: the root's last child in the tree
            counts.add(root, 0, 0, said.nbytes * counts.size)

        found = self._together(said.copy(), count)
        if self.rank == root and len(said):
            table[:] = np.stack(found)
        return _DONE

    def Ibcast(self, buffer: np.ndarray, root: int) -> Any:
        counts = self._crowd.counts
        found = self._together(
            buffer.copy() if self.rank == root else None,
            lambda values: counts.add(slice(None), counts.steps, counts.steps * buffer.nbytes, buffer.nbytes),
        )
        buffer[:] = found[root]
        return _DONE

    def Ibarrier(self) -> Any:
        self._together(None, lambda values: self._crowd.counts.add(slice(None), self._crowd.counts.steps, 0, 0))
        return _DONE

    def Dup(self) -> Comm:
        self._together(None, lambda said: self._crowd.counts.add(slice(None), 2 * self._crowd.counts.steps, 0, 0))
        return Comm(self._crowd, self.rank, self._context + 1)

    def Isend(self, body: Any, dest: int, tag: int) -> Any:
        nbytes = memoryview(body).nbytes
        self._crowd.counts.add(self.rank, 1, nbytes, 0)
        self._crowd.counts.add(dest, 0, 0, nbytes)
        self._crowd.inboxes[dest].append((self.rank, tag, nbytes))
        return _DONE

    def Improbe(self, source: int, tag: int, status: Any) -> Any:
        inbox = self._crowd.inboxes[self.rank]
        if not inbox:
            return None
        sender, tagged, _ = inbox.popleft()
        status.source, status.tag = sender, tagged
        return SimpleNamespace(Recv=lambda into: None)


_DONE: Any = SimpleNamespace(Test=lambda *status: True, Wait=lambda *status: None)


def measure(sizes: Sequence[int]) -> list[dict[str, Any]]:
    """For each number of ranks. Raises ConfigError where an aim is missed."""
    rows: list[dict[str, Any]] = []
    for size in sizes:
        began_s = time.perf_counter()
        some = [*_job(size).rows(), *_tolerant_end(size).rows()]
        rows += [{**row, "bench_s": time.perf_counter() - began_s} for row in some]
    missed = [row for row in rows if problem(row)]
    if missed:
        raise ConfigError("\n".join(f"{row['ranks']:,} ranks, {row['part']}: {problem(row)}" for row in missed))
    return rows


def problem(row: Mapping[str, Any]) -> str:
    """Say which aim a row misses; "" = none."""
    size = row["ranks"]
    aims = {
        "messages": MOST_MESSAGES * math.log2(size),
        "messages_of_rank_0": max(MOST_OF_RANK_0 * size, MOST_MESSAGES * math.log2(size)),
        "most_sent_nbytes": MOST_NBYTES,
        "most_told_nbytes": MOST_NBYTES,
    }
    return ", ".join(f"{name} = {row[name]:,}, at most {aim:,.0f} are wanted" for name, aim in aims.items() if row[name] > aim)


def lines_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Format the rows for printing."""
    lines = [f"{'ranks':>6} {'part':<28} {'messages':>9} {'of rank 0':>10} {'most sent':>12} {'most told':>12}"]
    for row in rows:
        sent, told = (f"{row[f'most_{name}_nbytes'] / 1e6:.2f} MB" for name in ("sent", "told"))
        messages, first = f"{row['messages']:,}", f"{row['messages_of_rank_0']:,}"
        lines.append(f"{row['ranks']:6,} {row['part']:<28} {messages:>9} {first:>10} {sent:>12} {told:>12}")
    return lines


def shards_of(size: int) -> int:
    """One for each node, as a job of so many ranks has them."""
    return max(1, size // PER_NODE)


def _job(size: int) -> Counts:
    """A fail-fast job's start, the heartbeat for as long as its ranks are patient, and its end."""
    counts = Counts(size)
    crowd = Crowd(size, counts)
    comms = [Comm(crowd, rank) for rank in range(size)]
    now_s = [0.0]
    with tempfile.TemporaryDirectory() as directory, ExitStack() as held:
        config = Config(
            shards=shards_of(size),
            way="whole",  # as on more than one node
            out=str(Path(directory) / "run"),
            model=MlpOptions(),
            data=SyntheticOptions(shape=(4,), classes=2, samples=size, test_samples=8),
            mu=1,
            threads=1,
            evaluation=EvaluationOptions(train=False),
            log=LogOptions(enabled=False, progress="off"),
        )
        host = SimpleNamespace(gethostname=lambda: f"node{crowd.rank // PER_NODE:05}")
        for module, name, instead in (
            (ranks, "socket", host),
            (reaper, "call", lambda *words, **more: None),
            (reaper, "leave", lambda *words, **more: None),
            (start, "torch", SimpleNamespace(set_num_threads=lambda count: None)),
            (start, "make_room", lambda count: ""),
        ):
            held.enter_context(mock.patch.object(module, name, instead))
        held.enter_context(kept())
        made = [job.Rank(comm, PATIENCE_S) for comm in comms]  # type: ignore[arg-type]

        def begins(rank: int) -> None:
            own = made[rank]
            own.signals = SimpleNamespace(received=0, hurried=False)  # type: ignore[assignment]
            own.watch = SimpleNamespace(end=lambda look: None, close=lambda: None)  # type: ignore[assignment]
            own.heartbeat = heartbeat.Heartbeat(comms[rank], PATIENCE_S, own.way_on, now_s=lambda: now_s[0])  # type: ignore[arg-type]
            own.heartbeat.begin()
            own.agree(config, NO_OBJECTS, False)

        crowd.everywhere(begins)
        counts.part = f"heartbeat, {PATIENCE_S:.0f} s"
        while now_s[0] < PATIENCE_S:
            now_s[0] += heartbeat.Heartbeat.every_s
            for each in made:
                each.heartbeat.look()
        counts.part = "end"

        def ends(rank: int) -> None:
            own = made[rank]
            with mock.patch.object(own.heartbeat, "drain", lambda: None):
                own._end(own._wire(), account(clock=7, samples=size, training_s=1.0))

        crowd.everywhere(ends)
    return counts


class _Counted(Machine):
    """Ranks in virtual time whose messages are counted."""

    counts: Counts

    def send(self, message: Any) -> None:
        self.counts.add(message.sender.rank, 1, message.nbytes, 0)
        self.counts.add(message.dest, 0, 0, message.nbytes)
        super().send(message)


def _tolerant_end(size: int) -> Counts:
    """The meetings at the end of a fault-tolerant job, in virtual time."""
    counts = Counts(size)
    counts.part = "end, fault-tolerant"
    machine = equip(_Counted(size, random.Random(1), tells=True, latency_ns=50_000, eager_nbytes=0, reorders=False))
    machine.counts = counts  # type: ignore[attr-defined]
    shard_ranks = range(shards_of(size))

    def main(rank: int) -> None:
        comm = machine.comms[0][rank]
        wire = VIRTUAL.tolerant.TolerantWire(comm, polite=True, vital=tuple(shard_ranks), describe=str, patience_s=PATIENCE_S)
        wire.meet()
        accounts_of(wire, account(clock=7), shard_ranks)
        wire.meet()
        end_of(wire, False, (), size)
        wire.part()
        machine.leave(machine.processes[rank])

    for process in machine.processes:
        process.begin(partial(main, process.rank))
    with package.on(machine):
        machine.run(10**12)
    return counts
