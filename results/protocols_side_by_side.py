"""Every protocol in one scene with stragglers, side by side: who computes and waits, staleness, seconds to a test error.

The scene: 8 virtual learners, one shard, network and service as their defaults; mini-batches are log-normal (mean 0.1 s, sigma
0.3), and learner 7 takes three times as long as the others. Real gradients of an MLP (128 hidden units) on the 1,437 training
digits of 8x8 pixels, mu = 8, SGD without momentum, no schedule, 20 epochs of applied samples; seeds 1 to 3 change the data's
order, the initial weights and everybody's seconds.

alpha0 = 0.04 for all, and the optimiser's rate is alpha0 times the number of gradients that normally make one update
(`linear_scaling`, [Chen16 A.2]): whatever the protocol, a gradient of weight 1 moves the weights as far. With one rate for
averages of 8 and for single gradients, the latter would learn eight times as much from the same data. (An update by fewer
gradients than normal, as after a time-out, moves them no less far: the divisor is counted.) Where a protocol weights by staleness
(softsync, async with `inverse`), alpha0 is not raised for it, though it then learns less from each gradient. One rate is not the
best one of each: this compares how the protocols behave, not how fast each could be if it were tuned.

The target, a test error of 10 % (360 digits), was chosen before any of the runs; then alpha0, with hardsync alone, of 0.005,
0.01, 0.02 and 0.04 the one that reached it first. Seconds to the target are those at which the first snapshot at or below it was
taken; snapshots are a tenth of an epoch apart.

Gradients begun are those that were pushed and those that were given up. *Refused* ones were dropped (late), rejected (computed
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

from mpisgd.analysis import books, timeline, training
from mpisgd.analysis.cycles import COMPUTE, PUSH
from mpisgd.analysis.tables import Cell, Column, Table
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Verdict
from mpisgd.report import style

LAMBDA = 8
SEEDS = (1, 2, 3)
TARGET = 0.1
"""Test error."""
EPOCHS = 20.0
ALPHA0 = 0.04
SHOWN_S = 1.6
"""Virtual seconds of the timelines."""
MOST_TAU = 26
"""Staleness at which the axes end; the last bar holds all beyond."""

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

    spans: of computing, by fate. updates_s: when updates were made. histogram: applied gradients of staleness 0, 1, 2 ...
    seconds: to the target, NaN where it was not reached. last: the last error of each seed. refused: shares of the gradients begun.
    slow_share: of the applied gradients, the slow learner's.
    """

    spans: Mapping[str, Spans]
    updates_s: np.ndarray
    histogram: np.ndarray
    seconds: np.ndarray
    last: np.ndarray
    refused: Mapping[str, float]
    slow_share: float
    updates_per_s: float

    @property
    def mean(self) -> float:
        return float(np.average(np.arange(len(self.histogram)), weights=self.histogram))

    @property
    def median_s(self) -> float:
        """Infinite where most seeds did not reach the target."""
        return float(np.median(np.where(np.isnan(self.seconds), np.inf, self.seconds)))


def job(protocol: dict[str, Any], seed: int, epochs: float = EPOCHS, alpha0: float = ALPHA0) -> Job:
    return {
        "protocol": protocol,
        "model": {"name": "mlp", "hidden": [128]},
        "data": {"name": "digits"},
        "optimizer": {"name": "sgd", "momentum": 0.0},
        "mu": 8,
        "alpha0": alpha0,
        "linear_scaling": True,
        "seed": seed,
        "epochs": epochs,
        "threads": 1,
        "nonfinite": "continue",
        "evaluation": {"every_epochs": 0.1},
        "virtual": {"learners": LAMBDA, "slow_nodes": {str(LAMBDA): 3.0}},  # node 0 has the shard
        "compute": {"name": "lognormal", "mean_s": 0.1, "sigma": 0.3},
    }


def measured(protocol: dict[str, Any], seeds: Sequence[int] = SEEDS, epochs: float = EPOCHS) -> Measured:
    runs = [logged(job(protocol, seed, epochs)) for seed in seeds]
    applied = np.concatenate([run.pushes[books.applied_rows(run)] for run in runs])
    return Measured(
        spans=computing(runs[0], SHOWN_S),
        updates_s=runs[0].updates["time_s"],
        histogram=np.bincount(applied["staleness"]),
        seconds=np.array([seconds_to(run) for run in runs]),
        last=np.array([_curve(run).final for run in runs]),
        refused=_refused(runs),
        slow_share=float(np.mean(applied["learner_id"] == LAMBDA - 1)),
        updates_per_s=float(np.median([len(run.updates) / run.updates["time_s"].max() for run in runs])),
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
    spans["given up"] = given_up(run)
    return spans


def seconds_to(run: Run, target: float = TARGET) -> float:
    """Virtual seconds until the first snapshot whose test error is at or below the target; NaN where there is none."""
    curve = _curve(run)
    there = np.flatnonzero(curve.error <= target)
    return float(curve.seconds[there[0]]) if len(there) else np.nan


def _curve(run: Run) -> training.Curve:
    curve = training.on_test_data(run)
    if curve is None:
        raise SystemExit("nothing was evaluated")
    return curve


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
    axes.vlines(found.updates_s[found.updates_s <= SHOWN_S], -1.35, -0.25, color="black", linewidth=0.8)
    axes.set(xlim=(0, SHOWN_S), ylim=(LAMBDA + 0.1, -1.5), yticks=[-0.8, 0.5, LAMBDA - 0.5])
    axes.set_yticklabels(["updates", "learner 0", f"{LAMBDA - 1}, slow"], fontsize=7.5)
    axes.tick_params(axis="y", length=0)


def _draw_staleness(axes: Axes, found: Measured) -> None:
    share = 100 * found.histogram / found.histogram.sum()
    shown = share[: MOST_TAU + 1].copy()
    if len(share) > len(shown):
        shown[-1] += share[len(shown) :].sum()
    axes.bar(np.arange(len(shown)), shown, 0.85, color=style.COLOURS[0])
    text = f"mean {found.mean:.1f}\nmax {len(share) - 1}"
    axes.text(0.98, 0.94, text, transform=axes.transAxes, ha="right", va="top", fontsize=8.5)
    axes.set(xlim=(-0.7, MOST_TAU + 0.7), ylim=(0, 1.12 * max(shown.max(), 10)))
    axes.tick_params(axis="y", labelsize=7.5)


def _draw_seconds(axes: Axes, found: Measured, longest: float) -> None:
    reached = found.seconds[~np.isnan(found.seconds)]
    if np.isfinite(found.median_s):
        axes.barh(0, found.median_s, 0.5, color=style.COLOURS[5])
    axes.plot(reached, np.linspace(-0.12, 0.12, len(reached)), "o", color="black", markersize=3.5)
    text = f" {found.median_s:.1f}" if np.isfinite(found.median_s) else " not reached"
    if len(reached) and len(reached) < len(found.seconds):
        text = f"{text} ({len(reached)} of {len(found.seconds)} seeds)"
    axes.annotate(text, (max(reached, default=0.0), 0), (3, 0), textcoords="offset points", va="center", fontsize=8.5)
    axes.set(xlim=(0, 1.25 * longest), ylim=(0.5, -0.5), yticks=[])


def _draw(all_found: Mapping[str, Measured]) -> Figure:
    figure = Figure(figsize=(12.0, 15.5), dpi=style.DPI, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(all_found), 3, sharex="col", width_ratios=[5, 2.2, 2.6])
    longest = max((float(np.nanmax(one.seconds)) for one in all_found.values() if not np.isnan(one.seconds).all()), default=1.0)
    for (name, found), (left, middle, right) in zip(all_found.items(), grid, strict=True):
        _draw_timeline(left, found)
        _draw_staleness(middle, found)
        _draw_seconds(right, found, longest)
        refused = [f"{100 * share:.0f} % {fate}" for fate, share in found.refused.items() if share >= 0.005]
        label = "\n".join([name, *refused])
        left.set_ylabel(label, rotation=0, ha="left", va="center", fontsize=9.5, labelpad=118)
        for axes in (left, middle, right):
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(axis="x", labelsize=8.5)
    first, last = grid[0], grid[-1]
    first[0].set_title("who computes, by what became of the gradient; between: who waits", fontsize=10)
    first[1].set_title("staleness of applied\ngradients [%]", fontsize=10)
    first[2].set_title(f"time to a test error of {100 * TARGET:g} %\nmedian, and each of {len(SEEDS)} seeds", fontsize=10)
    last[0].set_xlabel("virtual time since the start [s]")
    last[1].set_xlabel("staleness τ [updates]")
    last[2].set_xlabel("virtual time [s]")
    handles = [Patch(facecolor=c, edgecolor="white", hatch=h, label=f"computes: {name}") for name, (c, h) in FATES.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), fontsize=9, frameon=False)
    return figure


def _table(all_found: Mapping[str, Measured]) -> Table:
    columns = (
        Column("protocol"),
        Column("mean τ", spec=".2f"),
        Column("max τ"),
        Column("median", "s", ".1f"),
        Column("least", "s", ".1f"),
        Column("most", "s", ".1f"),
        Column("seeds that reached it"),
        Column("last error, median", "%", ".1f"),
        Column("updates/s", spec=".1f"),
        Column("dropped", "%", ".1f"),
        Column("rejected", "%", ".1f"),
        Column("given up", "%", ".1f"),
        Column("learner 7 of the applied", "%", ".1f"),
    )
    rows: list[tuple[Cell, ...]] = []
    for name, one in all_found.items():
        reached = one.seconds[~np.isnan(one.seconds)]
        median = one.median_s if np.isfinite(one.median_s) else None
        ends = (float(reached.min()), float(reached.max())) if len(reached) else (None, None)
        times: tuple[Cell, ...] = (median, *ends, f"{len(reached)} of {len(one.seconds)}")
        last = 100 * float(np.median(one.last))
        refused = (100 * one.refused[fate] for fate in ("dropped", "rejected", "given up"))
        label = name.replace("\n", ", ")
        rows.append((label, one.mean, len(one.histogram) - 1, *times, last, one.updates_per_s, *refused, 100 * one.slow_share))
    title = f"Virtual seconds to a test error of {100 * TARGET:g} %, {len(SEEDS)} seeds"
    return Table("protocols_side_by_side", title, columns, tuple(rows))


def draw() -> tuple[list[Table], Figure]:
    found = {name: measured(protocol) for name, protocol in PROTOCOLS.items()}
    return [_table(found)], _draw(found)


if __name__ == "__main__":
    main("protocols-side-by-side", __doc__, draw)
