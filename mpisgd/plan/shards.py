"""Choice of the number of shards S, by throughput.

Points are predicted by affordable virtual runs, and bounded in closed form (`bounds.py`) as a check.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from mpisgd.analysis.tables import Cell, Table, columns_of
from mpisgd.base.errors import ConfigError
from mpisgd.config import Config, replace
from mpisgd.plan.costs.bounds import Bounds, bounds
from mpisgd.plan.costs.predict import LEAST_ROUNDS, LEAST_UPDATES, predict, pushes_per_update
from mpisgd.plan.costs.scale import PLACEMENTS, Placement, with_learners, with_slow_links

#: Numbers of learners to try.
_SIZES = 4
#: Most shards to try.
_MOST_SHARDS = 64
#: Most messages of a virtual run, over a usual prediction's.
_AFFORDABLE = 20
#: Below this share of the bound, queues limit throughput, not the bottleneck.
_BUSY = 0.8
#: Share of the learners' possible pushes that is enough.
ENOUGH = 0.95


@dataclass(frozen=True)
class Point:
    """Throughput at a number of learners and shards, in applied gradients.

    `gradients_per_s`: None = too many messages to simulate. `expected`: predicted, else the bound times the share of the bound
    predicted for fewer learners.
    """

    learners: int
    shards: int
    placement: Placement
    gradients_per_s: float | None
    expected: float
    bounds: Bounds

    @property
    def bottleneck(self) -> str:
        """Bottleneck; far below the bound, shards and learners wait in each other's queues."""
        return "queues" if self.expected < _BUSY * self.bounds.gradients_per_s else self.bounds.bottleneck


def points(config: Config, most_learners: int, pushes: int) -> list[Point]:
    """Return points per number of learners, from S = 1 until learners are twice the bounds' bottleneck.

    Raises ConfigError: fewer learners than the run's.
    """
    lambda_ = config.virtual.learners
    if most_learners < lambda_:
        raise ConfigError(f"--learners {most_learners}: expected at least the {lambda_} of the run")
    config = replace(config, virtual=dataclasses.replace(config.virtual, spare_nodes=0))
    found: list[Point] = []
    for learners in sizes(lambda_, most_learners):
        scaled, step = with_learners(config, learners), 2 if learners == lambda_ else 4
        shards, freed = 1, 0
        while freed < 2 and shards <= min(_MOST_SHARDS, config.virtual.parameters):
            for placement in _placements(scaled, shards):
                moved = with_slow_links(replace(scaled, shards=shards, placement=placement), scaled)
                found.append(_point(moved, pushes, found))
            freed += ENOUGH * found[-1].bounds.shard > found[-1].bounds.learners
            shards *= step
    return found


def _point(config: Config, pushes: int, before: list[Point]) -> Point:
    """Predict a point, or bound an unaffordable point."""
    lambda_, limits = config.virtual.learners, bounds(config)
    needed = max(2 * pushes // config.shards, LEAST_ROUNDS * lambda_, LEAST_UPDATES * pushes_per_update(config))
    if needed * config.shards > _AFFORDABLE * pushes:
        expected = limits.gradients_per_s * _reached(config, before)
        return Point(lambda_, config.shards, config.placement, None, expected, limits)
    predicted = predict(config, min(pushes, needed)).gradients_per_s
    return Point(lambda_, config.shards, config.placement, predicted, predicted, limits)


def _reached(config: Config, before: list[Point]) -> float:
    """Return the last predicted share of the bound in this placement, at as many shards if known."""
    known = [point for point in before if point.gradients_per_s is not None and point.placement == config.placement]
    alike = [point for point in known if point.shards == config.shards]
    last = (alike or known)[-1:]
    return min(1.0, last[0].expected / last[0].bounds.gradients_per_s) if last else 1.0


def sizes(least: int, most: int) -> list[int]:
    """Return numbers doubled from least to most, or in larger equal ratios."""
    count = min(_SIZES, 1 + math.ceil(math.log2(most / least)))
    return sorted({round(size) for size in np.geomspace(least, most, count)})


def _placements(config: Config, shards: int) -> tuple[Placement, ...]:
    """Return both placements if they differ: several shards, several nodes, several ranks per node."""
    on_node, ranks = config.virtual.ranks_per_node, shards + config.virtual.learners
    return PLACEMENTS if shards > 1 and 1 < on_node < ranks else (config.placement,)


def enough(found: list[Point]) -> dict[int, Point]:
    """Return learners -> fewest shards near the most throughput; packed if as good."""
    result = {}
    for learners in sorted({point.learners for point in found}):
        own = [point for point in found if point.learners == learners]
        most = max(point.expected for point in own)
        result[learners] = next(point for point in own if point.expected >= ENOUGH * most)
    return result


def table(found: list[Point], mu: int) -> Table:
    best = enough(found)
    rows: list[tuple[Cell, ...]] = [
        (
            point.learners,
            point.shards,
            point.placement,
            point.gradients_per_s,
            mu * point.expected,
            point.bounds.gradients_per_s,
            100 * point.expected / point.bounds.learners,
            point.bottleneck,
            "enough" if best[point.learners] is point else None,
        )
        for point in found
    ]
    columns = columns_of(
        "λ | shards | placement | predicted gradients/s | images/s | bound gradients/s | of free learners [%] :.1f | bottleneck"
        " | choice"
    )
    note = (
        "Bound: throughput of the bottleneck alone, in closed form. Images: of the prediction; without an affordable prediction, of"
        " the bound times the share reached by fewer learners. Queues: far below the bound, as shards and learners wait"
        f" for one another. Enough: the fewest shards with {100 * ENOUGH:.0f} % of the most gradients."
    )
    return Table("shards", "Throughput over shards and learners", columns, tuple(rows), note)
