"""The virtual world: virtual ranks, their costs in virtual time, and learners that fail when their time has come."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any

from mpisgd.base.errors import PeerError
from mpisgd.comm.messages import Ending
from mpisgd.comm.virtual.wire import VirtualWire
from mpisgd.config import Config
from mpisgd.config.config_virtual import FailureOptions
from mpisgd.exchange.channel import LearnerChannel
from mpisgd.exchange.roles import Roles
from mpisgd.job.building.world import FailFast, World
from mpisgd.job.parts import Meta
from mpisgd.simulate.costs import Costs
from mpisgd.simulate.failures import LearnerFailed
from mpisgd.simulate.passes import Passes
from mpisgd.vectors.flat import Layer


class VirtualWorld(World):
    """What virtual ranks have in common, whether they compute with tensors or with sizes alone.

    Attributes:
        wires: of all ranks; filled before a role is built.
        meta, parameters, bounds: of the data, and of the model and its slices.
        slices: the layers of each slice; [] where they are cut evenly.
        batch_norm_policy, fingerprint: of the model, "" where there is none.
    """

    meta: Meta
    parameters: int
    bounds: list[tuple[int, int]]
    slices: list[list[Layer]]
    batch_norm_policy: str
    fingerprint = ""

    def __init__(self, config: Config, roles: Roles, costs: Costs) -> None:
        self.tolerance = FailFast()
        self.closing = ExitStack()
        self.shows_progress = self.saves = False
        self.config = config
        self.roles = roles
        self.costs = costs
        self.wires: list[VirtualWire] = []

    @abstractmethod
    def check(self) -> None:
        """Look whether the model can be trained. Raises ConfigError, DataError."""

    def wire(self, rank: int) -> VirtualWire:
        return self.wires[rank]

    def by_layers(self, rank: int, gradient: Any, channel: Any) -> Passes:
        return Passes(gradient, self.wires[rank], [len(layers) for layers in self.slices], channel)

    def failing(self, rank: int, channel: LearnerChannel | None) -> AbstractContextManager[object]:
        return _Failing(self.wires[rank], channel, self.config.failures)

    def sum_cost(self, rank: int, places: int) -> Callable[[], None]:
        wire, ns = self.wires[rank], self.costs.sum_ns(4 * self.parameters, places)
        return lambda: wire.work(ns)

    def _next_ns(self, rank: int) -> Callable[[], int]:
        """How many nanoseconds the next mini-batch of a rank takes."""
        return self.costs.compute_of(self.roles.number(rank), self.wires[rank])


class _Failing(AbstractContextManager[object]):
    """A learner that fails says goodbye, some time later, in the name of who would notice; or its failure ends the job."""

    def __init__(self, wire: VirtualWire, channel: LearnerChannel | None, options: FailureOptions) -> None:
        self._wire = wire
        self._channel = channel
        self._options = options

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if not isinstance(error, LearnerFailed):
            return False
        if self._channel is None or self._options.then == "stop":
            raise PeerError(f"{error}: the job is ended, as a fail-fast run is") from error
        self._wire.interrupt_by(None)
        self._wire.sleep(self._options.notice_s)
        self._channel.goodbye(ending=Ending.NONE)
        return True
