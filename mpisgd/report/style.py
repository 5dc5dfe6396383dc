"""Style of the figures: colour-blind-safe colours with line styles and markers beside them, axes with units.

Figures are built with matplotlib's objects alone (no pyplot, no global state, no display).
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

#: Okabe and Ito's palette, without its yellow, which is hard to see as a line on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (7, 2, 1, 2)), (0, (1, 1.5)), (0, (3, 1, 1, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
HATCHES = ("", "///", "...", "\\\\\\", "xxx", "++", "oo")
GREY = "#767676"
NEIGHBOUR = "#F0E442"
"""Waiting for the other ranks of a group."""

_HEIGHT_IN = 4.6
"""Of a figure that is as wide as they are by default."""
DPI = 150
#: Of the legend's font, in the width of a figure.
LEGEND_CHARACTERS = 100
#: Points of a drawn curve; more would not be seen.
POINTS = 1500


_LEAST_HEIGHT_IN = 2.8
_LABELS_IN = 1.2
"""Of a figure's width, at most: what is beside the axes, and keeps its size."""


def height_in() -> float:
    """Of a figure of the present width."""
    return max(_LEAST_HEIGHT_IN, _HEIGHT_IN * present().width / WIDTH_IN)


def _fitting(characters: int) -> int:
    """Characters of a line that has so many at the default width."""
    width = present().width
    return int(characters * min(width / WIDTH_IN, (width - _LABELS_IN) / (WIDTH_IN - _LABELS_IN)))


def new(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    """An empty figure; `title` may have a second, smaller line. It is as wide, and called, as the present look says."""
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
    """Colour, line style and marker of the at-th series; no two of the first 35 look alike."""
    return {
        "color": COLOURS[at % len(COLOURS)],
        "linestyle": DASHES[at % len(DASHES)],
        "marker": MARKERS[at % len(MARKERS)],
        "markersize": 5,
        "linewidth": 1.6,
    }


def hollow(look: dict[str, Any]) -> dict[str, Any]:
    """Style of a series' second line: dotted and thin, its markers large and white inside, seen around those of the first."""
    return {**look, "linestyle": ":", "linewidth": 1.2, "markersize": 7.5, "markerfacecolor": "white", "zorder": 2.5}


def explain(axes: Axes, first: str, second: str) -> None:
    """Two grey entries of the legend: what the solid and the hollow line of each series are."""
    look: dict[str, Any] = {"color": GREY, "linestyle": "-", "marker": "o", "markersize": 5}
    axes.plot([], [], label=first, **look)
    axes.plot([], [], label=second, **hollow(look))


def sparse(points: int, most: int = 25) -> int:
    """`markevery` for a curve of so many points: each has a marker while they are few, a single one always."""
    return max(1, points // most)


def legend(figure: Figure, axes: Axes) -> None:
    """Below the axes, where it hides no data; the figure grows with its rows, so that the axes keep their size."""
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
    """A label that matplotlib shows as written: no mathematics between dollars, not hidden for a leading underscore."""
    shown = text if len(text) <= 90 else f"{text[:44]} … {text[-43:]}"
    escaped = shown.replace("$", r"\$")
    return f" {escaped}" if escaped.startswith("_") else escaped


def time_unit(longest_s: float) -> tuple[float, str]:
    """Factor and name of the unit in which times up to `longest_s` seconds are read easily."""
    if longest_s < 1e-3:
        return 1e6, "µs"
    if longest_s < 1.0:
        return 1e3, "ms"
    return 1.0, "s"


def readable_end(longest: float, percentile_99: float) -> float:
    """End of an axis: the largest value; where a long tail would crush the rest, 1.5 times the percentile."""
    return 1.5 * percentile_99 if longest > 2 * percentile_99 > 0 else longest


def thinned(points: int) -> np.ndarray:
    """Indices of at most `POINTS` of so many points, evenly spread, first and last among them."""
    return np.unique(np.linspace(0, points - 1, min(points, POINTS)).round().astype(np.int64))


def save(figure: Figure, path: Path) -> list[Path]:
    """Write it in each of the present formats, which end the file's name; returns the files."""
    paths = [path.with_name(f"{path.name}.{each}") for each in present().format]
    for each in paths:
        figure.savefig(each, format=each.suffix[1:], dpi=DPI)
    return paths
