"""A learner that is late once, and learners that are late by chance: three ways of backup [Chen16 Alg. 3, 4].

*Dropped* is Algorithm 4: a late gradient is thrown away. With `abort` learners that are still computing when an update is done
are told, give up, and begin their mini-batch anew. With `late = "apply"` a late gradient goes into the next update.

Both scenes are virtual, and have four learners, N = 3, b = 1, one shard; 1,000 parameters and no gradient, since who is late
does not depend on it.

*Late once*: mini-batches of 0.1 s, give or take 0.1 %. Learner 3 is as fast as the others, but pauses for 0.05 s in its mini-batch
number 59 (counted from 0), halfway through the run, and never again. That is `straggler.pause_every = 60`, in a run in which it
begins fewer than 120: the script looks, and refuses to draw anything else. `tests/virtual/test_chronic_straggler.py` has the same
scene with the pause in mini-batch 0.
*Late by chance*: the same learners, and each mini-batch of each is delayed by an exponential time of mean 0.05 s.

Learner seconds are those from the start barrier to the last update, of all learners together. *Applied* ones were spent on
gradients (injected delays too) that went into an update; *wasted* ones on gradients that were dropped or given up; in the rest
a learner waited, or was at work on a gradient when the run ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from virtual_runs import Job, given_up, logged, main

from mpisgd.analysis import books, staleness
from mpisgd.analysis.tables import Cell, Column, Table
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Verdict
from mpisgd.report import style

LAMBDA = 4
WANTED = 3
UPDATES = {"late once": 108, "late by chance": 1080}
WINDOWS = 9
"""Equal parts of a run in each of which a learner's share is taken; the last four come after the pause."""
PAUSE_EVERY = 60
PAUSE_S = 0.05

WAYS: dict[str, dict[str, Any]] = {
    "dropped": {},
    "abort": {"abort": True},
    "late = apply": {"late": "apply"},
}
SCENES: dict[str, dict[str, Any]] = {
    "late once": {"pause_learner": 3, "pause_every": PAUSE_EVERY, "pause_s": PAUSE_S},
    "late by chance": {"delay": "exponential", "delay_mean_s": PAUSE_S},
}


@dataclass(frozen=True)
class Late:
    """One run. `clock` and `share`, (windows,) and (windows, learners): of the gradients applied in each window of updates.

    `applied`, `wasted` are shares of all learner seconds; `refused` that of the gradients begun.
    """

    clock: np.ndarray
    share: np.ndarray
    mean: float
    largest: int
    updates_per_s: float
    applied: float
    wasted: float
    refused: float
    last_share: float
    covered: int


def job(way: str, scene: str) -> Job:
    per_update = LAMBDA if way == "late = apply" else WANTED
    return {
        "protocol": {"name": "backup", "N": WANTED, **WAYS[way]},
        "mu": 1,
        "epochs": 1,
        "virtual": {"learners": LAMBDA, "gradients": False, "parameters": 1000, "train_samples": per_update * UPDATES[scene]},
        "compute": {"name": "normal", "mean_s": 0.1, "deviation_s": 0.0001},
        "straggler": SCENES[scene],
    }


def measured(way: str, scene: str) -> Late:
    run = logged(job(way, scene))
    if scene == "late once":
        _check_pauses(run)
    rows, applied = run.pushes, books.applied_rows(run)
    tau = staleness.overall(run)
    end_s = float(run.updates["time_s"].max())
    _, from_s, to_s = given_up(run)
    busy_s = rows["compute_s"] + rows["delay_s"]
    dropped = rows["verdict"] == Verdict.DROP
    wasted_s = float(busy_s[dropped].sum() + (to_s - from_s).sum())
    clock, share = shares(run, UPDATES[scene] // WINDOWS)
    return Late(
        clock=clock,
        share=share,
        mean=float(tau.mean or 0.0),
        largest=int(tau.maximum or 0),
        updates_per_s=len(run.updates) / end_s,
        applied=float(busy_s[applied].sum()) / (LAMBDA * end_s),
        wasted=wasted_s / (LAMBDA * end_s),
        refused=(int(dropped.sum()) + len(to_s)) / (len(rows) + len(to_s)),
        last_share=float(share[WINDOWS // 2 + 1 :, LAMBDA - 1].mean()),
        covered=sum(one.applied > 0 for one in books.coverage(run)),
    )


def shares(run: Run, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Middle of each whole window of updates, and each learner's share of the gradients applied in it: (windows, learners)."""
    rows = run.pushes[books.applied_rows(run)]
    windows = int(rows["clock"].max() + 1) // window
    counts = np.zeros((windows, LAMBDA))
    whole = rows[rows["clock"] < windows * window]
    np.add.at(counts, (whole["clock"] // window, whole["learner_id"]), 1)
    return (np.arange(windows) + 0.5) * window, counts / counts.sum(axis=1, keepdims=True)


def _check_pauses(run: Run) -> None:
    """The scene is one single pause; what was given up counts as begun."""
    begun = int((run.pushes["learner_id"] == LAMBDA - 1).sum() + (given_up(run)[0] == LAMBDA - 1).sum())
    if not PAUSE_EVERY <= begun < 2 * PAUSE_EVERY - 1:
        raise SystemExit(f"learner 3 began {begun} mini-batches: expected {PAUSE_EVERY} to {2 * PAUSE_EVERY - 2}, one pause")


def _draw_shares(axes: Axes, late: Late) -> None:
    bottom, width = np.zeros(len(late.clock)), late.clock[1] - late.clock[0]
    for learner_id, share in enumerate(100 * late.share.T):
        look: dict[str, Any] = {"color": style.COLOURS[learner_id], "edgecolor": "white", "linewidth": 0.5}
        hatch = "////" if learner_id == LAMBDA - 1 else ""
        axes.bar(late.clock, share, width, bottom, label=f"learner {learner_id}", hatch=hatch, **look)
        bottom += share
    axes.axhline(100 - 100 / LAMBDA, color="black", linewidth=1.0, linestyle=(0, (4, 2)), label="a fair share of learner 3")
    axes.set(xlim=(0, late.clock[-1] + width / 2), ylim=(0, 100), xlabel="clock [updates]")


def _draw_seconds(axes: Axes, found: dict[str, Late]) -> None:
    at = np.arange(len(found))
    applied, wasted = (np.array([getattr(late, name) for late in found.values()]) for name in ("applied", "wasted"))
    axes.barh(at, 100 * applied, 0.5, color=style.COLOURS[5], label="applied")
    axes.barh(at, 100 * wasted, 0.5, 100 * applied, color=style.COLOURS[6], label="wasted: dropped or given up")
    rest = 100 * (1 - applied - wasted)
    axes.barh(at, rest, 0.5, 100 * (applied + wasted), color="#DDDDDD", label="waiting, or unfinished at the end")
    for y, (way, late) in enumerate(found.items()):
        text = f"{way}: {late.updates_per_s:.2f} updates/s, {100 * late.wasted:.0f} % wasted"
        axes.text(0.5, y - 0.31, text, fontsize=8.5, va="bottom")
    axes.set(xlim=(0, 100), ylim=(len(found) - 0.6, -0.75), xlabel="learner seconds [%]", yticks=[])


def compute() -> dict[str, dict[str, Any]]:
    return {scene: {way: vars(measured(way, scene)) for way in WAYS} for scene in SCENES}


def draw(numbers: dict[str, dict[str, Any]]) -> tuple[list[Table], Figure]:
    figure = Figure(figsize=(13.2, 6.6), dpi=style.DPI, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(SCENES), len(WAYS) + 1, width_ratios=[1] * len(WAYS) + [1.25])
    rows: list[tuple[Cell, ...]] = []
    for scene, beside in zip(SCENES, grid, strict=True):
        arrays = ("clock", "share")
        found = {way: Late(**each | {name: np.array(each[name]) for name in arrays}) for way, each in numbers[scene].items()}
        for (way, late), axes in zip(found.items(), beside, strict=False):
            _draw_shares(axes, late)
            axes.set_title(f"{scene}, {way}\nstaleness τ: mean {late.mean:.2f}, max {late.largest}", fontsize=10)
            percent = (100 * late.last_share, 100 * late.refused, 100 * late.applied, 100 * late.wasted)
            rows.append((scene, way, percent[0], late.covered, late.mean, late.largest, late.updates_per_s, *percent[1:]))
        if scene == "late once":
            for axes in beside[:-1]:
                axes.axvline(PAUSE_EVERY, color="black", linewidth=1.2)
                axes.annotate("pause", (PAUSE_EVERY, 96), (-3, 0), textcoords="offset points", ha="right", va="top", fontsize=8.5)
        beside[0].set_ylabel(f"share of applied gradients [%]\nper {UPDATES[scene] // WINDOWS} updates")
        _draw_seconds(beside[-1], found)
        beside[-1].set_title(f"{scene}: where learners' time went", fontsize=10)
        for axes in beside:
            axes.spines[["top", "right"]].set_visible(False)
    handles, labels = grid[0][0].get_legend_handles_labels()
    more, names = grid[0][-1].get_legend_handles_labels()
    figure.legend([*handles, *more], [*labels, *names], loc="outside lower center", ncols=8, fontsize=8.5, frameon=False)
    columns = (
        Column("scene"),
        Column("late gradients"),
        Column("learner 3 in the last four ninths", "%", ".1f"),
        Column("learners that count"),
        Column("mean τ", spec=".2f"),
        Column("max τ"),
        Column("updates/s", spec=".2f"),
        Column("gradients dropped or given up", "%", ".1f"),
        Column("seconds applied", "%", ".1f"),
        Column("seconds wasted", "%", ".1f"),
    )
    return [Table("late_learners", "Late learners, N = 3 of 4", columns, tuple(rows))], figure


if __name__ == "__main__":
    main("late-learners", __doc__, compute, draw)
