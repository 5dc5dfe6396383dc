"""`bench checkpoint`: hardsync with something on against the same without it, interleaved in one job.

What is on is said by fields of the configuration (`Ways`), so that others are compared by one more entry. The order changes from
one repetition to the next; a ratio is that of two runs beside each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mpisgd.bench.machine import spread
from mpisgd.bench.train import CASES, LEARNERS, WARM_UP, Case, run_of, scratch
from mpisgd.config import CheckpointOptions
from mpisgd.mpi import MPI
from mpisgd.records.reader import Run
from mpisgd.records.schema import Event

OFF = "off"
Ways = Mapping[str, Mapping[str, Any]]
"""Name -> fields of the configuration that differ; `OFF` is what the others are compared with."""


def measure_checkpoints(comm: MPI.Intracomm, repetitions: int, every_updates: int) -> list[dict[str, Any]]:
    """Images/s with a checkpoint at every multiple of this clock, over without; and what one checkpoint costs."""
    ways = {OFF: {}, "checkpoints": {"checkpoint": CheckpointOptions(every_updates=every_updates)}}
    with scratch(comm) as directory:
        return [
            measure(comm, directory, case, ways, repetitions) | {"every_updates": every_updates} for case in (CASES[0], CASES[2])
        ]


def measure(comm: MPI.Intracomm, directory: Path, case: Case, ways: Ways, repetitions: int) -> dict[str, Any]:
    """One case in all ways; the row is the same on every rank."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    stops: list[float] = []
    counts = dict.fromkeys(("taken", "skipped", "unsaved"), 0)
    for repetition in range(repetitions):
        names = list(ways)
        for name in names[repetition % len(names) :] + names[: repetition % len(names)]:
            outcome = run_of(comm, directory, case, **ways[name])
            updated_s, events = comm.bcast(_told(outcome.path) if comm.Get_rank() == 0 else None)
            rates[name].append(LEARNERS * case.updates * case.mu / (updated_s[-1] - updated_s[WARM_UP - 1]))
            stops += events["value"][events["kind"] == Event.CHECKPOINT].tolist()
            for told, kind in (("taken", Event.CHECKPOINT), ("skipped", Event.SKIPPED), ("unsaved", Event.UNSAVED)):
                counts[told] += int(np.count_nonzero(events["kind"] == kind))
    return {
        "case": case.name,
        "images_per_s": {name: spread(values) for name, values in rates.items()},
        "over_off": {
            name: spread([on / off for on, off in zip(values, rates[OFF], strict=True)])
            for name, values in rates.items()
            if name != OFF
        },
        "stands_s": spread(stops) if stops else None,
        "checkpoints": counts,
    }


def _told(run: Path) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of the updates, and the events, of shard 0."""
    log = Run(run)
    return log.updates["time_s"], log.events


def lines_of(row: Mapping[str, Any]) -> list[str]:
    """What is printed of a row."""

    def told(value: Mapping[str, float], digits: int, factor: float = 1.0) -> str:
        low, high = value["min"] * factor, value["max"] * factor
        return f"{value['median'] * factor:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"

    lines = [f"{row['case']}: images/s {', '.join(f'{name} {told(rate, 0)}' for name, rate in row['images_per_s'].items())}"]
    lines += [f"  {name} / {OFF} {told(ratio, 3)}" for name, ratio in row["over_off"].items()]
    if row["stands_s"] is not None:
        counts = ", ".join(f"{count} {name}" for name, count in row["checkpoints"].items())
        lines.append(f"  a checkpoint stands in the loop for {told(row['stands_s'], 2, 1e3)} ms; {counts}")
    return lines
