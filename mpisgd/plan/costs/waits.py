"""What of the costs that columns tell are waits: a virtual run with them would be slower than the log.

A push waits for a shard that is at work. Where shards never rest, no push tells the latency; where links are always shared, no
transfer tells their rate. So the one is at most, and the other at least, what the columns say (`wire.py`). Where the virtual run's
cycles take longer than the log's, the latency is the default's, and then links are faster until they do not.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from mpisgd.config import Config, replace
from mpisgd.config.config_virtual import NetworkOptions
from mpisgd.plan.costs.observe import Observed
from mpisgd.plan.costs.predict import predict
from mpisgd.plan.costs.scale import layout
from mpisgd.plan.costs.wire import TELLING_NBYTES, Cost

_NEAR = 1.02
"""Up to so many times as long is no longer."""
_STEPS = 6


def without_waits(config: Config, real: Observed, pushes: int) -> tuple[Config, Observed, list[Cost]]:
    """The configuration whose cycles take no longer than the log's, if links can see to it; what it gives; what has changed."""
    virtual, costs, lambda_ = predict(config, pushes), list[Cost](), config.virtual.learners
    least_s = NetworkOptions().latency_s
    if _too_slow(virtual, real, lambda_) > 1 and config.network.latency_s > least_s:
        config = replace(config, network=dataclasses.replace(config.network, latency_s=least_s))
        virtual = predict(config, pushes)
        costs.append(Cost("latency", least_s, "s", "assumed: pushes wait for shards that are at work"))
    times = 1.0
    for _ in range(_STEPS if 4 * config.virtual.parameters / config.shards >= TELLING_NBYTES else 0):
        more = _too_slow(virtual, real, lambda_)
        if more == 1:
            break
        times *= more
        config = _with_faster_links(config, more)
        virtual = predict(config, pushes)
    if times > 1:
        costs.append(Cost("links beyond that", times, "times", "so that the virtual run is no slower: transfers share them"))
    return config, virtual, costs


def missing_s(virtual: Observed, real: Observed, lambda_: int, added_s: float = 0.0) -> float:
    """Seconds of a cycle that a virtual run, to which so many were added already, lacks besides compute and delay.

    By lags, which few odd mini-batches do not change. But where most of a cycle is lag, by cycles: a synchronous lag ends when a
    gradient's header comes, and its bytes may take longer than all else.
    """
    if _is_mostly_lag(real, lambda_):
        return added_s + lambda_ * (real.seconds_per_push - virtual.seconds_per_push)
    return real.lag.mean_s - virtual.lag.mean_s


def _is_mostly_lag(real: Observed, lambda_: int) -> bool:
    return real.lag.mean_s >= 0.5 * lambda_ * real.seconds_per_push


def _too_slow(virtual: Observed, real: Observed, lambda_: int) -> float:
    """How many times as long the same takes in the virtual run; 1 where that is hardly more."""
    if _is_mostly_lag(real, lambda_):
        times = virtual.seconds_per_push / real.seconds_per_push
    else:
        times = virtual.lag.mean_s / real.lag.mean_s if real.lag.mean_s > 0 else 1.0
    return times if times > _NEAR else 1.0


def _with_faster_links(config: Config, times: float) -> Config:
    """Those that the log has seen: of one node's, links between nodes are assumed."""
    names = ["bandwidth", "local_bandwidth"]
    if len(set(layout(config)[0])) > 1:
        names.append("node_bandwidth")
    faster: dict[str, Any] = {name: getattr(config.network, name) * times for name in names}
    return replace(config, network=dataclasses.replace(config.network, **faster))
