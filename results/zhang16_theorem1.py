"""The convergence bound of [Zhang16 Theorem 1] beside what is reached, on problems small enough to measure all that it is made of.

For N gradients of staleness tau, each weighted z = 1 / max(1, tau), at the rate that the theorem chooses,

    alpha0 = c sqrt(2 (F(theta_1) - F*) / (L sigma^2 sum z^2)),      c gradients in an update,

    min_t E |grad F(theta_t)|^2  <=  2 sqrt(2 (F(theta_1) - F*) L sigma^2 sum z^2) / sum z,

that is 2 sqrt(2 (F(theta_1) - F*) L sigma^2 / N) times the unevenness of Remark 1, sqrt(N sum z^2) / sum z. Terms of higher order
in alpha0, which the theorem keeps small by conditions on N, are left out.

Softmax regression and an MLP of 16 tanh units on the 1,437 training digits, mini-batches of 4. F: the mean loss of all of them;
F* = 0, its infimum. L: the largest eigenvalue of F's Hessian, and sigma^2: the mean |g - grad F|^2 of mini-batches, each the
largest of all points looked at: eleven on the way of a run of hardsync with as many gradients, of each seed. The left side: the
mean over five seeds, at 100 points of each run, the least of them. n-softsync on virtual learners, mini-batches normal, 20 %.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from matplotlib.figure import Figure
from torch import Tensor
from virtual_runs import logged, main, panels

from mpisgd.analysis.tables import Cell, Column, Table
from mpisgd.base.streams import Domain, stream
from mpisgd.config import DigitsOptions
from mpisgd.data import load
from mpisgd.records.log.schema import Verdict
from mpisgd.report import style

Vector = npt.NDArray[Any]

MU = 4
SEEDS = (1, 2, 3, 4, 5)
POINTS = 100
NORMAL = {"name": "normal", "mean_s": 0.01, "deviation_s": 0.002}
CONSTANT = {"name": "constant", "mean_s": 0.01}
WIDE = {"name": "lognormal", "mean_s": 0.01, "sigma": 1.0}


@dataclass(frozen=True)
class Problem:
    """A mean loss over samples, of a flat vector (parameters,) float64; `gradient` is the loss's, written out."""

    name: str
    size: int
    loss: Callable[[Tensor, Tensor, Tensor], Tensor]
    gradient: Callable[[Vector, Vector, Vector], Vector]


def _softmax(weights: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(inputs @ weights[:640].view(64, 10) + weights[640:], targets)


def _mlp(weights: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
    hidden = torch.tanh(inputs @ weights[:1024].view(64, 16) + weights[1024:1040])
    return torch.nn.functional.cross_entropy(hidden @ weights[1040:1200].view(16, 10) + weights[1200:], targets)


def _errors(logits: Vector, targets: Vector) -> Vector:
    """The gradient of the mean loss by the logits."""
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    shares[np.arange(len(targets)), targets] -= 1
    return np.asarray(shares / len(targets))


def _softmax_gradient(weights: Vector, inputs: Vector, targets: Vector) -> Vector:
    errors = _errors(inputs @ weights[:640].reshape(64, 10) + weights[640:], targets)
    return np.concatenate([(inputs.T @ errors).ravel(), errors.sum(axis=0)])


def _mlp_gradient(weights: Vector, inputs: Vector, targets: Vector) -> Vector:
    hidden = np.tanh(inputs @ weights[:1024].reshape(64, 16) + weights[1024:1040])
    above = weights[1040:1200].reshape(16, 10)
    errors = _errors(hidden @ above + weights[1200:], targets)
    below = (errors @ above.T) * (1 - hidden**2)
    parts = ((inputs.T @ below).ravel(), below.sum(axis=0), (hidden.T @ errors).ravel(), errors.sum(axis=0))
    return np.concatenate(parts)


PROBLEMS = (
    Problem("softmax regression", 650, _softmax, _softmax_gradient),
    Problem("MLP", 1210, _mlp, _mlp_gradient),
)


@dataclass(frozen=True)
class Order:
    """Gradients in the order in which they were applied: arrays (gradients,)."""

    clock: np.ndarray
    timestamp: np.ndarray

    @property
    def z(self) -> np.ndarray:
        return np.asarray(1 / np.maximum(1, self.clock - self.timestamp))

    @property
    def unevenness(self) -> float:
        return float(np.sqrt(len(self.z) * (self.z**2).sum()) / self.z.sum())


@cache
def order(lambda_: int, n: int, gradients: int, compute: str = "normal") -> Order:
    """Of n-softsync, n = 0: hardsync, that many gradients at least."""
    seconds = {"normal": NORMAL, "constant": CONSTANT, "wide": WIDE}[compute]
    job = {
        "protocol": {"name": "softsync", "n": n} if n else {"name": "hardsync"},
        "mu": 1,
        "epochs": 1,
        "virtual": {"learners": lambda_, "gradients": False, "parameters": 650, "train_samples": gradients},
        "compute": seconds,
    }
    rows = logged(job).pushes
    rows = rows[rows["verdict"] == Verdict.APPLY]
    return Order(rows["clock"].copy(), rows["timestamp"].copy())


@cache
def samples() -> tuple[Tensor, Tensor]:
    data = load(DigitsOptions(), seed=1)
    inputs, targets = data.train.batch(np.arange(len(data.train)))
    return inputs.flatten(1).double(), targets


def start_of(problem: Problem, seed: int) -> Vector:
    return np.asarray(0.1 * stream(Domain.MODEL, seed).standard_normal(problem.size))


def way(problem: Problem, told: Order, rate: float, seed: int, points: int) -> Iterator[Vector]:
    """The weights at so many points of a run, evenly apart, the first ones too."""
    inputs, targets = (each.numpy() for each in samples())
    drawn = stream(Domain.REPLACEMENT, seed).integers(len(targets), size=(len(told.clock), MU))
    weights = {0: start_of(problem, seed)}
    clocks, counts = np.unique(told.clock, return_counts=True)
    uses = np.bincount(told.timestamp, minlength=int(clocks[-1]) + 2)
    shown = set(np.linspace(0, len(clocks), points).astype(int).tolist())
    yield weights[0]
    at, z, stamps = 0, told.z.tolist(), told.timestamp.tolist()
    for made, (clock, count) in enumerate(zip(clocks.tolist(), counts.tolist(), strict=True), 1):
        step = np.zeros(problem.size)
        for row in range(at, at + count):
            stamp = stamps[row]
            step += z[row] * problem.gradient(weights[stamp], inputs[drawn[row]], targets[drawn[row]])
            uses[stamp] -= 1
            if not uses[stamp] and stamp != clock:
                del weights[stamp]
        weights[clock + 1] = weights[clock] - rate / count * step
        if not uses[clock]:
            del weights[clock]
        at += count
        if made in shown:
            yield weights[clock + 1]


@cache
def constants(problem: Problem, gradients: int) -> tuple[float, float, float]:
    """F(theta_1), L and sigma^2: the mean, and the largest at all points of runs of hardsync."""
    inputs, targets = samples()
    first, lipschitz, variance = [], 0.0, 0.0
    told = order(30, 0, gradients)
    for seed in SEEDS:
        first.append(float(problem.loss(torch.from_numpy(start_of(problem, seed)), inputs, targets)))
        for weights in way(problem, told, 0.1, seed, 11):
            lipschitz = max(lipschitz, largest_eigenvalue(problem, weights))
            variance = max(variance, _variance(problem, torch.from_numpy(weights)))
    return float(np.mean(first)), lipschitz, variance


def largest_eigenvalue(problem: Problem, weights: Vector) -> float:
    """Of the Hessian, by power iteration on differences of gradients."""
    batch = [each.numpy() for each in samples()]
    vector, value, near = stream(Domain.MODEL, 0).standard_normal(problem.size), 0.0, 1e-4
    for _ in range(30):
        vector /= np.linalg.norm(vector)
        ahead, behind = (problem.gradient(weights + side * near * vector, *batch) for side in (1, -1))
        product = (ahead - behind) / (2 * near)
        value, vector = float(vector @ product), product
    return value


def _variance(problem: Problem, weights: Tensor) -> float:
    """Of mini-batches drawn with replacement: that of single samples, by mu."""
    inputs, targets = samples()
    each = torch.func.vmap(torch.func.grad(lambda at, x, y: problem.loss(at, x[None], y[None])), (None, 0, 0))(
        weights, inputs, targets
    )
    return float((each - each.mean(0)).square().sum(1).mean()) / MU


@dataclass(frozen=True)
class Row:
    """One comparison: `reached` and `bound` are both sides."""

    problem: str
    lambda_: int
    n: int
    compute: str
    gradients: int
    mean_tau: float
    unevenness: float
    alpha0: float
    reached: float
    bound: float


def compare(problem: Problem, lambda_: int, n: int, gradients: int, compute: str = "normal") -> Row:
    told = order(lambda_, n, gradients, compute)
    first, lipschitz, variance = constants(problem, gradients)
    z, per_update = told.z, len(told.clock) / len(np.unique(told.clock))
    rate = per_update * float(np.sqrt(2 * first / (lipschitz * variance * (z**2).sum())))
    batch = [each.numpy() for each in samples()]
    ways = (way(problem, told, rate, seed, POINTS) for seed in SEEDS)
    norms = [[float((problem.gradient(weights, *batch) ** 2).sum()) for weights in each] for each in ways]
    bound = 2 * float(np.sqrt(2 * first * lipschitz * variance * (z**2).sum()) / z.sum())
    tau = float((told.clock - told.timestamp).mean())
    reached = float(np.mean(norms, axis=0).min())
    return Row(problem.name, lambda_, n, compute, len(z), tau, told.unevenness, rate, reached, bound)


def rows(quick: bool) -> Iterator[Row]:
    most = 2000 if quick else 32_000
    for problem in PROBLEMS:
        for gradients in (most,) if quick else (most // 16, most // 4, most):
            for lambda_, n in (
                ((30, 0), (30, 1), (30, 30)) if quick else ((30, 0), (30, 1), (30, 5), (30, 30), (10, 10), (100, 100))
            ):
                yield compare(problem, lambda_, n, gradients)
        for lambda_, compute in ((30, "constant"), (_as_long(most), "wide")):
            yield compare(problem, lambda_, lambda_, most, compute)


@cache
def _as_long(gradients: int) -> int:
    """The learners that wide staleness needs to have the mean 1/tau of 30 equal learners."""
    wanted = order(30, 30, gradients, "constant").z.mean()
    return min(range(20, 120, 5), key=lambda lambda_: abs(order(lambda_, lambda_, gradients, "wide").z.mean() - wanted))


def compute(quick: bool = False) -> dict[str, Any]:
    torch.set_num_threads(1)
    most = 2000 if quick else 32_000
    measured = {each.name: dict(zip(("F(theta_1)", "L", "sigma^2"), constants(each, most), strict=True)) for each in PROBLEMS}
    return {"constants": measured, "rows": [vars(row) for row in rows(quick)]}


def draw(numbers: dict[str, Any]) -> tuple[list[Table], Figure]:
    found = [Row(**row) for row in numbers["rows"]]
    columns = (
        *(Column(name) for name in ("problem", "λ", "n", "mini-batches", "gradients")),
        Column("mean τ", spec=".2f"),
        Column("unevenness", spec=".3f"),
        Column("α₀", spec=".3g"),
        Column("reached", spec=".2e"),
        Column("bound", spec=".2e"),
        Column("bound / reached", spec=".3g"),
    )
    cells: list[tuple[Cell, ...]] = []
    for row in found:
        values = (row.mean_tau, row.unevenness, row.alpha0, row.reached, row.bound, row.bound / row.reached)
        cells.append((row.problem, row.lambda_, row.n or "hardsync", row.compute, row.gradients, *values))
    figure, axes = panels("gradients N", [(problem.name, "min over t of E|∇F|²") for problem in PROBLEMS])
    for beside, problem in zip(axes, PROBLEMS, strict=True):
        own = [row for row in found if row.problem == problem.name and row.compute == "normal"]
        for at, (lambda_, n) in enumerate(dict.fromkeys((row.lambda_, row.n) for row in own)):
            some = [row for row in own if (row.lambda_, row.n) == (lambda_, n)]
            look = style.line(at)
            name = f"λ = {lambda_}, {f'n = {n}' if n else 'hardsync'}"
            beside.plot([row.gradients for row in some], [row.reached for row in some], label=name, **look)
            beside.plot(
                [row.gradients for row in some], [row.bound for row in some], color=look["color"], linewidth=0.9, linestyle=":"
            )
        beside.set(xscale="log", yscale="log")
        counts = sorted({round(row.gradients, -2) for row in own})
        beside.set_xticks(counts, [f"{count:,}" for count in counts])
        beside.minorticks_off()
        beside.legend(fontsize=7, frameon=False)
    figure.suptitle("[Zhang16 Theorem 1] on digits: reached, and dotted: the bound; mean of five seeds", fontsize=11)
    return [Table("zhang16_theorem1", "Both sides of the bound", columns, tuple(cells))], figure


if __name__ == "__main__":
    main("zhang16-theorem1", __doc__, compute, draw, partial(compute, quick=True))
