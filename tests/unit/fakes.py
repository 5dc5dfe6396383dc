"""Stand-ins without MPI: ranks joined by lists in memory, a crew of learners before a shard, a communicator of threads."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpisgd.errors import PeerError
from mpisgd.messages import Goodbye, Message, Pull, Push, SnapshotPull, Tag
from mpisgd.roles import Roles

ANSWERS = (Tag.ANSWER, Tag.WEIGHTS, Tag.SNAPSHOT_ANSWER, Tag.SNAPSHOT_WEIGHTS)


class Stuck(AssertionError):
    """A rank waits for what nobody will send: under MPI this would be a hang."""


def roles(shards: int = 1, learners: int = 2, evaluator: bool = False) -> Roles:
    """Packed: shards, learners, evaluator."""
    learner_ranks = tuple(range(shards, shards + learners))
    return Roles(tuple(range(shards)), learner_ranks, shards + learners if evaluator else learner_ranks[0])


# --------------------------------------------------------------------------------------------------------------- the wire


@dataclass
class Envelope:
    """As `wire.Envelope`."""

    source: int
    tag: int
    nbytes: int
    message: bytes


@dataclass
class Request:
    """A posted receive, or a send under way, whose buffer is read only when it is finished."""

    array: np.ndarray
    source: int = -1
    dest: int = -1
    tag: int = -1
    done: bool = False


@dataclass
class Network:
    """All ranks of a fake job, in one thread.

    `idle` is called while a rank waits; it lets somebody else do something, and returns whether anybody could.
    """

    idle: Callable[[], bool] = lambda: False
    now_ns: int = 0
    slept_s: list[float] = field(default_factory=list)
    sent: list[tuple[int, int, Tag]] = field(default_factory=list)
    announced: list[Tag] = field(default_factory=list)
    inbox: dict[int, list[Envelope]] = field(default_factory=dict)
    posted: dict[int, list[Request]] = field(default_factory=dict)

    def deliver(self, source: int, dest: int, tag: int, message: bytes) -> None:
        """Into the receive that was posted first, as MPI does; else into the inbox. Answers need a posted one (law 1)."""
        self.sent.append((source, dest, Tag(tag)))
        for request in self.posted.get(dest, []):
            if not request.done and (request.source, request.tag) == (source, tag):
                assert len(message) <= request.array.nbytes, f"{len(message)} bytes overrun a buffer of {request.array.nbytes}"
                request.array.view(np.uint8).reshape(-1)[: len(message)] = np.frombuffer(message, np.uint8)
                request.done = True
                return
        assert tag not in ANSWERS, f"law 1: rank {source} sends {Tag(tag).name} to rank {dest}, which has posted no receive"
        self.inbox.setdefault(dest, []).append(Envelope(source, tag, len(message), message))

    def wait_until(self, ready: Callable[[], Any], who: str) -> Any:
        while not (result := ready()):
            if not self.idle():
                raise Stuck(f"{who} waits for ever")
        return result


class FakeWire:
    """One rank's end of a `Network`, with the methods of `wire.Wire` that channels call."""

    def __init__(self, network: Network, rank: int) -> None:
        self.network = network
        self.rank = rank

    def now_ns(self) -> int:
        self.network.now_ns += 1000
        return self.network.now_ns

    def sleep(self, seconds: float) -> None:
        self.network.slept_s.append(seconds)

    def send(self, array: np.ndarray, dest: int, tag: int) -> None:
        self.network.deliver(self.rank, dest, tag, array.tobytes())

    def announce(self, array: np.ndarray, dest: int, tag: int) -> Request:
        self.network.announced.append(Tag(tag))
        self.send(array, dest, tag)
        return Request(array, dest=dest, tag=tag, done=True)

    def start_send(self, array: np.ndarray, dest: int, tag: int) -> Request:
        return Request(array, dest=dest, tag=tag)

    def post_receive(self, array: np.ndarray, source: int, tag: int) -> Request:
        request = Request(array, source=source, tag=tag)
        self.network.posted.setdefault(self.rank, []).append(request)
        return request

    def probe(self, *patterns: tuple[int | None, int | None]) -> Envelope:
        inbox = self.network.inbox.setdefault(self.rank, [])

        def match() -> Envelope | None:
            for source, tag in patterns:
                for envelope in inbox:
                    if source in (None, envelope.source) and tag in (None, envelope.tag):
                        return envelope
            return None

        envelope: Envelope = self.network.wait_until(match, f"rank {self.rank}, for {patterns},")
        inbox.remove(envelope)
        return envelope

    def accept(self, envelope: Envelope, array: np.ndarray) -> None:
        if envelope.nbytes != array.nbytes:
            raise PeerError(f"tag {envelope.tag} from rank {envelope.source}: {envelope.nbytes} bytes, expected {array.nbytes}")
        array.view(np.uint8).reshape(-1)[:] = np.frombuffer(envelope.message, np.uint8)

    def wait(self, request: Request) -> None:
        if request.dest >= 0 and not request.done:
            request.done = True
            self.network.deliver(self.rank, request.dest, request.tag, request.array.tobytes())
        self.network.wait_until(lambda: request.done, f"rank {self.rank}, for {request},")

    def finish(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.wait(request)


# ------------------------------------------------------------------------------------------------------ a shard's channel


def push(learner_id: int, timestamp: int = 0, seq: int = 0, **fields: Any) -> Push:
    """A push of which only what matters is said."""
    given = {"samples": 2, "compute_s": 0.0, "delay_s": 0.0, "push_s": 0.0, "wait_s": 0.0, "pull_s": 0.0, "loss": 1.0}
    return Push(learner_id=learner_id, timestamp=timestamp, seq=seq, **{**given, "arrival_s": 0.0, **fields})


class ScriptedChannel:
    """A shard's channel that plays messages from a list, and writes down the answers.

    A push is a pair (Push, gradient). As on the wire, the shard may say whose push it wants next; pulls are always to be had.
    """

    def __init__(self, script: Sequence[Message | tuple[Push, Sequence[float] | float]]) -> None:
        self.waiting = list(script)
        self.answers: list[tuple[Any, ...]] = []
        self.seconds = 0.0

    def now_s(self) -> float:
        self.seconds += 1.0
        return self.seconds

    def receive(self, gradient: np.ndarray, learner_id: int | None = None) -> Message:
        for place, item in enumerate(self.waiting):
            message, values = item if isinstance(item, tuple) and not hasattr(item, "_fields") else (item, None)
            if learner_id is None or isinstance(message, Pull | SnapshotPull) or message.learner_id == learner_id:
                del self.waiting[place]
                if values is not None:
                    gradient[:] = values
                return message
        raise Stuck(f"the shard waits for learner {learner_id}; there are only {self.waiting}")

    def start_answers(self, learner_ids: list[int], weights: np.ndarray, clock: int, verdicts: dict[int, int]) -> None:
        for learner_id in learner_ids:
            self.answers.append(("weights", learner_id, clock, weights.tolist()))

    def finish_answers(self) -> None:
        """Nothing is under way."""

    def stop(self, learner_id: int, clock: int) -> None:
        self.answers.append(("stop", learner_id, clock))

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

    def receive(self, gradient: np.ndarray, learner_id: int | None = None) -> Message:
        self._random.shuffle(self.waiting)
        message = super().receive(gradient, learner_id)
        if isinstance(message, Push):
            who, self._seq[message.learner_id] = message.learner_id, message.seq + 1
            if self._leave.get(who) == message.seq + 1:
                self.waiting.append(Goodbye(who, message.seq + 1, finished=False))
            else:
                self.waiting.append(Pull(who, self._next_clock(message.timestamp)))
        return message

    def start_answers(self, learner_ids: list[int], weights: np.ndarray, clock: int, verdicts: dict[int, int]) -> None:
        super().start_answers(learner_ids, weights, clock, verdicts)
        for learner_id in learner_ids:
            seq = self._seq[learner_id]
            self.waiting.append((push(learner_id, clock, seq), self._gradient(learner_id, seq)))

    def stop(self, learner_id: int, clock: int) -> None:
        super().stop(learner_id, clock)
        self.waiting.append(Goodbye(learner_id, self._seq[learner_id], finished=True))


# ------------------------------------------------------------------------------------------------------------ the others


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

    def allgather(self, value: Any) -> list[Any]:
        self._values[self.Get_rank()] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values

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
