"""`mpisgd compare RUN RUN ...`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import tyro

from mpisgd.base.errors import EXIT_OK
from mpisgd.config import hints
from mpisgd.report.look import Look, applied


@dataclass(frozen=True)
class Options(Look):
    """Print a table with a row per run; write it, with figures of all curves, as CSV, Markdown, and PNG, PDF or SVG.

    Runs that differ by seed alone are a row and a curve: the mean, the range, and their number. runs.csv has each run.

    With a target, also each run's epochs, updates, seconds and bytes to reach it.
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Runs' directories, e.g. results/hardsync results/softsync."""
    target_error: float | None = None
    """Test error to reach, a share: 0.02 is 2 %."""
    target_loss: float | None = None
    """Test loss to reach."""
    out: Path = Path("results/compare")
    """Folder for table and figures."""


def main(argv: list[str]) -> int:
    hints.refuse_foreign(argv, {item.name for item in fields(Options)}, hints.COMPARE)
    options = tyro.cli(Options, args=argv, prog="mpisgd compare")
    from mpisgd.analysis.training import make_target
    from mpisgd.report.compare import compare

    target = make_target(options.target_error, options.target_loss)
    with applied(options):
        compare(options.runs, options.out, target=target)
    return EXIT_OK
