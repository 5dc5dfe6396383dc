"""Seconds of a round over the links of several nodes, beside DDP's, the links' limit, and what the virtual cluster predicts.

Read from bench/nodes.json, which `python -m tests.bench nodes` writes: medians and ranges of runs in turn, on namespaces of one
machine with two cores. Nothing is measured here.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from virtual_runs import main

from mpisgd.analysis.tables import Column, Table
from mpisgd.report import style

BENCH = Path(__file__).parent / "bench" / "nodes.json"


def rows() -> list[Mapping[str, Any]]:
    return list(json.loads(BENCH.read_text())["rows"])


def title(row: Mapping[str, Any]) -> str:
    case = [line for part in row["case"].split(", ") for line in textwrap.wrap(part, 24)]
    return "\n".join([*case, f"{row['nodes']} nodes, {row['gbit_per_s']:g} Gbit/s"])


def _settings(found: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """One row for each network, number of nodes and rate; of an exchange that was measured twice there, the first."""
    merged: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in found:
        whole = merged.setdefault((row["case"], row["nodes"], row["gbit_per_s"]), dict(row))
        for part in ("round_s", "predicted_s", "over_limit", "speed_over_ddp"):
            whole[part] = whole[part] | {name: value for name, value in row[part].items() if name not in whole[part]}
    return list(merged.values())


def tables(found: list[Mapping[str, Any]]) -> list[Table]:
    """For each network a line for each exchange: median seconds, speed over DDP's, seconds over the limit, and the prediction's
    difference; DDP's own have only the first. Ranges are in the JSON file. Then what was aimed at."""
    cases = dict.fromkeys(row["case"] for row in found)
    return [*(_table(case, [row for row in found if row["case"] == case]) for case in cases), _aims(found)]


def _table(case: str, settings: list[Mapping[str, Any]]) -> Table:
    names = dict.fromkeys(name for row in settings for name in row["round_s"])
    lines = tuple((name, *(_cell(row, name) for row in settings)) for name in names)
    columns = (Column("exchange"), *(Column(f"{row['nodes']} nodes, {row['gbit_per_s']:g} Gbit/s") for row in settings))
    return Table(f"links-{case}", case, columns, lines)


def _cell(row: Mapping[str, Any], name: str) -> str | None:
    if name not in row["round_s"]:
        return None
    middle = row["round_s"][name]["median"]
    if name not in row["predicted_s"]:
        return f"{middle:.3f} s"
    beside, limit = (row[ratio][name]["median"] for ratio in ("speed_over_ddp", "over_limit"))
    return f"{middle:.3f} s, {beside:.2f}, {limit:.2f}, {100 * (row['predicted_s'][name] / middle - 1):+.0f} %"


@dataclass(frozen=True)
class Aim:
    """A ratio of an exchange's medians: its speed over DDP's, its seconds over the limit, or its speed over another exchange's."""

    what: str
    case: str
    exchange: str
    over: str
    aim: str

    def of(self, row: Mapping[str, Any]) -> float | None:
        """The ratio in one setting; None where it was not measured."""
        if row["case"] != self.case or self.exchange not in row["round_s"]:
            return None
        if self.over in ("speed_over_ddp", "over_limit"):
            return float(row[self.over][self.exchange]["median"])
        seconds = row["round_s"]
        return seconds[self.over]["median"] / seconds[self.exchange]["median"] if self.over in seconds else None


MLP, WAITING = "MLP of 11 M parameters, mu = 16", "10 M parameters whose layers wait"
AIMS = (
    Aim("hardsync / DDP", MLP, "hardsync", "speed_over_ddp", "≥ 1.0, on 4 nodes ≥ 0.95"),
    Aim("hardsync / limit", MLP, "hardsync", "over_limit", "≤ 1.2 on 2 nodes at 1 Gbit/s"),
    Aim("hardsync / whole vectors", MLP, "hardsync", "hardsync, whole", "≥ 0.97"),
    Aim("hardsync, 2 spare nodes / DDP without", MLP, "hardsync, 2 spare nodes", "speed_over_ddp", "≥ 1.1"),
    Aim("hardsync, 4 spare nodes / DDP without", MLP, "hardsync, 4 spare nodes", "speed_over_ddp", "≥ 1.25"),
    Aim("allreduce / DDP", MLP, "allreduce", "speed_over_ddp", "≥ 1.05"),
    Aim("allreduce / in buckets", MLP, "allreduce", "allreduce, in buckets", "≥ 0.97"),
    Aim("softsync n = λ, ahead = 1 / limit", MLP, "softsync, ahead = 1", "over_limit", "≤ 1.25"),
    Aim("allreduce, bfloat16 both ways / DDP, fp16 hook", MLP, "allreduce, bfloat16 both ways", "speed_over_ddp", "≥ 1.0"),
    Aim("layers wait: hardsync / DDP", WAITING, "hardsync", "speed_over_ddp", "≥ 1.1 on 2 nodes at 1 Gbit/s"),
    Aim("layers wait: hardsync / per layer", WAITING, "hardsync", "hardsync, per layer, 2 shards a node", "≥ 0.97"),
    Aim("layers wait: allreduce in buckets / DDP", WAITING, "allreduce, in buckets", "speed_over_ddp", "≥ 1.1"),
)


def _aims(found: list[Mapping[str, Any]]) -> Table:
    settings = list(dict.fromkeys((row["nodes"], row["gbit_per_s"]) for row in found if row["case"] == MLP))
    lines = []
    for aim in AIMS:
        ratios = {(row["nodes"], row["gbit_per_s"]): ratio for row in found if (ratio := aim.of(row)) is not None}
        lines.append((aim.what, *(ratios.get(setting) for setting in settings), aim.aim))
    columns = (Column("ratio"), *(Column(f"{nodes} nodes, {gbit:g} Gbit/s", spec=".2f") for nodes, gbit in settings), Column("aim"))
    return Table("links-aims", "what was aimed at", columns, tuple(lines))


def draw(_: None) -> tuple[list[Table], Figure]:
    found = _settings(rows())
    names = list(dict.fromkeys(name for row in found for name in row["round_s"]))
    figure = Figure(figsize=(16, 1.6 + 2 * 0.24 * len(names)), dpi=style.DPI, layout="constrained")
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
    return tables(found), figure


if __name__ == "__main__":
    main("links", __doc__, None, draw)
