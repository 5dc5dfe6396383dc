"""`mpisgd report RUN`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from mpisgd.report.look import Look, applied


@dataclass(frozen=True)
class Options(Look):
    """Print a run's tables and write them, with the papers' figures, as CSV, Markdown, and PNG, PDF or SVG.

    Works on runs under way or killed. Exit status 1: the books of an ended run do not balance.
    """

    run: tyro.conf.Positional[Path]
    """The run's directory, e.g. results/run."""
    out: Path | None = None
    """Folder for tables and figures; default: <run>/report."""


def main(argv: list[str]) -> int:
    options = tyro.cli(Options, args=argv, prog="mpisgd report")
    from mpisgd.report.single import report

    with applied(options):
        return report(options.run, options.out).exit_status
