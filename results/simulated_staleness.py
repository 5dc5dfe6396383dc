"""Simulated staleness: test error of an MNIST network for tau = 0, 20, 50, with and without a ramp [Chen16 2.1, Fig. 2].

The paper: the test error grows with the mean staleness, and large staleness needs to be reached slowly, from none.

Same: the 4-layer CNN of 3x3 filters with weight normalisation (`mnist_cnn`) on MNIST; the learning rate annealed linearly to 0; no
modulation by staleness. Staleness is exact, and no queue of old gradients is needed for it: protocol async with tau + 1 virtual
learners of equal, constant speed, which push in turn, makes every gradient tau updates old, from the (tau + 1)-th on. The ramp is
the protocol's own (`protocol.ramp`): learners join one after the other, evenly over the first epoch, or the first two.
Not the same: 3 epochs, a small part of the paper's training; one seed; mu = 32, momentum 0, no averaged weights, no augmentation.
alpha0 = 0.03, one rate for all: of 0.1 and 0.3, tried first, tau = 0 trains well with either, but tau = 50 learns nothing. So it
shows the effect, not the paper's numbers.

Needs the four IDX files of MNIST below $MPISGD_DATA/mnist, and says so where they are missing. 5,625 gradients per run: six runs,
some ten minutes of one core.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from matplotlib.figure import Figure
from virtual_runs import Job, logged, main

from mpisgd.analysis import books, style, training
from mpisgd.analysis.tables import Cell, Column, Table
from mpisgd.analysis.training import Curve
from mpisgd.data import mnist
from mpisgd.errors import DataError

RAMPS = {0: (0,), 20: (0, 1), 50: (0, 1, 2)}
"""tau -> epochs over which it is reached; 0 = it is there from the start."""
ALPHA0 = 0.03
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


def job(tau: int, ramp_epochs: int, epochs: float = EPOCHS) -> Job:
    return {
        "protocol": {"name": "async", "modulation": "none", "ramp": ramp_epochs * UPDATES_PER_EPOCH},
        "model": {"name": "mnist_cnn"},
        "data": {"name": "mnist"},
        "optimizer": {"name": "sgd", "momentum": 0.0},
        "schedule": {"name": "linear"},
        "mu": MU,
        "alpha0": ALPHA0,
        "epochs": epochs,
        "threads": 1,
        "nonfinite": "continue",
        "evaluation": {"every_epochs": 0.5},
        "virtual": {"learners": tau + 1},
        "compute": {"name": "constant", "mean_s": 0.1},
    }


def trained(tau: int, ramp_epochs: int) -> Trained:
    run = logged(job(tau, ramp_epochs))
    rows = run.pushes[books.applied_rows(run)]
    last = rows["staleness"][len(rows) // 2 :]
    curve = training.on_test_data(run)
    if curve is None:
        raise SystemExit(f"τ = {tau}: nothing was evaluated")
    print(f"τ = {tau}, ramp of {ramp_epochs} epochs: test error {100 * curve.final:.2f} %", file=sys.stderr, flush=True)
    return Trained(curve, float(rows["staleness"].mean()), (int(last.min()), int(last.max())))


def draw() -> tuple[list[Table], Figure]:
    try:
        mnist.load("mnist", "", True)
    except DataError as error:
        raise SystemExit(f"this script trains on MNIST, and needs its four IDX files below $MPISGD_DATA/mnist\n{error}") from error
    title = f"Simulated staleness on MNIST [Chen16 2.1, Fig. 2]\nin kind: {EPOCHS:g} epochs, μ = {MU}, α₀ = {ALPHA0:g}, momentum 0"
    figure, axes = style.new(title, "epochs", "test error [%]")
    rows: list[tuple[Cell, ...]] = []
    for at, (tau, ramps) in enumerate(RAMPS.items()):
        for ramp_epochs in ramps:
            one = trained(tau, ramp_epochs)
            label = f"τ = {tau}" if tau == 0 else f"τ = {tau}, from the start"
            look = style.line(at)
            if ramp_epochs:
                look, label = style.hollow(look), f"τ = {tau}, reached over {ramp_epochs} epoch{'s' if ramp_epochs > 1 else ''}"
            if ramp_epochs > 1:
                look["marker"] = "D"
            percent = 100 * one.curve.error
            axes.plot(one.curve.epochs, percent, label=label, **look)
            halfway = float(percent[len(percent) // 2])
            rows.append((tau, ramp_epochs, one.mean, *one.settled, halfway, float(percent.min()), float(percent[-1])))
    axes.set_yscale("log")
    axes.set_yticks([1, 2, 5, 10, 20, 50, 100], ["1", "2", "5", "10", "20", "50", "100"])
    axes.minorticks_off()
    style.legend(figure, axes)
    columns = (
        Column("τ"),
        Column("ramp", "epochs"),
        Column("mean τ", spec=".2f"),
        Column("min τ, second half"),
        Column("max τ, second half"),
        Column("test error halfway", "%", ".2f"),
        Column("least", "%", ".2f"),
        Column("last", "%", ".2f"),
    )
    return [Table("simulated_staleness", "Simulated staleness on MNIST", columns, tuple(rows))], figure


if __name__ == "__main__":
    main("simulated-staleness", __doc__, draw)
