"""Options of a virtual cluster and its costs, for `simulate` and `plan`; `train` ignores these tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from mpisgd.base.checks import at_least, at_least_each, require


@dataclass(frozen=True)
class VirtualOptions:
    """Virtual cluster and its computing."""

    learners: int = 30
    """Virtual learners lambda, besides shards and evaluator. With aggregation: computing ranks, in teams. Each may be a group of
    group_size ranks."""
    gradients: bool = True
    """Compute real gradients. Without, only sizes travel: timing and staleness at any scale."""
    batched: bool = False
    """Compute many learners' gradients as a batch. By torch.func.vmap; equal to float tolerance only."""
    parameters: int = 0
    """Parameters of the model, without gradients; 0 = as `model`."""
    layers: dict[str, int] = field(default_factory=dict)
    """Layers of a model, without gradients, lowest first: name parameters name parameters ... As many shards have a layer each.
    None = as `model`."""
    forward_s: dict[str, float] = field(default_factory=dict)
    """Measured forward seconds of each layer: name seconds name seconds ... With per_layer, layers share `compute`'s
    seconds in proportion. None = equal shares, a third forward."""
    backward_s: dict[str, float] = field(default_factory=dict)
    """Measured backward seconds of each layer."""
    train_samples: int = 50_000
    """Samples per epoch, without gradients [Zhang16 4.1: CIFAR-10]."""
    ranks_per_node: int = 1
    """Ranks sharing a node, its link and its slowness. Ranks are placed node by node."""
    spare_nodes: int = 0
    """Further nodes with a rank alone, a shard."""
    slow_nodes: dict[int, float] = field(default_factory=dict)
    """Slow nodes down: node factor node factor ... Mini-batches there take factor times as long."""
    pause_mean_s: float = 0.0
    """Mean length of a learner's random pauses, exponential; 0 = none. As by the operating system and neighbours."""
    pause_every_s: float = 60.0
    """Mean compute seconds between pauses, exponential."""

    def __post_init__(self) -> None:
        at_least(
            self,
            "virtual.",
            learners=1,
            parameters=0,
            train_samples=1,
            ranks_per_node=1,
            spare_nodes=0,
            pause_mean_s=0,
            pause_every_s=1e-3,
        )
        at_least_each(self.slow_nodes, "virtual.slow_nodes", 0.0)
        at_least_each(self.layers, "virtual.layers", 1)
        require(not (self.layers and self.gradients), "virtual.layers", "...", "none beside virtual.gradients = true")
        require(not (self.layers and self.parameters), "virtual.parameters", self.parameters, "0 beside virtual.layers")
        for name, seconds in (("forward_s", self.forward_s), ("backward_s", self.backward_s)):
            at_least_each(seconds, f"virtual.{name}", 0.0)
        same = [*self.forward_s] == [*self.backward_s] and (not self.layers or [*self.forward_s] in ([], [*self.layers]))
        require(same, "virtual.backward_s", [*self.backward_s], "the layers of virtual.forward_s and of virtual.layers, in order")
        total = sum(self.forward_s.values()) + sum(self.backward_s.values())
        require(total > 0 or not self.forward_s, "virtual.forward_s", total, "seconds above 0 in all")
        require(self.gradients or not self.batched, "virtual.batched", True, "virtual.gradients = true beside batched")


@dataclass(frozen=True)
class ConstantComputeOptions:
    """The same seconds for every mini-batch."""

    mean_s: float = 0.1
    """Seconds per mini-batch."""

    def __post_init__(self) -> None:
        at_least(self, "compute.", mean_s=0)


@dataclass(frozen=True)
class NormalComputeOptions:
    """Normal compute seconds, cut at a tenth of the mean."""

    mean_s: float = 0.1
    """Mean seconds per mini-batch."""
    deviation_s: float = 0.01
    """Standard deviation, in seconds."""

    def __post_init__(self) -> None:
        at_least(self, "compute.", mean_s=0, deviation_s=0)


@dataclass(frozen=True)
class LognormalComputeOptions:
    """Log-normal compute seconds."""

    mean_s: float = 0.1
    """Mean seconds per mini-batch."""
    sigma: float = 0.2
    """Deviation of the logarithm."""

    def __post_init__(self) -> None:
        at_least(self, "compute.", mean_s=0, sigma=0)
        require(self.sigma <= 10, "compute.sigma", self.sigma, "at most 10")


@dataclass(frozen=True)
class HeavyTailComputeOptions:
    """Narrow log-normal body with rare delays from a Pareto tail: the stragglers of [Chen16 Fig. 3, 4].

    Defaults have the figures' shape, not their numbers. Of 100 learners, the mean time to collect k gradients is 1.4 to 1.8 s for k
    = 2 to 96, 2.2 s for 99, 5 s for 100 (median 2.5 s); the longest takes some 310 s.
    """

    mean_s: float = 1.6
    """Mean seconds per mini-batch of the body."""
    sigma: float = 0.06
    """Deviation of the body's logarithm."""
    tail_probability: float = 0.012
    """Share of straggling mini-batches."""
    tail_scale_s: float = 0.5
    """Least extra seconds of stragglers."""
    tail_index: float = 1.0
    """Pareto index of the extra seconds: P(extra > x) = (tail_scale_s / x)^tail_index; small = heavy."""
    tail_most_s: float = 310.0
    """Most extra seconds [Chen16 Fig. 3: the longest seen took 310 s]."""

    def __post_init__(self) -> None:
        at_least(self, "compute.", mean_s=0, sigma=0, tail_probability=0, tail_scale_s=0, tail_index=0.1, tail_most_s=0)
        require(self.sigma <= 10, "compute.sigma", self.sigma, "at most 10")
        require(self.tail_probability <= 1, "compute.tail_probability", self.tail_probability, "at most 1")
        least = f"at least compute.tail_scale_s = {self.tail_scale_s!r}"
        require(self.tail_most_s >= self.tail_scale_s, "compute.tail_most_s", self.tail_most_s, least)


@dataclass(frozen=True)
class EmpiricalComputeOptions:
    """Compute seconds drawn with replacement from a run's log; learner l draws from the run's learner l modulo lambda.

    Without injected delays and each learner's first mini-batch, a warm-up.
    """

    run: str = ""
    """The run's directory."""
    pooled: bool = False
    """Draw from all learners' mini-batches together, as if they differed by chance alone."""


ComputeOptions = (
    ConstantComputeOptions | NormalComputeOptions | LognormalComputeOptions | HeavyTailComputeOptions | EmpiricalComputeOptions
)
COMPUTE: Mapping[str, type] = {
    "constant": ConstantComputeOptions,
    "normal": NormalComputeOptions,
    "lognormal": LognormalComputeOptions,
    "heavy_tail": HeavyTailComputeOptions,
    "empirical": EmpiricalComputeOptions,
}


@dataclass(frozen=True)
class NetworkOptions:
    """A message takes overhead, latency, and bytes over the slowest link's bandwidth; links are queues.

    Defaults: a usual 100 Gb/s interconnect; the POWER7 nodes of [Zhang16 4.1] have 192 GB/s each.
    """

    latency_s: float = 2e-6
    """Seconds of a message without bytes."""
    overhead_s: float = 1e-6
    """Seconds a rank is busy per message; none to receive by a posted receive."""
    bandwidth: float = 5e9
    """Bytes per second into, and out of, a rank."""
    node_bandwidth: float = 10e9
    """Bytes per second into, and out of, a node, shared by ranks."""
    local_bandwidth: float = 10e9
    """Bytes per second between ranks of a node, without the node's link."""
    core_bandwidth: float = 0.0
    """Bytes per second that a node's cores move between memory and link, both ways together, as for TCP; 0 = links alone, as
    InfiniBand. Messages within the node take cores as long as at local_bandwidth."""
    turn_nbytes: int = 0
    """Bytes of a message before a link's next turn; 0 = whole messages, in order. About a million: messages share links, as over
    TCP."""
    slow_links: dict[int, float] = field(default_factory=dict)
    """Slow the links of nodes down: node factor node factor ... Bytes in and out take factor times as long."""

    def __post_init__(self) -> None:
        at_least(self, "network.", latency_s=0, overhead_s=0, bandwidth=1, node_bandwidth=1, local_bandwidth=1)
        at_least(self, "network.", core_bandwidth=0, turn_nbytes=0)
        at_least_each(self.slow_links, "network.slow_links", 0.0)


@dataclass(frozen=True)
class ServiceOptions:
    """Costs of a shard's own work, besides the wire."""

    gradient_s_per_byte: float = 1e-10
    """Seconds per byte to check and sum a gradient."""
    update_s_per_byte: float = 5e-10
    """Seconds per byte of an update."""
    gradient_s: float = 0.0
    """Seconds per gradient of any size."""
    update_s: float = 0.0
    """Seconds per update of any size."""

    def __post_init__(self) -> None:
        at_least(self, "service.", gradient_s_per_byte=0, update_s_per_byte=0, gradient_s=0, update_s=0)


@dataclass(frozen=True)
class FailureOptions:
    """Failing virtual learners, whose mini-batch is lost; shards notice later."""

    at_s: dict[int, float] = field(default_factory=dict)
    """Let learners fail: learner_id second learner_id second ... Seconds are virtual."""
    mean_s: float = 0.0
    """Mean seconds of a learner's life, exponential; 0 = for ever."""
    notice_s: float = 0.05
    """Seconds until shards know of a failure."""
    then: Literal["leave", "stop"] = "leave"
    """Go on without the learner, or end the job. stop: as fail-fast on real ranks."""

    def __post_init__(self) -> None:
        at_least(self, "failures.", mean_s=0, notice_s=0)
        at_least_each(self.at_s, "failures.at_s", 0.0)
