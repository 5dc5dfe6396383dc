"""The papers' figures of staleness, error and time; None without data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from mpisgd.analysis.arrivals import Collected
from mpisgd.analysis.staleness import OverClock
from mpisgd.analysis.throughput import LearnerTime
from mpisgd.analysis.training import Curve
from mpisgd.records.log.schema import LogRows
from mpisgd.report import style
from mpisgd.report.writing import Drawing

#: Most learners drawn as bars; more are an area, for hatched bars would be too thin.
_BARS = 64


def staleness_distribution(title: str, histograms: Sequence[tuple[str, np.ndarray]], n: int | None) -> Figure | None:
    """Draw the share of gradients per staleness [Zhang16 Fig. 1]: bars for a single run, steps for several.

    `histograms`: (label, gradients of staleness 0, 1, 2 ...). `n` marks 2n [Zhang16 2.4].
    """
    shown = [(name, counts) for name, counts in histograms if counts.sum() > 0]
    if not shown:
        return None
    longest = max(len(counts) for _, counts in shown) - 1
    most = max(int(np.searchsorted(np.cumsum(counts), 0.99 * counts.sum())) for _, counts in shown)
    end = max(style.readable_end(longest, most) if longest > 40 else longest, 1.1 * 2 * n if n and longest > 2 * n else 0.0)
    cut = f"; largest, not shown: {longest}" if longest > end else ""
    figure, axes = style.new(title, f"staleness τ [updates]{cut}", "share of applied gradients [%]")
    for at, (name, counts) in enumerate(shown):
        share = 100 * counts / counts.sum()
        tau = np.arange(len(share))
        if len(shown) == 1:
            mean = float((tau * share).sum() / 100)
            axes.bar(tau, share, width=0.8, color=style.COLOURS[0], edgecolor="white", linewidth=0.3)
            axes.axvline(mean, color=style.COLOURS[1], linestyle="--", label=f"mean = {mean:.2f}")
        else:
            look = {**style.line(at), "markersize": max(4.0, 10.0 - 1.5 * at)}  # equal shares stay visible around each other
            axes.plot(tau, share, label=style.plain(name), markevery=style.sparse(round(end) + 1), drawstyle="steps-mid", **look)
    if n is not None:
        axes.axvline(2 * n, color=style.GREY, linestyle=":", label=f"2n = {2 * n}")
    axes.set_xlim(-0.7, max(end, 2.0, 2.0 * (n or 0)) + 0.7)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    style.legend(figure, axes)
    return figure


def staleness_over_clock(title: str, found: OverClock) -> Figure | None:
    """Draw mean and range per update [Zhang16 Fig. 1]."""
    if len(found.clock) == 0:
        return None
    width = -(-len(found.clock) // 400)
    starts = np.arange(0, len(found.clock), width)
    sizes = np.diff(np.append(starts, len(found.clock)))
    clock = np.add.reduceat(found.clock, starts) / sizes
    mean = np.add.reduceat(found.mean, starts) / sizes
    least, largest = np.minimum.reduceat(found.minimum, starts), np.maximum.reduceat(found.maximum, starts)
    each = "of each update" if width == 1 else f"over {width} updates"
    figure, axes = style.new(title, "clock [updates]", "staleness τ [updates]")
    axes.fill_between(clock, least, largest, color=style.COLOURS[5], alpha=0.35, linewidth=0, label=f"range {each}")
    size = 3.0 if len(clock) <= 60 else 0.0
    axes.plot(clock, mean, label=f"mean {each}", color=style.COLOURS[0], linewidth=1.4, marker="o", markersize=size)
    top = max(1.0, 1.05 * float(largest.max()))
    axes.set_xlim(left=0)
    axes.set_ylim(-0.03 * top, top)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    style.legend(figure, axes)
    return figure


def error(title: str, runs: Sequence[tuple[str, Sequence[Curve]]], against: Literal["epochs", "seconds"]) -> Figure | None:
    """Draw error, or loss if no curve has an error [Zhang16 Fig. 3].

    A single run has a colour per curve; several have a colour each, thetabar dotted and hollow. A band spans the range over seeds.
    """
    given = [(name, curve) for name, curves in runs for curve in curves]
    errors = any(curve.has_error for _, curve in given)
    shown = [(name, curve) for name, curve in given if (curve.has_error if errors else not np.isnan(curve.loss).all())]
    if not shown:
        return None
    names = [name for name, _ in runs]
    x = "epochs [applied samples / training samples]" if against == "epochs" else "training time [s]"
    figure, axes = style.new(title, x, "error [%]" if errors else "loss")
    for at, (name, curve) in enumerate(shown):
        look, label = style.line(at), curve.name
        if len(runs) > 1:
            look = style.line(names.index(name))
            label = "" if curve.averaged else style.plain(name)
            look = style.hollow(look) if curve.averaged else look
        places = getattr(curve, against)
        every = style.sparse(len(places))
        drawn = 100 * curve.error if errors else curve.loss
        if curve.seeds:
            values = [100 * each.error if errors else each.loss for each in curve.seeds]
            axes.fill_between(places, np.min(values, axis=0), np.max(values, axis=0), color=look["color"], alpha=0.2, linewidth=0)
        axes.plot(places, drawn, label=label, markevery=every, clip_on=False, **{"zorder": 3, **look})
    if len(runs) > 1 and any(curve.averaged for _, curve in shown):
        style.explain(axes, "theta", "thetabar")
    right = max(float(np.max(getattr(curve, against))) for _, curve in shown)
    axes.set_xlim(0, 1.02 * right if right > 0 else 1.0)
    if errors:
        top = max(float(np.nanmax(each.error)) for _, curve in shown for each in (curve, *curve.seeds))
        axes.set_ylim(0, min(100.0, max(1.0, 105 * top)))
    style.legend(figure, axes)
    return figure


def errors(what: str, title: str, runs: Sequence[tuple[str, Sequence[Curve]]], missing: str) -> list[Drawing]:
    how: tuple[Literal["epochs", "seconds"], ...] = ("epochs", "seconds")
    return [Drawing(f"error_{each}", f"{what} against {each} [Zhang16 Fig. 3]", error(title, runs, each), missing) for each in how]


def losses(title: str, iterations: LogRows) -> Figure | None:
    if len(iterations) == 0:
        return None
    figure, axes = style.new(title, "iterations, or evaluations", "loss of the batch")
    for at, (name, label) in enumerate((("iteration", "against iterations"), ("clock", "against evaluations"))):
        axes.plot(iterations[name], iterations["loss"], label=label, **style.line(at))
    above = axes.twiny()
    above.set_xlabel("training time [s]")
    above.plot(iterations["time_s"], iterations["loss"], **style.hollow(style.line(2)))
    axes.plot([], [], label="against seconds (above)", **style.hollow(style.line(2)))
    if (iterations["loss"] > 0).all():
        axes.set_yscale("log")
    axes.set_xlim(left=0)
    above.set_xlim(left=0)
    style.legend(figure, axes)
    return figure


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
