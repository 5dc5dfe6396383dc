"""`mpisgd compare RUN RUN ...`: several runs side by side."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from mpisgd.base.errors import EXIT_FAILED, EXIT_OK, ConfigError
from mpisgd.report.look import Look, applied


@dataclass(frozen=True)
class Options(Look):
    """Print one table with a row per run; write it, with figures of all runs' curves, as CSV, Markdown, and PNG, PDF or SVG.

    Runs that differ in nothing but the seed are one row and one curve: the mean, from the least to the largest value, and how many
    they are. runs.csv has each of them.

    With a target, also what it took each to reach it: epochs, updates, seconds and bytes.

    With --sweep, all runs of a sweep, and which of them are not done, with their reasons. Exit status 1: some are not.
    """

    runs: tyro.conf.Positional[tuple[Path, ...]] = ()
    """The runs' directories, e.g. results/hardsync results/softsync."""
    sweep: Path | None = None
    """The directory of a sweep, in place of those of runs."""
    target_error: float | None = None
    """Test error to be reached, a share: 0.02 is 2 %."""
    target_loss: float | None = None
    """Test loss to be reached."""
    out: Path | None = None
    """Folder for the table and figures; default: results/compare, or <sweep>/compare."""


def main(argv: list[str]) -> int:
    options = tyro.cli(Options, args=argv, prog="mpisgd compare")
    from mpisgd.analysis.training import make_target
    from mpisgd.report.compare import compare

    target = make_target(options.target_error, options.target_loss)
    if options.sweep is None:
        with applied(options):
            compare(options.runs, options.out or Path("results/compare"), target=target)
        return EXIT_OK
    if options.runs:
        raise ConfigError(f"compare: --sweep {options.sweep} and {options.runs[0]}: expected one or the other")
    from mpisgd.report.swept import compare_sweep

    with applied(options):
        done = compare_sweep(options.sweep, options.out or options.sweep / "compare", target=target)
    return EXIT_OK if done else EXIT_FAILED
