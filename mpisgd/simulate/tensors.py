"""A virtual job with gradients: every virtual learner computes a real one, on this machine, when its virtual time has come."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpisgd.comm.communicator import Node
from mpisgd.comm.virtual.wire import VirtualWire
from mpisgd.config import Config
from mpisgd.evaluator import Evaluator
from mpisgd.exchange.evaluator_channel import EvaluatorChannel
from mpisgd.exchange.roles import Roles
from mpisgd.gradient import stages
from mpisgd.gradient.aggregate import SharedMemory
from mpisgd.gradient.gradient import Gradient
from mpisgd.gradient.measure import Unmeasured, batch_norm_policy
from mpisgd.job import parts
from mpisgd.job.parts import Brought
from mpisgd.records.checkpoint.snapshots import Snapshots
from mpisgd.records.log.progress import Evaluations
from mpisgd.records.log.writer import EvaluatorLog
from mpisgd.simulate.batch import Batch
from mpisgd.simulate.costs import Costs
from mpisgd.update.device_update import make_update
from mpisgd.update.slice_update import SliceUpdate
from mpisgd.vectors.computing import Travels
from mpisgd.vectors.memory import Memory, host_vector, host_view


class Tensors:
    """Computing of virtual ranks with tensors: one model and one copy of the data for all of them.

    `evaluated`: whether snapshots are.
    """

    def __init__(self, config: Config, brought: Brought, ranks: int, evaluated: bool = True) -> None:
        self.config = config
        self._evaluated = evaluated
        self.data = parts.load_data(config, brought)
        self.meta = parts.meta_of(self.data)
        self.loss = parts.load_loss(config, brought)
        self.model = parts.build_model(config, self.meta, brought)
        self.initial = self.model.weights.clone()
        self.parameters = self.model.size
        self.bounds = parts.bounds(config, self.model)
        self.slices = parts.cut(config, self.model)
        self.sampling = parts.make_sampling(config, self.meta, ranks)
        self._batch = Batch(config, self.model, self.loss, self.data, self.sampling) if config.virtual.batched else None

    @property
    def batch_norm_policy(self) -> str:
        return batch_norm_policy(self.model.module, self.config.evaluation, self.meta.train_samples)

    def check(self) -> None:
        """The first mini-batch must fit the model. Raises ConfigError."""
        parts.check_first_batch(self.config, self.meta, self.model, self._gradient(0, self.model.memory))
        if self._batch is not None:
            self._batch.check()

    def update(self, shard: int, gradients_per_update: float, wire: VirtualWire, costs: Costs) -> SliceUpdate:
        """The update of one shard: the real one, which also takes its virtual time."""
        start, end = self.bounds[shard]
        update = make_update(
            self.config,
            self.initial[start:end],
            gradients_per_update=gradients_per_update,
            train_samples=self.meta.train_samples,
        )
        nbytes = 4 * (end - start)
        update.accumulate = after(update.accumulate, wire, costs.gradient_ns(nbytes))  # type: ignore[method-assign]
        update.begin_step = after(update.begin_step, wire, costs.update_ns(nbytes))  # type: ignore[method-assign]
        return update

    def snapshots(self, path: Path, shard: int, update: SliceUpdate) -> Snapshots:
        return Snapshots(
            path / f".snapshots-{shard:03d}",
            every_epochs=self.config.evaluation.every_epochs,
            vectors=1 if update.averaged is None else 2,
            size=len(update.weights),
        )

    def shared(self, node: Node) -> SharedMemory:
        return SharedMemory.of(node, self.parameters)

    def gradient(self, number: int, wire: VirtualWire, next_ns: Callable[[], int] | None, memory: Memory | None = None) -> Travels:
        """Make the gradient of one rank, which takes its virtual time; `next_ns` None: that passes elsewhere."""
        memory = memory or Memory.zeros(self.parameters)
        gradient: Travels = self._gradient(number, memory)
        if self._batch is not None:
            gradient = BatchedGradient(memory, wire, self._batch, number)
        return gradient if next_ns is None else Timed(gradient, wire, next_ns)

    def _gradient(self, number: int, memory: Memory) -> Gradient:
        return stages.make_gradient(self.config, self.model, self.loss, self.data, self.sampling, number, memory)

    def evaluate(
        self, wire: VirtualWire, roles: Roles, log: EvaluatorLog, weights_file: Path, serve_here: Callable[[], None] | None
    ) -> None:
        """Every snapshot, as on real ranks; it takes no virtual time."""
        config = self.config
        pulled = [host_vector(self.parameters) for _ in range(2 if config.averaging > 0 else 1)]
        channel = EvaluatorChannel(
            wire,
            roles,
            weights=host_view(pulled[0]),
            averaged=host_view(pulled[1]) if config.averaging > 0 else None,
            bounds=self.bounds,
            serve_here=serve_here,
        )
        measure = parts.make_measure(config, self.model, self.loss, self.data) if self._evaluated else Unmeasured()
        nobody, samples = Evaluations("off", 0, 0, 0.0), self.meta.train_samples
        evaluator = Evaluator(
            channel, self.model, pulled, measure, log, train=config.evaluation.train, train_samples=samples, told=nobody
        )
        evaluator.evaluate_all(weights_file)


class BatchedGradient(Travels):
    """A virtual learner's gradient, computed together with those of all learners that are computing at that virtual time."""

    def __init__(self, memory: Memory, wire: VirtualWire, batch: Batch, learner_id: int) -> None:
        self.memory = memory
        self.samples = 0
        self._wire = wire
        self._batch = batch
        self._learner_id = learner_id

    def begin(self, seq: int) -> None:
        """The others that compute now register theirs before this one's virtual time is over."""
        self._batch.add(self._learner_id, seq, *self.memory.tensors)

    def compute(self, seq: int) -> float:
        self._wire.catch_up()
        self.samples, loss = self._batch.result(self._learner_id)
        return loss


class Timed(Travels):
    """A virtual learner's gradient, which is computed when its virtual time is over."""

    def __init__(self, gradient: Travels, wire: VirtualWire, next_ns: Callable[[], int]) -> None:
        self.memory = gradient.memory
        self.samples = 0
        self._gradient = gradient
        self._wire = wire
        self._next_ns = next_ns

    def compute(self, seq: int) -> float:
        """Compute the gradient of mini-batch `seq` at the weights that were pulled; returns the loss."""
        self._gradient.begin(seq)
        self._wire.work(self._next_ns())
        loss, self.samples = self._gradient.compute(seq), self._gradient.samples
        return loss


def after(action: Callable[..., Any], wire: VirtualWire, ns: int) -> Callable[..., Any]:
    """Let an action take so many nanoseconds of a rank's virtual time."""

    def timed(*args: Any, **named: Any) -> Any:
        wire.work(ns)
        return action(*args, **named)

    return timed
