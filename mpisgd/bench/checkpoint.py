"""`bench checkpoint`: hardsync with checkpoints against hardsync without, in turn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpisgd.bench.parts.cases import CASES, LEARNERS, WARM_UP, Case
from mpisgd.bench.parts.measured import OFF, in_turn, over_off, show, spread
from mpisgd.bench.parts.runs import run_of, scratch
from mpisgd.config import CheckpointOptions
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Event

if TYPE_CHECKING:
    from mpisgd.comm.mpi.library import MPI


class Tally:
    def __init__(self, case: Case, ways: Sequence[str]) -> None:
        self._case = case
        self._rates: dict[str, list[float]] = {name: [] for name in ways}
        self._stops: list[float] = []
        self._counts = dict.fromkeys(("taken", "skipped", "unsaved"), 0)

    def add(self, way: str, updated_s: np.ndarray, events: np.ndarray) -> None:
        case = self._case
        self._rates[way].append(float(LEARNERS * case.updates * case.mu / (updated_s[-1] - updated_s[WARM_UP - 1])))
        self._stops += events["value"][events["kind"] == Event.CHECKPOINT].tolist()
        for what, kind in (("taken", Event.CHECKPOINT), ("skipped", Event.SKIPPED), ("unsaved", Event.UNSAVED)):
            self._counts[what] += int(np.count_nonzero(events["kind"] == kind))

    def row(self) -> dict[str, Any]:
        """Return rates, ratios to OFF and seconds per checkpoint."""
        rates = self._rates
        return {
            "case": self._case.name,
            "images_per_s": {name: spread(values) for name, values in rates.items()},
            "over_off": over_off(rates),
            "stands_s": spread(self._stops) if self._stops else None,
            "checkpoints": self._counts,
        }


def measure(comm: MPI.Intracomm, repetitions: int, every_updates: int) -> Iterator[dict[str, Any]]:
    """Measure images/s with checkpoints at multiples of this clock; rows are equal on all ranks."""
    ways: dict[str, dict[str, Any]] = {OFF: {}, "checkpoints": {"checkpoint": CheckpointOptions(every_updates=every_updates)}}
    with scratch(comm) as directory:
        for case in (CASES["cnn-16"], CASES["mlp-16"]):
            tally = Tally(case, list(ways))
            for name in in_turn(list(ways), repetitions, told=comm.Get_rank() == 0):
                outcome = run_of(comm, directory, case, **ways[name])
                tally.add(name, *comm.bcast(seen(Run(outcome.path)) if comm.Get_rank() == 0 else None))
            yield tally.row() | {"every_updates": every_updates}


def seen(log: Run) -> tuple[np.ndarray, np.ndarray]:
    return log.updates["time_s"], log.events


def lines_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [line for row in rows for line in _lines_of(row)]


def _lines_of(row: Mapping[str, Any]) -> list[str]:
    lines = [f"{row['case']}: images/s {', '.join(f'{name} {show(rate, 0)}' for name, rate in row['images_per_s'].items())}"]
    lines += [f"  {name} / {OFF} {show(ratio, 3)}" for name, ratio in row["over_off"].items()]
    if row["stands_s"] is not None:
        counts = ", ".join(f"{count} {name}" for name, count in row["checkpoints"].items())
        lines.append(f"  a checkpoint stands in the loop for {show(row['stands_s'], 2, 1e3)} ms; {counts}")
    return lines
