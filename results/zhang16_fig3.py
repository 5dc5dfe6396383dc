"""Test error on CIFAR-10 for hardsync and n-softsync, lambda = 30, with alpha0 and with alpha0/tau [Zhang16 4.3, Fig. 3].

The paper: with the best rate of synchronous SGD, alpha0, convergence degrades as n grows, and with n = 15 and 30 the test error
stays at 90 %. With alpha0/tau (eq. 3) the curves of all protocols can hardly be told apart, and all end at about 18 %.

Same: the data, their per-pixel mean subtracted; Caffe's network with Caffe's first weights, normalisation, rates and weight decays
(`jobs/zhang16-cifar10.toml`); lambda = 30, mu = 4, momentum 0.9, alpha0 = 0.001, divided by 10 after 120 epochs and again after
130; 140 epochs. Beside it the same in 40 epochs, three seeds, also n = 2 and 6, with the schedule scaled.
Weight decay is part of each learner's gradient (`decayed`), and so weighted by its staleness, as in eq. 2. Decay by the shards'
optimiser is not: 30-softsync has 30 times as many updates, each with hardsync's decay and 1/30 of its gradient; its training loss
stayed at 2.0.
Not the same: virtual learners, each of which computes a real gradient at the weights that it pulled; how stale each gradient is
comes from the mini-batches of zhang16_fig1.py (normal, 20 %). Hardsync is computed as one learner with mini-batches of 120. The
training error is that of the first 10,000 training images.

Needs CIFAR-10 below $MPISGD_DATA/cifar10, and says so where it is missing. Every curve is kept as a CSV, and goes on where it was
left: start the script again after an interruption, or in several processes at once (`curves.py`). A curve of 140 epochs takes 60 to
90 minutes of a core. `--quick` is the same with the 8x8 digits and a small CNN, one seed, in half a minute.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import zhang16_fig1 as fig1
from curves import CHANCE, Curve, Trained, script
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from passes import Decay
from torch import nn
from virtual_runs import Job, panels

from mpisgd.analysis.tables import Cell, Column, Table
from mpisgd.config import Cifar10FullOptions
from mpisgd.models import make as make_model
from mpisgd.report import style

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Scale:
    """What is trained, and for how many epochs in the long curves and in the short ones.

    `settings`: parts of a job; `stale`: in their place where gradients are stale.
    """

    name: str
    told: str
    settings: Job
    long: int
    short: int
    stale: Job = field(default_factory=dict)


PAPERS = tomllib.loads((HERE.parent / "jobs" / "zhang16-cifar10.toml").read_text("utf-8"))
FULL = Scale(
    "zhang16-fig3",
    "CIFAR-10, cifar10_full in Caffe's form",
    {name: PAPERS[name] for name in ("model", "data", "optimizer", "groups", "alpha0")},
    long=140,
    short=40,
    stale={
        "model": {"name": "zhang16_fig3:decayed"},
        "optimizer": {"name": "sgd", "momentum": PAPERS["optimizer"]["momentum"]},
        "groups": {"rate": PAPERS["groups"]["rate"]},
    },
)
QUICK = Scale(
    "zhang16-fig3-quick",
    "8×8 digits, small CNN",
    {
        "model": {"name": "small_cnn", "channels": [8, 16]},
        "data": {"name": "digits"},
        "optimizer": {"name": "sgd", "momentum": 0.9},
        "alpha0": 0.03,
    },
    long=6,
    short=4,
)


def decayed(seed: int) -> nn.Module:
    """The network; each of its gradients contains the weight decay of `PAPERS`."""
    model = make_model(Cifar10FullOptions(form="caffe"), input_shape=(3, 32, 32), classes=10, seed=seed)
    for name, parameter in model.named_parameters():
        decay = PAPERS["groups"]["weight_decay"].get(name, PAPERS["optimizer"]["weight_decay"])
        parameter.register_hook(Decay(parameter, decay))  # type: ignore[no-untyped-call]
    return model


@dataclass(frozen=True)
class Kind:
    """A protocol and how it weighs. `n` = 0 is hardsync, whose gradients are not stale: both ways to weigh them are the same."""

    n: int
    modulation: str = "inverse"

    @property
    def protocol(self) -> str:
        return f"{self.n}-softsync" if self.n else "hardsync"

    @property
    def rate(self) -> str:
        return {"none": "α₀", "inverse": "α₀/τ"}[self.modulation] if self.n else "α₀ (τ = 0)"


LONG = (Kind(0), Kind(1), Kind(30), Kind(15, "none"), Kind(30, "none"), Kind(15), Kind(1, "none"))
SHORT = (Kind(0), Kind(1), Kind(30), Kind(1, "none"), Kind(6), Kind(2), Kind(15))
SEEDS = (1, 2, 3)


def settings_of(scale: Scale, kind: Kind) -> Job:
    return {**scale.settings, **(scale.stale if kind.n else {})}


def job(scale: Scale, kind: Kind, epochs: int, seed: int, **other: Any) -> Job:
    """A job; `other` stands in the place of the scale's settings."""
    protocol = {"name": "softsync", "n": kind.n, "modulation": kind.modulation} if kind.n else {"name": "hardsync"}
    return {
        **settings_of(scale, kind),
        **other,
        "protocol": protocol,
        "schedule": {"name": "step", "epochs": [epochs * 120 / 140, epochs * 130 / 140], "factor": 0.1},
        "mu": fig1.MU if kind.n else fig1.MU * fig1.LAMBDA,
        "seed": seed,
        "epochs": epochs,
        "threads": 1,
        "nonfinite": "continue",
        "evaluation": {"every_epochs": 1.0},
        "virtual": {"learners": fig1.LAMBDA if kind.n else 1},
        "compute": fig1.SPREAD,
    }


def curve(scale: Scale, kind: Kind, epochs: int, seed: int) -> Curve:
    rate = f"-{kind.modulation}" if kind.n else ""
    return Curve(f"{epochs}-{kind.protocol}{rate}-seed{seed}", job(scale, kind, epochs, seed))


def curves(scale: Scale) -> list[Curve]:
    """All curves, in the order in which they are computed."""
    longer = [curve(scale, kind, scale.long, 1) for kind in LONG]
    return longer + [curve(scale, kind, scale.short, seed) for seed in SEEDS for kind in SHORT]


# ---------------------------------------------------------------------------------------------------------- table and figure


def by_kind(scale: Scale, found: Sequence[Trained], kinds: Sequence[Kind], epochs: int) -> Iterator[tuple[Kind, list[Trained]]]:
    """The curves of each kind, all seeds, by n and with alpha0 first; without the kinds of which there is none."""
    for kind in sorted(kinds, key=lambda kind: (kind.modulation == "inverse", kind.n)):
        names = [curve(scale, kind, epochs, seed).name for seed in SEEDS]
        seeds = [each for each in found if each.curve.name in names]
        if seeds:
            yield kind, seeds


def table(scale: Scale, found: Sequence[Trained]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for epochs, kinds in ((scale.long, LONG), (scale.short, SHORT)):
        for kind, seeds in by_kind(scale, found, kinds, epochs):
            tau = float(np.mean([each.about["mean_staleness"] for each in seeds]))
            largest = max(int(each.about["max_staleness"]) for each in seeds)
            errors = " ".join(f"{each.error:.1f}" for each in seeds)
            training = " ".join("–" if each.lost else f"{100 * each.rows[-1, 3]:.1f}" for each in seeds)
            reached = " ".join("ended" if each.lost else f"{each.rows[-1, 0]:.0f}" for each in seeds)
            rows.append((epochs, kind.protocol, kind.rate, tau, largest, errors, training, reached))
    columns = (
        Column("epochs"),
        Column("protocol"),
        Column("rate"),
        Column("mean τ", spec=".2f"),
        Column("max τ"),
        Column("test error of each seed", "%"),
        Column("training error", "%"),
        Column("epochs computed"),
    )
    return Table("zhang16_fig3", "Error at the end", columns, tuple(rows))


def figure_of(scale: Scale, found: Sequence[Trained]) -> Figure:
    """Above the long curves, below the short ones: alpha0, alpha0/tau, and that again where the curves lie close together."""
    lengths = [each for each in ((scale.long, LONG), (scale.short, SHORT)) if any(by_kind(scale, found, each[1], each[0]))]
    titles = [
        (f"{epochs} epochs: {what}", "error [%]")
        for epochs, _ in lengths
        for what in ("rate α₀ for every gradient", "rate α₀/τ", "rate α₀/τ, closer")
    ]
    figure, axes = panels("epochs", titles, rows=len(lengths))
    looks = {n: style.line(at) for at, n in enumerate(sorted({kind.n for kind in (*LONG, *SHORT)}))}
    for row, (epochs, kinds) in enumerate(lengths):
        beside, ends = axes[3 * row : 3 * row + 3], []
        for kind, seeds in by_kind(scale, found, kinds, epochs):
            for at, modulation in enumerate(("none", "inverse", "inverse")):
                if not kind.n or kind.modulation == modulation:
                    _draw(beside[at], kind, seeds, epochs, looks[kind.n], training=at < 2)
            if kind.modulation == "inverse":
                ends += [each.error for each in seeds if not each.lost]
        for each in beside:
            each.axhline(100 * CHANCE, color=style.GREY, linewidth=1.0, linestyle=":")
            each.set(xlim=(0, epochs * 1.02), ylim=(0, 100))
        if ends:
            beside[2].set(ylim=(min(ends) - 3, max(ends) + 9))
        for each in beside[:2]:
            each.legend(fontsize=8, frameon=False, loc="center right" if each is beside[0] else "best")
    figure.suptitle(
        f"{scale.told}: λ = {fig1.LAMBDA}, μ = {fig1.MU}, α₀ = {scale.settings['alpha0']:g}; test error, thin: training error;"
        " shaded: range of the seeds where there are several",
        fontsize=11,
    )
    return figure


def _draw(axes: Axes, kind: Kind, seeds: Sequence[Trained], epochs: int, look: dict[str, Any], *, training: bool) -> None:
    at = np.arange(epochs + 1)
    for column, width in (("test_error", 1.0), ("training_error", 0.4))[: 2 if training else 1]:
        percent = 100 * np.array([each.at(at, column) for each in seeds])
        known = np.isfinite(percent).all(axis=0)
        thin = {**look, "linewidth": width * look.get("linewidth", 1.5), "markevery": max(1, epochs // 10)}
        if width < 1:
            thin["marker"] = ""
        axes.plot(at[known], percent[:, known].mean(axis=0), label=kind.protocol if width == 1 else None, **thin)
        if len(seeds) > 1:
            low, high = percent[:, known].min(axis=0), percent[:, known].max(axis=0)
            axes.fill_between(at[known], low, high, color=look["color"], alpha=0.2, linewidth=0)


if __name__ == "__main__":
    script(__doc__, (FULL, QUICK), curves, lambda scale, found, _: ([table(scale, found)], figure_of(scale, found)))
