"""Every protocol in one scene with stragglers, side by side: which learners compute and wait, staleness, refused gradients.

The scene: 8 virtual learners, one shard, network and service as their defaults; mini-batches are log-normal (mean 0.1 s, sigma
0.3), and learner 7 takes three times as long as the others. Only sizes travel: an MLP of 9,610 parameters, the 1,437 training
digits, mu = 8, 20 epochs of applied samples; seeds 1 to 3 change every learner's seconds. What a protocol costs in accuracy is
protocols_tuned.py's question.

Gradients begun are those that were pushed and those that were given up. *Refused* gradients were dropped (late), rejected (computed
again) or given up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from virtual_runs import Job, given_up, logged, main

from mpisgd.analysis import books, timeline
from mpisgd.analysis.cycles import COMPUTE, PUSH
from mpisgd.analysis.tables import Cell, Column, Table
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Verdict
from mpisgd.report import style

LAMBDA = 8
SEEDS = (1, 2, 3)
EPOCHS = 20.0
SHOWN_S = 1.6
"""Virtual seconds of the timelines."""
MOST_TAU = 26
"""Staleness at which the axes end; a hatched bar holds all beyond."""

PROTOCOLS: Mapping[str, dict[str, Any]] = {
    "hardsync": {"name": "hardsync"},
    "backup, b = 2": {"name": "backup", "b": 2},
    "backup, b = 2\nabort": {"name": "backup", "b": 2, "abort": True},
    "backup, b = 2\nlate = apply": {"name": "backup", "b": 2, "late": "apply"},
    "timeout 0.15 s\nN_min = 4": {"name": "timeout", "timeout_s": 0.15, "N_min": 4},
    "versioned": {"name": "versioned"},
    "softsync, n = 1": {"name": "softsync", "n": 1},
    "softsync, n = λ": {"name": "softsync", "n": LAMBDA},
    "async": {"name": "async"},
    "async\ninverse": {"name": "async", "modulation": "inverse"},
    "ssp, slack = 3": {"name": "ssp", "slack": 3},
    "downpour\nn_push = n_fetch = 2": {"name": "downpour", "n_push": 2, "n_fetch": 2},
}

#: What became of a gradient: colour and hatch.
FATES: Mapping[str, tuple[str, str]] = {
    "applied": (style.COLOURS[0], ""),
    "dropped": (style.COLOURS[1], "////"),
    "rejected": (style.COLOURS[3], "...."),
    "given up": (style.COLOURS[4], "\\\\\\\\"),
}
_FATE_OF = {Verdict.APPLY: "applied", Verdict.DROP: "dropped", Verdict.REJECT: "rejected", Verdict.LATE: "applied"}

Spans = tuple[np.ndarray, np.ndarray, np.ndarray]
"""learner_id, first second, last second."""


@dataclass(frozen=True)
class Measured:
    """One protocol, over all seeds; the timeline is that of the first.

    spans: of computing, by fate. updates_s: when updates were made, up to SHOWN_S. histogram: applied gradients of staleness
    0, 1, 2 ... refused: shares of the gradients begun. slow_share: of the applied gradients, the slow learner's.
    updates_per_s: of each seed.
    """

    spans: Mapping[str, Spans]
    updates_s: np.ndarray
    histogram: np.ndarray
    refused: Mapping[str, float]
    slow_share: float
    updates_per_s: list[float]

    @property
    def mean(self) -> float:
        return float(np.average(np.arange(len(self.histogram)), weights=self.histogram))


def job(protocol: dict[str, Any], seed: int) -> Job:
    return {
        "protocol": protocol,
        "mu": 8,
        "seed": seed,
        "epochs": EPOCHS,
        "virtual": {
            "learners": LAMBDA,
            "gradients": False,
            "parameters": 9610,
            "train_samples": 1437,
            "slow_nodes": {str(LAMBDA): 3.0},  # node 0 has the shard
        },
        "compute": {"name": "lognormal", "mean_s": 0.1, "sigma": 0.3},
    }


def measured(protocol: dict[str, Any]) -> Measured:
    runs = [logged(job(protocol, seed)) for seed in SEEDS]
    updates_s = runs[0].updates["time_s"]
    applied = np.concatenate([run.pushes[books.applied_rows(run)] for run in runs])
    return Measured(
        spans=computing(runs[0], SHOWN_S),
        updates_s=updates_s[updates_s <= SHOWN_S],
        histogram=np.bincount(applied["staleness"]),
        refused=_refused(runs),
        slow_share=float(np.mean(applied["learner_id"] == LAMBDA - 1)),
        updates_per_s=[float(len(run.updates) / run.updates["time_s"].max()) for run in runs],
    )


def computing(run: Run, to_s: float) -> dict[str, Spans]:
    """Who computed when, by what became of the gradient."""
    look = timeline.look(run, to_s=to_s)
    cycles = look.cycles
    shown = look.window.of(cycles.edges[:, COMPUTE], cycles.edges[:, PUSH])
    verdict = look.pushes["verdict"][cycles.row[shown]]
    fate = np.array([_FATE_OF[Verdict(one)] for one in verdict.tolist()])
    every = (cycles.learner_id[shown], cycles.edges[shown, COMPUTE] / 1e9, cycles.edges[shown, PUSH] / 1e9)
    spans: dict[str, Spans] = {name: (every[0][fate == name], every[1][fate == name], every[2][fate == name]) for name in FATES}
    gave_up = given_up(run)
    early = gave_up[1] <= to_s
    spans["given up"] = (gave_up[0][early], gave_up[1][early], gave_up[2][early])
    return spans


def _refused(runs: Sequence[Run]) -> dict[str, float]:
    """Shares of the gradients begun, all seeds together."""
    verdicts = np.concatenate([run.pushes["verdict"] for run in runs])
    gave_up = sum(len(given_up(run)[0]) for run in runs)
    begun = len(verdicts) + gave_up
    dropped, rejected = (int((verdicts == kind).sum()) for kind in (Verdict.DROP, Verdict.REJECT))
    return {"dropped": dropped / begun, "rejected": rejected / begun, "given up": gave_up / begun}


def _draw_timeline(axes: Axes, found: Measured) -> None:
    """A row for each learner, a tick above for each update."""
    axes.hlines(np.arange(LAMBDA) + 0.5, 0, SHOWN_S, color=style.GREY, linewidth=0.7)
    for name, (learner_id, start, end) in found.spans.items():
        top, bottom = learner_id + 0.1, learner_id + 0.9
        corners = np.stack([start, top, end, top, end, bottom, start, bottom], axis=1).reshape(-1, 4, 2)
        colour, hatch = FATES[name]
        axes.add_collection(PolyCollection(list(corners), facecolor=colour, edgecolor="white", linewidth=0.5, hatch=hatch))
    axes.vlines(found.updates_s, -1.35, -0.25, color="black", linewidth=0.8)
    axes.set(xlim=(0, SHOWN_S), ylim=(LAMBDA + 0.1, -1.5), yticks=[-0.8, 0.5, LAMBDA - 0.5])
    axes.set_yticklabels(["updates", "learner 0", f"{LAMBDA - 1}, slow"], fontsize=7.5)
    axes.tick_params(axis="y", length=0)


def _draw_staleness(axes: Axes, found: Measured) -> None:
    share = 100 * found.histogram / found.histogram.sum()
    shown = share[: MOST_TAU + 1].copy()
    if len(share) > len(shown):
        shown[-1] += share[len(shown) :].sum()
    bars = axes.bar(np.arange(len(shown)), shown, 0.85, color=style.COLOURS[0])
    if len(share) > len(shown):
        bars[-1].set(hatch="////", edgecolor="white")
        axes.annotate(f"≥ {MOST_TAU}", (MOST_TAU + 0.5, shown[-1]), (0, 2), textcoords="offset points", ha="right", fontsize=7)
    text = f"mean {found.mean:.1f}\nmax {len(share) - 1}"
    axes.text(0.98, 0.94, text, transform=axes.transAxes, ha="right", va="top", fontsize=8.5)
    axes.set(xlim=(-0.7, MOST_TAU + 0.7), ylim=(0, 1.12 * max(shown.max(), 10)))
    axes.tick_params(axis="y", labelsize=7.5)


def _draw(all_found: Mapping[str, Measured]) -> Figure:
    figure = Figure(figsize=(10.0, 15.5), dpi=style.DPI, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(all_found), 2, sharex="col", width_ratios=[5, 2.2])
    for (name, found), (left, right) in zip(all_found.items(), grid, strict=True):
        _draw_timeline(left, found)
        _draw_staleness(right, found)
        refused = [f"{100 * share:.0f} % {fate}" for fate, share in found.refused.items() if share >= 0.005]
        label = "\n".join([name, *refused])
        left.set_ylabel(label, rotation=0, ha="left", va="center", fontsize=9.5, labelpad=118)
        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(axis="x", labelsize=8.5)
    first, last = grid[0], grid[-1]
    first[0].set_title("learners that compute, by what became of the gradient; between: waiting", fontsize=10)
    first[1].set_title("staleness of applied\ngradients [%]", fontsize=10)
    last[0].set_xlabel("virtual time since the start [s]")
    last[1].set_xlabel("staleness τ [updates]")
    handles = [Patch(facecolor=c, edgecolor="white", hatch=h, label=f"computes: {name}") for name, (c, h) in FATES.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), fontsize=9, frameon=False)
    return figure


def _table(all_found: Mapping[str, Measured]) -> Table:
    columns = (
        Column("protocol"),
        Column("mean τ", spec=".2f"),
        Column("max τ"),
        Column("updates/s", spec=".1f"),
        Column("range of the seeds"),
        Column("dropped", "%", ".1f"),
        Column("rejected", "%", ".1f"),
        Column("given up", "%", ".1f"),
        Column("learner 7 of the applied", "%", ".1f"),
    )
    rows: list[tuple[Cell, ...]] = []
    for name, one in all_found.items():
        rates = one.updates_per_s
        refused = (100 * one.refused[fate] for fate in ("dropped", "rejected", "given up"))
        label = name.replace("\n", ", ")
        speed = (float(np.median(rates)), f"{min(rates):.1f} to {max(rates):.1f}")
        rows.append((label, one.mean, len(one.histogram) - 1, *speed, *refused, 100 * one.slow_share))
    return Table("protocols_side_by_side", f"Every protocol in one scene, {len(SEEDS)} seeds", columns, tuple(rows))


def compute() -> dict[str, dict[str, Any]]:
    return {name: vars(measured(protocol)) for name, protocol in PROTOCOLS.items()}


def draw(numbers: dict[str, dict[str, Any]]) -> tuple[list[Table], Figure]:
    found = {}
    for name, each in numbers.items():
        spans = {fate: tuple(np.array(part) for part in span) for fate, span in each["spans"].items()}
        arrays = {part: np.array(each[part]) for part in ("updates_s", "histogram")}
        found[name] = Measured(**each | {"spans": spans} | arrays)
    return [_table(found)], _draw(found)


if __name__ == "__main__":
    main("protocols-side-by-side", __doc__, compute, draw)
