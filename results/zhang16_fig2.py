"""Speed-up over the number of learners under hardsync, 1-softsync and lambda-softsync [Zhang16 4.2, Fig. 2], virtual cluster.

The paper: speed-ups of 22 to 28 at lambda = 30 "for different benchmarks and different batch sizes"; asynchronous runs are on
average 50 % faster than synchronous ones. It does not print what a mini-batch takes, nor how much mini-batches differ.

Same: the protocols, models of 350 kB (CIFAR-10) and 289 MB (ImageNet), lambda up to 30, sharded parameter server, blocking
sends, weak scaling: each learner's mini-batch stays, so that speed-up is that of images per second over one learner's.
Not the same: virtual ranks; no gradient is computed, since only its size counts.

Assumed, once for all nine curves; the 20 % and the 3 % were chosen with the paper's two numbers in view, and are no measurements:
- A learner has four cores [Zhang16 2.3], of 123 Gflop/s at their peak (982 Gflop/s per node of 32). CIFAR-10 needs 74 Mflop
  per image, AlexNet 4.3 Gflop. A fifth and a third of the peak make 3.2 ms and 0.11 s per image: 0.41 s for mu = 128, 13 ms for
  mu = 4, 1.7 s for mu = 16 of ImageNet.
- Mini-batches are normal with a deviation of 20 %: the most with which Fig. 1 still comes out amply (zhang16_fig1.py). Of 30 such
  learners the slowest takes 1.4 times the mean. A second table shows other spreads.
- Six learners share a node [Zhang16 2.3: 4 or 6], its memory and caches: each neighbour makes a mini-batch 3 % longer. Without
  that, speed-ups at 30 learners are what the last column of the first table says; ratios hardly change.
- 5 GB/s into and out of each rank. A node's link, 96 GB/s each way [Zhang16 4.1], is never the bottleneck of so few ranks: every
  rank is given one of its own. Service of the shards: mpisgd's defaults, 0.6 ns per byte of gradient and update.
- One shard for 350 kB, eight for 289 MB.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from virtual_runs import Job, main, panels, timed

from mpisgd.analysis.tables import Cell, Column, Table
from mpisgd.report import style

LAMBDAS = (1, 2, 4, 10, 18, 30)
PROTOCOLS = ("hardsync", "1-softsync", "λ-softsync")
DEVIATION = 0.2
PER_NODE = 6
NEIGHBOUR = 0.03
ROUNDS = 150
"""Mini-batches of each learner."""


@dataclass(frozen=True)
class Benchmark:
    """What is trained: its parameters, samples of a mini-batch and mean seconds of compute per sample."""

    name: str
    parameters: int
    mu: int
    sample_s: float
    shards: int


BENCHMARKS = (
    Benchmark("CIFAR-10, μ = 128", 89_578, 128, 3.2e-3, 1),
    Benchmark("CIFAR-10, μ = 4", 89_578, 4, 3.2e-3, 1),
    Benchmark("ImageNet, μ = 16", 72_250_000, 16, 0.106, 8),
)

Compute = dict[str, Any]


def normal(mean_s: float, share: float = DEVIATION) -> Compute:
    return {"name": "normal", "mean_s": mean_s, "deviation_s": share * mean_s}


def options(protocol: str, lambda_: int) -> dict[str, Any]:
    if protocol == "hardsync":
        return {"name": "hardsync"}
    return {"name": "softsync", "n": 1 if protocol == "1-softsync" else lambda_}


def neighbours(lambda_: int) -> list[int]:
    """Of each learner: how many others are on its node."""
    return [min(PER_NODE, lambda_ - learner_id // PER_NODE * PER_NODE) - 1 for learner_id in range(lambda_)]


def job(what: Benchmark, protocol: str, lambda_: int, rounds: int, neighbour: float, compute: Compute) -> Job:
    """Ranks are on nodes of their own, shards first; a learner's node is as slow as its real node's neighbours make it."""
    slow = {str(what.shards + at): 1 + neighbour * others for at, others in enumerate(neighbours(lambda_))}
    return {
        "protocol": options(protocol, lambda_),
        "mu": what.mu,
        "shards": what.shards,
        "epochs": 1,
        "virtual": {
            "learners": lambda_,
            "gradients": False,
            "parameters": what.parameters,
            "train_samples": rounds * lambda_ * what.mu,
            "slow_nodes": slow,
        },
        "compute": compute,
    }


def samples_per_s(
    what: Benchmark,
    protocol: str,
    lambda_: int,
    rounds: int = ROUNDS,
    neighbour: float = NEIGHBOUR,
    compute: Compute | None = None,
) -> float:
    outcome = timed(job(what, protocol, lambda_, rounds, neighbour, compute or normal(what.mu * what.sample_s)))
    return outcome.samples[0] / outcome.training_s


def speed_up(what: Benchmark, protocol: str, lambda_: int, rounds: int = ROUNDS, neighbour: float = NEIGHBOUR) -> float:
    """Over one learner, to whom all protocols are the same."""
    return samples_per_s(what, protocol, lambda_, rounds, neighbour) / samples_per_s(what, "hardsync", 1, 4 * rounds)


def spreads() -> dict[str, float]:
    """Softsync over hardsync for other spreads."""
    what = BENCHMARKS[0]
    mean_s = what.mu * what.sample_s
    kinds = {
        "normal, 10 %": normal(mean_s, 0.1),
        "normal, 20 %": normal(mean_s),
        "normal, 30 %": normal(mean_s, 0.3),
        "log-normal, σ = 0.2": {"name": "lognormal", "mean_s": mean_s, "sigma": 0.2},
        "log-normal, σ = 0.3": {"name": "lognormal", "mean_s": mean_s, "sigma": 0.3},
    }
    found = {}
    for name, kind in kinds.items():
        hard, soft = (samples_per_s(what, protocol, 30, compute=kind) for protocol in PROTOCOLS[:2])
        found[name] = soft / hard
    return found


def compute() -> dict[str, Any]:
    """Speed-ups of each benchmark and protocol over LAMBDAS, and at last that of 30 learners without neighbours."""
    found: dict[str, dict[str, list[float]]] = {}
    for what in BENCHMARKS:
        alone = samples_per_s(what, "hardsync", 1, 4 * ROUNDS)
        found[what.name] = {
            protocol: [
                *(samples_per_s(what, protocol, lambda_) / alone for lambda_ in LAMBDAS[1:]),
                samples_per_s(what, protocol, LAMBDAS[-1], neighbour=0.0) / alone,
            ]
            for protocol in PROTOCOLS
        }
    return {"speed-ups": found, "spreads": spreads()}


def draw(numbers: dict[str, Any]) -> tuple[list[Table], Figure]:
    figure, beside = panels("learners λ", [(what.name, "speed-up") for what in BENCHMARKS])
    rows: list[tuple[Cell, ...]] = []
    for what, axes in zip(BENCHMARKS, beside, strict=True):
        axes.plot(LAMBDAS, LAMBDAS, color=style.GREY, linewidth=1.0, label="linear")
        axes.fill_between([29, 31], 22, 28, color=style.COLOURS[5], alpha=0.35, linewidth=0, label="[Zhang16]: 22 to 28")
        found = numbers["speed-ups"][what.name]
        for at, (protocol, (*own, without)) in enumerate(found.items()):
            axes.plot(LAMBDAS, [1.0, *own], label=protocol, **style.line(at))
            rows.append((what.name, protocol, *own, None if at == 0 else own[-1] / found["hardsync"][-2], without))
        axes.set(xlim=(0, 32), ylim=(0, 32))
    beside[0].legend(fontsize=8.5, frameon=False)
    columns = (
        Column(""),
        Column("protocol"),
        *(Column(f"λ = {lambda_}", spec=".1f") for lambda_ in LAMBDAS[1:]),
        Column("over hardsync", spec=".2f"),
        Column("λ = 30, no neighbours", spec=".1f"),
    )
    spread = (Column("mini-batches"), Column("1-softsync over hardsync", spec=".2f"))
    title = f"{BENCHMARKS[0].name}, λ = 30, other spreads"
    return [
        Table("zhang16_fig2", "Speed-up over one learner", columns, tuple(rows)),
        Table("spread", title, spread, tuple(numbers["spreads"].items())),
    ], figure


if __name__ == "__main__":
    main("zhang16-fig2", __doc__, compute, draw)
