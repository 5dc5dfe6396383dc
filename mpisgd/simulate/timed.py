"""Gradients with tensors, and the service of shards, in virtual time."""

from __future__ import annotations

from collections.abc import Callable

from mpisgd.comm.virtual.wire import VirtualWire
from mpisgd.simulate.batch import Batch
from mpisgd.vectors.computing import Charges, Travels
from mpisgd.vectors.memory import Memory


class Service(Charges):
    """Service of a virtual shard."""

    def __init__(self, wire: VirtualWire, gradient_ns: int, update_ns: int) -> None:
        self._wire = wire
        self._gradient_ns = gradient_ns
        self._update_ns = update_ns

    def gradient(self) -> None:
        self._wire.work(self._gradient_ns)

    def update(self) -> None:
        self._wire.work(self._update_ns)


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
