"""Simulated staleness: test error of an MNIST network for tau = 0, 20, 50, with and without a ramp [Chen16 2.1, Fig. 2].

The paper: the test error grows with the mean staleness, and large staleness needs to be reached slowly, from none.

Same: the 4-layer CNN of 3x3 filters with weight normalisation (`mnist_cnn`) on MNIST; the learning rate annealed linearly to 0; no
modulation by staleness. Staleness is exact, and no queue of old gradients is needed for it: protocol async with tau + 1 virtual
learners of equal, constant speed, which push in turn, makes every gradient tau updates old, from the (tau + 1)-th on. The ramp is
the protocol's own (`protocol.ramp`): learners join one after the other, evenly over the first epoch, or the first two.
Not the same: 3 epochs, a small part of the paper's training; mu = 32, momentum 0, no averaged weights, no augmentation. So it shows
the effect, not the paper's numbers.

alpha0 = 0.01, one rate for all: a tenth of 0.1, with which tau = 0 ends at 0.96 %, but tau = 20 from the start learns nothing. It
was chosen by single runs from the start with seed 0, which is none of those shown: tau = 20 ends at 7 % with 0.01, 18 % with 0.02;
tau = 50 at 54 % with 0.005, 46 % with 0.01. With 0.03 (seed 1, tried before) they end at 67 % and 50 %: neither leaves the plateau.

Needs the four IDX files of MNIST below $MPISGD_DATA/mnist, and says so where they are missing. 5,625 gradients per run, 15 runs, as
many at once as there are cores: some 20 minutes of one core in all.
"""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from virtual_runs import Job, logged, main

from mpisgd.analysis import books, training
from mpisgd.analysis.tables import Cell, Column, Table
from mpisgd.analysis.training import Curve
from mpisgd.base.errors import DataError
from mpisgd.data import mnist
from mpisgd.report import style

RAMPS = {0: (0,), 20: (0, 1), 50: (0, 2)}
"""tau -> epochs over which it is reached; 0 = it is there from the start."""
SEEDS = (1, 2, 3)
ALPHA0 = 0.01
MU = 32
EPOCHS = 3.0
TRAIN_SAMPLES = 60_000
UPDATES_PER_EPOCH = TRAIN_SAMPLES // MU


@dataclass(frozen=True)
class Trained:
    """The test error of one run, and the staleness of its gradients: mean over all, and least and largest of the last half."""

    curve: Curve
    mean: float
    settled: tuple[int, int]


def job(tau: int, ramp_epochs: int, seed: int) -> Job:
    return {
        "protocol": {"name": "async", "modulation": "none", "ramp": ramp_epochs * UPDATES_PER_EPOCH},
        "model": {"name": "mnist_cnn"},
        "data": {"name": "mnist"},
        "optimizer": {"name": "sgd", "momentum": 0.0},
        "schedule": {"name": "linear"},
        "mu": MU,
        "alpha0": ALPHA0,
        "seed": seed,
        "epochs": EPOCHS,
        "threads": 1,
        "nonfinite": "continue",
        "evaluation": {"every_epochs": 0.5},
        "virtual": {"learners": tau + 1},
        "compute": {"name": "constant", "mean_s": 0.1},
    }


def trained(tau: int, ramp_epochs: int, seed: int) -> Trained:
    run = logged(job(tau, ramp_epochs, seed))
    rows = run.pushes[books.applied_rows(run)]
    last = rows["staleness"][len(rows) // 2 :]
    curve = training.on_test_data(run)
    if curve is None:
        raise SystemExit(f"τ = {tau}: nothing was evaluated")
    told = f"τ = {tau}, ramp of {ramp_epochs} epochs, seed {seed}: test error {100 * curve.final:.2f} %"
    print(told, file=sys.stderr, flush=True)
    return Trained(curve, float(rows["staleness"].mean()), (int(last.min()), int(last.max())))


def draw() -> tuple[list[Table], Figure]:
    try:
        mnist.load("mnist", "", True)
    except DataError as error:
        raise SystemExit(f"this script trains on MNIST, and needs its four IDX files below $MPISGD_DATA/mnist\n{error}") from error
    kinds = [(tau, ramp_epochs) for tau, ramps in RAMPS.items() for ramp_epochs in ramps]
    with ProcessPoolExecutor() as pool:
        runs = list(pool.map(trained, *zip(*((*kind, seed) for seed in SEEDS for kind in kinds), strict=True)))
    title = (
        "Simulated staleness on MNIST [Chen16 2.1, Fig. 2], in kind"
        f"\nμ = {MU}, α₀ = {ALPHA0:g}, momentum 0; mean and range of {len(SEEDS)} seeds"
    )
    figure, axes = style.new(title, "epochs", "test error [%]")
    rows: list[tuple[Cell, ...]] = []
    for at, (tau, ramp_epochs) in enumerate(kinds):
        seeds = runs[at :: len(kinds)]
        look, label = style.line(list(RAMPS).index(tau)), f"τ = {tau}" if tau == 0 else f"τ = {tau}, from the start"
        if ramp_epochs:
            look, label = style.hollow(look), f"τ = {tau}, reached over {ramp_epochs} epoch{'s' if ramp_epochs > 1 else ''}"
        percent = 100 * np.array([one.curve.error for one in seeds])  # (seeds, snapshots)
        epochs = seeds[0].curve.epochs
        axes.plot(epochs, percent.mean(axis=0), label=label, **look)
        axes.fill_between(epochs, percent.min(axis=0), percent.max(axis=0), color=look["color"], alpha=0.15, linewidth=0)
        settled = (min(one.settled[0] for one in seeds), max(one.settled[1] for one in seeds))
        halfway, last = percent[:, percent.shape[1] // 2], percent[:, -1]
        staleness = float(np.mean([one.mean for one in seeds]))
        rows.append((tau, ramp_epochs, staleness, *settled, *map(float, (halfway.mean(), last.mean(), last.min(), last.max()))))
    axes.set_yscale("log")
    axes.set_yticks([2, 5, 10, 20, 50, 100], ["2", "5", "10", "20", "50", "100"])
    axes.minorticks_off()
    style.legend(figure, axes)
    columns = (
        Column("τ"),
        Column("ramp", "epochs"),
        Column("mean τ", spec=".2f"),
        Column("min τ, second half"),
        Column("max τ, second half"),
        Column("test error halfway", "%", ".2f"),
        Column("last", "%", ".2f"),
        Column("least of the seeds", "%", ".2f"),
        Column("largest", "%", ".2f"),
    )
    return [Table("simulated_staleness", "Simulated staleness on MNIST", columns, tuple(rows))], figure


if __name__ == "__main__":
    main("simulated-staleness", __doc__, draw)
