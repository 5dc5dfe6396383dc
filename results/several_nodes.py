"""Gradients per second on 64 to 4,096 nodes: shards and learners beside a ring's allreduce, under stragglers.

Virtual, without gradients: 25 M parameters, 100 MB, as Inception has them [Chen16 5]; seconds of a mini-batch have the heavy tail
of [Chen16 Fig. 3, 4] (`compute.name = "heavy_tail"`, mean of the body 1.6 s). Links of 1 and 10 Gbit/s, 20 us of latency. Up
to 256 nodes, each has a learner and a shard; beyond, 256 nodes more have a shard each, so that a shard's link carries the vectors
of 4 or 16 learners.

*ring*: computed, not simulated: the slowest of the same mini-batches, then 2 (nodes - 1) / nodes vectors over each link, and as
many latencies as a ring has steps; what sums and updates take is left out. *hardsync* exchanges in chunks both ways at once
(`streamed`). Shards of *backup*, b = nodes / 20, and of *softsync*, n = 4, gather gradients (`gathered`), and its learners push
and pull at the same time (`ahead = 1`).

Told is what is applied per second, of what free learners compute: learners that wait for nobody, and whose messages take nothing.

`python results/several_nodes.py`: hours of one core and 8 GB, most at 4,096 nodes; an hour with `--most 1024`. What was found
lies in `bench/several-nodes.csv`; only what is not there is simulated, also by several processes at once, each with other `--ways`.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

import numpy as np
from virtual_runs import Job, logged, oldest, panels, show

from mpisgd.analysis.tables import Cell, Column, Table
from mpisgd.exchange.link_load import GIGABIT
from mpisgd.plan.costs.observe import observe
from mpisgd.report import style

NODES = (64, 256, 1024, 4096)
MOST_SHARDS = 256
GBIT = (1, 10)
PARAMETERS = 25_000_000
LATENCY_S = 20e-6
ROUNDS = {64: 60, 256: 20, 1024: 6, 4096: 4}
"""Mini-batches of each learner."""
RING = "ring"
WAYS = ("hardsync", "backup", "softsync")
KEPT = Path(__file__).parent / "bench/several-nodes.csv"
COLUMNS = ("way", "nodes", "gbit_per_s", "share", "commit")


def job(way: str, nodes: int, gbit: float) -> Job:
    shards = min(nodes, MOST_SHARDS)
    protocol: dict[str, dict[str, Any]] = {
        "hardsync": {"name": "hardsync"},
        "backup": {"name": "backup", "b": nodes // 20},
        "softsync": {"name": "softsync", "n": 4},
    }
    rate = gbit * GIGABIT
    return {
        "protocol": protocol[way],
        "ahead": int(way == "softsync"),
        "mu": 1,
        "epochs": 1,
        "shards": shards,
        "placement": "spread",
        "virtual": {
            "learners": nodes,
            "gradients": False,
            "parameters": PARAMETERS,
            "train_samples": ROUNDS[nodes] * nodes,
            "ranks_per_node": 2 if shards == nodes else 1,
        },
        "compute": {"name": "heavy_tail"},
        "network": {"latency_s": LATENCY_S, "bandwidth": max(rate, 10e9), "node_bandwidth": rate},
    }


def ring(slowest_s: np.ndarray, nodes: int, gbit: float, mean_s: float) -> float:
    """The same of a ring's allreduce; `slowest_s`: of each round."""
    exchange_s = 2 * (nodes - 1) * (4 * PARAMETERS / nodes / (gbit * GIGABIT) + LATENCY_S)
    return mean_s / (float(slowest_s.mean()) + exchange_s)


def found(way: str, nodes: int, gbit: float) -> tuple[dict[str, float], str]:
    """Shares, by way: of hardsync also the ring's, from the same mini-batches; and the commit that ran."""
    run = logged(job(way, nodes, gbit), "streamed" if way == "hardsync" else "gathered")
    rows = run.pushes[run.pushes["shard"] == 0]
    mean_s = float(rows["compute_s"].mean())
    settled = observe(run)
    assert settled is not None
    shares = {way: settled.gradients_per_s * mean_s / run.lambda_}
    if way == "hardsync":
        rounds = np.unique(rows["clock"])[-settled.updates :]
        slowest_s = np.array([rows["compute_s"][rows["clock"] == clock].max() for clock in rounds])
        shares[RING] = ring(slowest_s, nodes, gbit, mean_s)
    return shares, str(run.environment["git_commit"])


def rows_kept() -> list[dict[str, str]]:
    if not KEPT.exists():
        return []
    with KEPT.open(newline="") as file:
        return list(csv.DictReader(file))


def kept() -> dict[tuple[str, int, int], float]:
    return {(each["way"], int(each["nodes"]), int(each["gbit_per_s"])): float(each["share"]) for each in rows_kept()}


def keep(nodes: int, gbit: int, shares: dict[str, float], commit: str) -> None:
    """Add rows, which a single write does, so that several processes may."""
    head = "" if KEPT.exists() else ",".join(COLUMNS) + "\n"
    lines = (f"{way},{nodes},{gbit},{value:.4f},{commit}\n" for way, value in shares.items())
    with KEPT.open("a", newline="") as file:
        file.write(head + "".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "figures", help="folder of the figure")
    parser.add_argument("--draw", action="store_true", help="simulate nothing, draw the rows that are kept")
    parser.add_argument("--most", type=int, default=NODES[-1], help="nodes")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    options = parser.parse_args()
    sizes = [nodes for nodes in NODES if nodes <= options.most]
    for nodes in sizes:
        for gbit in GBIT:
            for way in options.ways:
                if not options.draw and (way, nodes, gbit) not in kept():
                    shares, commit = found(way, nodes, gbit)
                    keep(nodes, gbit, shares, commit)
                    print(f"{nodes} nodes, {gbit} Gbit/s:", *(f"{name} {value:.2f}" for name, value in shares.items()), flush=True)
    if options.ways == WAYS:
        draw(sizes, options.out)


def draw(sizes: list[int], folder: Path) -> None:
    """The table, and the figure of all ways."""
    shares = kept()
    found = {(nodes, gbit): [shares[way, nodes, gbit] for way in (RING, *WAYS)] for nodes in sizes for gbit in GBIT}
    rows: list[tuple[Cell, ...]] = [(gbit, nodes, *found[nodes, gbit]) for gbit in GBIT for nodes in sizes]
    columns = (Column("Gbit/s", spec="d"), Column("nodes", spec="d"), *(Column(name, spec=".2f") for name in (RING, *WAYS)))
    table = Table("several-nodes", "Applied gradients per second, of those of free learners", columns, tuple(rows))
    figure, beside = panels("nodes", [(f"{gbit} Gbit/s", "applied / free learners'") for gbit in GBIT])
    for axes, gbit in zip(beside, GBIT, strict=True):
        for at, name in enumerate((RING, *WAYS)):
            line: dict[str, Any] = {"color": style.COLOURS[at], "marker": "o", "label": name}
            axes.plot(sizes, [found[nodes, gbit][at] for nodes in sizes], "--" if name == RING else "-", **line)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [f"{nodes:,}" for nodes in sizes])
        axes.set_ylim(0, 1.05)
    beside[0].legend(frameon=False)
    show("several-nodes", folder, [table], figure, oldest(each["commit"] for each in rows_kept()))


if __name__ == "__main__":
    main()
