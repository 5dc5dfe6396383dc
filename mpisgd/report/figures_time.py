"""The papers' figures of time; None without data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from mpisgd.analysis.arrivals import Collected
from mpisgd.analysis.throughput import LearnerTime
from mpisgd.report import style

#: Most learners drawn as bars; more are an area, for hatched bars would be too thin.
_BARS = 64


def arrival_cdf(title: str, samples: Sequence[tuple[str, np.ndarray]], x: str) -> Figure | None:
    """Draw the cumulative distribution of sorted seconds [Chen16 Fig. 3]."""
    shown = [(name, times) for name, times in samples if len(times)]
    if not shown:
        return None
    longest = max(float(times[-1]) for _, times in shown)
    most = max(float(np.percentile(times, 99)) for _, times in shown)
    end = style.readable_end(longest, most)
    factor, unit = style.time_unit(end)
    cut = f"; longest, not shown: {factor * longest:.4g} {unit}" if longest > end else ""
    figure, axes = style.new(title, f"{x} [{unit}]{cut}", "cumulative share")
    for at, (name, times) in enumerate(shown):
        rank = style.thinned(len(times))
        places, share = factor * times[rank], (rank + 1) / len(times)
        places, share = np.insert(places, 0, places[0]), np.insert(share, 0, 0.0)
        every = 1 if len(rank) <= 2 else (0.03 * at, 0.25)
        look = style.line(at)
        axes.plot(places, share, label=style.plain(name), drawstyle="steps-post", markevery=every, **look)
    axes.set_xlim(0, 1.02 * factor * end if end > 0 else 1.0)
    axes.set_ylim(0, 1.02)
    style.legend(figure, axes)
    return figure


def collect(title: str, found: Sequence[tuple[str, Collected]], lambda_: int, wanted: int | None) -> Figure | None:
    """Draw mean (solid) and median (dotted) time to collect k gradients [Chen16 Fig. 4]; `wanted` marks N of λ."""
    shown = [(name, one) for name, one in found if len(one.k)]
    if not shown:
        return None
    slowest = max(float(max(one.mean.max(), one.median.max())) for _, one in shown)
    factor, unit = style.time_unit(slowest)
    figure, axes = style.new(title, "gradients collected, k", f"time since the clock's start [{unit}]")
    for at, (name, one) in enumerate(shown):
        look, every = style.line(at), style.sparse(len(one.k))
        label, other = (style.plain(name), "") if len(found) > 1 else ("mean", "median")
        axes.plot(one.k, factor * one.mean, label=label, markevery=every, **{"zorder": 3, **look})
        axes.plot(one.k, factor * one.median, label=other, markevery=every, **style.hollow(look))
    if len(found) > 1:
        style.explain(axes, "mean", "median")
    if wanted is not None and wanted < lambda_:
        axes.axvline(wanted, color=style.GREY, linestyle="--", linewidth=1.0, label=f"N = {wanted} wanted")
    axes.set_xlim(0, lambda_ + 1)
    axes.set_ylim(0, 1.08 * factor * slowest if slowest > 0 else 1.0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    style.legend(figure, axes)
    return figure


def time_spent(title: str, spent: LearnerTime) -> Figure | None:
    pushing = spent.mini_batches > 0
    if not pushing.any():
        return None
    parts = [(*style.ACTIVITIES[name.removesuffix("_s")], seconds) for name, seconds in spent.activities.items()]
    parts.append(("other", "#BBBBBB", np.maximum(spent.other, 0.0)))
    factor, unit = style.time_unit(max(float(np.max(sum(part[2] for part in parts))), float(spent.elapsed.max())))
    figure, axes = style.new(title, "learner_id", f"time up to the learner's last push [{unit}]")
    learners = len(spent.mini_batches)
    gap = max(1.0, 0.03 * learners)
    bottom, mean_bottom = np.zeros(learners), 0.0
    for (name, colour, seconds), hatch in zip(parts, style.HATCHES, strict=False):
        if not seconds.any():
            continue
        look: dict[str, Any] = {"facecolor": colour, "edgecolor": "white", "linewidth": 0.0}
        height, mean = factor * seconds, factor * float(seconds[pushing].mean())
        if learners <= _BARS:
            look["hatch"] = hatch
            axes.bar(np.arange(learners), height, 0.84, bottom, label=name, **look)
        else:
            axes.fill_between(np.arange(learners), bottom, bottom + height, step="mid", label=name, **look)
        axes.bar(learners + gap, mean, 1.2 * gap, mean_bottom, **look)
        bottom, mean_bottom = bottom + height, mean_bottom + mean
    _name_learners(axes, learners, gap)
    axes.set_ylim(bottom=0)
    axes.grid(False, axis="x")
    style.legend(figure, axes)
    return figure


def _name_learners(axes: Axes, learners: int, gap: float) -> None:
    steps = MaxNLocator(nbins=10, integer=True).tick_values(0, learners - 1)
    ticks = sorted({round(tick) for tick in steps if 0 <= tick < learners})
    axes.set_xticks([*ticks, learners + gap], [*(str(tick) for tick in ticks), "mean"])
    axes.axvline(learners - 0.5 + 0.3 * gap, color=style.GREY, linewidth=0.8)
    axes.set_xlim(-0.8, learners + 1.8 * gap)
