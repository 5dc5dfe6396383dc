"""Where the claim of [Zhang16 Fig. 3] holds: error after ten epochs over the rate, beside the rates at which delays end stability.

On a quadratic of curvature h, updates with momentum m of gradients of staleness tau, weighted w(tau), obey

    z^2 - (1 + m) z + m + alpha0 h sum_tau p(tau) w(tau) z^(1 - tau) = 0

and are stable while all |z| < 1. With tau = 0 that is alpha0 h < 2 (1 + m); with tau = 1 alpha0 h < 1 - m. Here p is the staleness
of zhang16_fig1.py, and h the largest eigenvalue of the Hessian of the training loss, with weight decay, in the metric of the rates
of single parameters: measured by power iteration on 2,000 images, at the weights of hardsync after an epoch at alpha0 = 0.001.

Same as in zhang16_fig3.py: data, network, rates and weight decays, lambda, mu, staleness. Not the same: ten epochs at a constant
rate; with m = 0 the rates are ten times those with m = 0.9, so that alpha0 / (1 - m) is the same. One seed.

Needs CIFAR-10 below $MPISGD_DATA/cifar10. Every curve is kept as a CSV, and goes on where it was left (`curves.py`); 70 of them
take eight to ten hours of one core. `--quick` is the same with the 8x8 digits and a small CNN, in a minute.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zhang16_fig1 as fig1
import zhang16_fig3 as fig3
from course import Course
from curves import CHANCE, Curve, Trained, script
from matplotlib.figure import Figure
from virtual_runs import Job, panels
from zhang16_fig3 import Kind, Scale

from mpisgd.analysis.tables import Cell, Column, Table
from mpisgd.base.git import commit_of
from mpisgd.report import style
from mpisgd.vectors.flat import FlatModel

HERE = Path(__file__).parent
NAME = "zhang16-stability"
FULL = dataclasses.replace(fig3.FULL, name=NAME, long=10)
QUICK = dataclasses.replace(fig3.QUICK, name=f"{NAME}-quick", long=2)
RATES = {FULL.name: (0.001, 0.003, 0.0003, 0.01, 0.03), QUICK.name: (0.03, 0.3)}
"""With m = 0.9, in the order in which they are computed."""
KINDS = (Kind(0), Kind(1), Kind(30), Kind(15), Kind(1, "none"), Kind(30, "none"), Kind(15, "none"))
MOMENTA = (0.9, 0.0)
IMAGES = 2000
ITERATIONS = 20


def job(scale: Scale, kind: Kind, momentum: float, rate: float, seed: int = 1, epochs: int = 0) -> Job:
    optimizer = {**fig3.settings_of(scale, kind)["optimizer"], "momentum": momentum}
    return {
        **fig3.job(scale, kind, epochs or scale.long, seed, optimizer=optimizer, alpha0=rate),
        "schedule": {"name": "constant"},
    }


def rate_of(scale: Scale, momentum: float, at: float) -> float:
    """The rate that stands for `at`, a rate with m = 0.9."""
    return at if momentum else round(10 * at, 10)


def named(scale: Scale, kind: Kind, momentum: float, rate: float) -> Curve:
    modulation = f"-{kind.modulation}" if kind.n else ""
    return Curve(f"m{momentum:g}-{kind.protocol}{modulation}-{rate:g}", job(scale, kind, momentum, rate))


def curves(scale: Scale) -> list[Curve]:
    found = []
    for at in RATES[scale.name]:
        for momentum in MOMENTA:
            found += [named(scale, kind, momentum, rate_of(scale, momentum, at)) for kind in KINDS]
    return found


# ------------------------------------------------------------------------------------------------------------------ limits


def limit(staleness: np.ndarray, momentum: float, modulation: str) -> float:
    """The largest alpha0 h that is stable; `staleness`: how many gradients had tau = 0, 1, 2 ..."""
    tau = np.arange(len(staleness))
    weights = staleness / staleness.sum() / (np.maximum(1, tau) if modulation == "inverse" else 1)
    low, high = 0.0, 2 * (1 + momentum)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if _is_stable(middle, weights, momentum) else (low, middle)
    return low


def _is_stable(step: float, weights: np.ndarray, momentum: float) -> bool:
    """Whether all roots of the polynomial lie within the unit circle; it is multiplied by z^(longest - 1)."""
    polynomial = np.zeros(max(3, len(weights) + 1))
    polynomial[:3] += (1, -(1 + momentum), momentum)
    polynomial[1 : len(weights) + 1] += step * weights
    return bool(np.abs(np.roots(polynomial)).max() < 1)


def curvature(scale: Scale, folder: Path) -> dict[str, Any]:
    """Measure h at the weights of hardsync after one epoch; kept in a file."""
    path = folder / "curvature.json"
    one = job(scale, Kind(0), 0.9, min(RATES[scale.name], key=lambda rate: abs(rate - 0.001)), epochs=1)
    if path.is_file() and (kept := json.loads(path.read_text("utf-8")))["job"] == json.loads(json.dumps(one)):
        return dict(kept)
    place = folder / ".curvature"
    place.mkdir(parents=True, exist_ok=True)
    course = Course(one, place)
    for _ in course.run():
        pass
    values = power_iteration(course)
    about = {"job": one, "h": values[-1], "iterations": values, "images": min(IMAGES, course.train_samples)}
    about |= {"date": time.strftime("%Y-%m-%d"), "commit": commit_of(HERE).name}
    path.write_text(json.dumps(about, indent=1) + "\n", "utf-8")
    return about


def power_iteration(course: Course) -> list[float]:
    """The largest eigenvalue of D^1/2 (H + decay) D^1/2, D the rates of the parameters: its estimate after each iteration."""
    model, tensors = course.model, course.tensors
    model.weights.copy_(course.update.weights)
    rates, decays = torch.ones(model.size), torch.full((model.size,), float(getattr(course.config.optimizer, "weight_decay", 0.0)))
    for each in tensors.segments:
        rates[each.start : each.stop] = each.rate
        if each.weight_decay is not None:
            decays[each.start : each.stop] = each.weight_decay
    assert tensors.data is not None
    inputs, targets = tensors.data.train.batch(np.arange(min(IMAGES, course.train_samples)))
    vector, found = torch.randn(model.size, generator=torch.Generator().manual_seed(1)), list[float]()
    for _ in range(ITERATIONS):
        vector = vector / vector.norm()
        product = rates.sqrt() * (_hessian_times(model, tensors.loss, inputs, targets, rates.sqrt() * vector))
        product += rates * decays * vector
        found.append(round(float(vector @ product), 4))
        vector = product
    return found


def _hessian_times(model: FlatModel, loss: Any, inputs: torch.Tensor, targets: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    total, parameters = torch.zeros_like(vector), [each for each in model.module.parameters() if each.requires_grad]
    views = list(model.views(vector).values())
    for start in range(0, len(inputs), 250):
        some = slice(start, start + 250)
        value = loss(model.module(model.inputs(inputs[some])), targets[some]) * len(targets[some]) / len(inputs)
        gradients = torch.autograd.grad(value, parameters, create_graph=True)
        along = torch.stack([(one * other).sum() for one, other in zip(gradients, views, strict=True)]).sum()
        again = torch.autograd.grad(along, parameters)
        for into, each in zip(model.views(total).values(), again, strict=True):
            into.add_(each)
    return total


# ---------------------------------------------------------------------------------------------------------- table and figure


def staleness_of(kind: Kind) -> np.ndarray:
    """How many gradients have tau = 0, 1, 2 ..., at lambda = 30."""
    if not kind.n:
        return np.ones(1)
    return np.asarray(fig1.measured(kind.n, fig1.SPREAD, 20_000))


def limits() -> dict[tuple[Kind, float], float]:
    found = {kind.n: staleness_of(kind) for kind in KINDS}
    return {(kind, momentum): limit(found[kind.n], momentum, kind.modulation) for kind in KINDS for momentum in MOMENTA}


def errors(scale: Scale, found: Sequence[Trained], kind: Kind, momentum: float) -> Iterator[tuple[float, float]]:
    """Rates, and the errors after all epochs, in percent; without curves that have not come so far."""
    by_name = {each.curve.name: each for each in found if each.done}
    for at in sorted(RATES[scale.name]):
        rate = rate_of(scale, momentum, at)
        trained = by_name.get(named(scale, kind, momentum, rate).name)
        if trained is not None:
            yield rate, trained.error


def table(scale: Scale, found: Sequence[Trained], h: float, bounds: dict[tuple[Kind, float], float]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for momentum in MOMENTA:
        for kind in sorted(KINDS, key=lambda kind: (kind.modulation == "inverse", kind.n)):
            known = dict(errors(scale, found, kind, momentum))
            cells = (known.get(rate_of(scale, momentum, at)) for at in sorted(RATES[scale.name]))
            bound = bounds[kind, momentum]
            rows.append((f"{momentum:g}", kind.protocol, kind.rate, bound, bound / h, *cells))
    rates = [f"{rate:g}" for rate in sorted(RATES[scale.name])]
    columns = (
        Column("m"),
        Column("protocol"),
        Column("rate"),
        Column("stable α₀h", spec=".3g"),
        Column("that is α₀", spec=".2g"),
        *(Column(f"at {rate}", "%", ".1f") for rate in rates),
    )
    note = f"Test error after {scale.long} epochs at these rates with m = 0.9, at ten times these with m = 0."
    return Table("zhang16_stability", "Error over the rate", columns, tuple(rows), note)


def figure_of(scale: Scale, found: Sequence[Trained], h: float, bounds: dict[tuple[Kind, float], float]) -> Figure:
    titles = [
        (f"m = {momentum:g}, {what}", f"test error after {scale.long} epochs [%]")
        for momentum in MOMENTA
        for what in ("α₀", "α₀/τ")
    ]
    figure, axes = panels("α₀", titles, rows=2)
    looks = {n: style.line(at) for at, n in enumerate(sorted({kind.n for kind in KINDS}))}
    for row, momentum in enumerate(MOMENTA):
        for kind in KINDS:
            for column, modulation in enumerate(("none", "inverse")):
                if kind.n and kind.modulation != modulation:
                    continue
                beside, look = axes[2 * row + column], looks[kind.n]
                known = list(errors(scale, found, kind, momentum))
                beside.plot(*zip(*known, strict=True) if known else ([], []), label=kind.protocol, **{**look, "marker": "."})
                beside.axvline(bounds[kind, momentum] / h, color=look["color"], linewidth=0.9, linestyle=":")
        for beside in axes[2 * row : 2 * row + 2]:
            rates = sorted(rate_of(scale, momentum, at) for at in RATES[scale.name])
            beside.set(xscale="log", xlim=(min(rates) / 2, max(rates) * 2), ylim=(15, 100 * CHANCE + 5))
            beside.set_xticks(rates, [f"{rate:g}" for rate in rates])
            beside.minorticks_off()
            beside.axhline(100 * CHANCE, color=style.GREY, linewidth=1.0, linestyle=":")
    axes[0].legend(fontsize=8, frameon=False)
    figure.suptitle(f"{scale.told}: λ = 30, μ = 4, one seed; dotted: stable up to here, with h = {h:.3g}", fontsize=11)
    return figure


def draw(scale: Scale, found: Sequence[Trained], folder: Path) -> tuple[list[Table], Figure]:
    h, bounds = curvature(scale, folder)["h"], limits()
    return [table(scale, found, h, bounds)], figure_of(scale, found, h, bounds)


if __name__ == "__main__":
    script(__doc__, (FULL, QUICK), curves, draw)
