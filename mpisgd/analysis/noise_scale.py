"""The gradient noise scale of a run, from squared norms in its log: how large a batch still pays.

[McCandlish18] McCandlish, Kaplan, Amodei et al.: An Empirical Model of Large-Batch Training (arXiv:1812.06162).
G is the mean gradient, Sigma the covariance of one sample's gradient; both change during training.

    B_simple = tr(Sigma) / |G|^2                                      (eq. 2.9, in samples)
    E |g|^2  = |G|^2 + tr(Sigma) / B                                  (appendix A.1; g: mean over B samples)

Limits: updates of a single gradient give no estimate, different weights (softsync) an approximate one. Dropout and augmentation are
noise. Batch normalisation, `clip_norm`, and losses that are no mean over samples are outside the theory. |G|^2 is of the data's
population; with `sampling` "replacement", larger by tr(Sigma) / training samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mpisgd.analysis import books
from mpisgd.analysis.tables import Cell, Table, columns_of
from mpisgd.records.log.reader import Run

_BLOCKS = 20
_PARTS = (
    ("first quarter", 0.0, 0.25),
    ("second", 0.25, 0.5),
    ("third", 0.5, 0.75),
    ("last", 0.75, 1.0),
    ("whole run", 0.0, 1.0),
)


@dataclass(frozen=True)
class NoiseScale:
    """tr(Sigma), |G|^2 and their ratio over a part of a run; NaN = unknown."""

    variance: float
    """tr(Sigma), summed over parameters."""
    gradient_sq: float
    """|G|^2; estimates can be negative in noise."""
    error: float
    """Standard error of `samples`."""
    updates: int
    """On the shard with the fewest."""

    @property
    def samples(self) -> float:
        """B_simple; NaN where |G|^2 is lost in noise."""
        return max(0.0, self.variance) / self.gradient_sq if self.gradient_sq > 0 else math.nan

    def updates_ratio(self, batch: float) -> float:
        """Return S/S_min = 1 + B_noise/B: updates to a given loss, relative to endless batches.

        From (S/S_min - 1) (E/E_min - 1) = 1 [McCandlish18 eq. 2.11, 5.1], with S/S_min = 2 at B = B_noise.
        """
        return 1.0 + self.samples / batch


@dataclass(frozen=True)
class Measured:
    """Usable updates of all shards; arrays, (measured,).

    `progress`: share of the shard's samples applied by then. `variance`, `gradient_sq`: tr(Sigma) and |G|^2 of the shard's slice
    from this update alone: unbiased, mostly noise.
    """

    shard: np.ndarray
    clock: np.ndarray
    progress: np.ndarray
    variance: np.ndarray
    gradient_sq: np.ndarray

    def only(self, which: np.ndarray) -> Measured:
        return Measured(**{name: values[which] for name, values in vars(self).items()})


def measured(run: Run) -> Measured:
    """Return updates of two or more pushes with norms measured and all gradients logged.

    An update sums c gradients g_i, means over mu_i samples, with weights w_i. The log has c `gradient_sq` = sum |w_i g_i|^2 and
    `sum_sq` = |sum w_i g_i|^2:

        |G|^2     = (|sum w_i g_i|^2 - sum |w_i g_i|^2) / ((sum w_i)^2 - sum w_i^2)
        tr(Sigma) = (sum |w_i g_i|^2 - sum w_i^2 |G|^2) / (sum w_i^2 / mu_i)

    A team of k ranks pushes a sum of k means: k is a weight. Weights of the rate
    (`modulate`) leave w_i at 1.
    """
    updates, pushes = run.updates, run.pushes[books.applied_rows(run)]
    clocks = 1 + int(updates["clock"].max(initial=0))
    cells = run.shards * clocks
    cell = updates["shard"].astype(np.int64) * clocks + updates["clock"]
    summed_in = pushes["shard"].astype(np.int64) * clocks + pushes["clock"] + 1

    def sums(values: np.ndarray) -> np.ndarray:
        return np.asarray(np.bincount(summed_in, weights=values, minlength=cells)[cell])

    last = np.zeros(run.shards, np.int64)
    np.maximum.at(last, updates["shard"], updates["samples"])
    weighted = run.config.get("modulate") != "rate"
    factors = (pushes["weight"] if weighted else 1.0) * pushes["gradients"]
    weights, weights_sq = sums(factors), sums(factors**2)
    squares = updates["gradients"] * updates["gradient_sq"]
    with np.errstate(divide="ignore", invalid="ignore"):
        gradient_sq = (updates["sum_sq"] - squares) / (weights**2 - weights_sq)
        variance = (squares - weights_sq * gradient_sq) / sums(factors**2 / pushes["samples"])
        progress = updates["samples"] / last[updates["shard"]]
    everything = Measured(updates["shard"], updates["clock"], progress, variance, gradient_sq)
    complete = sums(pushes["gradients"]) == updates["gradients"]
    return everything.only(complete & (sums(np.ones(len(pushes))) > 1) & np.isfinite(gradient_sq))


def noise_scale(run: Run, start: float = 0.0, end: float = 1.0) -> NoiseScale:
    """Return the noise scale between two shares of the samples."""
    return _noise_scale(measured(run), run.shards, start, end)


def _noise_scale(rows: Measured, shards: int, start: float, end: float) -> NoiseScale:
    rows = rows.only((start < rows.progress) & (rows.progress <= end))
    variance, gradient_sq = _means(rows, shards)
    least = int(np.bincount(rows.shard, minlength=shards).min())
    return NoiseScale(variance, gradient_sq, _error(rows, shards), least)


def _means(rows: Measured, shards: int) -> tuple[float, float]:
    """Return tr(Sigma) and |G|^2: means over each shard's updates, summed over shards.

    Divide only means (A.1): single updates' ratios are biased.
    """
    count = np.bincount(rows.shard, minlength=shards)
    with np.errstate(invalid="ignore"):
        variance, gradient_sq = (
            float((np.bincount(rows.shard, weights=values, minlength=shards) / count).sum())
            for values in (rows.variance, rows.gradient_sq)
        )
    return variance, gradient_sq


def _error(rows: Measured, shards: int) -> float:
    """Return the jackknife's standard error of B_simple.

    Blocks are interleaved (every 20th clock, the same on every shard), to tell error from change during training.
    """
    clocks, place = np.unique(rows.clock, return_inverse=True)
    blocks = min(_BLOCKS, len(clocks))
    if blocks < 2:
        return math.nan
    kept = (_means(rows.only(place % blocks != block), shards) for block in range(blocks))
    ratios = np.array([variance / gradient_sq if gradient_sq > 0 else math.nan for variance, gradient_sq in kept])
    return float(math.sqrt((blocks - 1) * ratios.var()))


def table(run: Run) -> Table:
    rows, batch = measured(run), _batch(run)
    lines: list[tuple[Cell, ...]] = []
    for part, start, end in _PARTS if len(rows.shard) else ():
        found = _noise_scale(rows, run.shards, start, end)
        values = (found.samples, found.error, found.variance, found.gradient_sq, found.updates_ratio(batch))
        lines.append((part, found.updates, *(value if math.isfinite(value) else None for value in values)))
    columns = columns_of(
        "part of the run | updates measured | noise scale [samples] | standard error [samples] | tr Σ | |G|²"
        " | updates / fewest possible"
    )
    note = _note(run, batch) if lines else "No estimate without updates of two gradients and more."
    if any(line[2] is None for line in lines):
        note += " –: |G|² is lost in noise, or nothing was measured."
    return Table("noise_scale", "Gradient noise scale [McCandlish18]", columns, tuple(lines), note)


def _batch(run: Run) -> float:
    return float(run.updates["samples"].max(initial=0)) / max(1, int(run.updates["clock"].max(initial=0)))


def _note(run: Run, batch: float) -> str:
    note = f"An update has {batch:.4g} samples; with as many as the noise scale, training takes twice the fewest possible updates."
    if np.any(run.pushes["staleness"][books.applied_rows(run)] > 0):
        note += " Approximate: gradients of one update come from different weights."
    return note
