"""Best N of N + b: time to target = updates(N) times seconds per update(N) [Chen16 3.1, Fig. 6]."""

from __future__ import annotations

from dataclasses import dataclass

from mpisgd.analysis.tables import Cell, Table, columns_of
from mpisgd.plan.collect import Collecting
from mpisgd.plan.target import Convergence


@dataclass(frozen=True)
class Choice:
    """Prediction for a b, relative to b = 0 unless `Convergence.absolute`."""

    wanted: int
    b: int
    seconds_per_update: float
    updates: float
    time: float


@dataclass(frozen=True)
class Choices:
    """Choices for b with known updates, ascending."""

    choices: tuple[Choice, ...]
    convergence: Convergence

    @property
    def best(self) -> Choice:
        """Least time, then least b."""
        return min(self.choices, key=lambda choice: choice.time)

    def of(self, b: int) -> Choice | None:
        return next((choice for choice in self.choices if choice.b == b), None)


def choices(found: Collecting, convergence: Convergence) -> Choices:
    lambda_ = len(found.wanted)
    unit = 1.0 if convergence.absolute else found.seconds_per_update(lambda_)
    rows = []
    for b in range(lambda_):
        updates = convergence.updates(lambda_ - b)
        if updates is not None:
            seconds = found.seconds_per_update(lambda_ - b)
            rows.append(Choice(lambda_ - b, b, seconds, updates, updates * seconds / unit))
    return Choices(tuple(rows), convergence)


def table(found: Choices) -> Table:
    absolute = found.convergence.absolute
    best = found.best
    rows: list[tuple[Cell, ...]] = [
        (one.wanted, one.b, one.seconds_per_update, one.updates, one.time, one.time / best.time, "best" if one == best else None)
        for one in found.choices
    ]
    target = "updates to target | time to target [s]" if absolute else "updates / those of b = 0 | time / that of b = 0"
    columns = columns_of(f"N | b | per update [s] | {target} | time / the best :.3f | choice")
    note = f"Updates: {found.convergence.source}."
    return Table("backup", "Time to the target with b backup learners [Chen16 Fig. 6]", columns, tuple(rows), note)
