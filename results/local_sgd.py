"""Local SGD and DiLoCo over a slow network: test error against seconds, and against bytes [DiLoCo].

Four virtual learners with real gradients train an MLP (784-256-10, 203,530 parameters) on MNIST, mu = 32, ten epochs, where the
paper trains language models. A mini-batch takes 10 ms, give or take 20 % (lognormal). Every rank has a node of its own, with 100
Mbit/s into and out of it: an update of hardsync takes half a second, for 0.8 MB cross the shard's link eight times. All ways have
AdamW and a cosine over the run. Rates are the best, or nearly, of 0.001, 0.002, 0.004 and 0.008 after four epochs, another seed
(`--rates`): 0.004 for hardsync, 0.002 for own steps at H = 8. Softsync and other H have these, too, and outer steps DiLoCo's
Nesterov momentum 0.9 at 0.7: they were not tuned. Bytes are those of pushes and pulls of all learners.

`MPISGD_DATA=... python results/local_sgd.py`; needs MNIST; ten minutes of one core. `--quick`: digits in place of MNIST.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from virtual_runs import Job, logged, main, panels

from mpisgd.analysis.tables import Cell, Column, Table
from mpisgd.records.log.reader import Run
from mpisgd.report import style

LEARNERS = 4
RATE, INNER_RATE = 0.004, 0.002
OUTER: dict[str, Any] = {"alpha0": 0.7, "optimizer": {"name": "sgd", "momentum": 0.9, "nesterov": True}}
INNER: dict[str, Any] = {"inner_alpha0": INNER_RATE, "inner_optimizer": {"name": "adamw"}}
ADAMW: dict[str, Any] = {"alpha0": RATE, "optimizer": {"name": "adamw"}}
SOFT: dict[str, Any] = {"protocol": {"name": "softsync", "n": LEARNERS}}
WAYS: dict[str, dict[str, Any]] = {
    "hardsync": ADAMW,
    "softsync n = λ, α₀/τ": {**SOFT, **ADAMW},
    "DiLoCo, H = 8": {**OUTER, **INNER, "local_steps": 8},
    "DiLoCo, H = 64": {**OUTER, **INNER, "local_steps": 64},
    "softsync n = λ, H = 64, α₀/τ": {**SOFT, **OUTER, **INNER, "local_steps": 64},
    "hardsync, bfloat16": {**ADAMW, "push_format": "bfloat16"},
}
SLOW = 100e6 / 8
ERRORS = (2, 3, 5, 10, 20, 50)
"""Test errors on the axis, in %."""
COMMON: dict[str, Any] = {
    "virtual": {"learners": LEARNERS, "ranks_per_node": 1},
    "compute": {"name": "lognormal", "mean_s": 0.01, "sigma": 0.2},
    "network": {"bandwidth": SLOW, "node_bandwidth": SLOW, "local_bandwidth": SLOW},
    "schedule": {"name": "CosineAnnealingLR"},
    "mu": 32,
    "threads": 1,
    "evaluation": {"every_epochs": 0.5},
}
FULL: dict[str, Any] = {"data": "mnist", "model": {"name": "mlp", "hidden": [256]}, "epochs": 10.0}
QUICK: dict[str, Any] = {"data": "digits", "model": {"name": "mlp", "hidden": [64]}, "epochs": 10.0, "mu": 4}


def curve(run: Run) -> dict[str, Any]:
    """Seconds, bytes so far and test error of each snapshot; the mean staleness."""
    own, size = run.evaluations, int(run.environment["parameter_nbytes"])
    pushed = np.searchsorted(np.sort(run.pushes["arrival_s"]), own["taken_s"])
    both_ways = 1.5 if run.config["push_format"] == "bfloat16" else 2.0
    nbytes = pushed * size * both_ways
    return {"seconds": own["taken_s"], "bytes": nbytes, "error": own["error"], "tau": run.pushes["staleness"].mean()}


def rates() -> None:
    """Print the test error of hardsync, and of own steps, after four epochs, by rate."""
    for name, rate_of in (("hardsync", "alpha0"), ("DiLoCo, H = 8", "inner_alpha0")):
        for rate in (0.001, 0.002, 0.004, 0.008):
            run = logged({**COMMON, **FULL, **WAYS[name], rate_of: rate, "epochs": 4.0, "seed": 2})
            print(f"{name}, {rate:g}: {100 * float(run.evaluations['error'][-1]):.2f} %")


def compute(base: Job = FULL) -> dict[str, Any]:
    return {"job": {**COMMON, **base}, "ways": {name: curve(logged({**COMMON, **base, **way})) for name, way in WAYS.items()}}


def quick() -> dict[str, Any]:
    return compute(QUICK)


def draw(numbers: dict[str, Any]) -> tuple[list[Table], Figure]:
    figure, (over_s, over_bytes) = panels("", [("Over seconds", "test error [%]"), ("Over bytes", "test error [%]")])
    rows: list[tuple[Cell, ...]] = []
    for number, (name, way) in enumerate(numbers["ways"].items()):
        seconds, nbytes, error = (np.array(way[each]) for each in ("seconds", "bytes", "error"))
        color = style.COLOURS[number % len(style.COLOURS)]
        for axes, x in ((over_s, seconds), (over_bytes, nbytes / 1e9)):  # a logarithmic axis has no place for the first weights
            axes.plot(x[1:], 100 * error[1:], label=name, color=color, marker=".", markersize=4)
        rows.append((name, *map(float, (seconds[-1], nbytes[-1] / 1e9, way["tau"], 100 * error.min(), 100 * error[-1]))))
    for axes, label in ((over_s, "virtual seconds"), (over_bytes, "GB pushed and pulled by all")):
        axes.set(xlabel=label, xscale="log", yscale="log")
        axes.set_yticks(ERRORS, [f"{error}" for error in ERRORS])
        axes.set_yticks([], minor=True)
    over_s.legend(fontsize=7)
    columns = (
        Column("way"),
        Column("virtual seconds", "s", ".0f"),
        Column("bytes", "GB", ".2f"),
        Column("mean τ", "", ".2f"),
        Column("least test error", "%", ".2f"),
        Column("last test error", "%", ".2f"),
    )
    title = f"{LEARNERS} learners, {numbers['job']['data']}, {numbers['job']['epochs']:g} epochs, 100 Mbit/s, one seed"
    return [Table("local-sgd", title, columns, tuple(rows))], figure


if __name__ == "__main__":
    main("local-sgd", __doc__, compute, draw, quick, rates)
