"""Costs of everything in one virtual job, from its configuration: the objects of `virtual/`, put together."""

from __future__ import annotations

from collections.abc import Callable

from mpisgd.comm.virtual.network import Network
from mpisgd.comm.virtual.wire import VirtualWire
from mpisgd.config import Config
from mpisgd.exchange.roles import Roles
from mpisgd.simulate import compute, failures
from mpisgd.simulate.failures import LearnerFailed

_NS = 10**9


class Costs:
    """Compute of learners, network, service of shards, failures.

    Args:
        nodes: the node of each rank.

    Raises ConfigError, DataError where a cost model does not fit the job.
    """

    def __init__(self, config: Config, roles: Roles, nodes: list[int]) -> None:
        computing = [nodes[rank] for rank in roles.computing_ranks]
        self._service = config.service
        self._compute = compute.make(config.compute, config.virtual, seed=config.seed, lambda_=len(computing), nodes=computing)
        self._failures = failures.Failures(config.failures, config.seed)
        self._local_bandwidth = config.network.local_bandwidth
        self.network = Network(config.network, nodes)

    def gradient_ns(self, nbytes: int) -> int:
        """To check a gradient of so many bytes and add it to the sum."""
        return round((self._service.gradient_s + self._service.gradient_s_per_byte * nbytes) * _NS)

    def sum_ns(self, nbytes: int, places: int) -> int:
        """To sum one part of so many gradients of so many bytes each: the others' are read as fast as they would be sent here."""
        return round(nbytes / places * (places - 1) / self._local_bandwidth * _NS)

    def update_ns(self, nbytes: int) -> int:
        """To make an update of a slice of so many bytes."""
        return round((self._service.update_s + self._service.update_s_per_byte * nbytes) * _NS)

    def compute_of(self, learner_id: int, wire: VirtualWire) -> Callable[[], int]:
        """Tells how many nanoseconds the next mini-batch of a learner takes. Raises LearnerFailed where it fails meanwhile.

        In teams, what is called a learner here is a rank, by its number (`Roles.number`).
        """
        cost = self._compute.nanoseconds(learner_id).__next__
        fails_ns = self._failures.nanosecond_of(learner_id)
        if fails_ns is None:
            return cost

        def cost_until_failure() -> int:
            ns, left = cost(), fails_ns - wire.now_ns()
            if left <= ns:
                wire.work(max(0, left))
                raise LearnerFailed(learner_id, wire.now_ns())
            return ns

        return cost_until_failure
