"""Gradients and updates with tensors, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpisgd.comm.virtual.wire import VirtualWire
from mpisgd.simulate.batch import Batch
from mpisgd.update.slice_update import SliceUpdate, Step
from mpisgd.update.streamed_update import StreamedUpdate
from mpisgd.vectors.computing import Travels
from mpisgd.vectors.memory import Memory


class TimedUpdate(SliceUpdate):
    """A virtual shard's update; `service_ns`: cost of a gradient, and of an update."""

    def __init__(self, wire: VirtualWire, service_ns: tuple[int, int], *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._wire = wire
        self._gradient_ns, self._update_ns = service_ns

    def accumulate(self, *arguments: Any, **named: Any) -> None:
        self._wire.work(self._gradient_ns)
        super().accumulate(*arguments, **named)

    def begin_step(self) -> Step:
        self._wire.work(self._update_ns)
        return super().begin_step()


class TimedStreamedUpdate(TimedUpdate, StreamedUpdate):
    """A `TimedUpdate` in chunks; its time passes before the first chunk."""


class BatchedGradient(Travels):
    """A virtual learner's gradient, computed with those of all learners computing at the same virtual time."""

    def __init__(self, memory: Memory, wire: VirtualWire, batch: Batch, learner_id: int) -> None:
        self.memory = memory
        self.samples = 0
        self._wire = wire
        self._batch = batch
        self._learner_id = learner_id

    def begin(self, seq: int) -> None:
        """Join the batch; other learners join before this mini-batch's virtual time is over."""
        self._batch.add(self._learner_id, seq, *self.memory.tensors)

    def compute(self, seq: int) -> float:
        self._wire.cluster.until_first(self._wire)
        self.samples, loss = self._batch.result(self._learner_id)
        return loss


class Timed(Travels):
    """A virtual learner's gradient, computed at the end of its virtual time."""

    def __init__(self, gradient: Travels, wire: VirtualWire, next_ns: Callable[[], int]) -> None:
        self.memory, self.scaled = gradient.memory, gradient.scaled
        self.samples = 0
        self._gradient = gradient
        self._wire = wire
        self._next_ns = next_ns

    def compute(self, seq: int) -> float:
        self._gradient.begin(seq)
        self._wire.work(self._next_ns())
        loss, self.samples = self._gradient.compute(seq), self._gradient.samples
        self.skipped = self._gradient.skipped
        return loss
