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
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """The runs' directories, e.g. results/hardsync results/softsync."""
    out: Path = Path("results/compare")
    """Folder for the table and figures."""


def main(argv: list[str]) -> int:
    options = tyro.cli(Options, args=argv, prog="mpisgd compare")
    from mpisgd.report.compare import compare

    with applied(options):
        compare(options.runs, options.out)
    return EXIT_OK
