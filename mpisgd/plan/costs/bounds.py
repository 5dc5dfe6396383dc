"""Closed-form bounds on throughput, if only the bottleneck is waited for.

Operational analysis (Denning and Buzen 1978): N customers (learners) that think (compute) for Z seconds and use a server for D are
served at most at N / (Z + D) and 1 / D. Servers are shards (a gradient's bytes, service, the weights' bytes, a share of an update),
and the links of the node of most shards.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from mpisgd.config import Config, StragglerOptions, footprint, replace
from mpisgd.gradient.straggler import Delays
from mpisgd.plan.costs.scale import layout
from mpisgd.simulate import compute

#: Mini-batches to draw, over all learners.
_DRAWN = 20_000


@dataclass(frozen=True)
class Bounds:
    """Most applied gradients per second through each part."""

    learners: float
    shard_link: float
    shard_service: float
    shard_update: float
    node_link: float

    @property
    def shard(self) -> float:
        """Most gradients per second of a shard: link, service and updates in sequence."""
        return 1 / (1 / self.shard_link + 1 / self.shard_service + 1 / self.shard_update)

    @property
    def gradients_per_s(self) -> float:
        return min(self.learners, self.shard, self.node_link)

    @property
    def bottleneck(self) -> str:
        least = self.gradients_per_s
        if least == self.learners:
            return "learners"
        if least == self.node_link:
            return "node's link"
        parts = {"shard's link": self.shard_link, "shard's service": self.shard_service, "shard's update": self.shard_update}
        return min(parts, key=lambda part: parts[part])


def bounds(config: Config) -> Bounds:
    """Return the bounds. Raises ConfigError, DataError: compute cannot be drawn."""
    lambda_, network, service = config.virtual.learners, config.network, config.service
    protocol = config.protocol.make(lambda_)
    per_update = protocol.gradients_per_update
    pushes = lambda_ / per_update if protocol.consistent else 1.0  # and answers, per applied gradient
    whole = 4 * config.virtual.parameters
    ways = [each * config.virtual.parameters for each in footprint.of_exchange(vars(config))]
    both_ways = sum(ways)
    nbytes = whole / config.shards
    on_node, remote, nodes = _layout(config)
    slowest = min(network.bandwidth, network.node_bandwidth) if remote else min(network.bandwidth, network.local_bandwidth)
    overhead_s, latency_s = network.overhead_s, network.latency_s
    gradient_s = service.gradient_s + service.gradient_s_per_byte * nbytes
    update_s = service.update_s + service.update_s_per_byte * nbytes
    link_s = pushes * (both_ways / config.shards / slowest + 3 * overhead_s) + (0.0 if protocol.consistent else latency_s)
    hops = 2 if protocol.consistent else 3  # a synchronous request waits at the shard before the update
    wire_s = both_ways / slowest + hops * latency_s + 2 * config.shards * overhead_s + gradient_s
    thinking_s = _thinking_s(config, nodes)
    if protocol.consistent:
        learners = per_update / (order_statistic(thinking_s, per_update, lambda_) + wire_s + update_s)
    else:
        learners = lambda_ / (float(thinking_s.mean()) + wire_s)
    return Bounds(
        learners=learners,
        shard_link=_rate(link_s),
        shard_service=_rate(pushes * gradient_s),
        shard_update=_rate(update_s / per_update),
        node_link=_rate(pushes * on_node * max(ways) / config.shards * remote / network.node_bandwidth),
    )


def order_statistic(seconds: np.ndarray, k: int, of: int) -> float:
    """Return the mean k-th smallest of `of` draws from `seconds`, (drawn,): exact for the last, else the usual quantile."""
    if k < of:
        return float(np.quantile(seconds, k / (of + 1)))
    below = np.arange(len(seconds) + 1) / len(seconds)
    return float(np.sort(seconds) @ np.diff(below**of))


def _rate(seconds: float) -> float:
    return 1 / seconds if seconds > 0 else math.inf


def _layout(config: Config) -> tuple[int, float, list[int]]:
    """Return shards on the fullest node, the share of learners elsewhere, and learners' nodes."""
    nodes, roles = layout(config)
    (fullest, shards), *_ = Counter(nodes[rank] for rank in roles.shard_ranks).most_common(1)
    of_learners = [nodes[rank] for rank in roles.learner_ranks]
    return shards, sum(node != fullest for node in of_learners) / len(of_learners), of_learners


def mini_batch_s(config: Config) -> float:
    """Return mean seconds of a mini-batch of `mu` samples, without delays."""
    alone = replace(config, local_steps=0, straggler=StragglerOptions())
    return float(_thinking_s(alone, _layout(alone)[2]).mean()) / alone.mini_batches_per_push


def _thinking_s(config: Config, nodes: list[int]) -> np.ndarray:
    """Draw seconds from pull to push, with delays, over all learners: float64, (drawn,)."""
    lambda_ = config.virtual.learners
    costs = compute.make(config.compute, config.virtual, seed=config.seed, lambda_=lambda_, nodes=nodes)
    some = np.unique(np.linspace(0, lambda_ - 1, min(lambda_, _DRAWN // 40)).astype(int)).tolist()
    drawn = []
    for learner_id in some:
        nanoseconds, delays = costs.nanoseconds(learner_id), Delays(config.straggler, config.seed, learner_id)
        for seq in range(max(1, _DRAWN // len(some) // config.mini_batches_per_push)):
            compute_s = sum(itertools.islice(nanoseconds, config.mini_batches_per_push)) * 1e-9
            drawn.append(compute_s + delays.of(seq, compute_s))
    return np.array(drawn)
