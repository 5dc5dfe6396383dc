"""`python -m tests.bench settings`: which way to wait, and to copy within a node, is the fastest here; each in launches of its own.

What differs is set from outside, by environment variables: how a rank waits for messages (`wire.py`), and, with Open MPI, whether a
large message is copied once, by the receiver out of the sender's memory (CMA), or twice, through shared memory. Which is better
depends on the machine, and on how many ranks share a core (TRAPS 4): so it is measured.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpisgd.bench.parts import runs
from mpisgd.bench.parts.cases import CASES, LEARNERS, config_of
from mpisgd.bench.parts.measured import OFF, in_turn, over_off, show, spread
from mpisgd.comm.mpi.launch import version
from tests import travel

WAITING: dict[str, dict[str, str]] = {
    OFF: {},
    "MPISGD_WAIT=blocking": {"MPISGD_WAIT": "blocking"},
    "MPISGD_WAIT=polite": {"MPISGD_WAIT": "polite"},
}
COPYING: dict[str, dict[str, str]] = {"OMPI_MCA_smsc=^cma": {"OMPI_MCA_smsc": "^cma"}}
"""Open MPI 5; others do not know it."""
LONGER = 3
"""Times the mini-batches of the other benches: what a launch costs is not timed, but long."""
WORTH = 1.03
"""A setting that is faster by less is not worth the name."""


def measure(repetitions: int) -> Iterator[dict[str, Any]]:
    """Images/s of hardsync by messages, in each setting. Raises ConfigError where a launch fails."""
    settings = dict(WAITING)
    if "Open MPI" in version():
        settings |= COPYING
    for key in ("cnn-16", "mlp-16"):
        case = replace(CASES[key], updates=LONGER * CASES[key].updates)
        rates: dict[str, list[float]] = {name: [] for name in settings}
        for name in in_turn(list(settings), repetitions):
            with tempfile.TemporaryDirectory() as directory:
                env = settings[name] | {travel.VARIABLE: "whole"}
                log = runs.launched(config_of(Path(directory), case), 1 + LEARNERS, env=env)
                rates[name].append(runs.rate_of(log, case))
        yield {
            "case": case.name,
            "images_per_s": {name: spread(values) for name, values in rates.items()},
            "over_off": over_off(rates),
        }


def lines_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Format the rows for printing."""
    return [line for row in rows for line in _lines_of(row)]


def _lines_of(row: Mapping[str, Any]) -> list[str]:
    """Format one row; last, which setting is worth a change."""
    lines = [f"{row['case']}: images/s as it is {show(row['images_per_s'][OFF], 0)}"]
    lines += [f"  {name:<22} {show(ratio)}" for name, ratio in row["over_off"].items()]
    name, ratio = max(row["over_off"].items(), key=lambda item: item[1]["median"])
    if ratio["median"] >= WORTH:
        return [*lines, f"  export {name}  # for a model of this size"]
    return [*lines, "  leave all as it is: nothing tried here is faster by 3 %"]
