"""A small run, or a window, as a figure: a row of bars per rank, shards on top."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from mpisgd.analysis import about
from mpisgd.analysis.cycles import ACTIVITIES, COMPUTE, PUSH
from mpisgd.analysis.timeline import Timeline, look
from mpisgd.base.errors import DataError
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Event, LogRows, Verdict
from mpisgd.report import style
from mpisgd.report.chrome_trace import word_of
from mpisgd.report.writing import Drawing

#: Most rows, and most pushes of a learner, that can be told apart.
MOST_ROWS = 40
MOST_PUSHES = 100
#: Pushes of a learner that are easy to see.
GOOD_PUSHES = 25

_BARS = {**style.ACTIVITIES, "update": ("update", style.COLOURS[3]), "evaluate": ("evaluate", style.GREY)}
#: Upper and lower edge in a row of height 1.
_EDGES = {
    "wait": (0.44, 0.56),
    "pull": (0.22, 0.78),
    "compute": (0.1, 0.9),
    "neighbour": (0.34, 0.66),
    "delay": (0.1, 0.9),
    "push": (0.22, 0.78),
    "update": (0.1, 0.9),
    "evaluate": (0.22, 0.78),
}
_MARKS: dict[Verdict, tuple[str, dict[str, Any]]] = {
    Verdict.APPLY: ("push arrives, applied", {"marker": "|", "markersize": 7}),
    Verdict.DROP: ("dropped", {"marker": "x", "markersize": 5}),
    Verdict.REJECT: ("rejected", {"marker": "v", "markersize": 4.5}),
    Verdict.LATE: ("late", {"marker": "o", "markersize": 4.5, "markerfacecolor": "white"}),
}
_SUFFIX = {Verdict.DROP: "×", Verdict.REJECT: "↺"}
_ROW_IN = 0.27


def drawing(run: Run, timeline: Timeline | None = None) -> Drawing:
    figure, missing = None, unreadable(run, timeline)
    if not missing:
        try:
            figure = draw(about.label(run), timeline or look(run))
        except DataError as error:
            missing = str(error)
    return Drawing("timeline", "Who computed, waited, sent and received when", figure, missing)


def unreadable(run: Run, timeline: Timeline | None = None) -> str:
    """Explain why a figure would be unreadable; "" = readable."""
    group = max(map(len, about.groups_of(run)), default=1)
    learners = timeline.learners if timeline else run.lambda_ * group
    others = run.shards + int(run.environment.get("evaluator_rank", -1) >= 0)
    if learners + others > MOST_ROWS:
        most = (MOST_ROWS - others) // group
        fewer = f"; see mpisgd timeline {run.path} --learners {most}" if most > 0 else ""
        return f"{learners + others:,} ranks, of which {MOST_ROWS} can be told apart{fewer}"
    rows = run.pushes[(run.pushes["shard"] == 0) & (run.pushes["learner_id"] < learners)]
    from_s = timeline.window.start / 1e9 if timeline else 0.0
    if timeline:
        rows = rows[(rows["arrival_s"] >= from_s) & (rows["arrival_s"] <= timeline.window.end / 1e9)]
    if len(rows) == 0:
        return "no gradient was pushed" + (" in this window" if timeline else "")
    counts = np.bincount(rows["learner_id"])
    busiest = int(counts.argmax())
    if counts[busiest] <= MOST_PUSHES:
        return ""
    good_s = np.sort(rows["arrival_s"][rows["learner_id"] == busiest])[GOOD_PUSHES]
    return (
        f"{counts[busiest]:,} pushes of learner {busiest}, of which {MOST_PUSHES} can be told apart;"
        f" see mpisgd timeline {run.path} --from-s {from_s:.6g} --to-s {good_s:.6g}"
    )


def draw(title: str, timeline: Timeline) -> Figure:
    """Draw the window's spans and, given room, each gradient's staleness."""
    ranks, window = timeline.ranks, timeline.window
    factor, unit = style.time_unit(window.end / 1e9)
    figure, axes = style.new(title, f"time since the start barrier [{unit}]", "")
    names = timeline.names
    row_of = {rank: row for row, rank in enumerate(names)}
    per_ns = factor / 1e9
    cycles, updates, evaluations = timeline.cycles, timeline.updates, timeline.evaluations
    shown = window.of(cycles.edges[:, 0], cycles.edges[:, -1])
    rows, edges = _of_learners(row_of, timeline, cycles.learner_id[shown]), per_ns * cycles.edges[shown]
    for activity, name in enumerate(ACTIVITIES):
        _bars(axes, name, rows, edges[:, activity], edges[:, activity + 1])
    done = window.of(updates.start, updates.end)
    _bars(axes, "update", updates.rows["shard"][done], per_ns * updates.start[done], per_ns * updates.end[done])
    measured = window.of(evaluations.start, evaluations.end)
    where = np.full(len(measured), row_of[ranks.evaluator])
    _bars(axes, "evaluate", where, per_ns * evaluations.start[measured], per_ns * evaluations.end[measured])
    _mark(axes, timeline, row_of, per_ns)
    axes.set_xlim(per_ns * window.start, per_ns * (window.end + 0.01 * max(window.end - window.start, 1)))
    _write_staleness(axes, timeline, shown, rows, edges)
    axes.set_ylim(len(names), 0)
    axes.set_yticks(np.arange(len(names)) + 0.5, list(names.values()))
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")
    style.legend(figure, axes)
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height - style.height_in() + 1.4 + _ROW_IN * len(names))
    return figure


def _of_learners(row_of: dict[int, int], timeline: Timeline, learner_id: np.ndarray) -> np.ndarray:
    return np.array([row_of[timeline.ranks.learners[one]] for one in learner_id.tolist()], np.int64)


def _bars(axes: Axes, name: str, row: LogRows, start: np.ndarray, end: np.ndarray) -> None:
    """Draw bars as a collection, much faster than rectangles."""
    if not np.any(end > start):
        return
    (label, colour), (low, high) = _BARS[name], _EDGES[name]
    top, bottom = row + low, row + high
    corners = np.stack([start, top, end, top, end, bottom, start, bottom], axis=1).reshape(-1, 4, 2)
    look: dict[str, Any] = {"facecolor": colour, "edgecolor": "white", "linewidth": 0.0}
    if name == "compute":  # tells mini-batches apart even if nothing visible lies between
        look["linewidth"] = 0.4
    elif name == "delay":
        look["hatch"] = "////"
    elif name in ("update", "evaluate"):  # short, and alone on their rows: seen at any length
        look |= {"edgecolor": colour, "linewidth": 0.7}
    axes.add_collection(PolyCollection(list(corners), label=label, **look))


def _mark(axes: Axes, timeline: Timeline, row_of: dict[int, int], per_ns: float) -> None:
    at = timeline.window.of(timeline.arrival, timeline.arrival)
    verdict, shard = timeline.pushes["verdict"][at], timeline.pushes["shard"][at]
    for kind, (label, marker) in _MARKS.items():
        which = verdict == kind
        if which.any():
            x = per_ns * timeline.arrival[at][which]
            axes.plot(x, shard[which] + 0.5, linestyle="none", color="black", markeredgewidth=0.9, label=label, **marker)
    events = timeline.events
    concerned = (events["learner_id"] >= 0) & (events["learner_id"] < timeline.learners)
    for kind in np.unique(events["kind"][concerned]).tolist():
        which = concerned & (events["kind"] == kind)
        rows = _of_learners(row_of, timeline, events["learner_id"][which])
        plus: dict[str, Any] = {"marker": "P", "markersize": 7, "color": "black", "markeredgecolor": "white"}
        axes.plot(per_ns * timeline.moment[which], rows + 0.5, linestyle="none", label=word_of(Event, kind), **plus)


def _write_staleness(axes: Axes, timeline: Timeline, shown: np.ndarray, rows: LogRows, edges: np.ndarray) -> None:
    left, right = axes.get_xlim()
    start, end = np.clip(edges[:, COMPUTE], left, right), np.clip(edges[:, PUSH], left, right)
    pushes = timeline.pushes[timeline.cycles.row[shown]]
    texts = [f"{staleness}{_SUFFIX.get(verdict, '')}" for staleness, verdict in pushes[["staleness", "verdict"]].tolist()]
    room = (end - start) / (right - left)
    wide = [at for at, text in enumerate(texts) if room[at] > 0.004 + 0.0095 * len(text)]
    outlined = [withStroke(linewidth=1.6, foreground="black")]
    for at in wide:
        where = ((start[at] + end[at]) / 2, rows[at] + 0.52)
        axes.annotate(texts[at], where, color="white", fontsize=6.5, ha="center", va="center", path_effects=outlined)
    if wide:
        signs = [f"; {sign} = {_MARKS[kind][0]}" for kind, sign in _SUFFIX.items() if (pushes["verdict"] == kind).any()]
        axes.plot([], [], linestyle="none", marker="$2$", color="black", markersize=5, label=f"staleness τ{''.join(signs)}")
