"""What the scripts beside this one share: virtual runs in a directory that is thrown away; tables and a figure shown."""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mpisgd.analysis.tables import Table
from mpisgd.base.git import commit_of
from mpisgd.config import replace
from mpisgd.config.config_file import from_mapping
from mpisgd.job.finish import Outcome
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Event
from mpisgd.report import style
from mpisgd.simulate import simulate

Job = Mapping[str, Any]
"""A configuration as a job file has it."""
Shown = tuple[Sequence[Table], Figure]
NOTHING: Mapping[str, Any] = {}
BEGUN = commit_of(Path(__file__).parent)
"""The commit when this process began: whatever is committed while it computes is not what it computes with."""


def timed(job: Job) -> Outcome:
    """The outcome of a run that writes no log."""
    with tempfile.TemporaryDirectory(prefix="mpisgd-results-") as folder:
        return simulate(from_mapping({**job, **_quiet(folder, enabled=False)}))


def logged(job: Job, way: str = "auto") -> Run:
    """The log of a run, whose vectors travel so (`mpisgd/exchange/ways.py`); all of it has been read, for its files are gone."""
    with tempfile.TemporaryDirectory(prefix="mpisgd-results-") as folder:
        config = from_mapping({**job, **_quiet(folder, flush_rows=8192, flush_s=1e9)})
        run = Run(simulate(replace(config, way=way)).path)
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


def main(
    name: str,
    text: str | None,
    compute: Callable[[], Any] | None,
    draw: Callable[[Any], Shown],
    quick: Callable[[], Any] | None = None,
    rates: Callable[[], None] | None = None,
) -> None:
    """Run a script: compute its numbers, keep them as NAME.json, and show what is drawn from them, as `show` says.

    Args:
        compute: returns what JSON can hold; None where the numbers are in other files.
        draw: gets the numbers as JSON gives them back, or None.
        quick: computes the numbers of a quick form.
        rates: prints how learning rates were chosen.
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="compute nothing, draw the numbers that are kept")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "figures", help="folder of the figure and the numbers")
    if quick is not None:
        parser.add_argument("--quick", dest="compute", action="store_const", const=quick, help="in a minute, of smaller runs")
    if rates is not None:
        parser.add_argument("--rates", action="store_true", help="print how learning rates were chosen, and draw nothing")
    parser.set_defaults(compute=compute, rates=False)
    options, begun = parser.parse_args(), time.monotonic()
    if rates is not None and options.rates:
        rates()
        return
    name += "-quick" * (options.compute is not compute)
    if options.compute is None:
        about = None
    elif options.draw:
        about = kept(options.out / f"{name}.json")
    else:
        numbers = json.loads(json.dumps(_plain(options.compute())))
        about = {"numbers": numbers, "seconds": round(time.monotonic() - begun)}
    show(name, options.out, *draw(about and about["numbers"]), about)


def kept(path: Path) -> dict[str, Any]:
    """Read what a file of numbers says, but its tables."""
    about: dict[str, Any] = json.loads(path.read_text("utf-8"))
    del about["tables"]
    return about


def show(name: str, folder: Path, tables: Sequence[Table], figure: Figure, about: Mapping[str, Any] | None = NOTHING) -> None:
    """Tables on the terminal, as Markdown; in the folder the figure as NAME.png and NAME.pdf, and the tables as NAME.json.

    `about`: what else NAME.json is to say, beside when and by which commit and versions it was made; None: there is none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    style.save(figure, folder / name)
    figure.savefig(folder / f"{name}.pdf", metadata={"CreationDate": None})
    if about is not None:
        told = {**made_with(), **about, "tables": [dataclasses.asdict(table) for table in tables]}
        lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in _plain(told).items())
        (folder / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    for table in tables:
        print(table.markdown())
    print(f"figure: {folder / name}.png")


def oldest(commits: Iterable[str]) -> dict[str, str]:
    """Tell the oldest commit and its date, of numbers that were made by several."""
    told = ("git", "-C", str(Path(__file__).parent), "log", "--no-walk=sorted", "--format=%H %cs", *set(commits))
    commit, date = subprocess.run(told, capture_output=True, text=True, check=True).stdout.split()[-2:]
    return {"date": date, "commit": commit}


def made_with() -> dict[str, Any]:
    """Tell today's date, the commit that this process began with, whether files were edited then, and versions."""
    versions = {"python": platform.python_version(), "torch": str(torch.__version__), "numpy": np.__version__}
    return {"date": time.strftime("%Y-%m-%d"), "commit": BEGUN.name, "edited": BEGUN.dirty, "versions": versions}


def _plain(value: Any) -> Any:
    """Numbers of numpy as Python's, NaN as none; of tables no more than their title, columns and rows."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items() if not key.startswith("_")}
    value = value.tolist() if isinstance(value, np.generic | np.ndarray) else value
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value
