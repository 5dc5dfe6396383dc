"""Removal of waits from costs if the virtual run is slower than the log.

The columns (`messages.py`) give a largest latency and a least rate: try the default latency, then faster links.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from mpisgd.config import Config, replace
from mpisgd.config.config_virtual import NetworkOptions
from mpisgd.plan.costs.messages import TELLING_NBYTES, Cost
from mpisgd.plan.costs.observe import Observed
from mpisgd.plan.costs.predict import predict
from mpisgd.plan.costs.scale import layout

_NEAR = 1.02
"""Ratio of cycles that counts as no longer."""
_STEPS = 6


def without_waits(config: Config, real: Observed, pushes: int) -> tuple[Config, Observed, list[Cost]]:
    """Return the configuration of cycles no longer than the log's, if links allow; its prediction; changed costs."""
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
        costs.append(Cost("links beyond that", times, "times", "so that the virtual run is no slower: transfers share links"))
    return config, virtual, costs


def missing_s(virtual: Observed, real: Observed, lambda_: int, added_s: float = 0.0) -> float:
    """Return seconds to add to a virtual cycle; `added_s`: already added.

    Compare lags; or whole cycles, where these are mostly lag.
    """
    if _is_mostly_lag(real, lambda_):
        return added_s + lambda_ * (real.seconds_per_push - virtual.seconds_per_push)
    return real.lag.mean_s - virtual.lag.mean_s


def _is_mostly_lag(real: Observed, lambda_: int) -> bool:
    return real.lag.mean_s >= 0.5 * lambda_ * real.seconds_per_push


def _too_slow(virtual: Observed, real: Observed, lambda_: int) -> float:
    """Return virtual over real seconds of a cycle; 1 if hardly more."""
    if _is_mostly_lag(real, lambda_):
        times = virtual.seconds_per_push / real.seconds_per_push
    else:
        times = virtual.lag.mean_s / real.lag.mean_s if real.lag.mean_s > 0 else 1.0
    return times if times > _NEAR else 1.0


def _with_faster_links(config: Config, times: float) -> Config:
    """Speed up logged links: on a single node, none between nodes."""
    names = ["bandwidth", "local_bandwidth"]
    if len(set(layout(config)[0])) > 1:
        names.append("node_bandwidth")
    faster: dict[str, Any] = {name: getattr(config.network, name) * times for name in names}
    return replace(config, network=dataclasses.replace(config.network, **faster))
