"""A virtual job without gradients: only sizes travel. Timing and staleness, at any scale."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpisgd.base.errors import ConfigError
from mpisgd.comm.communicator import Node
from mpisgd.comm.virtual.wire import VirtualWire
from mpisgd.config import Config
from mpisgd.exchange.evaluator_channel import EvaluatorChannel
from mpisgd.exchange.roles import Roles
from mpisgd.gradient.aggregate import SharedMemory
from mpisgd.job import parts
from mpisgd.job.parts import Brought, Meta
from mpisgd.records.checkpoint.snapshots import Nowhere, Snapshots
from mpisgd.records.log.writer import EvaluatorLog
from mpisgd.simulate.costs import Costs
from mpisgd.simulate.sized import SizedGradient, SizedUpdate
from mpisgd.update import schedule
from mpisgd.vectors.flat import FlatModel, Layer, slice_bounds
from mpisgd.vectors.memory import Memory, SizedVector


class Sizes:
    """Computing of ranks without tensors: it takes its time, and no more."""

    def __init__(self, config: Config, brought: Brought) -> None:
        self.config = config
        options = config.virtual
        self.meta = Meta(options.train_samples, 0, (), 0)
        model = None if options.parameters else _model(config, brought)
        self.parameters = options.parameters if model is None else model.size
        self.bounds = slice_bounds(self.parameters, config.shards) if model is None else parts.bounds(config, model)
        self.slices: list[list[Layer]] = []
        if model is not None:
            self.slices = parts.cut(config, model)
        elif config.exchange == "layerwise":  # of a model of which only the size is known, each slice is one layer
            self.slices = [[Layer(f"layer {shard}", end - start)] for shard, (start, end) in enumerate(self.bounds)]
        vector = SizedVector(self.parameters)
        self._memory = Memory(vector, vector)

    @property
    def batch_norm_policy(self) -> str:
        return "no gradients were computed"

    def check(self) -> None:
        """Any configuration will do."""

    def update(self, shard: int, gradients_per_update: float, wire: VirtualWire, costs: Costs) -> Any:
        """The update of one shard."""
        config = self.config
        start, end = self.bounds[shard]
        return SizedUpdate(
            end - start,
            learning_rate=config.alpha0 * (gradients_per_update if config.linear_scaling else 1),
            schedule=schedule.of_run(config, gradients_per_update, self.meta.train_samples),
            train_samples=self.meta.train_samples,
            half=config.push_format == "bfloat16",
            rank=wire,
            gradient_ns=costs.gradient_ns(4 * (end - start)),
            update_ns=costs.update_ns(4 * (end - start)),
        )

    def snapshots(self, path: Path, shard: int, update: Any) -> Snapshots:
        return Nowhere()

    def shared(self, node: Node) -> SharedMemory:
        return SharedMemory(node, [self._memory for _ in range(node.places)])

    def gradient(
        self, number: int, wire: VirtualWire, next_ns: Callable[[], int] | None, memory: Memory | None = None
    ) -> SizedGradient:
        """Make the gradient of one rank; `next_ns` None: its virtual time passes elsewhere."""
        return SizedGradient(memory or self._memory, self.config.mu, wire, next_ns)

    def evaluate(
        self, wire: VirtualWire, roles: Roles, log: EvaluatorLog, weights_file: Path, serve_here: Callable[[], None] | None
    ) -> None:
        """There is nothing to evaluate: the evaluator says goodbye."""
        channel = EvaluatorChannel(
            wire, roles, weights=self._memory.weights, averaged=None, bounds=self.bounds, serve_here=serve_here
        )
        channel.goodbye()


def _model(config: Config, brought: Brought) -> FlatModel:
    """The model whose parameters are counted, which must be built for that, for its own data."""
    try:
        return parts.build_model(config, parts.meta_of(parts.load_data(config, brought)), brought)
    except ConfigError as error:
        raise ConfigError(f"virtual.parameters = 0: the model's are counted, but {error}") from error
