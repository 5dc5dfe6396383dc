"""Learning curves of theta and thetabar, and targets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from mpisgd.analysis.tables import Cell, Table, columns_of
from mpisgd.base.errors import ConfigError
from mpisgd.config import Part
from mpisgd.records.log.progress import in_words, loss_of
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Why, extra

_AXES = ("epochs", "taken_s", "loss", "error", "clock_min")


@dataclass(frozen=True)
class Target:
    what: Literal["error", "loss"]
    value: float

    def __str__(self) -> str:
        return f"test error {100 * self.value:g} %" if self.what == "error" else f"test loss {self.value:g}"


def make_target(error: float | None, loss: float | None) -> Target | None:
    """Return the target, if any. Raises ConfigError: two targets, or an impossible value."""
    if error is not None and loss is not None:
        raise ConfigError(f"--target-error {error:g} and --target-loss {loss:g}: expected only one target")
    if error is not None:
        if not 0 < error < 1:
            raise ConfigError(f"--target-error {error:g}: expected a share between 0 and 1; 2 % is 0.02")
        return Target("error", error)
    if loss is not None:
        if not math.isfinite(loss):
            raise ConfigError(f"--target-loss {loss:g}: expected a finite number")
        return Target("loss", loss)
    return None


class Reached(NamedTuple):
    """First meeting of curve and target, linear between evaluations."""

    epochs: float
    updates: float
    seconds: float


@dataclass(frozen=True)
class Curve:
    """Evaluations of a kind of weights on a part of the data; arrays, (snapshots,).

    `seconds`: of taking the snapshot; `error`: share of wrong classes; `updates`: least clock of all shards; `metrics`: an own
    step's.
    """

    averaged: bool
    part: Part
    epochs: np.ndarray
    seconds: np.ndarray
    loss: np.ndarray
    error: np.ndarray
    updates: np.ndarray
    metrics: Mapping[str, np.ndarray] = field(default_factory=dict)
    seeds: tuple[Curve, ...] = ()
    """For a mean over seeds: the runs' curves, of equal length."""

    @property
    def weights(self) -> str:
        return "thetabar" if self.averaged else "theta"

    @property
    def name(self) -> str:
        return f"{self.weights} {self.part}"

    @property
    def final(self) -> float:
        """Error of the last snapshot; NaN if the run diverged or data have no classes."""
        return float(self.error[-1])

    def least(self, what: Literal["error", "loss"]) -> float | None:
        values = self._of(what)
        return None if np.isnan(values).all() else float(np.nanmin(values))

    def reached(self, target: Target) -> Reached | None:
        values = self._of(target.what)
        known = np.isfinite(values)
        met = np.flatnonzero(values[known] <= target.value)
        if not len(met):
            return None
        at, value = int(met[0]), values[known]
        share = (value[at - 1] - target.value) / (value[at - 1] - value[at]) if at else 1.0
        axes = (axis[known].astype(np.float64) for axis in (self.epochs, self.updates, self.seconds))
        return Reached(*(float(axis[max(0, at - 1)] + share * (axis[at] - axis[max(0, at - 1)])) for axis in axes))

    def _of(self, what: Literal["error", "loss"]) -> np.ndarray:
        return self.error if what == "error" else self.loss

    @property
    def has_error(self) -> bool:
        """Any error is known: regression and language models show their loss."""
        return not np.isnan(self.error).all()

    @property
    def best(self) -> int | None:
        """Index of the first least error, or loss without errors."""
        shown = self.error if self.has_error else self.loss
        return None if np.isnan(shown).all() else int(np.nanargmin(shown))


def curves(run: Run) -> list[Curve]:
    result = []
    for part in Part:
        for averaged in (False, True):
            rows = run.evaluations[(run.evaluations["averaged"] == averaged) & (run.evaluations["train"] == part)]
            rows = rows[np.argsort(rows["snapshot"], kind="stable")]
            if len(rows):
                metrics = {name: rows[name] for name in extra("evaluations", rows.dtype)}
                epochs, seconds, loss, error, updates = (rows[name] for name in _AXES)
                result.append(Curve(averaged, part, epochs, seconds, loss, error, updates, metrics))
    return result


def on_test_data(run: Run, averaged: bool = False) -> Curve | None:
    return next((curve for curve in curves(run) if curve.averaged == averaged and curve.part is Part.TEST), None)


def final_text(run: Run) -> str:
    """Return e.g. `2.50 % (theta), 2.31 % (thetabar) at epoch 10.00`."""
    found = [curve for curve in curves(run) if curve.part is Part.TEST]
    if not found:
        return "not evaluated"
    if run.environment.get("test_samples") == 0:
        return "no test data"
    last = [{"loss": curve.loss[-1], "error": curve.final} for curve in found]
    finals = ", ".join(
        f"{in_words(row, loss_of(run.config), ()).removeprefix('error ')} ({curve.weights})"
        for row, curve in zip(last, found, strict=True)
    )
    return f"{finals} at epoch {found[0].epochs[-1]:.2f}"


def metric_names(run: Run) -> tuple[str, ...]:
    return extra("evaluations", run.evaluations.dtype)


def summary_table(run: Run) -> Table:
    found, names = curves(run), metric_names(run)
    errors = any(curve.has_error for curve in found) or not found
    rows: list[tuple[Cell, ...]] = []
    for curve in found:
        best, scale, shown = curve.best, *((100, curve.error) if curve.has_error else (1, curve.loss))
        least = (None, None) if best is None else (scale * float(shown[best]), float(curve.epochs[best]))
        error = (100 * curve.final if curve.has_error else None,) if errors else ()
        metrics = (float(curve.metrics[name][-1]) for name in names)
        last = (*error, float(curve.loss[-1]), *metrics, float(curve.epochs[-1]), float(curve.seconds[-1]))
        rows.append((curve.name, len(curve.error), *last, *least))
    columns = columns_of(
        "weights, data | evaluations"
        + " | final error [%] :.2f" * errors
        + " | final loss"
        + "".join(f" | final {name}" for name in names)
        + f" | at epoch :.2f | at [s] | {'best error [%] :.2f' if errors else 'best loss'} | at its epoch :.2f"
    )
    return Table("training", "Training", columns, tuple(rows), "" if rows else "Nothing was evaluated.")


def evaluation_table(run: Run) -> Table:
    found = run.evaluations[np.lexsort((run.evaluations["averaged"], run.evaluations["train"], run.evaluations["snapshot"]))]
    names = metric_names(run)
    rows = [
        (
            int(row["snapshot"]),
            float(row["epochs"]),
            float(row["taken_s"]),
            int(row["clock_min"]),
            int(row["clock_max"]),
            "thetabar" if row["averaged"] else "theta",
            str(Part(row["train"])),
            float(row["loss"]),
            None if np.isnan(row["error"]) else 100 * float(row["error"]),
            *(float(row[name]) for name in names),
        )
        for row in found
    ]
    columns = columns_of(
        "snapshot | epochs :.2f | taken [s] | clock min | clock max | weights | data | loss | error [%] :.2f"
        + "".join(f" | {name}" for name in names)
    )
    return Table("evaluations", "Evaluations", columns, tuple(rows))


_ENDS = {
    Why.GOES_ON: "the run has not ended, or the log is not whole",
    Why.ITERATIONS: "all iterations were made",
    Why.GRADIENT: "no element of the gradient is above tolerance_grad",
    Why.CHANGE: "neither the loss nor the weights changed any more",
    Why.DIRECTION: "the loss does not fall along the direction",
    Why.LINE_SEARCH: "the line search found no lower loss",
}


def iteration_table(run: Run) -> Table:
    rows = run.of_coordinator("iterations")
    names = ("iteration", "clock", "time_s", "loss", "gradient_max", "step", "evaluations", "history")
    cells = tuple(tuple(row[name].item() for name in names) for row in rows)
    headings = "iteration | evaluations | time [s] | loss :.6g | greatest gradient | step | evaluations made | history"
    ending = _ENDS[Why(int(rows["why"][-1]))] if len(rows) else _ENDS[Why.GOES_ON]
    note = f"Loss: of the whole batch, with weight decay. The last iteration: {ending}."
    return Table("iterations", "Iterations of L-BFGS [Dean12 4.2]", columns_of(headings), cells, note)
