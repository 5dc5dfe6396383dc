"""Seconds of a round over the links of several nodes, beside DDP's, the links' limit, and what the virtual cluster predicts.

Read from bench/nodes.json, which `python -m tests.bench nodes` writes: medians and ranges of runs in turn, on namespaces of one
machine with two cores. Nothing is measured here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from virtual_runs import main

from mpisgd.analysis.tables import Cell, Column, Table
from mpisgd.bench.parts.spread import told
from mpisgd.report import style

BENCH = Path(__file__).parent / "bench" / "nodes.json"


def rows() -> list[Mapping[str, Any]]:
    return list(json.loads(BENCH.read_text())["rows"])


def title(row: Mapping[str, Any]) -> str:
    return f"{row['case']}\n{row['nodes']} nodes, {row['gbit_per_s']:g} Gbit/s"


def table(found: list[Mapping[str, Any]]) -> Table:
    """A line for each exchange; DDP's own have no limit, no prediction."""
    lines: list[tuple[Cell, ...]] = []
    for row in found:
        for name, seconds in row["round_s"].items():
            ours = name in row["predicted_s"]
            middle = seconds["median"]
            lines.append(
                (
                    row["case"].partition(",")[0],
                    row["nodes"],
                    row["gbit_per_s"],
                    name,
                    row["repetitions"],
                    told(seconds, 3),
                    told(row["speed_over_ddp"][name]) if ours else None,
                    told(row["over_limit"][name]) if ours else None,
                    f"{100 * (row['predicted_s'][name] / middle - 1):+.0f} %" if ours else None,
                )
            )
    names = ("case", "nodes", "Gbit/s", "exchange", "times", "seconds of a round", "speed / DDP's", "seconds / limit", "predicted")
    return Table("links", "", tuple(Column(name) for name in names), tuple(lines))


def draw() -> tuple[list[Table], Figure]:
    found = rows()
    names = list(dict.fromkeys(name for row in found for name in row["round_s"]))
    figure = Figure(figsize=(13, 1.2 + 2 * 0.24 * len(names)), dpi=style.DPI, layout="constrained")
    beside = figure.subplots(2, -(-len(found) // 2), squeeze=False, sharey=True)
    for axes, row in zip(beside.flat, found, strict=False):
        for at, name in enumerate(names):
            if (seconds := row["round_s"].get(name)) is None:
                continue
            ours = name in row["predicted_s"]
            axes.barh(at, seconds["median"], color=style.COLOURS[0] if ours else style.GREY, height=0.7)
            axes.plot([seconds["min"], seconds["max"]], [at, at], color="black", linewidth=1)
            if ours:
                limit_s = seconds["median"] / row["over_limit"][name]["median"]
                axes.plot([limit_s] * 2, [at - 0.4, at + 0.4], color=style.COLOURS[1], linewidth=2)
                axes.plot(row["predicted_s"][name], at, "D", color=style.COLOURS[2], markersize=4)
        axes.set_title(title(row), fontsize=8)
        axes.set_yticks(range(len(names)), names, fontsize=7)
        axes.set_xlabel("seconds of a round", fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    beside.flat[0].invert_yaxis()  # all axes share it
    for axes in list(beside.flat)[len(found) :]:
        axes.set_visible(False)
    kinds = [
        Patch(color=style.GREY, label="DDP"),
        Patch(color=style.COLOURS[0], label="mpisgd"),
        Line2D([], [], color=style.COLOURS[1], linewidth=2, label="what the busiest link needs"),
        Line2D([], [], color=style.COLOURS[2], marker="D", markersize=4, linestyle="", label="predicted"),
    ]
    figure.legend(handles=kinds, loc="outside lower right", ncols=4, fontsize=8, frameon=False)
    return [table(found)], figure


if __name__ == "__main__":
    main("links", __doc__, draw)
