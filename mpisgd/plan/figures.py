"""Figures of a plan."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, StrMethodFormatter

from mpisgd.analysis.arrivals import Collected
from mpisgd.plan.backup import Choices
from mpisgd.plan.collect import Collecting
from mpisgd.plan.shards import Point
from mpisgd.plan.softsync import Asynchrony
from mpisgd.report import style


def seconds_per_update(title: str, found: Collecting, logged: Collected | None) -> Figure:
    """Draw predictions over N, and the log's mean time to the N-th gradient [Chen16 Fig. 4]."""
    factor, unit = style.time_unit(float(found.mean.max()))
    figure, axes = style.new(title, "gradients wanted for an update, N", f"time per update [{unit}]")
    points = found.simulated
    for at, (label, values) in enumerate((("predicted mean", found.mean), ("predicted median", found.median))):
        axes.plot(found.wanted[points], factor * values[points], label=label, **style.line(at))
    if logged is not None and len(logged.k):
        look = style.hollow(style.line(2))
        every = style.sparse(len(logged.k))
        axes.plot(logged.k, factor * logged.mean, label="log: mean time to the N-th gradient", markevery=every, **look)
    axes.set_xlim(0, len(found.wanted) + 1)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    style.legend(figure, axes)
    return figure


def time_to_target(title: str, found: Choices) -> Figure:
    """Draw estimates over b, and the least [Chen16 Fig. 6]."""
    absolute, best = found.convergence.absolute, found.best
    factor, unit = style.time_unit(max(one.time for one in found.choices)) if absolute else (1.0, "b = 0 is 1")
    figure, axes = style.new(title, "backup learners, b", f"estimated time to the target [{unit}]")
    look, every = style.line(0), style.sparse(len(found.choices))
    b, times = [one.b for one in found.choices], [factor * one.time for one in found.choices]
    axes.plot(b, times, label="updates(N) x seconds per update(N)", markevery=every, **look)
    axes.axvline(best.b, color=style.COLOURS[1], linestyle="--", label=f"least: b = {best.b}, N = {best.wanted}")
    # Beyond three times the least, the curve would only flatten the rest.
    axes.set_ylim(0, min(1.08 * max(times), 3 * factor * best.time))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    style.legend(figure, axes)
    return figure


def throughput_over_n(title: str, found: Asynchrony) -> Figure:
    figure, axes = style.new(title, "splitting parameter, n", "gradients applied per second")
    n = np.array(list(found.by_n))
    axes.plot(n, [one.gradients_per_s for one in found.by_n.values()], label="n-softsync", **style.line(0))
    axes.axhline(found.hardsync.gradients_per_s, color=style.GREY, linestyle="--", label="hardsync")
    axes.set_ylim(bottom=0)
    beside = axes.twinx()
    beside.set_ylabel("mean staleness τ [updates]")
    look = style.hollow(style.line(1))
    beside.plot(n, [one.mean_staleness for one in found.by_n.values()], **look)
    beside.set_ylim(bottom=0)
    axes.plot([], [], label="mean τ of n-softsync (right axis)", **look)
    axes.set_xscale("log", base=2)
    axes.set_xticks(n, [str(one) for one in n])
    axes.minorticks_off()
    style.legend(figure, axes)
    return figure


def throughput_over_shards(title: str, found: list[Point]) -> Figure:
    """Draw the better placement over S, a line per number of learners; dotted: the bound."""
    figure, axes = style.new(title, "shards, S", "gradients applied per second")
    for at, learners in enumerate(sorted({point.learners for point in found})):
        own = [point for point in found if point.learners == learners]
        shards = sorted({point.shards for point in own})
        best = [max((point for point in own if point.shards == one), key=lambda point: point.expected) for one in shards]
        predicted = [np.nan if point.gradients_per_s is None else point.gradients_per_s for point in best]
        axes.plot(shards, predicted, label=f"λ = {learners:,}", **{"zorder": 3, **style.line(at)})
        axes.plot(shards, [point.bounds.gradients_per_s for point in best], **style.hollow(style.line(at)))
    style.explain(axes, "predicted", "bound of the bottleneck")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    ticks = sorted({point.shards for point in found})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    style.legend(figure, axes)
    return figure
