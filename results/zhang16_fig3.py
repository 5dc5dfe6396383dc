"""Test error on CIFAR-10 for hardsync and n-softsync, lambda = 30, with alpha0 and with alpha0/tau [Zhang16 4.3, Fig. 3].

The paper: with the best rate of synchronous SGD, alpha0, convergence degrades as n grows, and with n = 15 and 30 the test error
stays at 90 %. With alpha0/tau (eq. 3) the curves of all protocols can hardly be told apart, and all end at about 18 %.

Same: the data, their per-pixel mean subtracted; Caffe's network (`cifar10_full`); lambda = 30, mu = 4, momentum 0.9; one rate for
all, that of a single learner with mini-batches of 128; alpha0 divided by 10 after 120/140 and 130/140 of the run.
Not the same: 10 epochs in place of 140. Inputs of 0 to 1, not 0 to 255, torch's initialisation and no response normalisation
(see `mpisgd/models/cifar10_full.py`), so that the paper's alpha0 = 0.001 does not carry over. Virtual learners, each of which
computes a real gradient at the weights that it pulled; who is how stale comes from the mini-batches of zhang16_fig1.py (normal,
20 %). The paper shows the error on the training data, too; kept here is the mean loss of the mini-batches.

alpha0 = 0.03 has the least test error of a single learner, mu = 128, 4 epochs with the same schedule, seed 99, which is none of
those shown: 50.7 % with 0.003, 38.8 % with 0.01, 28.6 % with 0.03, 29.8 % with 0.1. No other protocol was tried on CIFAR-10 before.

Needs CIFAR-10 below $MPISGD_DATA/cifar10, and says so where it is missing. Every curve is kept as a CSV when it is done, and is
not made again: start the script again after an interruption, or in several processes at once; each takes the next curve that no
other has. One curve takes some ten minutes of one core. `--quick` is the same with the 8x8 digits and a small CNN, one seed, in
half a minute.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zhang16_fig1 as fig1
from matplotlib.figure import Figure
from virtual_runs import Job, logged, panels, show

from mpisgd.analysis import books, training
from mpisgd.analysis.tables import Cell, Column, Table
from mpisgd.base.errors import ConfigError, DataError
from mpisgd.records.lock import Lock
from mpisgd.records.log.reader import Run
from mpisgd.report import style

HERE = Path(__file__).parent
COLUMNS = ("epochs", "test_error", "test_loss", "training_loss")
CHANCE = 0.9
"""The error of ten classes by chance."""


@dataclass(frozen=True)
class Scale:
    """What is trained, and for how long."""

    name: str
    told: str
    data: str
    model: dict[str, Any]
    alpha0: float
    epochs: int


FULL = Scale("zhang16-fig3", "CIFAR-10, cifar10_full", "cifar10", {"name": "cifar10_full"}, alpha0=0.03, epochs=10)
QUICK = Scale(
    "zhang16-fig3-quick", "8×8 digits, small CNN", "digits", {"name": "small_cnn", "channels": [8, 16]}, alpha0=0.03, epochs=6
)


@dataclass(frozen=True)
class Curve:
    """One run. `n` = 0 is hardsync, whose gradients have no staleness: both ways to weight them are the same."""

    n: int
    modulation: str
    seed: int

    @property
    def protocol(self) -> str:
        return f"{self.n}-softsync" if self.n else "hardsync"

    @property
    def may_diverge(self) -> bool:
        """Stale gradients that count in full: the first epoch tells whether the others are worth computing."""
        return self.n > 1 and self.modulation == "none"

    @property
    def rate(self) -> str:
        return {"none": "α₀", "inverse": "α₀/τ"}[self.modulation] if self.n else "α₀ (τ = 0)"

    @property
    def name(self) -> str:
        return f"{self.protocol}{f'-{self.modulation}' if self.n else ''}-seed{self.seed}"


KINDS = ((0, "none"), (30, "inverse"), (30, "none"), (1, "inverse"), (15, "inverse"), (15, "none"), (1, "none"))
CURVES = tuple(Curve(n, modulation, seed) for seed in (1, 2) for n, modulation in KINDS)
"""In the order in which they are made."""


@dataclass(frozen=True)
class Trained:
    """A curve that is done. `rows`: (evaluations, 4), as in COLUMNS; `about`: settings, staleness, and where it was made."""

    curve: Curve
    about: dict[str, Any]
    rows: np.ndarray

    @property
    def error(self) -> float:
        """Percent of the test images, at the end."""
        return 100 * float(self.rows[-1, 1])


def job(scale: Scale, curve: Curve) -> Job:
    protocol = {"name": "softsync", "n": curve.n, "modulation": curve.modulation} if curve.n else {"name": "hardsync"}
    return {
        "protocol": protocol,
        "model": scale.model,
        "data": {"name": scale.data},
        "optimizer": {"name": "sgd", "momentum": 0.9},
        "schedule": {"name": "step", "epochs": [scale.epochs * 120 / 140, scale.epochs * 130 / 140], "factor": 0.1},
        "mu": fig1.MU,
        "alpha0": scale.alpha0,
        "seed": curve.seed,
        "epochs": scale.epochs,
        "threads": 1,
        "nonfinite": "continue",
        "evaluation": {"every_epochs": 1.0},
        "virtual": {"learners": fig1.LAMBDA},
        "compute": fig1.SPREAD,
    }


# ------------------------------------------------------------------------------------------------------------- making curves


def trained(scale: Scale, curve: Curve) -> Trained:
    """The run; of one whose weights are not finite after an epoch, which they never will be again, only that epoch."""
    begun_s, whole = time.monotonic(), job(scale, curve)
    run = logged({**whole, "epochs": 1} if curve.may_diverge else whole)
    lost = curve.may_diverge and not np.isfinite(run.evaluations["loss"][-1])
    if curve.may_diverge and not lost:
        run = logged(whole)
    pushes = run.pushes[books.applied_rows(run)]
    rows, environment = summary(run, pushes), run.environment
    if lost:
        later = np.arange(2, scale.epochs + 1)
        rows = np.vstack([rows, *([epoch, *rows[-1, 1:]] for epoch in later)])
    about = {
        "job": whole,
        "not_finite_after_epochs": 1 if lost else None,
        "gradients": len(pushes),
        "updates": len(run.updates),
        "mean_staleness": round(float(pushes["staleness"].mean()), 4),
        "max_staleness": int(pushes["staleness"].max()),
        "wall_s": round(time.monotonic() - begun_s),
        "git_commit": environment["git_commit"],
        "versions": environment["versions"],
    }
    return Trained(curve, about, rows)


def summary(run: Run, pushes: np.ndarray) -> np.ndarray:
    """One row per evaluation, as in COLUMNS; training loss: of the mini-batches since the evaluation before, at first NaN."""
    found = training.on_test_data(run)
    if found is None:
        raise SystemExit("nothing was evaluated")
    epochs = np.cumsum(pushes["samples"]) / run.environment["train_samples"]
    part = np.searchsorted(found.epochs, epochs - 1e-9)  # of the first evaluation at or after it
    loss = [pushes["loss"][part == at].mean() if (part == at).any() else np.nan for at in range(len(found.epochs))]
    return np.column_stack([found.epochs, found.error, found.loss, loss])


def write(path: Path, done: Trained) -> None:
    """Whole or not at all."""
    sink = io.StringIO()
    sink.write(f"# {json.dumps(done.about)}\n")
    writer = csv.writer(sink, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([f"{value:.6g}" for value in row] for row in done.rows.tolist())
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(sink.getvalue(), encoding="utf-8")
    aside.rename(path)


def read(path: Path, scale: Scale, curve: Curve) -> Trained | None:
    """None where it is not there, or was made with other settings."""
    if not path.is_file():
        return None
    first, *lines = path.read_text(encoding="utf-8").splitlines()
    about = json.loads(first.removeprefix("# "))
    if about["job"] != job(scale, curve):
        return None
    return Trained(curve, about, np.array([[float(cell) for cell in row] for row in list(csv.reader(lines))[1:]]))


def there(folder: Path, scale: Scale, curves: Sequence[Curve] = CURVES) -> list[Trained]:
    found = (read(folder / f"{curve.name}.csv", scale, curve) for curve in curves)
    return [each for each in found if each is not None]


def make(folder: Path, scale: Scale, curves: Sequence[Curve] = CURVES) -> None:
    """Make those that are not there, and that no other process is making. Raises DataError where the data are missing."""
    for curve in curves:
        path, claim = folder / f"{curve.name}.csv", folder / f".{curve.name}"
        claim.mkdir(parents=True, exist_ok=True)
        try:
            lock = Lock(claim)
        except ConfigError:
            print(f"{curve.name}: another process makes it", file=sys.stderr, flush=True)
            continue
        try:
            if read(path, scale, curve) is None:
                done = trained(scale, curve)
                write(path, done)
                told = f"{curve.name}: test error {done.error:.2f} %, {done.about['wall_s']} s"
                print(told, file=sys.stderr, flush=True)
        finally:
            lock.release()
            with contextlib.suppress(OSError):  # another process has just claimed it, to see that it is done
                claim.rmdir()


# ---------------------------------------------------------------------------------------------------------- table and figure


def by_kind(found: Sequence[Trained]) -> Iterator[tuple[Curve, list[Trained]]]:
    """The runs of each protocol and rate, all seeds, by n and with alpha0 first; without those of which there is none."""
    for n, modulation in sorted(KINDS, key=lambda kind: (kind[1] == "inverse", kind[0])):
        seeds = [each for each in found if (each.curve.n, each.curve.modulation) == (n, modulation)]
        if seeds:
            yield seeds[0].curve, seeds


def table(found: Sequence[Trained]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for curve, seeds in by_kind(found):
        errors = " ".join(f"{each.error:.1f}" for each in seeds)
        staleness = float(np.mean([each.about["mean_staleness"] for each in seeds]))
        largest = max(int(each.about["max_staleness"]) for each in seeds)
        best = min(100 * float(np.nanmin(each.rows[:, 1])) for each in seeds)
        loss = float(np.mean([each.rows[-1, 3] for each in seeds]))
        rows.append((curve.protocol, curve.rate, staleness, largest, errors, best, loss if np.isfinite(loss) else None))
    columns = (
        Column("protocol"),
        Column("rate"),
        Column("mean τ", spec=".2f"),
        Column("max τ"),
        Column("test error of each seed", "%"),
        Column("least of all epochs", "%", ".1f"),
        Column("training loss, last epoch", spec=".2f"),
    )
    return Table("zhang16_fig3", "Test error at the end", columns, tuple(rows))


def figure_of(found: Sequence[Trained], scale: Scale) -> Figure:
    titles = {"none": "rate α₀ for every gradient", "inverse": "rate α₀/τ"}
    figure, beside = panels("epochs", [(title, "test error [%]") for title in titles.values()])
    looks = {n: style.line(at) for at, n in enumerate(sorted({n for n, _ in KINDS}))}
    for modulation, axes in zip(titles, beside, strict=True):
        for curve, seeds in by_kind(found):
            if curve.n and curve.modulation != modulation:
                continue
            percent = 100 * np.array([each.rows[:, 1] for each in seeds])
            epochs, look = seeds[0].rows[:, 0], looks[curve.n]
            axes.plot(epochs, percent.mean(axis=0), label=curve.protocol, **look)
            axes.fill_between(epochs, percent.min(axis=0), percent.max(axis=0), color=look["color"], alpha=0.2, linewidth=0)
        axes.axhline(100 * CHANCE, color=style.GREY, linewidth=1.0, linestyle=":", label="chance")
        axes.set(xlim=(0, scale.epochs * 1.02), ylim=(0, 100))
    beside[-1].legend(fontsize=8.5, frameon=False)
    seeds = "; mean and range where there are two seeds" if any(len(seeds) > 1 for _, seeds in by_kind(found)) else ""
    figure.suptitle(f"{scale.told}: λ = {fig1.LAMBDA}, μ = {fig1.MU}, α₀ = {scale.alpha0:g}{seeds}", fontsize=11)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="digits and a small CNN, one seed, in half a minute")
    parser.add_argument("--draw", action="store_true", help="make no curve, draw those that are there")
    parser.add_argument("--curves", type=Path, help="folder of the CSVs; default: beside this file")
    parser.add_argument("--out", type=Path, help="folder of the figure; default: figures/, with --quick that of the CSVs")
    options = parser.parse_args()
    scale, curves = (QUICK, CURVES[: len(KINDS)]) if options.quick else (FULL, CURVES)
    folder = options.curves or HERE / scale.name
    if not options.draw:
        try:
            make(folder, scale, curves)
        except DataError as error:
            raise SystemExit(f"this script trains on {scale.data}: {error}") from error
    found = there(folder, scale, curves)
    if not found:
        raise SystemExit(f"{folder} has no curve of these settings")
    show(scale.name, options.out or (folder if options.quick else HERE / "figures"), [table(found)], figure_of(found, scale))
    print(f"curves: {len(found)} of {len(curves)}")


if __name__ == "__main__":
    main()
