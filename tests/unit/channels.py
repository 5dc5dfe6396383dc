"""Channels to test: of a whole job on virtual wires, and of one shard before which any bytes may lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpisgd.comm.messages import (
    LAYOUTS,
    Ending,
    Message,
    Pull,
    Push,
    Tag,
)
from mpisgd.config.config_virtual import NetworkOptions
from mpisgd.exchange.exchange import Answers, Report
from mpisgd.exchange.learner_channel import LearnerChannel, Slices
from mpisgd.exchange.shard_channel import ShardChannel
from mpisgd.vectors.body import Pool
from mpisgd.vectors.flat import slice_bounds
from tests.unit.fakes import Comm, Envelope, wire_without_mpi
from tests.virtual.scene import Scene, WatchedWire, packed

SIZE = 6
SLICE = 4 * SIZE
ZERO = (0,) * 8
ASKS = NetworkOptions(latency_s=1e-3, overhead_s=1e-4)


class Job:
    """Shards, learners and an evaluator on virtual ranks, whose mains are given to `run`; the others leave at once."""

    def __init__(
        self,
        shards: int = 1,
        learners: int = 2,
        *,
        evaluator: bool = False,
        consistent: bool = False,
        interruptible: bool = False,
        network: NetworkOptions = ASKS,
    ) -> None:
        self.roles = packed(shards, learners, evaluator)
        self.scene = Scene(shards + learners + evaluator, network=network, name=self.roles.describe, wire=WatchedWire)
        self.wires = self.scene.wires
        self.bounds = slice_bounds(SIZE, shards)
        self.shards = [ShardChannel(self.wires[shard], self.roles, shard) for shard in range(shards)]
        self.scratch = [np.zeros(end - start, np.float32) for start, end in self.bounds]
        self.weights = [np.zeros(SIZE, np.float32) for _ in range(learners)]
        self.gradients = [np.zeros(SIZE, np.float32) for _ in range(learners)]
        self.learners = [
            LearnerChannel(
                self.wires[rank],
                self.roles,
                learner_id,
                Slices(self.weights[learner_id], self.gradients[learner_id], self.bounds),
                consistent=consistent,
                interruptible=interruptible,
            )
            for learner_id, rank in enumerate(self.roles.learner_ranks)
        ]
        self.asked: list[tuple[int, int, int]] = []
        self.received: list[tuple[int, Message]] = []

    def run(self, mains: dict[int, Callable[[], None]]) -> Job:
        self.scene.run(mains)
        return self

    def receive(self, shard: int = 0, learner_id: int | None = None) -> Message:
        message = self.shards[shard].receive(Pool(self.scratch[shard]), learner_id)
        assert message is not None, "it waits without end"
        self.received.append((shard, message))
        return message

    def answers(self, shard: int, clocks: list[int]) -> None:
        """A shard takes one pull after the other, and gives it the next of these clocks; -1 = stop."""
        channel = self.shards[shard]
        for clock in clocks:
            message = self.receive(shard)
            assert isinstance(message, Pull)
            self.asked.append((shard, message.learner_id, message.min_clock))
            if clock < 0:
                channel.stop(message.learner_id, 99, Ending.FINISHED, 1)
            else:
                weights = np.full(len(self.scratch[shard]), 10 * shard + clock, np.float32)
                channel.start_answers([message.learner_id], weights, clock, {})
                channel.finish_answers()

    def pulled(self, clocks: list[list[int]], min_clock: int) -> Answers:
        """What learner 0 gets where the shards answer with these clocks, in turn."""
        found: list[Answers] = []
        mains: dict[int, Callable[[], None]] = {shard: lambda s=shard: self.answers(s, clocks[s]) for shard in range(len(clocks))}  # type: ignore[misc]
        mains[len(clocks)] = lambda: found.append(self.learners[0].pull(min_clock))
        self.run(mains)
        return found[0]

    def push(self, learner_id: int, seq: int = 0, meanwhile: Callable[[], None] | None = None) -> int:
        channel = self.learners[learner_id]
        channel._clocks = [0 for _ in self.shards]
        channel.push(Report(seq, samples=1, loss=0.5, compute_ns=0, delay_ns=0), meanwhile)
        return channel.push_ns


real = wire_without_mpi()


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


def header(tag: int, *fields: float) -> bytes:
    return LAYOUTS[tag].pack(fields)


def a_push(learner_id: int = 0, nbytes: int = SLICE, gradients: int = 1) -> bytes:
    return header(Tag.PUSH, learner_id, 0, 0, 0, gradients, *(0,) * 6, nbytes, -1, 0, 0.0, 1.0, 0.5)


class Door:
    """Shard 0 of a job of two learners and an evaluator, ranks 1 to 3, behind the real wire; anything may lie before it."""

    def __init__(self, polite: bool = False) -> None:
        self.comm = Comm()
        self.wire = real.Wire(self.comm, polite=polite)
        self.shard = ShardChannel(self.wire, packed(1, 2, evaluator=True), 0)
        self.scratch = np.full(SIZE, 5.0, np.float32)

    def comes(self, source: int, tag: int, payload: bytes | np.ndarray) -> None:
        self.comm.inbox.append(Envelope(source, tag, payload if isinstance(payload, bytes) else payload.tobytes()))

    def receive(self, learner_id: int | None = None) -> Message:
        message = self.shard.receive(Pool(self.scratch), learner_id)
        assert message is not None, "it waits without end"
        return message
