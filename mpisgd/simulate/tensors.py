"""A virtual job with gradients: every virtual learner computes a real one, on this machine, when its virtual time has come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpisgd.comm.virtual.wire import VirtualWire
from mpisgd.config import Config
from mpisgd.exchange.evaluator_channel import EvaluatorChannel
from mpisgd.exchange.roles import Roles
from mpisgd.gradient.gradient import Gradient
from mpisgd.gradient.measure import Unmeasured
from mpisgd.job import parts
from mpisgd.job.building.tensors import Tensors
from mpisgd.job.parts import Brought
from mpisgd.records.checkpoint.snapshots import Snapshots
from mpisgd.records.log.progress import Evaluations
from mpisgd.records.log.writer import EvaluatorLog
from mpisgd.simulate.batch import Batch
from mpisgd.simulate.costs import Costs
from mpisgd.simulate.world import VirtualWorld
from mpisgd.update.slice_update import SliceUpdate
from mpisgd.vectors.computing import Travels
from mpisgd.vectors.flat import FlatModel, host_vector, host_view


class TensorWorld(VirtualWorld):
    """Virtual ranks that compute with tensors: one model and one copy of the data for all of them.

    `evaluated`: whether snapshots are evaluated, or only pulled: that takes no virtual time.
    """

    def __init__(self, config: Config, brought: Brought, roles: Roles, costs: Costs, evaluated: bool = True) -> None:
        super().__init__(config, roles, costs)
        data = parts.load_data(config, brought)
        self.meta = parts.meta_of(data)
        loss = parts.load_loss(config, brought)
        model = parts.build_model(config, self.meta, brought)
        sampling = parts.make_sampling(config, self.meta, len(roles.computing_ranks))
        self._tensors = Tensors(config, self.meta, loss, model, sampling, data)
        self._evaluated = evaluated
        self.fingerprint = model.fingerprint
        self.parameters = model.size
        self.bounds = parts.bounds(config, model)
        self.slices = parts.cut(config, model)
        self.batch_norm_policy = self._tensors.batch_norm_policy
        self._batch = Batch(config, model, loss, data, sampling) if config.virtual.batched else None

    def check(self) -> None:
        self._tensors.check()
        if self._batch is not None:
            self._batch.check()

    def gradient(self, rank: int) -> VirtualGradient:
        number, wire, model = self.roles.number(rank), self.wires[rank], self._tensors.model
        gradient, next_ns = self._tensors.gradient(number), self._next_ns(rank)
        if self._batch is not None:
            return BatchedGradient(model, gradient, wire, next_ns, self._batch, number)
        return VirtualGradient(model, gradient, wire, next_ns)

    def update(self, rank: int, gradients_per_update: float) -> Any:
        """The real one, which also takes its virtual time."""
        start, end = self.bounds[self.roles.index(rank)]
        update = self._tensors.update((start, end), gradients_per_update)
        nbytes = 4 * (end - start)
        return Charged(update, self.wires[rank], self.costs.gradient_ns(nbytes), self.costs.update_ns(nbytes))

    def snapshots(self, path: Path, update: Any, resumed: Sequence[Sequence[float]]) -> Snapshots:
        return self._tensors.snapshots(path, update, resumed)

    def evaluate(self, channel: Callable[..., EvaluatorChannel], log: EvaluatorLog, weights_file: Path, first: int) -> None:
        """Every snapshot, as on real ranks; it takes no virtual time."""
        measure = self._tensors.measure() if self._evaluated else Unmeasured()
        told = Evaluations("off", 0, 0, 0.0)
        self._tensors.evaluate(channel, log, weights_file, first, measure=measure, told=told)


class Charged:
    """An update whose sums and steps take virtual time on its shard's clock; all else is the update's own."""

    __slots__ = ("_gradient_ns", "_update", "_update_ns", "_wire")

    def __init__(self, update: SliceUpdate, wire: VirtualWire, gradient_ns: int, update_ns: int) -> None:
        for name, value in zip(self.__slots__, (gradient_ns, update, update_ns, wire), strict=True):
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._update, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._update, name, value)

    def accumulate(self, *args: Any, **named: Any) -> None:
        self._wire.work(self._gradient_ns)
        self._update.accumulate(*args, **named)

    def step(self) -> Any:
        self._wire.work(self._update_ns)
        return self._update.step()

    def begin_step(self) -> Any:
        self._wire.work(self._update_ns)
        return self._update.begin_step()


class VirtualGradient(Travels):
    """A virtual learner's gradient: its own weights and gradients, the model of all.

    `wire_weights` and `wire_gradients`, both (parameters,) float32, are what travels.
    """

    def __init__(self, model: FlatModel, gradient: Gradient, wire: VirtualWire, next_ns: Callable[[], int]) -> None:
        self._model = model
        self._gradient = gradient
        self._wire = wire
        self.next_ns = next_ns
        self._weights = host_vector(model.size)
        self._gradients = host_vector(model.size)
        self.wire_weights = host_view(self._weights)
        self.wire_gradients = host_view(self._gradients)
        self.samples = 0

    def live_in(self, weights: np.ndarray, gradients: np.ndarray) -> None:
        """Let this memory take the place of `wire_weights` and `wire_gradients`."""
        self.wire_weights, self.wire_gradients = weights, gradients
        self._weights, self._gradients = torch.from_numpy(weights), torch.from_numpy(gradients)

    def prepare(self, seq: int) -> None:
        """Nothing is to be gained: virtual learners wait in virtual time."""

    def interrupt_by(self, check: Callable[[], None]) -> None:
        """Its virtual time is interrupted by the wire, before anything is computed."""

    def compute(self, seq: int) -> float:
        """Compute the gradient of mini-batch `seq` at the weights that were pulled; returns the loss."""
        self._wire.work(self.next_ns())
        return self.at_once(seq)

    def at_once(self, seq: int) -> float:
        """Compute, when its virtual time has passed elsewhere."""
        self._model.weights.copy_(self._weights)
        loss = self._gradient.compute(seq)
        self._gradients.copy_(self._model.gradients)
        self.samples = self._gradient.samples
        return loss


class BatchedGradient(VirtualGradient):
    """A virtual gradient, computed together with those of all learners that are computing at that virtual time."""

    def __init__(
        self,
        model: FlatModel,
        gradient: Gradient,
        wire: VirtualWire,
        next_ns: Callable[[], int],
        batch: Batch,
        learner_id: int,
    ) -> None:
        super().__init__(model, gradient, wire, next_ns)
        self._batch = batch
        self._learner_id = learner_id

    def compute(self, seq: int) -> float:
        """The others that compute now register theirs before this one's virtual time is over."""
        self._batch.add(self._learner_id, seq, self._weights, self._gradients)
        self._wire.work(self.next_ns())
        self._wire.catch_up()
        self.samples, loss = self._batch.result(self._learner_id)
        return loss
