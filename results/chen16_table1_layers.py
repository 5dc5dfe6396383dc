"""Staleness by layer of 40 asynchronous learners that exchange layers one by one [Chen16 Table 1], in kind, on the virtual cluster.

The paper: Async-Opt with 40 learners, Inception; parameters are read as the forward pass reaches each layer, and gradients sent as
the backward pass leaves it. So staleness rises from the top layer, which is read last and sent first, to the lowest, where its mean
is about 39.

Same: Async-Opt (`protocol = "async"`), lambda = 40, `exchange = "layerwise"`, a shard for each layer.
Not the same: only sizes travel, of 18 layers of equal size, 27 million parameters in all; a third of each mini-batch is forward,
two thirds backward, and every layer takes the same of it. Inception's layers are unequal, and run side by side. So it shows how
staleness grows with the time that a layer's weights are in use, not the paper's numbers. Assumed: mini-batches of 1 s, normal, 10 %
deviation; a wire of 5 GB/s into and out of each rank, idle most of the time; or of 0.2 GB/s, where 40 slices of 6 MB take a shard
1.2 s, longer than a mini-batch: learners then queue before the shards.

The first 2 lambda gradients of each layer are left out: they come from clock 0.
"""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from virtual_runs import Job, logged, main

from mpisgd.analysis.staleness import Staleness, of_histogram
from mpisgd.analysis.tables import Column, Table
from mpisgd.report import style

LAMBDA = 40
LAYERS = 18
PARAMETERS = 27_000_000
PUSHES = 6000
WIRES = {"5 GB/s": 5e9, "0.2 GB/s": 0.2e9}


def job(exchange: str, bandwidth: float, pushes: int) -> Job:
    return {
        "protocol": "async",
        "exchange": exchange,
        "shards": LAYERS,
        "mu": 1,
        "epochs": 1,
        "virtual": {"learners": LAMBDA, "gradients": False, "parameters": PARAMETERS, "train_samples": pushes},
        "compute": {"name": "normal", "mean_s": 1.0, "deviation_s": 0.1},
        "network": {"bandwidth": bandwidth, "node_bandwidth": bandwidth},
    }


def by_layer(exchange: str, bandwidth: float, pushes: int = PUSHES) -> list[Staleness]:
    """Of each layer, the lowest first, once all learners have settled."""
    rows = logged(job(exchange, bandwidth, pushes)).pushes
    return [of_histogram(np.bincount(rows["staleness"][rows["shard"] == layer][2 * LAMBDA :]), 0) for layer in range(LAYERS)]


def draw() -> tuple[list[Table], Figure]:
    title = f"Staleness by layer, Async-Opt with {LAMBDA} learners [Chen16 Table 1]"
    title += f"\nin kind: {LAYERS} equal layers, virtual learners"
    figure, axes = style.new(title, "layer (0 = lowest)", "staleness τ [updates]")
    layers = np.arange(LAYERS)
    found = {wire: by_layer("layerwise", bandwidth) for wire, bandwidth in WIRES.items()}
    whole = by_layer("whole", WIRES["5 GB/s"])
    first = found["5 GB/s"]
    least, most = ([float(getattr(layer, name) or 0) for layer in first] for name in ("minimum", "maximum"))
    axes.fill_between(layers, least, most, color=style.COLOURS[5], alpha=0.3, linewidth=0, label="5 GB/s, least to largest")
    for at, (wire, each) in enumerate(found.items()):
        axes.plot(layers, [layer.mean or 0.0 for layer in each], label=f"{wire}, mean", **style.line(at))
    axes.plot(layers, [layer.mean or 0.0 for layer in whole], label="whole vectors, mean", **style.line(2))
    axes.set(xlim=(-0.3, LAYERS - 0.7), ylim=(0, None))
    axes.set_xticks(layers)
    style.legend(figure, axes)
    columns = (
        Column("layer"),
        Column("min τ"),
        Column("mean τ", spec=".2f"),
        Column("median τ", spec="g"),
        Column("max τ"),
        Column("deviation", spec=".2f"),
        Column("mean τ at 0.2 GB/s", spec=".2f"),
        Column("mean τ, whole vectors", spec=".2f"),
    )
    rows = []
    for layer in reversed(range(LAYERS)):
        s = first[layer]
        numbers = (s.minimum, s.mean, s.median, s.maximum, s.deviation, found["0.2 GB/s"][layer].mean, whole[layer].mean)
        rows.append((f"{layer} (top)" if layer == LAYERS - 1 else f"{layer} (bottom)" if not layer else str(layer), *numbers))
    return [Table("chen16_table1_layers", f"Staleness by layer, {LAMBDA} learners", columns, tuple(rows))], figure


if __name__ == "__main__":
    main("chen16-table1-layers", __doc__, draw)
