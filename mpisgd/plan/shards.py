"""Choice of the number of shards: throughput at S = 1, 2, 4 ... among the run's learners and among more.

Each point is predicted by a virtual run, where that is affordable, and bounded in closed form (`bounds.py`) as a check on it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mpisgd.analysis.tables import Cell, Table, columns_of
from mpisgd.base.errors import ConfigError
from mpisgd.config import Config, replace
from mpisgd.plan.costs.bounds import Bounds, bounds
from mpisgd.plan.costs.predict import LEAST_ROUNDS, LEAST_UPDATES, predict, pushes_per_update
from mpisgd.plan.costs.scale import PLACEMENTS, Placement, with_learners, with_slow_links

#: Numbers of learners that are tried, from the run's to the most.
_SIZES = 4
#: Shards that are tried at most.
_MOST_SHARDS = 64
#: A virtual run may have so many times the messages of a usual prediction.
_AFFORDABLE = 20
#: Below this share of its bound, throughput is limited by waiting in queues, rather than by the bottleneck.
_BUSY = 0.8
#: Of what the learners could push, this share is enough.
ENOUGH = 0.95


@dataclass(frozen=True)
class Point:
    """Throughput at one number of learners and of shards; gradients per second are applied ones.

    `gradients_per_s` is predicted, None where a virtual run would have too many messages. `expected` is that; where it is None
    the bound, times the share of its own bound that was predicted for fewer learners.
    """

    learners: int
    shards: int
    placement: Placement
    gradients_per_s: float | None
    expected: float
    bounds: Bounds

    @property
    def bottleneck(self) -> str:
        """Far below the bound nothing is busy all the time: shards and learners wait in each other's queues."""
        return "queues" if self.expected < _BUSY * self.bounds.gradients_per_s else self.bounds.bottleneck


def points(config: Config, most_learners: int, pushes: int) -> list[Point]:
    """For each number of learners: S from 1 upwards, until by the bounds the learners are the bottleneck, and once more.

    Raises ConfigError where there are to be fewer learners than the run has.
    """
    lambda_ = config.virtual.learners
    if most_learners < lambda_:
        raise ConfigError(f"--learners {most_learners}: expected at least the {lambda_} of the run")
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
    """`before`: the points that are known already."""
    lambda_, limits = config.virtual.learners, bounds(config)
    needed = max(2 * pushes // config.shards, LEAST_ROUNDS * lambda_, LEAST_UPDATES * pushes_per_update(config))
    if needed * config.shards > _AFFORDABLE * pushes:
        expected = limits.gradients_per_s * _reached(config, before)
        return Point(lambda_, config.shards, config.placement, None, expected, limits)
    predicted = predict(config, min(pushes, needed)).gradients_per_s
    return Point(lambda_, config.shards, config.placement, predicted, predicted, limits)


def _reached(config: Config, before: list[Point]) -> float:
    """The share of its bound that was predicted last for this placement: for as many shards, or else for any number."""
    known = [point for point in before if point.gradients_per_s is not None and point.placement == config.placement]
    alike = [point for point in known if point.shards == config.shards]
    last = (alike or known)[-1:]
    return min(1.0, last[0].expected / last[0].bounds.gradients_per_s) if last else 1.0


def sizes(least: int, most: int) -> list[int]:
    """Numbers of learners from one to the other: doubled, or in equal ratios where that would be too many."""
    count = min(_SIZES, 1 + math.ceil(math.log2(most / least)))
    return sorted({round(size) for size in np.geomspace(least, most, count)})


def _placements(config: Config, shards: int) -> tuple[Placement, ...]:
    """Both, where they differ: several shards, several nodes, and several ranks on each."""
    on_node, ranks = config.virtual.ranks_per_node, shards + config.virtual.learners
    return PLACEMENTS if shards > 1 and 1 < on_node < ranks else (config.placement,)


def enough(found: list[Point]) -> dict[int, Point]:
    """Learners -> the fewest shards that come near the most gradients per second of any number; packed if that is as good."""
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
        "Bound: what the bottleneck alone lets through, in closed form. Images: of the prediction, or where none is affordable, of"
        " the bound times the share of theirs that fewer learners reach. Queues: far below the bound, as shards and learners wait"
        f" for one another. Enough: the fewest shards with {100 * ENOUGH:.0f} % of the most gradients."
    )
    return Table("shards", "Throughput over shards and learners", columns, tuple(rows), note)
