"""Sandblaster L-BFGS, Downpour, Downpour with Adagrad, and one replica's SGD: error over seconds, seconds over ranks [Dean12 5].

Virtual learners with real gradients train an MLP (784-32-10, 25,450 parameters) on MNIST, the paper a speech model of 42
million parameters. A sample takes 0.1 ms of a learner (lognormal, give or take 20 %), a mini-batch of SGD has 100, a portion of
Sandblaster 50. Each rank has a node and 10 Gbit/s of its own; there is a shard for each 16 learners. n_push = n_fetch = 1, as in
the paper; no momentum, constant rates, 10 epochs, 20 of 64 and more learners. RATE has the best of six for each way and number of
learners, by the seconds to the target, another seed, three epochs (`--rates`). Sandblaster has no rate: its line search chooses
each step; it makes 45, with the default history.

`MPISGD_DATA=... python results/dean12_sandblaster.py`; needs MNIST: 17 minutes of one core, `--rates` four.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from virtual_runs import logged, main, panels

from mpisgd.analysis.tables import Cell, Column, Table
from mpisgd.base.errors import DivergenceError
from mpisgd.report import style

TRIED = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
RATE: dict[str, dict[int, float]] = {
    "Downpour": {1: 1.0, 4: 1.0, 16: 0.1, 64: 0.03, 256: 0.01},
    "Downpour, Adagrad": {1: 0.1, 4: 0.03, 16: 0.03, 64: 0.01, 256: 0.003},
}
LEARNERS = (1, 4, 16, 64, 256)
SHOWN = 64
"""Learners of those whose error is shown over seconds."""
TARGET = 0.05
SAMPLE_S = 1e-4
LINK = 10e9 / 8
SGD: dict[str, Any] = {"protocol": {"name": "downpour"}, "optimizer": {"name": "sgd", "momentum": 0.0}}
WAYS: dict[str, dict[str, Any]] = {
    "Downpour": SGD,
    "Downpour, Adagrad": {**SGD, "optimizer": {"name": "adagrad"}},
    "Sandblaster L-BFGS": {"protocol": {"name": "sandblaster", "iterations": 45}, "mu": 50},
}
COMMON: dict[str, Any] = {
    "network": {"bandwidth": LINK, "node_bandwidth": LINK, "local_bandwidth": LINK},
    "threads": 1,
    "mu": 100,
    "data": "mnist",
    "model": {"name": "mlp", "hidden": [32]},
}
Curve = tuple[np.ndarray, np.ndarray]
"""Seconds and test error of each snapshot."""


def job(name: str, learners: int) -> dict[str, Any]:
    found: dict[str, Any] = {**COMMON, **WAYS[name], "shards": math.ceil(learners / 16), "virtual": {"learners": learners}}
    found["compute"] = {"name": "lognormal", "mean_s": SAMPLE_S * found["mu"], "sigma": 0.2}
    found["evaluation"] = {"every_epochs": 0.1 if name in RATE else 1.0}
    if name in RATE:
        found |= {"alpha0": RATE[name][learners], "epochs": 10.0 if learners < SHOWN else 20.0}
    return found


def curve(name: str, learners: int, **changes: Any) -> Curve:
    """What comes after weights that are not finite is left out."""
    try:
        own = logged({**job(name, learners), **changes}).evaluations
    except DivergenceError:
        return np.array([0.0]), np.array([1.0])
    finite = np.isfinite(own["loss"])
    return own["taken_s"][finite], own["error"][finite]


def compute() -> dict[str, dict[str, Any]]:
    """Of each way and number of learners: job, seconds and test errors."""
    found: dict[str, dict[str, Any]] = {}
    for name in WAYS:
        for learners in LEARNERS:
            seconds, error = curve(name, learners)
            found.setdefault(name, {})[str(learners)] = {"job": job(name, learners), "seconds": seconds, "error": error}
    return found


def reached_s(found: Curve) -> float:
    """Seconds until the test error is at most the target; infinite where it never is."""
    seconds, error = found
    there = np.flatnonzero(error <= TARGET)
    return float(seconds[there[0]]) if len(there) else math.inf


def rates() -> None:
    """Print the choice for RATE: the first to reach the target, else what comes nearest."""
    for name in RATE:
        for learners in LEARNERS:
            found = {rate: curve(name, learners, alpha0=rate, epochs=3.0, seed=2) for rate in TRIED}
            said = ", ".join(f"{rate:g}: {reached_s(each):.3g} s, {100 * each[1].min():.1f} %" for rate, each in found.items())
            print(f"{name}, {learners} learners: {said}", flush=True)


def draw(numbers: dict[str, dict[str, Any]]) -> tuple[list[Table], Figure]:
    figure, (over_s, over_ranks) = panels("", [("", "test error [%]"), ("", f"virtual seconds to {100 * TARGET:g} %")])
    rows: list[tuple[Cell, ...]] = []
    for number, (name, own) in enumerate(numbers.items()):
        look: dict[str, Any] = {"color": style.COLOURS[number], "marker": ".", "markersize": 4}
        times: dict[int, float] = {}
        for learners, each in ((int(key), each) for key, each in own.items()):
            seconds, error = np.array(each["seconds"]), np.array(each["error"])
            ranks = learners + math.ceil(learners / 16) + (name not in RATE)
            times[ranks] = reached_s((seconds, error))
            rate = RATE[name][learners] if name in RATE else None
            reached = times[ranks] if math.isfinite(times[ranks]) else None
            rows.append((name, learners, ranks, rate, reached, 100 * float(error.min()), float(seconds[-1])))
            shown = (seconds[1:], 100 * error[1:])  # a logarithmic axis has no second 0
            if learners == SHOWN:
                over_s.plot(*shown, label=f"{name}, {learners} learners", **look)
            elif learners == 1 and name == "Downpour":
                over_s.plot(*shown, label="SGD, one replica", **{**look, "color": style.GREY})
        over_ranks.plot(list(times), list(times.values()), label=name, **look)
    over_s.set(xlabel="virtual seconds", xscale="log", yscale="log")
    over_ranks.set(xlabel="ranks", xscale="log", yscale="log")
    over_s.legend(fontsize=7, loc="lower left")
    powers = (1, 2, 5, 10, 20, 50, 100, 200)
    for axis, ticks in ((over_s.yaxis, (3, 5, 10, 20, 50)), (over_ranks.yaxis, powers), (over_ranks.xaxis, powers[1:])):
        axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set_ticks([], minor=True)
    columns = (
        Column("way"),
        Column("learners"),
        Column("ranks"),
        Column("rate", "", "g"),
        Column(f"to {100 * TARGET:g} %", "s", ".2f"),
        Column("least test error", "%", ".2f"),
        Column("all of it", "s", ".1f"),
    )
    title = f"MNIST: seconds to a test error of {100 * TARGET:g} %; one learner of Downpour is one replica's SGD"
    return [Table("dean12_sandblaster", title, columns, tuple(rows))], figure


if __name__ == "__main__":
    main("dean12-sandblaster", __doc__, compute, draw, rates=rates)
