"""The gradient noise scale of a run, from the squared norms in its log: how large a batch still pays.

[McCandlish18] McCandlish, Kaplan, Amodei et al.: An Empirical Model of Large-Batch Training (arXiv:1812.06162).
G is the mean gradient over samples and Sigma the covariance of the gradient of one sample; both change as training goes on.

    B_simple = tr(Sigma) / |G|^2                                      (eq. 2.9, in samples)
    E |g|^2  = |G|^2 + tr(Sigma) / B                                  (appendix A.1; g: mean over B samples)

Two batch sizes B make that two equations. The small batch is a single gradient's, the big one an update's: the sum of c gradients
g_i with weights w_i, each the mean over mu_i samples. The log has c `gradient_sq` = sum |w_i g_i|^2 and `sum_sq` =
|sum w_i g_i|^2, whose difference is made of products of different gradients, and so free of noise on average:

    |G|^2     = (|sum w_i g_i|^2 - sum |w_i g_i|^2) / ((sum w_i)^2 - sum w_i^2)
    tr(Sigma) = (sum |w_i g_i|^2 - sum w_i^2 |G|^2) / (sum w_i^2 / mu_i)

What a team of k ranks pushes is the sum of its gradients: k times their mean over all their samples, so k counts as a weight.

With all weights 1 that is A.1 for batches of mu and c mu samples. So every protocol's updates give an estimate; w_i and mu_i
are those of `pushes`. Where they are weights of the rate (`modulate`), gradients are summed as they are: w_i is 1.

As A.1 says, |G|^2 and tr(Sigma) are averaged over many updates and only then divided: their ratio in one update would be
biased, and mostly noise. They are estimated shard by shard and added up, whichever gradients each shard summed.

What the numbers do not say:

- Updates of one gradient (hardsync with one learner, lambda-softsync) have one batch size only: no estimate.
- Where the gradients of one update come from different weights (softsync), the differences between these count as noise or
  signal: the estimate is approximate, the better, the less the weights move in n updates.
- Dropout and augmentation are noise like any other. Batch normalisation, clipped gradients (`clip_norm`), and a loss that is no
  mean over samples are outside the theory.
- With `sampling = "epoch"` or `"own"` mini-batches do not overlap; |G|^2 is then that of the population that the training data came
  from, with `"replacement"` that of the training data, which is larger by tr(Sigma) / training samples.
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
    """tr(Sigma), |G|^2 and their ratio, averaged over a part of a run; NaN where the log does not tell."""

    variance: float
    """tr(Sigma): the variance of the gradient of one sample, summed over the parameters."""
    gradient_sq: float
    """|G|^2. Where noise hides it, its estimate can be negative."""
    error: float
    """Standard error of `samples`."""
    updates: int
    """Updates that were measured, on the shard that has the fewest."""

    @property
    def samples(self) -> float:
        """B_simple = tr(Sigma) / |G|^2, in samples; NaN where |G|^2 is lost in noise."""
        return max(0.0, self.variance) / self.gradient_sq if self.gradient_sq > 0 else math.nan

    def updates_ratio(self, batch: float) -> float:
        """S/S_min = 1 + B_noise/B: updates to a given loss with so many samples in each, relative to endlessly many.

        From (S/S_min - 1) (E/E_min - 1) = 1 [McCandlish18 eq. 2.11, 5.1], with S/S_min = 2 at B = B_noise.
        """
        return 1.0 + self.samples / batch


@dataclass(frozen=True)
class Measured:
    """The updates that can be used, over all shards; arrays of shape (measured,).

    `shard`; `clock`; `progress`, samples applied up to and with the update as a share of all on the shard, 0 ... 1; `variance` and
    `gradient_sq`, tr(Sigma) and |G|^2 of the shard's slice as this update alone tells them: right on average, mostly noise.
    """

    shard: np.ndarray
    clock: np.ndarray
    progress: np.ndarray
    variance: np.ndarray
    gradient_sq: np.ndarray

    def only(self, which: np.ndarray) -> Measured:
        return Measured(**{name: values[which] for name, values in vars(self).items()})


def measured(run: Run) -> Measured:
    """Updates of two pushes and more whose norms were measured and whose gradients are all in the log."""
    updates, pushes = run.updates, run.pushes[books.applied_rows(run)]
    clocks = 1 + int(updates["clock"].max(initial=0))
    cells = run.shards * clocks
    cell = updates["shard"].astype(np.int64) * clocks + updates["clock"]
    summed_in = pushes["shard"].astype(np.int64) * clocks + pushes["clock"] + 1

    def sums(values: np.ndarray) -> np.ndarray:
        """Sum one value per gradient over each update."""
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
    """The noise scale over a part of the run: from one share of the samples applied to another, both 0 ... 1."""
    return _noise_scale(measured(run), run.shards, start, end)


def _noise_scale(rows: Measured, shards: int, start: float, end: float) -> NoiseScale:
    rows = rows.only((start < rows.progress) & (rows.progress <= end))
    variance, gradient_sq = _means(rows, shards)
    least = int(np.bincount(rows.shard, minlength=shards).min())
    return NoiseScale(variance, gradient_sq, _error(rows, shards), least)


def _means(rows: Measured, shards: int) -> tuple[float, float]:
    """tr(Sigma) and |G|^2: means over the updates of each shard, summed over the shards; NaN where a shard has none."""
    count = np.bincount(rows.shard, minlength=shards)
    with np.errstate(invalid="ignore"):
        variance, gradient_sq = (
            float((np.bincount(rows.shard, weights=values, minlength=shards) / count).sum())
            for values in (rows.variance, rows.gradient_sq)
        )
    return variance, gradient_sq


def _error(rows: Measured, shards: int) -> float:
    """Standard error of B_simple by the jackknife: one block of updates is left out at a time.

    Blocks are interleaved (every 20th clock), so that each spans the whole part and what changes during training is not taken
    for an error; a clock is in the same block on every shard, for there they have gradients in common.
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
    note = _note(run, batch) if lines else "No estimate: it needs updates of two gradients and more."
    if any(line[2] is None for line in lines):
        note += " –: |G|² is lost in noise, or nothing was measured."
    return Table("noise_scale", "Gradient noise scale [McCandlish18]", columns, tuple(lines), note)


def _batch(run: Run) -> float:
    """Mean samples of an update."""
    return float(run.updates["samples"].max(initial=0)) / max(1, int(run.updates["clock"].max(initial=0)))


def _note(run: Run, batch: float) -> str:
    note = f"An update has {batch:.4g} samples; with as many as the noise scale, it takes twice the fewest possible updates."
    if np.any(run.pushes["staleness"][books.applied_rows(run)] > 0):
        note += " Approximate: gradients of one update come from different weights."
    return note
