"""How much faster a mini-batch is on more machines per replica, whose machines are all at work on the same layer [Dean12 Fig. 3].

Models of the paper's kinds and sizes, as `mpisgd/models` has them: `speech`, fully connected, and `local`, locally connected
images of 3 x 128 x 128 with fields of 5 x 5, three layers of so many channels, 100 classes. One replica; on machine k piece k of
the model. Nothing is trained. What each piece computes and sends is counted: the pieces are passed forward and backward without
values (torch's device meta), the floating point operations of its matrix products are those of torch's own counter, and the bytes
are those that the calls of its partition give. Then virtual ranks go through just that, over a modelled network, with the calls of
real ones.

Assumed, for all: mini-batches of 100; a machine makes 50 Gflop/s of matrix products, all else takes it nothing; a link of 1 Gbit/s,
0.1 ms of latency, 10 us of a machine for each message; what a machine takes for a mini-batch is lognormal, sigma = 0.2. Weights are
where they are needed: there are no shards. Mean of 160 / machines mini-batches, at least five. Also computed: the same without
variance, and with links of 10 Gbit/s.

`python results/dean12_fig3.py`: two minutes of one core.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from virtual_runs import main, panels

from mpisgd import models
from mpisgd.analysis.tables import Cell, Column, Table
from mpisgd.base.streams import Domain, stream
from mpisgd.comm.virtual.cluster import Cluster
from mpisgd.comm.virtual.network import Network
from mpisgd.comm.virtual.wire import VirtualWire
from mpisgd.config import Config, LocalOptions, ModelOptions, SpeechOptions
from mpisgd.config.config_virtual import NetworkOptions
from mpisgd.models.interleaved import Interleaved
from mpisgd.models.partition import Partition, Parts
from mpisgd.models.partitioned import Partitioned
from mpisgd.report import style
from mpisgd.simulate.piece_seconds import PieceSeconds, Step, WholeGroup
from mpisgd.vectors.memory import Memory, SizedVector

MU = 100
FLOPS = 50e9
SIGMA = 0.2
LINK = 1e9 / 8
BATCHES = 160
"""Mini-batches of all machines together, but at least `LEAST`."""
LEAST = 5
MACHINES = (1, 2, 4, 8, 16, 32, 64, 128)
IMAGES = (3, 128, 128)


class Shape(NamedTuple):
    options: ModelOptions
    input_shape: tuple[int, ...]
    classes: int
    most: int
    """Machines: images are cut into columns, each at least as wide as the border of 2 that the next one needs."""


SHAPES = {
    "speech": Shape(SpeechOptions(), (11, 40), 8192, 128),
    "images, 8 channels": Shape(LocalOptions(channels=(8, 8, 8), field=5), IMAGES, 100, 64),
    "images, 18 channels": Shape(LocalOptions(channels=(18, 18, 18), field=5), IMAGES, 100, 64),
    "images, 44 channels": Shape(LocalOptions(channels=(44, 44, 44), field=5), IMAGES, 100, 64),
}
#: name -> (sigma, link)
ASSUMED = {"as assumed": (SIGMA, LINK), "no variance": (0.0, LINK), "10 Gbit/s": (SIGMA, 10 * LINK)}


class Flops(TorchDispatchMode):
    """Those of the matrix products so far, by torch's own formulas."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (count := flop_registry.get(func._overloadpacket)) is not None:
            self.total += count(*args, **(kwargs or {}), out_val=out)
        return out


class Counted(Interleaved):
    """Of each piece, the operations before each of its calls, and in all."""

    def __init__(self, partitions: Sequence[Partition]) -> None:
        super().__init__(partitions)
        self.counters = [Flops() for _ in partitions]
        self.before: list[list[int]] = [[] for _ in partitions]
        self.calls: list[list[int]] = [[] for _ in partitions]

    def deal(self, place: int, call: int, parts: Parts, back: bool) -> Parts:
        self.before[place].append(self.counters[place].total)
        self.calls[place].append(call)
        return super().deal(place, call, parts, back)

    def pass_of(self, place: int, piece: nn.Module, inputs: Tensor, targets: Tensor) -> None:
        with self.counters[place]:
            loss = functional.cross_entropy(piece(inputs), targets)
            loss.backward(None if place == 0 else torch.zeros_like(loss))


def programs(shape: Shape, machines: int) -> tuple[list[int], list[list[Step]], int]:
    """Of each piece the operations of a mini-batch, and its steps; and the parameters of all."""
    with torch.device("meta"):
        made = models.make(shape.options, input_shape=shape.input_shape, classes=shape.classes, seed=1, places=machines)
        inputs, targets = torch.empty(MU, *shape.input_shape), torch.empty(MU, dtype=torch.int64)
    pieces = list(made) if isinstance(made, Partitioned) else [made]
    counted = Counted(made.partitions if isinstance(made, Partitioned) else [Partition()])
    counted.run([partial(counted.pass_of, place, piece, inputs, targets) for place, piece in enumerate(pieces)])
    totals, found = [counter.total for counter in counted.counters], []
    for total, before, calls, dealt in zip(totals, counted.before, counted.calls, counted.dealt, strict=True):
        shares = np.diff([0, *before, total]) / total
        found.append([Step(*step) for step in zip(shares.tolist(), [*calls, -1], [*dealt, None], strict=True)])
    return totals, found, sum(parameter.numel() for parameter in made.parameters())


def seconds(totals: Sequence[int], steps: Sequence[Sequence[Step]], sigma: float, link: float) -> float:
    """Virtual seconds of a mini-batch, the mean."""
    machines, batches = len(totals), max(LEAST, BATCHES // len(totals))
    options = NetworkOptions(latency_s=1e-4, overhead_s=1e-5, bandwidth=link, node_bandwidth=link, local_bandwidth=link)
    cluster, wires, config = Cluster(lambda rank: f"machine {rank}"), list[VirtualWire](), Config(mu=MU)
    network, memory, group = (
        Network(options, list(range(machines))),
        Memory(SizedVector(0), SizedVector(0)),
        WholeGroup(None, machines),
    )
    for _ in range(machines):
        VirtualWire(cluster, network, wires)

    def at_work(rank: int) -> None:
        factors = stream(Domain.COMPUTE, 1, rank).lognormal(-(sigma**2) / 2, sigma, batches)
        costs = iter(np.rint(1e9 * totals[rank] / FLOPS * factors).astype(int).tolist())
        piece = PieceSeconds(wires[rank], range(machines), memory, costs.__next__, config, steps[rank], group)
        for seq in range(batches):
            piece.compute(seq)

    cluster.run(wires, [partial(at_work, rank) for rank in range(machines)])
    return max(wire.clock.now_ns() for wire in wires) / 1e9 / batches


def compute() -> list[dict[str, Any]]:
    """Of each model and number of machines: Gflop, MB sent by the busiest, seconds by assumption."""
    found = []
    for name, shape in SHAPES.items():
        for machines in (each for each in MACHINES if each <= shape.most):
            totals, steps, parameters = programs(shape, machines)
            sent = max(sum(sum(each.dealt.nbytes[j] or 0 for j in range(machines)) for each in own if each.dealt) for own in steps)
            taken = {way: seconds(totals, steps, sigma, link) for way, (sigma, link) in ASSUMED.items()}
            own = {"model": name, "parameters": parameters, "machines": machines}
            found.append({**own, "gflop": sum(totals) / 1e9, "sent": sent / 1e6, "seconds": taken})
    return found


def draw(numbers: list[dict[str, Any]]) -> tuple[list[Table], Figure]:
    figure, beside = panels("machines per replica", [(name, "speed-up of a mini-batch") for name in ("as assumed", "10 Gbit/s")])
    rows: list[tuple[Cell, ...]] = []
    for number, name in enumerate(SHAPES):
        own = [each for each in numbers if each["model"] == name]
        size, machines = f"{own[0]['parameters'] / 1e6:,.0f} M", [each["machines"] for each in own]
        gained = {way: [own[0]["seconds"][way] / each["seconds"][way] for each in own] for way in ASSUMED}
        for at, each in enumerate(own):
            cells = (each["machines"], each["gflop"], each["sent"], each["seconds"]["as assumed"])
            rows.append((f"{name}, {size}", *cells, *(gained[way][at] for way in ASSUMED)))
        for axes, way in zip(beside, ("as assumed", "10 Gbit/s"), strict=True):
            label = f"{name}: {size} parameters"
            axes.plot(machines, gained[way], label=label, color=style.COLOURS[number], marker=".", markersize=4)
    for axes in beside:
        axes.plot(MACHINES, MACHINES, color=style.GREY, linewidth=0.8, linestyle="--")
        axes.set(xscale="log", yscale="log", xticks=MACHINES, xticklabels=MACHINES, yticks=MACHINES, yticklabels=MACHINES)
        axes.minorticks_off()
    beside[0].legend(fontsize=7)
    beside[0].set_title("links of 1 Gbit/s", fontsize=10)
    beside[1].set_title("links of 10 Gbit/s", fontsize=10)
    columns = (
        Column("model"),
        Column("machines"),
        Column("operations", "Gflop", ".1f"),
        Column("sent by the busiest", "MB", ".2f"),
        Column("mini-batch", "s", ".3f"),
        Column("speed-up", "", ".2f"),
        Column("no variance", "", ".2f"),
        Column("10 Gbit/s", "", ".2f"),
    )
    return [Table("dean12-fig3", "Machines per replica; times as fast as one", columns, tuple(rows))], figure


if __name__ == "__main__":
    main("dean12-fig3", __doc__, compute, draw)
