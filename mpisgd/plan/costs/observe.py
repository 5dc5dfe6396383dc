"""Speed and staleness of a log, real or virtual: a plan's numbers.

Counted after two pushes per learner on average, or a fifth of a short log.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mpisgd.analysis import about, arrivals, books
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run

_WARM_PUSHES = 2
_WARM_SHARE = 0.2


@dataclass(frozen=True)
class Lag:
    """Seconds of cycles besides compute and injected delay: messages, queues, service, all else."""

    mean_s: float
    deviation_s: float

    def beyond(self, other: Lag) -> Lag:
        """Return the independent lag to add to `other` for this lag."""
        more = self.deviation_s**2 - other.deviation_s**2
        return Lag(max(0.0, self.mean_s - other.mean_s), math.sqrt(max(0.0, more)))


@dataclass(frozen=True)
class Observed:
    """A settled run, on shard 0's clock.

    `intervals`: seconds between updates, float64, (updates,); `gradients`, `pushes`: applied, received in these. `staleness`:
    counts of 0, 1, 2 ... over all shards, int64, (largest τ + 1,) or empty.
    """

    intervals: np.ndarray
    gradients: int
    pushes: int
    staleness: np.ndarray
    n: int | None
    lag: Lag

    @property
    def updates(self) -> int:
        return len(self.intervals)

    @property
    def seconds(self) -> float:
        return float(self.intervals.sum())

    @property
    def seconds_per_push(self) -> float:
        """A learner's mean cycle over λ."""
        return self.seconds / max(1, self.pushes)

    @property
    def seconds_per_update(self) -> float:
        return self.seconds / self.updates

    @property
    def updates_per_s(self) -> float:
        return self.updates / self.seconds

    @property
    def gradients_per_s(self) -> float:
        """Applied gradients."""
        return self.gradients / self.seconds

    @property
    def mean_staleness(self) -> float:
        return float(np.arange(len(self.staleness)) @ self.staleness / self.staleness.sum())

    @property
    def largest_staleness(self) -> int:
        return len(self.staleness) - 1

    @property
    def beyond(self) -> float | None:
        """P(τ > 2n) [Zhang16 2.4]; None unless n-softsync."""
        return None if self.n is None else float(self.staleness[2 * self.n + 1 :].sum() / self.staleness.sum())


def observe(run: Run) -> Observed | None:
    """Observe a log; None with fewer than two updates after the first."""
    pushes = run.pushes[run.pushes["shard"] == 0]
    time_s = run.updates["time_s"][run.updates["shard"] == 0]
    arrival_s = np.sort(pushes["arrival_s"])
    warm = min(_WARM_PUSHES * run.lambda_, int(_WARM_SHARE * len(arrival_s)))
    if len(arrival_s) <= warm:
        return None
    time_s = time_s[time_s >= arrival_s[warm]]
    if len(time_s) < 3:
        return None
    start_s, end_s = float(time_s[0]), float(time_s[-1])
    applied = books.applied_rows(run) & (run.pushes["arrival_s"] > start_s)
    within = (arrival_s > start_s) & (arrival_s <= end_s)
    return Observed(
        intervals=np.diff(time_s),
        gradients=int(np.count_nonzero(applied & (run.pushes["shard"] == 0) & (run.pushes["arrival_s"] <= end_s))),
        pushes=int(np.count_nonzero(within)),
        staleness=np.bincount(run.pushes["staleness"][applied]),
        n=about.splitting(run),
        lag=lag(run, start_s),
    )


def lag(run: Run, start_s: float = 0.0) -> Lag:
    """Measure the lag of cycles begun from `start_s` on; 0 s without any.

    From arrival to arrival on shard 0; where learners wait for others (synchronous, ssp), from answer to arrival.
    """
    rows = run.pushes[run.pushes["shard"] == 0]
    rows = rows[np.lexsort((rows["seq"], rows["learner_id"]))]
    before, after = rows[:-1], rows[1:]
    waits = arrivals.synchronous(run) or about.protocol_name(run) == "ssp"
    since_s = before["answer_s"] if waits else before["arrival_s"]
    lags_s = after["arrival_s"] - since_s - after["compute_s"] - after["delay_s"] + schema.backward_s(after)
    usable = (after["learner_id"] == before["learner_id"]) & (before["arrival_s"] >= start_s) & np.isfinite(lags_s)
    return Lag(float(lags_s[usable].mean()), float(lags_s[usable].std())) if usable.any() else Lag(0.0, 0.0)


def distance(first: np.ndarray, second: np.ndarray) -> float:
    """Return the Kolmogorov-Smirnov distance of two histograms, 0 ... 1: int64, (largest τ + 1,)."""
    size = max(len(first), len(second))
    shares = [np.cumsum(np.pad(counts, (0, size - len(counts)))) / counts.sum() for counts in (first, second)]
    return float(np.abs(shares[0] - shares[1]).max())
