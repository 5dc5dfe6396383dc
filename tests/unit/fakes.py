"""Stand-ins without MPI: messages that lie before a rank, a crew of learners before a shard, a communicator of threads."""

from __future__ import annotations

import importlib.util
import math
import random
import sys
import threading
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import mpisgd
from mpisgd.comm.messages import LAYOUTS, Ending, Goodbye, Interrupt, Message, Pull, Push, SnapshotPull, Tag
from mpisgd.exchange.shard_channel import Numbers

ROOM = Path(mpisgd.__file__).parent / "comm" / "mpi"


class Stuck(AssertionError):
    """A rank waits for what nobody will send: under MPI this would be a hang."""


# ---------------------------------------------------------------------------------------------------- MPI without MPI


class Envelope(NamedTuple):
    """A message that has arrived, whole, at the only rank there is."""

    source: int
    tag: int
    payload: bytes

    def Recv(self, into: Any) -> None:
        view = memoryview(into).cast("B")
        view[: len(self.payload)] = self.payload


class Status:
    source = tag = nbytes = -1

    def Get_elements(self, datatype: object) -> int:
        return self.nbytes

    def Get_tag(self) -> int:
        return self.tag


class TruncatedError(Exception):
    """What MPI raises where a message is longer than the memory that was posted for it."""

    def Get_error_class(self) -> int:
        return ERR_TRUNCATE


ERR_TRUNCATE = 15


class Done:
    """A request that needs no waiting for; of a receive, so many bytes have come."""

    def __init__(self, nbytes: int = -1, room: int = -1) -> None:
        self.nbytes, self.room = nbytes, room

    def Wait(self, status: Status | None = None) -> None:
        if self.nbytes > self.room:
            raise TruncatedError
        if status is not None:
            status.nbytes = self.nbytes

    def Test(self, status: Status | None = None) -> bool:
        self.Wait(status)
        return True


class Comm:
    """An mpi4py communicator of one rank before which messages lie; it says which of MPI's sends were used, and for what."""

    def __init__(self) -> None:
        self.inbox: list[Envelope] = []
        self.sent: list[tuple[str, int, int, bytes]] = []

    def Get_rank(self) -> int:
        return 0

    def Isend(self, buffer: Any, dest: int, tag: int) -> Done:
        return self._send("Isend", buffer, dest, tag)

    def Issend(self, buffer: Any, dest: int, tag: int) -> Done:
        return self._send("Issend", buffer, dest, tag)

    def _send(self, how: str, buffer: Any, dest: int, tag: int) -> Done:
        self.sent.append((how, dest, tag, bytes(memoryview(buffer).cast("B"))))
        return Done()

    def Irecv(self, into: Any, source: int, tag: int) -> Done:
        message = self.Improbe(source, tag, Status())
        if message is None:
            raise Stuck(f"nothing of tag {tag} from rank {source}; there are only {self.inbox}")
        room = memoryview(into).nbytes
        if len(message.payload) <= room:
            message.Recv(into)
        return Done(len(message.payload), room)

    def Improbe(self, source: int, tag: int, status: Status) -> Envelope | None:
        """The first that matches, taken out. Raises Stuck where there is nothing at all: nothing ever comes."""
        for message in self.inbox:
            if source in (-1, message.source) and tag in (-1, message.tag):
                self.inbox.remove(message)
                status.source, status.tag, status.nbytes = message.source, message.tag, len(message.payload)
                return message
        if not self.inbox:
            raise Stuck("the inbox is empty")
        return None

    def Iprobe(self, source: int, tag: int, status: Status) -> bool:
        """Whether one is there, which stays. Raises Stuck where there is nothing at all."""
        before = list(self.inbox)
        found = self.Improbe(source, tag, status) is not None
        self.inbox = before
        return found

    def Mprobe(self, source: int, tag: int, status: Status) -> Envelope:
        message = self.Improbe(source, tag, status)
        if message is None:
            raise Stuck(f"nothing of tag {tag} from rank {source}; there are only {self.inbox}")
        return message


def wire_without_mpi() -> types.ModuleType:
    """`mpisgd.comm.mpi.wire` and what it is made of, loaded beside the real ones, which would start MPI."""
    stub = types.ModuleType("mpisgd.comm.mpi.library")
    request = types.SimpleNamespace(Waitall=lambda requests: None)
    errors = {"Exception": TruncatedError, "ERR_TRUNCATE": ERR_TRUNCATE, "ERR_IN_STATUS": 18}
    mpi = types.SimpleNamespace(Status=Status, ANY_SOURCE=-1, ANY_TAG=-1, BYTE=object(), Request=request, **errors)
    stub.MPI = mpi  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:  # of these alone: what else is imported meanwhile stays
        patch.setitem(sys.modules, stub.__name__, stub)
        for name in ("clock", "transfers", "message_queue", "wire"):
            spec = importlib.util.spec_from_file_location(f"{name}_without_mpi", ROOM / f"{name}.py")
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            patch.setitem(sys.modules, f"mpisgd.comm.mpi.{name}", module)
            spec.loader.exec_module(module)
    return module


# ------------------------------------------------------------------------------------------------------ a shard's channel


def push(learner_id: int, timestamp: int = 0, seq: int = -1, **fields: Any) -> Push:
    """A push of which only what matters is said; a `ScriptedChannel` numbers those of -1."""
    given: dict[str, Any] = {
        **dict.fromkeys(LAYOUTS[Tag.PUSH].fields, 0),
        "samples": 2,
        "gradients": 1,
        "nbytes": 4,
        "rounded": 0.25,
        "loss": 1.0,
    }
    given |= {"learner_id": learner_id, "timestamp": timestamp, "seq": seq, **fields}
    arrival_ns = given.pop("arrival_ns", 0)
    return Push(tuple(given.values()), arrival_ns)


def told(message: Message | None) -> tuple[Any, ...]:
    """What a message says, to be compared: its kind, then its header."""
    match message:
        case Push():
            return Push, *(getattr(message, name) for name in LAYOUTS[Tag.PUSH].fields)
        case Pull(learner_id=learner_id, min_clock=min_clock):
            return Pull, learner_id, min_clock
        case None:
            return (None,)
    return type(message), *message


class ScriptedChannel:
    """A shard's channel that plays messages from a list, and writes down the answers.

    A push is a pair (Push, gradient). As on the wire, the shard may say whose push it wants next; pulls are always to be had.
    None is a time-out, which comes only if one is asked for. `verdicts` are those that the answers told, by learner.
    """

    duplex = False
    rounds_in_chunks = False

    def __init__(self, script: Sequence[Message | tuple[Push, Sequence[float] | float] | None]) -> None:
        self.waiting = list(script)
        self.verdicts: list[tuple[int, int]] = []
        self._next_seq: dict[int, int] = {}
        self.answers: list[tuple[Any, ...]] = []
        self.seconds = 0.0
        self.numbers = Numbers()
        self.opened: list[int] = []
        self._chunks: list[np.ndarray] = []
        self._told: tuple[int, dict[int, int]] = (0, {})

    def now_s(self) -> float:
        self.seconds += 1.0
        return self.seconds

    def rank_of(self, learner_id: int) -> int:
        return 1 + learner_id

    def learner_of(self, rank: int) -> int:
        return rank - 1

    def receive(self, gradient: np.ndarray, learner_id: int | None = None, until_s: float = math.inf) -> Message | None:
        for place, item in enumerate(self.waiting):
            message: Any
            message, values = item if isinstance(item, tuple) and not hasattr(item, "_fields") else (item, None)
            if message is None:
                assert until_s < math.inf, "nobody asked for a time-out"
                del self.waiting[place]
                return None
            if learner_id is None or isinstance(message, Pull | SnapshotPull | Interrupt) or message.learner_id == learner_id:
                del self.waiting[place]
                if values is not None:
                    gradient[:] = values
                return self._numbered(message)
        raise Stuck(f"the shard waits for learner {learner_id}; there are only {self.waiting}")

    def _numbered(self, message: Message) -> Message:
        if not isinstance(message, Push):
            return message
        if message.seq < 0:
            message.seq = self._next_seq.get(message.learner_id, 0)
        self._next_seq[message.learner_id] = message.seq + 1
        return message

    def receive_pull(self) -> Message | None:
        for message in self.waiting:
            if isinstance(message, Pull):
                self.waiting.remove(message)
                return message
        return None

    def open_answers(self, learner_ids: list[int], weights: np.ndarray, clock: int, verdicts: dict[int, int]) -> None:
        self.opened += learner_ids
        self._told = (clock, verdicts)

    def add_chunk(self, chunk: np.ndarray) -> None:
        self._chunks.append(chunk.copy())  # as it is now

    def close_answers(self) -> None:
        if self.opened:
            self.start_answers(self.opened, np.concatenate(self._chunks), *self._told)
        self.opened, self._chunks = [], []

    def start_answers(self, learner_ids: list[int], weights: np.ndarray, clock: int, verdicts: dict[int, int]) -> None:
        for learner_id in learner_ids:
            self.answers.append(("weights", learner_id, clock, weights.tolist()))
            self.verdicts.append((learner_id, verdicts.get(learner_id, -1)))

    def finish_answers(self, *, last: bool = False) -> bool:
        """Nothing is under way."""
        return True

    def stop(self, learner_id: int, clock: int, ending: int, chunks: int) -> None:
        self.answers.append(("stop" if ending == Ending.FINISHED else "interrupted", learner_id, clock))

    def answer_snapshot(self, vectors: list[np.ndarray], clock: int, samples: int, taken_s: float) -> None:
        self.answers.append(("snapshot", clock, samples, [vector.tolist() for vector in vectors]))


class Crew(ScriptedChannel):
    """Learners that behave: each pulls, pushes what `gradient` says, pulls; who comes next is drawn from a seed.

    Args:
        leave: learner_id -> number of pushes after which it departs while others go on.
    """

    def __init__(
        self,
        lambda_: int,
        next_clock: Callable[[int], int],
        gradient: Callable[[int, int], Sequence[float] | float],
        *,
        seed: int = 0,
        leave: dict[int, int] | None = None,
    ) -> None:
        super().__init__([Pull(learner_id, 0) for learner_id in range(lambda_)])
        self._next_clock = next_clock
        self._gradient = gradient
        self._random = random.Random(seed)
        self._leave = leave or {}
        self._seq = [0] * lambda_

    def receive(self, gradient: np.ndarray, learner_id: int | None = None, until_s: float = math.inf) -> Message | None:
        self._random.shuffle(self.waiting)
        message = super().receive(gradient, learner_id, until_s)
        if isinstance(message, Push):
            who, self._seq[message.learner_id] = message.learner_id, message.seq + 1
            if self._leave.get(who) == message.seq + 1:
                self.waiting.append(Goodbye(who, message.seq + 1, Ending.NONE))
            else:
                self.waiting.append(Pull(who, self._next_clock(message.timestamp)))
        return message

    def receive_pull(self) -> Message | None:
        """Some have come already, and some have not."""
        return super().receive_pull() if self._random.random() < 0.5 else None

    def start_answers(self, learner_ids: list[int], weights: np.ndarray, clock: int, verdicts: dict[int, int]) -> None:
        super().start_answers(learner_ids, weights, clock, verdicts)
        for learner_id in learner_ids:
            seq = self._seq[learner_id]
            self.waiting.append((push(learner_id, clock, seq), self._gradient(learner_id, seq)))

    def stop(self, learner_id: int, clock: int, ending: int, chunks: int) -> None:
        super().stop(learner_id, clock, ending, chunks)
        self.waiting.append(Goodbye(learner_id, self._seq[learner_id], ending))


# ------------------------------------------------------------------------------------------------------------ the others


class Aborted(BaseException):
    """Stands for the end of the process that has called `Abort`."""


class Threads:
    """An mpi4py communicator of so many threads, of which each calls `allgather` as often as the others."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=10)
        self._values: list[Any] = [None] * size
        self._local = threading.local()
        self.aborted: list[int] = []

    def Get_rank(self) -> int:
        return int(getattr(self._local, "rank", 0))

    def Get_size(self) -> int:
        return self.size

    def Abort(self, status: int) -> None:
        self.aborted.append(status)
        raise Aborted(status)

    def allgather(self, value: Any) -> list[Any]:
        self._values[self.Get_rank()] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values

    def bcast(self, value: Any, root: int) -> Any:
        return self.allgather(value)[root]

    def everywhere(self, action: Callable[[int], Any]) -> list[Any]:
        """What `action(rank)` returned, or the exception it raised, on each rank."""
        results: list[Any] = [None] * self.size

        def one(rank: int) -> None:
            self._local.rank = rank
            try:
                results[rank] = action(rank)
            except BaseException as error:
                results[rank] = error

        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=20)
        return results


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean squared error by hand."""
    return ((output - target) ** 2).mean()


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)
