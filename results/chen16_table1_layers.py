"""Staleness by layer of 40 asynchronous learners that exchange layers one by one [Chen16 Table 1], on the virtual cluster.

The paper: Async-Opt with 40 learners, Inception; parameters are read as the forward pass reaches each layer, and gradients sent as
the backward pass leaves it. So staleness rises from the top layer, which is read last and sent first, by unequal steps to the
lowest, where its mean is about 39.

Same: Async-Opt (`protocol = "async"`), lambda = 40, `per_layer = true`, a shard for each layer; sizes and seconds of each
layer are those of a real Inception-v3, measured once on this machine (inception_v3.py).
Not the same: only sizes travel. A layer is a block of Inception-v3 (17 of them), whose branches are exchanged together. The seconds
are a CPU core's, a mini-batch of 8 images; the paper's learners had GPUs, for which not all layers speed up alike. Assumed: seconds
of a mini-batch normal, 10 % deviation; wires into and out of each rank of 5 GB/s, idle most of the time, or of 1 Gbit/s.

The first 2 lambda gradients of each layer are left out: they come from clock 0.
"""

from __future__ import annotations

from typing import Any

import inception_v3
import numpy as np
from matplotlib.figure import Figure
from virtual_runs import Job, logged, main

from mpisgd.analysis.staleness import of_histogram
from mpisgd.analysis.tables import Column, Table
from mpisgd.report import style

LAMBDA = 40
PUSHES = 6000
WIRES = {"5 GB/s": 5e9, "1 Gbit/s": 0.125e9}
KEPT = inception_v3.kept()
LAYERS = list(KEPT["layers"])


def job(per_layer: bool, bandwidth: float, pushes: int) -> Job:
    seconds = sum(KEPT["forward_s"].values()) + sum(KEPT["backward_s"].values())
    measured = {name: KEPT[name] for name in ("forward_s", "backward_s") if per_layer}
    return {
        "protocol": "async",
        "per_layer": per_layer,
        "shards": len(LAYERS),
        "mu": 1,
        "epochs": 1,
        "virtual": {"learners": LAMBDA, "gradients": False, "train_samples": pushes, "layers": KEPT["layers"], **measured},
        "compute": {"name": "normal", "mean_s": seconds, "deviation_s": 0.1 * seconds},
        "network": {"bandwidth": bandwidth, "node_bandwidth": bandwidth},
    }


def by_layer(bandwidth: float, pushes: int = PUSHES, *, per_layer: bool = True) -> list[list[int]]:
    """Of each layer, the lowest first, how many gradients had tau = 0, 1, 2 ... once all learners have settled."""
    rows = logged(job(per_layer, bandwidth, pushes)).pushes
    return [np.bincount(rows["staleness"][rows["shard"] == at][2 * LAMBDA :]).tolist() for at in range(len(LAYERS))]


def in_use() -> list[float]:
    """Of each layer, the share of a mini-batch for which its weights are in use, times lambda - 1: what an idle wire leads to."""
    forward, backward = ([KEPT[name][layer] for layer in LAYERS] for name in ("forward_s", "backward_s"))
    whole = sum(forward) + sum(backward)
    return [(LAMBDA - 1) * (sum(forward[at:]) + sum(backward[at:])) / whole for at in range(len(LAYERS))]


def compute() -> dict[str, list[list[int]]]:
    """Histograms of staleness of each layer, the lowest first, once all learners have settled."""
    found = {wire: by_layer(bandwidth) for wire, bandwidth in WIRES.items()}
    return {**found, "whole vectors": by_layer(WIRES["5 GB/s"], per_layer=False)}


def draw(numbers: dict[str, list[list[int]]]) -> tuple[list[Table], Figure]:
    title = f"Staleness by layer, Async-Opt with {LAMBDA} learners [Chen16 Table 1]"
    title += "\nsizes and seconds of Inception-v3, virtual learners"
    figure, axes = style.new(title, "", "staleness τ [updates]")
    layers = np.arange(len(LAYERS))
    found = {name: [of_histogram(np.array(layer), 0) for layer in each] for name, each in numbers.items()}
    first = found["5 GB/s"]
    least, most = ([float(getattr(layer, name) or 0) for layer in first] for name in ("minimum", "maximum"))
    shade: dict[str, Any] = {"color": style.COLOURS[5], "alpha": 0.3, "linewidth": 0}
    axes.fill_between(layers, least, most, step="mid", label="5 GB/s, least to largest", **shade)
    for at, (name, each) in enumerate(found.items()):
        axes.plot(layers, [layer.mean or 0.0 for layer in each], label=f"{name}, mean", drawstyle="steps-mid", **style.line(at))
    axes.set(xlim=(-0.5, len(LAYERS) - 0.5), ylim=(0, None))
    axes.set_xticks(layers, [name.removeprefix("Conv2d_").removesuffix("_3x3") for name in LAYERS], rotation=60, ha="right")
    style.legend(figure, axes)
    columns = (
        Column("layer"),
        Column("parameters"),
        Column("min τ"),
        Column("mean τ", spec=".2f"),
        Column("median τ", spec="g"),
        Column("max τ"),
        Column("deviation", spec=".2f"),
        Column("in use · (λ − 1)", spec=".2f"),
        Column("mean τ at 1 Gbit/s", spec=".2f"),
        Column("mean τ, whole vectors", spec=".2f"),
    )
    rows = []
    for at in reversed(range(len(LAYERS))):
        s = first[at]
        told = (s.minimum, s.mean, s.median, s.maximum, s.deviation, in_use()[at])
        rows.append((LAYERS[at], KEPT["layers"][LAYERS[at]], *told, found["1 Gbit/s"][at].mean, found["whole vectors"][at].mean))
    return [
        Table("chen16_table1_layers", f"Staleness by layer, {LAMBDA} learners, the top layer first", columns, tuple(rows))
    ], figure


if __name__ == "__main__":
    main("chen16-table1-layers", __doc__, compute, draw)
