"""What the scripts beside this one share: virtual runs in a directory that is thrown away; tables and a figure shown."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mpisgd.analysis.tables import Table
from mpisgd.config.config_file import from_mapping
from mpisgd.job.finish import Outcome
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Event
from mpisgd.report import style
from mpisgd.simulate import simulate

Job = Mapping[str, Any]
"""A configuration as a job file has it."""


def timed(job: Job) -> Outcome:
    """The outcome of a run that writes no log."""
    with tempfile.TemporaryDirectory(prefix="mpisgd-results-") as folder:
        return simulate(from_mapping({**job, **_quiet(folder, enabled=False)}))


def logged(job: Job) -> Run:
    """The log of a run; all of it has been read, for its files are gone."""
    with tempfile.TemporaryDirectory(prefix="mpisgd-results-") as folder:
        run = Run(simulate(from_mapping({**job, **_quiet(folder, flush_rows=8192, flush_s=1e9)})).path)
        _ = run.pushes, run.updates, run.evaluations, run.events, run.summaries, run.counts
    return run


def _quiet(folder: str, **log: Any) -> dict[str, Any]:
    return {"out": f"{folder}/run", "log": {"progress": "off", **log}}


def given_up(run: Run) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Computations that were given up: learner_id, first second, last second; arrays, shape (given up,).

    Of these the log has an event at their end. They began when their learner was last answered, or gave up the one before:
    what lies between is the answer to a pull, microseconds.
    """
    events = run.events[(run.events["kind"] == Event.GAVE_UP) & (run.events["shard"] == 0)]
    events = events[np.lexsort((events["time_s"], events["learner_id"]))]
    answers = run.pushes[run.pushes["shard"] == 0]
    start_s = np.zeros(len(events))
    for at, event in enumerate(events):
        mine = answers["answer_s"][answers["learner_id"] == event["learner_id"]]
        start_s[at] = np.max(mine[mine < event["time_s"]], initial=0.0)  # NaN, no answer, is not below
        if at and events["learner_id"][at - 1] == event["learner_id"]:
            start_s[at] = max(start_s[at], events["time_s"][at - 1])
    return events["learner_id"], start_s, events["time_s"]


def panels(x: str, titles_and_y: Sequence[tuple[str, str]], rows: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure with axes side by side, row after row, which look like those of the reports."""
    columns = len(titles_and_y) // rows
    figure = Figure(figsize=(4.3 * columns, 4.3 * rows), dpi=style.DPI, layout="constrained")
    beside = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, (title, y) in zip(beside, titles_and_y, strict=True):
        axes.set(xlabel=x, ylabel=y)
        axes.set_title(title, fontsize=10)
        axes.grid(True, color="#DDDDDD", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, beside


def main(name: str, text: str | None, draw: Callable[[], tuple[Sequence[Table], Figure]]) -> None:
    """A script: its tables on the terminal, as Markdown; its figure as NAME.png in the folder --out."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "figures", help="folder of the figure")
    folder = parser.parse_args().out
    show(name, folder, *draw())


def show(name: str, folder: Path, tables: Sequence[Table], figure: Figure) -> None:
    """Tables on the terminal, as Markdown; the figure as NAME.png in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    style.save(figure, folder / name)
    for table in tables:
        print(table.markdown())
    print(f"figure: {folder / name}.png")
