"""Computing with tensors: gradients, updates, snapshots and evaluations of one model, for one real rank or all virtual ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpisgd.config import Config
from mpisgd.data import DataSet
from mpisgd.data.sampling import Sampling
from mpisgd.evaluator import Evaluator
from mpisgd.exchange.evaluator_channel import EvaluatorChannel
from mpisgd.gradient.gradient import Gradient, Loss
from mpisgd.gradient.measure import Measure, Unmeasured, batch_norm_policy
from mpisgd.job import parts
from mpisgd.job.parts import Meta
from mpisgd.records.checkpoint.snapshots import Snapshots
from mpisgd.records.log.progress import Evaluations
from mpisgd.records.log.writer import EvaluatorLog
from mpisgd.update.slice_update import SliceUpdate
from mpisgd.vectors.flat import FlatModel, host_vector, host_view


@dataclass
class Tensors:
    """The parts that compute.

    Attributes:
        data: None on a rank that has no use for it.
        device, shard_device: of gradients, and of updates: "cpu", or a rank's GPU.
    """

    config: Config
    meta: Meta
    loss: Loss
    model: FlatModel
    sampling: Sampling
    data: DataSet | None
    device: str = "cpu"
    shard_device: str = "cpu"

    @property
    def batch_norm_policy(self) -> str:
        return batch_norm_policy(self.model.module, self.config.evaluation, self.meta.train_samples)

    def gradient(self, number: int, *, direct: bool = False) -> Gradient:
        """The gradient of the rank of this number (`Roles.number`)."""
        assert self.data is not None
        return parts.make_gradient(self.config, self.model, self.loss, self.data, self.sampling, number, direct=direct)

    def check(self) -> float:
        """The loss of a first mini-batch, which must fit the model. Raises ConfigError, DataError."""
        return parts.check_first_batch(self.config, self.meta, self.model, self.gradient(0))

    def update(self, bounds: tuple[int, int], gradients_per_update: float, *, direct: bool = False) -> SliceUpdate:
        """The update of a slice, from the weights that the model has now."""
        return parts.make_update(
            self.config,
            self.model.weights[slice(*bounds)],
            device=self.shard_device,
            direct=direct,
            gradients_per_update=gradients_per_update,
            train_samples=self.meta.train_samples,
        )

    def snapshots(self, path: Path, update: SliceUpdate, resumed: Sequence[Sequence[float]]) -> Snapshots:
        """As in `World.snapshots`."""
        every, vectors = self.config.evaluation.every_epochs, 1 if update.averaged is None else 2
        return Snapshots(path, every_epochs=every, vectors=vectors, size=len(update.weights), resumed=resumed)

    def measure(self) -> Measure:
        assert self.data is not None
        return parts.make_measure(self.config, self.model, self.loss, self.data)

    def evaluate(
        self,
        channel: Callable[..., EvaluatorChannel],
        log: EvaluatorLog,
        weights_file: Path,
        first: int,
        *,
        measure: Measure | Unmeasured,
        told: Evaluations,
    ) -> None:
        """As in `World.evaluate`; `told` is told how far it is."""
        pulled = [host_vector(self.model.size) for _ in range(2 if self.config.averaging > 0 else 1)]
        evaluator = Evaluator(
            channel(weights=host_view(pulled[0]), averaged=host_view(pulled[1]) if len(pulled) > 1 else None),
            self.model,
            pulled,
            measure,
            log,
            train=self.config.evaluation.train,
            train_samples=self.meta.train_samples,
            told=told,
        )
        evaluator.evaluate_all(weights_file, first)
