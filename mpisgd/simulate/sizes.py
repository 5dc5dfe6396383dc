"""A virtual job without gradients: only sizes travel. Timing and staleness, at any scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mpisgd.base.errors import ConfigError
from mpisgd.config import Config
from mpisgd.exchange.evaluator_channel import EvaluatorChannel
from mpisgd.exchange.roles import Roles
from mpisgd.job import parts
from mpisgd.job.parts import Brought, Meta
from mpisgd.records.checkpoint.snapshots import Nowhere, Snapshots
from mpisgd.records.log.writer import EvaluatorLog
from mpisgd.simulate.costs import Costs
from mpisgd.simulate.sized import SizedGradient, SizedUpdate, SizedVector
from mpisgd.simulate.world import VirtualWorld
from mpisgd.vectors.flat import FlatModel, Layer, slice_bounds


class SizedWorld(VirtualWorld):
    """Virtual ranks without tensors: computing takes its time, and no more."""

    batch_norm_policy = "no gradients were computed"

    def __init__(self, config: Config, brought: Brought, roles: Roles, costs: Costs) -> None:
        super().__init__(config, roles, costs)
        options = config.virtual
        self.meta = Meta(options.train_samples, 0, (), 0)
        model = None if options.parameters else _model(config, brought)
        self.parameters = options.parameters if model is None else model.size
        self.bounds = slice_bounds(self.parameters, config.shards) if model is None else parts.bounds(config, model)
        self.slices = []
        if model is not None:
            self.slices = parts.cut(config, model)
        elif config.exchange == "layerwise":  # of a model of which only the size is known, each slice is one layer
            self.slices = [[Layer(f"layer {shard}", end - start)] for shard, (start, end) in enumerate(self.bounds)]
        self._vector: Any = SizedVector(self.parameters)

    def check(self) -> None:
        """Any configuration will do."""

    def gradient(self, rank: int) -> SizedGradient:
        return SizedGradient(self._vector, self.config.mu, self.wires[rank], self._next_ns(rank))

    def update(self, rank: int, gradients_per_update: float) -> SizedUpdate:
        config, (start, end) = self.config, self.bounds[self.roles.index(rank)]
        return SizedUpdate(
            end - start,
            learning_rate=config.alpha0 * (gradients_per_update if config.linear_scaling else 1),
            schedule=parts.make_schedule(config, gradients_per_update, self.meta.train_samples),
            train_samples=self.meta.train_samples,
            half=config.push_format == "bfloat16",
            rank=self.wires[rank],
            gradient_ns=self.costs.gradient_ns(4 * (end - start)),
            update_ns=self.costs.update_ns(4 * (end - start)),
        )

    def snapshots(self, path: Path, update: Any, resumed: Sequence[Sequence[float]]) -> Snapshots:
        return Nowhere()

    def evaluate(self, channel: Callable[..., EvaluatorChannel], log: EvaluatorLog, weights_file: Path, first: int) -> None:
        """There is nothing to evaluate: the evaluator says goodbye."""
        channel(weights=self._vector, averaged=None).goodbye()


def _model(config: Config, brought: Brought) -> FlatModel:
    """The model whose parameters are counted, which must be built for that, for its own data."""
    try:
        return parts.build_model(config, parts.meta_of(parts.load_data(config, brought)), brought)
    except ConfigError as error:
        raise ConfigError(f"virtual.parameters = 0: the model's are counted, but {error}") from error
