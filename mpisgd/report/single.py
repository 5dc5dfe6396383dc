"""The report of a run, finished or not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from mpisgd.analysis import about, arrivals, books, noise_scale, staleness, throughput, training
from mpisgd.analysis.tables import Table
from mpisgd.base.errors import EXIT_FAILED, EXIT_OK
from mpisgd.records.log.reader import Run
from mpisgd.report import link_speed
from mpisgd.report.writing import Drawing, say, tell, terminal, write


@dataclass(frozen=True)
class Report:
    """A report; `problems`: a line per unbalanced part of an ended run's books."""

    tables: tuple[Table, ...]
    drawings: tuple[Drawing, ...]
    problems: tuple[str, ...]
    files: tuple[Path, ...]

    def table(self, key: str) -> Table:
        return next(table for table in self.tables if table.key == key)

    @property
    def exit_status(self) -> int:
        return EXIT_FAILED if self.problems else EXIT_OK


def report(run_path: str | Path, out: Path | None = None, console: Console | None = None) -> Report:
    """Print a run's tables; write tables and figures to `out`, by default `<run>/report`.

    Raises DataError: no run, or a log missing, foreign or damaged; ConfigError: `out` unwritable.
    """
    console = console or terminal()
    run = Run(run_path)
    state = about.status(run)
    problems = tuple(books.imbalances(run)) if state.ended else ()
    tables = _tables(run, state)
    for table in tables:
        table.print_to(console)
        say(console, "")
    from mpisgd.report import figures_timeline

    drawings = (*draw(run), figures_timeline.drawing(run))
    folder = out or run.path / "report"
    lines = [state.text, *(f"**Books do not balance**: {problem}" for problem in problems)]
    files = write(folder / "report.md", f"Report of {run.name}", lines, tables, drawings)
    tell(console, folder, drawings)
    if not state.done:
        say(console, f"{run.name} is {state.text}", "bold")
    for problem in problems:
        say(console, f"books do not balance: {problem}", "bold red")
    return Report(tables, drawings, problems, tuple(files))


def _tables(run: Run, state: about.Status) -> tuple[Table, ...]:
    return (
        about.header(run, state, training.final_text(run)),
        training.summary_table(run),
        *([training.iteration_table(run)] if run.is_batch else []),
        training.evaluation_table(run),
        throughput.rate_table(run),
        *([throughput.portion_table(run)] if run.is_batch else _tables_of_gradients(run)),
        books.shard_table(run),
        books.learner_table(run),
    )


def _tables_of_gradients(run: Run) -> tuple[Table, ...]:
    nodes = link_speed.links(run)
    return (
        throughput.time_table(run),
        *([link_speed.table(run, nodes)] if nodes else []),
        *([throughput.bubble_table(run)] if throughput.tells_neighbours(run) else []),
        staleness.shard_table(run),
        *([staleness.layer_table(run)] if run.environment.get("layers") else []),
        staleness.learner_table(run),
        staleness.histogram_table(run),
        arrivals.arrival_table(run),
        arrivals.collect_table(run),
        noise_scale.table(run),
        *([books.fault_table(run)] if books.has_faults(run) else []),
    )


def draw(run: Run) -> tuple[Drawing, ...]:
    """Draw figures but the timeline; imports matplotlib late."""
    from mpisgd.report import figures

    title, synchronous = about.label(run), arrivals.synchronous(run)
    curves = training.curves(run)
    if run.is_batch:
        losses = figures.losses(title, run.of_coordinator("iterations"))
        return (
            Drawing("losses", "Loss against iterations, evaluations and seconds [Dean12 4.2]", losses, "no iteration was made"),
            *figures.errors("Error", title, [(run.name, curves)], "every error is NaN" if curves else "nothing was evaluated"),
        )
    axis = "time since the clock's start" if synchronous else "turnaround: weights answered to gradient arrived"
    return (
        Drawing(
            "staleness_distribution",
            "Distribution of the staleness of applied gradients [Zhang16 Fig. 1]",
            figures.staleness_distribution(title, [(run.name, staleness.histogram(run))], about.splitting(run)),
            "no gradient was applied",
        ),
        Drawing(
            "staleness_over_clock",
            "Staleness of the gradients of each update [Zhang16 Fig. 1]",
            figures.staleness_over_clock(title, staleness.over_clock(run)),
            "no gradient was applied",
        ),
        *figures.errors("Error", title, [(run.name, curves)], "every error is NaN" if curves else "nothing was evaluated"),
        Drawing(
            "arrivals",
            "Cumulative distribution of arrival times of gradients on shard 0 [Chen16 Fig. 3]",
            figures.arrival_cdf(title, _arrival_series(run), axis),
            "no gradient has an arrival time",
        ),
        Drawing(
            "collect",
            "Mean and median time to collect k gradients [Chen16 Fig. 4]",
            figures.collect(title, [(run.name, arrivals.collected(run))], run.lambda_, arrivals.wanted(run)),
            "no gradient arrived" if synchronous else f"gradients of {about.protocol_name(run)} have no common start",
        ),
        Drawing(
            "learner_time",
            "Where the learners' time went",
            figures.time_spent(title, throughput.learner_time(run)),
            "no gradient was pushed",
        ),
    )


def _arrival_series(run: Run) -> list[tuple[str, np.ndarray]]:
    series = [("any gradient", arrivals.times(run))]
    if not arrivals.synchronous(run):
        return series
    lambda_, clocks = run.lambda_, len(arrivals.times_to(run, 1))
    for k in sorted({1, -(-lambda_ // 2), -(-9 * lambda_ // 10), arrivals.wanted(run), lambda_}):
        collected = arrivals.times_to(run, k)
        where = "" if len(collected) == clocks else f" (in {len(collected)} of {clocks} clock values)"
        series.append((f"k = {k} of {lambda_}{where}", collected))
    return series
