"""Learning curves: evaluations against epochs and seconds, of theta and thetabar, on test and training data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpisgd.analysis.tables import Cell, Table, columns_of
from mpisgd.records.log.reader import Run


@dataclass(frozen=True)
class Curve:
    """Evaluations of one kind of weights on one kind of data, by snapshot; arrays, shape (snapshots,).

    `seconds` is when the snapshot was taken, `error` the share of wrong classes, 0 ... 1.
    """

    averaged: bool
    train: bool
    epochs: np.ndarray
    seconds: np.ndarray
    loss: np.ndarray
    error: np.ndarray

    @property
    def weights(self) -> str:
        return "thetabar" if self.averaged else "theta"

    @property
    def name(self) -> str:
        return f"{self.weights} {'training' if self.train else 'test'}"

    @property
    def final(self) -> float:
        """Error of the last snapshot; NaN where the run diverged or the data have no classes."""
        return float(self.error[-1])

    @property
    def best(self) -> int | None:
        """Index of the least error, the first of equals; None where every error is NaN."""
        return None if np.isnan(self.error).all() else int(np.nanargmin(self.error))


def curves(run: Run) -> list[Curve]:
    """List the curves that have evaluations: theta test, thetabar test, theta training, thetabar training."""
    result = []
    for train in (False, True):
        for averaged in (False, True):
            rows = run.evaluations[(run.evaluations["averaged"] == averaged) & (run.evaluations["train"] == train)]
            rows = rows[np.argsort(rows["snapshot"], kind="stable")]
            if len(rows):
                result.append(Curve(averaged, train, rows["epochs"], rows["taken_s"], rows["loss"], rows["error"]))
    return result


def on_test_data(run: Run, averaged: bool = False) -> Curve | None:
    return next((curve for curve in curves(run) if curve.averaged == averaged and not curve.train), None)


def final_text(run: Run) -> str:
    """E.g. `2.50 % (theta), 2.31 % (thetabar) at epoch 10.00`."""
    found = [curve for curve in curves(run) if not curve.train]
    if not found:
        return "not evaluated"
    errors = ", ".join(f"{100 * curve.final:.2f} % ({curve.weights})" for curve in found)
    return f"{errors} at epoch {found[0].epochs[-1]:.2f}"


def summary_table(run: Run) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for curve in curves(run):
        best = curve.best
        least = (None, None) if best is None else (100 * float(curve.error[best]), float(curve.epochs[best]))
        last = (100 * curve.final, float(curve.loss[-1]), float(curve.epochs[-1]), float(curve.seconds[-1]))
        rows.append((curve.name, len(curve.error), *last, *least))
    columns = columns_of(
        "weights, data | evaluations | final error [%] :.2f | final loss | at epoch :.2f | at [s] | best error [%] :.2f"
        " | at its epoch :.2f"
    )
    return Table("training", "Training", columns, tuple(rows), "" if rows else "Nothing was evaluated.")


def evaluation_table(run: Run) -> Table:
    found = run.evaluations[np.lexsort((run.evaluations["averaged"], run.evaluations["train"], run.evaluations["snapshot"]))]
    rows = [
        (
            int(row["snapshot"]),
            float(row["epochs"]),
            float(row["taken_s"]),
            int(row["clock_min"]),
            int(row["clock_max"]),
            "thetabar" if row["averaged"] else "theta",
            "training" if row["train"] else "test",
            float(row["loss"]),
            100 * float(row["error"]),
        )
        for row in found
    ]
    columns = columns_of("snapshot | epochs :.2f | taken [s] | clock min | clock max | weights | data | loss | error [%] :.2f")
    return Table("evaluations", "Evaluations", columns, tuple(rows))
