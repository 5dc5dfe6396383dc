"""Style of figures: colour-blind-safe colours, line styles, markers; axes with units.

Only matplotlib's objects are used: no pyplot, no global state, no display.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from mpisgd.report.look import WIDTH_IN, present

#: Okabe and Ito's palette without yellow, which is hard to see as a line on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (7, 2, 1, 2)), (0, (1, 1.5)), (0, (3, 1, 1, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
HATCHES = ("", "///", "...", "\\\\\\", "xxx", "++", "oo")
GREY = "#767676"
ACTIVITIES = {
    "compute": ("compute", COLOURS[0]),
    "neighbour": ("wait for neighbours", "#F0E442"),
    "delay": ("injected delay", COLOURS[4]),
    "push": ("push", COLOURS[2]),
    "wait": ("wait", COLOURS[1]),
    "pull": ("pull", COLOURS[5]),
}
"""Name and colour of a learner's activities."""

_HEIGHT_IN = 4.6
"""At the default width."""
DPI = 150
#: Characters of the legend's font across the default width.
LEGEND_CHARACTERS = 100
#: Most points of a drawn curve; more would be invisible.
POINTS = 1500


_LEAST_HEIGHT_IN = 2.8
_LABELS_IN = 1.2
"""Largest width beside the axes, of labels that keep their size."""


def height_in() -> float:
    return max(_LEAST_HEIGHT_IN, _HEIGHT_IN * present().width / WIDTH_IN)


def _fitting(characters: int) -> int:
    width = present().width
    return int(characters * min(width / WIDTH_IN, (width - _LABELS_IN) / (WIDTH_IN - _LABELS_IN)))


def new(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    """Return an empty figure of the present look; `title` may have a second line."""
    given = present().title
    figure = Figure(figsize=(present().width, height_in()), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    first, _, second = (title if given is None else given).partition("\n")
    lines = [*textwrap.wrap(first, _fitting(66)), *textwrap.wrap(second, _fitting(92))]
    axes.set_title("\n".join(lines), fontsize=10, parse_math=False)
    axes.set_xlabel("\n".join(textwrap.wrap(x, _fitting(92))))
    axes.set_ylabel("\n".join(textwrap.wrap(y, _fitting(44))))
    axes.grid(True, color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def line(at: int) -> dict[str, Any]:
    """Return the style of the at-th series; the first 35 differ."""
    return {
        "color": COLOURS[at % len(COLOURS)],
        "linestyle": DASHES[at % len(DASHES)],
        "marker": MARKERS[at % len(MARKERS)],
        "markersize": 5,
        "linewidth": 1.6,
    }


def hollow(look: dict[str, Any]) -> dict[str, Any]:
    """Return a series' second style: dotted and thin, with large white markers around the first's."""
    return {**look, "linestyle": ":", "linewidth": 1.2, "markersize": 7.5, "markerfacecolor": "white", "zorder": 2.5}


def explain(axes: Axes, first: str, second: str) -> None:
    look: dict[str, Any] = {"color": GREY, "linestyle": "-", "marker": "o", "markersize": 5}
    axes.plot([], [], label=first, **look)
    axes.plot([], [], label=second, **hollow(look))


def sparse(points: int, most: int = 25) -> int:
    return max(1, points // most)


def legend(figure: Figure, axes: Axes) -> None:
    """Place the legend below the axes; the figure grows, so axes keep their size."""
    handles, texts = axes.get_legend_handles_labels()
    if not handles:
        return
    columns = max(1, _fitting(LEGEND_CHARACTERS) // (max(len(text) for text in texts) + 9))
    rows = -(-len(texts) // columns)
    columns = -(-len(texts) // rows)
    figure.legend(handles, texts, loc="outside lower center", ncols=columns, fontsize=8.5, frameon=False)
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.18 * (rows - 1))


def plain(text: str) -> str:
    """Return a label shown as written: no mathematics between dollars, not hidden by an underscore."""
    shown = text if len(text) <= 90 else f"{text[:44]} … {text[-43:]}"
    escaped = shown.replace("$", r"\$")
    return f" {escaped}" if escaped.startswith("_") else escaped


def time_unit(longest_s: float) -> tuple[float, str]:
    if longest_s < 1e-3:
        return 1e6, "µs"
    if longest_s < 1.0:
        return 1e3, "ms"
    return 1.0, "s"


def readable_end(longest: float, percentile_99: float) -> float:
    """Return the largest value or, for a long tail, 1.5 times the percentile."""
    return 1.5 * percentile_99 if longest > 2 * percentile_99 > 0 else longest


def thinned(points: int) -> np.ndarray:
    return np.unique(np.linspace(0, points - 1, min(points, POINTS)).round().astype(np.int64))


def save(figure: Figure, path: Path) -> list[Path]:
    paths = [path.with_name(f"{path.name}.{each}") for each in present().format]
    for each in paths:
        figure.savefig(each, format=each.suffix[1:], dpi=DPI)
    return paths
