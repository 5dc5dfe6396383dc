"""Staleness of 40 asynchronous learners, and the error that it costs [Chen16 Table 1, Fig. 2], in kind, on the virtual cluster.

The paper: Async-Opt with 40 learners has a mean staleness of about 39 in the lowest layer (Inception, Table 1); and the test
error of a CNN on MNIST rises with the mean staleness (Fig. 2).

Same: Async-Opt, that is n-softsync with n = lambda and no modulation; lambda = 40; one learning rate whatever the staleness.
Not the same: a small model, a CNN of 8 and 16 channels, on 1,437 digits of 8x8 pixels, mu = 8, momentum 0.9, 6 epochs, mean of
two seeds; staleness comes from virtual learners (lambda = 1, 10, 20, 40), where Fig. 2 queues gradients; all slices of a gradient
are read and used at once, so that all layers are as stale as the paper's lowest. So it shows the effect, and how it grows with
the learning rate, not the paper's numbers. Assumed: mini-batches normal, 10 % deviation.

The mean over all gradients is a little below lambda - 1: the first ones of all learners come from clock 0. "Settled" leaves out
2 lambda of them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from virtual_runs import Job, logged, main

from mpisgd.analysis import training
from mpisgd.analysis.tables import Column, Table
from mpisgd.records.log.schema import Verdict
from mpisgd.report import style

LAMBDAS = (1, 10, 20, 40)
ALPHAS = (0.002, 0.005)
SEEDS = (1, 2)


@dataclass(frozen=True)
class Trained:
    """One run: mean and largest staleness after the first 2 lambda gradients; the last weights' error and training loss."""

    mean: float
    largest: int
    error: float
    loss: float


def job(lambda_: int, alpha0: float, seed: int, epochs: float) -> Job:
    return {
        "protocol": {"name": "softsync", "n": lambda_, "modulation": "none"},
        "model": {"name": "small_cnn", "channels": [8, 16]},
        "optimizer": {"name": "sgd", "momentum": 0.9},
        "mu": 8,
        "alpha0": alpha0,
        "seed": seed,
        "epochs": epochs,
        "threads": 1,
        "nonfinite": "continue",
        "evaluation": {"every_epochs": 0, "train": True},
        "virtual": {"learners": lambda_, "batched": lambda_ > 1},
        "compute": {"name": "normal", "mean_s": 0.1, "deviation_s": 0.01},
    }


def trained(lambda_: int, alpha0: float, seed: int = 1, epochs: float = 6) -> Trained:
    run = logged(job(lambda_, alpha0, seed, epochs))
    tau = run.pushes["staleness"][run.pushes["verdict"] == Verdict.APPLY][2 * lambda_ :]
    last = {curve.name: curve for curve in training.curves(run)}
    return Trained(float(tau.mean()), int(tau.max()), last["theta test"].final, float(last["theta training"].loss[-1]))


def compute() -> list[list[list[tuple[Any, ...]]]]:
    """Runs of each rate, number of learners and seed."""
    return [[[dataclasses.astuple(trained(lambda_, alpha0, seed)) for seed in SEEDS] for lambda_ in LAMBDAS] for alpha0 in ALPHAS]


def draw(numbers: list[list[list[list[Any]]]]) -> tuple[list[Table], Figure]:
    title = "Error against staleness, Async-Opt with 1, 10, 20, 40 learners [Chen16 Fig. 2, Table 1]"
    figure, axes = style.new(f"{title}\nin kind: a small CNN on 8x8 digits", "mean staleness τ [updates]", "test error [%]")
    rows = []
    for at, (alpha0, found) in enumerate(zip(ALPHAS, numbers, strict=True)):
        runs = {lambda_: [Trained(*one) for one in each] for lambda_, each in zip(LAMBDAS, found, strict=True)}
        mean = {lambda_: np.mean([(one.mean, 100 * one.error, one.loss) for one in each], 0) for lambda_, each in runs.items()}
        points = np.array(list(mean.values()))
        axes.plot(points[:, 0], points[:, 1], label=f"α₀ = {alpha0:g}", **style.line(at))
        seeds = np.array([(one.mean, 100 * one.error) for each in runs.values() for one in each])
        axes.plot(*seeds.T, ".", color="black", markersize=4, label="each of two seeds" if at == 0 else None)
        for lambda_, (tau, error, loss) in mean.items():
            largest = max(one.largest for one in runs[lambda_])
            rows.append((alpha0, lambda_, float(tau), largest, float(error), float(loss)))
    axes.set_ylim(0, 100)
    style.legend(figure, axes)
    columns = (
        Column("α₀"),
        Column("λ"),
        Column("mean τ, settled", spec=".2f"),
        Column("max τ"),
        Column("test error", "%", ".1f"),
        Column("training loss", spec=".3f"),
    )
    return [Table("chen16_table1", "Async-Opt: error and staleness", columns, tuple(rows))], figure


if __name__ == "__main__":
    main("chen16-table1", __doc__, compute, draw)
