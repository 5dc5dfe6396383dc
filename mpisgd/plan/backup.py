"""The best N of N + b: time to the target is updates(N) times seconds per update(N) [Chen16 3.1, Fig. 6]."""

from __future__ import annotations

from dataclasses import dataclass

from mpisgd.analysis.tables import Cell, Table, columns_of
from mpisgd.plan.collect import Collecting
from mpisgd.plan.target import Convergence


@dataclass(frozen=True)
class Choice:
    """Prediction for one b. `updates` and `time_s` are relative to those of N = λ where no target was measured
    (`Convergence.absolute`)."""

    wanted: int
    b: int
    seconds_per_update: float
    updates: float
    time: float


@dataclass(frozen=True)
class Choices:
    """Every b whose number of updates is known, from b = 0 upwards."""

    choices: tuple[Choice, ...]
    convergence: Convergence

    @property
    def best(self) -> Choice:
        """The least time; of equals the one with the fewest backup learners."""
        return min(self.choices, key=lambda choice: choice.time)

    def of(self, b: int) -> Choice | None:
        return next((choice for choice in self.choices if choice.b == b), None)


def choices(found: Collecting, convergence: Convergence) -> Choices:
    """Time to the target for each b; relative to b = 0 where there is no measured target."""
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
