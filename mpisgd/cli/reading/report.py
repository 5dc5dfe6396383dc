"""`mpisgd report RUN`: tables and figures of one run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from mpisgd.report.look import Look, applied


@dataclass(frozen=True)
class Options(Look):
    """Print the tables of a run and write them, with the papers' figures, as CSV, Markdown, and PNG, PDF or SVG.

    Works on runs that are under way or were killed. Exit status 1: the books of a run that has ended do not balance.
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
