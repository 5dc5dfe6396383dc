"""The table and the figure of all ratios in results/bench/*.json: what was measured, and what was aimed at.

Each ratio is one of runs side by side, in turn: median and range over the repetitions. They are read from the files that
`mpisgd bench` wrote; nothing is measured here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from virtual_runs import main

from mpisgd.analysis.tables import Column, Table
from mpisgd.bench.parts.measured import Spread, show
from mpisgd.report import style

BENCH = Path(__file__).parent / "bench"
CNN16, CNN64, MLP = "CIFAR-10 network, mu = 16", "CIFAR-10 network, mu = 64", "MLP of 11 M parameters, mu = 16"
BEST = "allreduce"
"""The synchronous way of one node: nothing is sent."""


@dataclass(frozen=True)
class Ratio:
    """One line: the case, the ratio, what was aimed at, the bench that tells it."""

    what: str
    case: str
    found: Spread
    aim: float
    bench: str
    at_most: bool = False

    @property
    def reached(self) -> bool:
        return self.found["median"] <= self.aim if self.at_most else self.found["median"] >= self.aim


def rows_of(bench: str) -> list[Mapping[str, Any]]:
    """What a bench has kept; nothing, where it was never run."""
    path = BENCH / f"{bench}.json"
    return list(json.loads(path.read_text())["rows"]) if path.exists() else []


def ratios() -> Iterator[Ratio]:
    """All that are there, in the order of the table."""
    for row in rows_of("wire"):
        if (row["optimizer"], row["learners"], row["shards"]) == ("sgd", 1, 1):
            size = row["nbytes"]
            aim = 1.15 if size > 10**7 else 1.3
            yield Ratio("push + pull + update / floor", f"{size:,} bytes", row["over_stream"], aim, "wire", at_most=True)
            yield Ratio("the same / floor with new bytes", f"{size:,} bytes", row["over_in_place"], aim, "wire", at_most=True)
    aims = {
        "best synchronous / best DDP": (1.15, 1.1, 1.7),
        "best synchronous / loops": (0.9, 0.9, 0.8),
        "hardsync / best DDP": (1.05, 1.05, 1.2),
        "softsync / loops": (None, 0.9, None),
        "loops / loops, contiguous": (1.4, 1.4, None),
    }
    yield from _of_cases("train", aims)
    peers = {
        f"{BEST} / Horovod": (1.3, 1.3, 1.4),
        f"{BEST} / TensorFlow SyncReplicas": (1.3, 1.0, 2.5),
        f"{BEST} / torch RPC server": (1.5, 1.1, 2.0),
    }
    yield from _of_cases("peers", peers)
    for bench, mpi, aim in (("oversubscribed", "Open MPI", 1.3), ("oversubscribed-mpich", "MPICH", 0.95)):
        for row in rows_of(bench):
            for name in ("hardsync", "softsync"):
                found = row["over_serial"][name]
                yield Ratio(f"31 ranks on 2 cores, {mpi}, {name} / one loop", row["case"], found, aim, bench)
    for row in rows_of("log"):
        yield Ratio("run log on / off", row["case"], row["on_over_off"], 0.99, "log")
    for row in rows_of("faults"):
        for name, found in row["over_off"].items():
            yield Ratio(f"{name} / off", row["case"], found, 0.98, "faults")


def _of_cases(bench: str, aims: Mapping[str, tuple[float | None, ...]]) -> Iterator[Ratio]:
    rows = {row["case"]: row for row in rows_of(bench)}
    for name, each in aims.items():
        for case, aim in zip((CNN16, CNN64, MLP), each, strict=True):
            if aim is not None and case in rows and name in rows[case]["ratios"]:
                yield Ratio(name, case, rows[case]["ratios"][name], aim, bench)


def by_network(found: list[Ratio]) -> Table:
    """Whole runs, a line for each ratio, a column for each network: medians, and what was aimed at."""
    lines: dict[str, dict[str, Ratio]] = {}
    for each in found:
        if each.bench in ("train", "peers"):
            lines.setdefault(each.what, {})[each.case] = each
    rows = tuple(
        (what, *(_cell(cases.get(case)) for case in (CNN16, CNN64, MLP)), next(iter(cases.values())).bench)
        for what, cases in lines.items()
    )
    names = ("images/s of … / those of …", "CNN, μ = 16", "CNN, μ = 64", "MLP, μ = 16", "bench")
    return Table("speed-by-network", "", tuple(Column(name) for name in names), rows)


def _cell(found: Ratio | None) -> str | None:
    return None if found is None else f"{found.found['median']:.2f} (≥ {found.aim:g})"


def table(found: list[Ratio]) -> Table:
    rows = tuple(
        (each.what, each.case, show(each.found), f"{'≤' if each.at_most else '≥'} {each.aim:g}", each.reached, each.bench)
        for each in found
    )
    return Table("speed", "", tuple(Column(name) for name in ("ratio", "of", "measured", "aim", "reached", "bench")), rows)


def draw(_: None) -> tuple[list[Table], Figure]:
    found = list(ratios())
    title = "Ratios measured side by side: median and range\n◀ at most, ▶ at least what was aimed at"
    figure, axes = style.new(title, "ratio", "")
    figure.set_size_inches(9.0, 0.6 + 0.24 * len(found))
    for at, each in enumerate(found):
        middle, low, high = (each.found[key] for key in ("median", "min", "max"))
        colour = style.COLOURS[2] if each.reached else style.COLOURS[1]
        axes.errorbar(middle, at, xerr=[[middle - low], [high - middle]], fmt="o" if each.reached else "s", color=colour, capsize=2)
        axes.plot([each.aim, each.aim], [at - 0.35, at + 0.35], color="black", linewidth=1.5)
        axes.plot([each.aim * (0.985 if each.at_most else 1.015)], [at], "<" if each.at_most else ">", color="black", markersize=4)
    axes.set_yticks(range(len(found)), [f"{each.what}, {each.case}" for each in found], fontsize=7)
    axes.set_xscale("log")
    ticks = (0.5, 0.7, 1, 1.5, 2, 3, 5)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.invert_yaxis()
    return [by_network(found), table(found)], figure


if __name__ == "__main__":
    main("speed", __doc__, None, draw)
