"""`mpisgd compare RUN RUN ...`: several runs side by side."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from mpisgd.base.errors import EXIT_OK
from mpisgd.report.look import Look, applied


@dataclass(frozen=True)
class Options(Look):
    """Print one table with a row per run; write it, with figures of all runs' curves, as CSV, Markdown, and PNG, PDF or SVG.

    Runs that differ in nothing but the seed are one row and one curve: the mean, from the least to the largest value, and how many
    they are. runs.csv has each of them.

    With a target, also what it took each to reach it: epochs, updates, seconds and bytes.
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """The runs' directories, e.g. results/hardsync results/softsync."""
    target_error: float | None = None
    """Test error to be reached, a share: 0.02 is 2 %."""
    target_loss: float | None = None
    """Test loss to be reached."""
    out: Path = Path("results/compare")
    """Folder for the table and figures."""


def main(argv: list[str]) -> int:
    options = tyro.cli(Options, args=argv, prog="mpisgd compare")
    from mpisgd.analysis.training import make_target
    from mpisgd.report.compare import compare

    target = make_target(options.target_error, options.target_loss)
    with applied(options):
        compare(options.runs, options.out, target=target)
    return EXIT_OK
