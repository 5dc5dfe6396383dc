"""Test error of an MNIST network over simulated staleness [Chen16 2.1, Fig. 2], at the paper's length.

The paper: the test error rises with the staleness of the gradients; from a staleness of 15 on it must be reached slowly, over the
first three epochs, and from more the learning rate must be lower, or runs diverge.

Same: MNIST with random rotations and zooms, the CNN of 3x3 filters with weight normalisation (`mnist_cnn`), 25 epochs, alpha0 =
0.1, constant for 15 epochs and then annealed linearly to 0, weights averaged with a decay of 0.9999, which are those shown.
Staleness is exact: protocol async with tau + 1 virtual learners of equal, constant speed, which push in turn, makes every gradient
tau updates old. Slowly: by the protocol's ramp, learners join one after the other over three epochs.
Not said in the paper, and chosen here: mu = 32, momentum 0, rotations of up to 10 degrees and zooms of up to 10 %, the rates 0.03
and 0.01 beside 0.1 from tau = 20 on, and the correction of the average's bias. Three seeds; a run that diverges is counted.

Needs the four IDX files of MNIST below $MPISGD_DATA/mnist. Every curve is kept as a CSV, and goes on where it was left
(`curves.py`); a curve takes ten minutes of a core. `--quick` is the same with the 8x8 digits, a small CNN and three epochs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from curves import Curve, Trained, script
from matplotlib.figure import Figure
from torch import Tensor, nn
from virtual_runs import Job, panels

from mpisgd.analysis.tables import Cell, Column, Table
from mpisgd.config import MnistCnnOptions, SmallCnnOptions
from mpisgd.models import make as make_model
from mpisgd.report import style

HERE = Path(__file__).parent
SEEDS = (1, 2, 3)
RAMPED = 15
"""From this staleness on it is reached slowly."""
RATES = (0.1, 0.03, 0.01)


class Moved(nn.Module):
    """Images, in training each rotated and zoomed by chance about its centre."""

    def __init__(self, degrees: float, zoom: float) -> None:
        super().__init__()
        self._most = degrees * math.pi / 180, zoom

    def draw(self, samples: int) -> Tensor:
        """An angle and a zoom for each sample."""
        angle, zoom = (most * (2 * torch.rand(samples) - 1) for most in self._most)
        return torch.stack([angle, zoom], 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.given(images, self.draw(len(images)).to(images.device)) if self.training else images

    def given(self, images: Tensor, drawn: Tensor) -> Tensor:
        """The images, turned and zoomed by so much."""
        angle, zoom = drawn.unbind(1)
        cos, sin, none = (1 + zoom) * torch.cos(angle), (1 + zoom) * torch.sin(angle), torch.zeros_like(angle)
        turned = torch.stack([torch.stack([cos, -sin, none], 1), torch.stack([sin, cos, none], 1)], 1)
        grid = nn.functional.affine_grid(turned, list(images.shape), align_corners=False)
        return nn.functional.grid_sample(images, grid, align_corners=False)


def network(seed: int) -> nn.Module:
    return nn.Sequential(Moved(10.0, 0.1), make_model(MnistCnnOptions(), input_shape=(1, 28, 28), classes=10, seed=seed))


def small(seed: int) -> nn.Module:
    model = make_model(SmallCnnOptions(channels=(8, 16)), input_shape=(1, 8, 8), classes=10, seed=seed)
    return nn.Sequential(Moved(10.0, 0.1), model)


@dataclass(frozen=True)
class Scale:
    """What is trained. `epochs`: in all, at the full rate, and of the ramp."""

    name: str
    told: str
    settings: Job
    taus: tuple[int, ...]
    epochs: tuple[int, int, int]
    updates_per_epoch: int


FULL = Scale(
    "chen16-fig2",
    "MNIST, mnist_cnn",
    {"model": {"name": "chen16_fig2:network"}, "data": {"name": "mnist"}, "mu": 32, "averaging": 0.9999},
    (0, 5, 10, 15, 20, 30, 50, 80, 120),
    (25, 15, 3),
    60_000 // 32,
)
QUICK = Scale(
    "chen16-fig2-quick",
    "8×8 digits, small CNN",
    {"model": {"name": "chen16_fig2:small"}, "data": {"name": "digits"}, "mu": 4, "averaging": 0.99},
    (0, 20),
    (3, 2, 1),
    1437 // 4,
)


@dataclass(frozen=True)
class Kind:
    """A staleness and a rate."""

    tau: int
    rate: float

    @property
    def ramped(self) -> bool:
        return self.tau >= RAMPED


def kinds(scale: Scale) -> list[Kind]:
    """In the order in which they are computed: the paper's rate first."""
    lower = [Kind(tau, rate) for rate in RATES[1:] for tau in scale.taus if tau >= 20]
    return [*(Kind(tau, RATES[0]) for tau in scale.taus), *lower]


def job(scale: Scale, kind: Kind, seed: int) -> Job:
    whole, full, ramp = scale.epochs
    return {
        **scale.settings,
        "protocol": {"name": "async", "ramp": ramp * scale.updates_per_epoch if kind.ramped else 0},
        "optimizer": {"name": "sgd", "momentum": 0.0},
        "schedule": {"name": "linear", "start_epochs": full},
        "averaging_bias_correction": True,
        "alpha0": kind.rate,
        "seed": seed,
        "epochs": whole,
        "threads": 1,
        "nonfinite": "continue",
        "evaluation": {"every_epochs": 1.0},
        "virtual": {"learners": kind.tau + 1},
        "compute": {"name": "constant", "mean_s": 0.1},
    }


def curve(scale: Scale, kind: Kind, seed: int) -> Curve:
    return Curve(f"tau{kind.tau}-{kind.rate:g}-seed{seed}", job(scale, kind, seed))


def curves(scale: Scale) -> list[Curve]:
    return [curve(scale, kind, seed) for seed in SEEDS for kind in kinds(scale)]


# ---------------------------------------------------------------------------------------------------------- table and figure


def of_kind(scale: Scale, found: Sequence[Trained], kind: Kind) -> list[Trained]:
    names = [curve(scale, kind, seed).name for seed in SEEDS]
    return [each for each in found if each.curve.name in names and each.done]


def averaged(trained: Trained) -> float:
    """The last averaged weights' error, in percent."""
    return 100 * float(trained.rows[-1, 5])


def best(scale: Scale, found: Sequence[Trained], tau: int) -> tuple[Kind, list[Trained]] | None:
    """The rate whose seeds have the least mean error, of those of which none was lost."""
    whole = [(kind, of_kind(scale, found, kind)) for kind in kinds(scale) if kind.tau == tau]
    good = [(kind, seeds) for kind, seeds in whole if seeds and not any(each.lost for each in seeds)]
    return min(good, key=lambda each: float(np.mean([averaged(one) for one in each[1]]))) if good else None


def table(scale: Scale, found: Sequence[Trained]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for kind in sorted(kinds(scale), key=lambda kind: (kind.tau, -kind.rate)):
        if not (seeds := of_kind(scale, found, kind)):
            continue
        errors = [averaged(each) for each in seeds if not each.lost]
        said = " ".join("diverged" if each.lost else f"{averaged(each):.2f}" for each in seeds)
        ramp = scale.epochs[2] if kind.ramped else None
        rows.append((kind.tau, f"{kind.rate:g}", ramp, float(np.mean(errors)) if errors else None, said))
    columns = (
        Column("τ"),
        Column("α₀"),
        Column("ramp", "epochs"),
        Column("mean test error", "%", ".2f"),
        Column("of each seed", "%"),
    )
    note = "Of averaged weights, at the end; the mean is of the seeds that did not diverge."
    return Table("chen16_fig2", "Test error over staleness", columns, tuple(rows), note)


def figure_of(scale: Scale, found: Sequence[Trained]) -> Figure:
    title = ("best rate of each τ; points: seeds", "test error [%]")
    figure, (beside, over) = panels("", [title, ("over epochs, the best rate of each τ", "test error [%]")])
    shown = [(tau, each) for tau in scale.taus if (each := best(scale, found, tau)) is not None]
    means = [float(np.mean([averaged(one) for one in seeds])) for _, (_, seeds) in shown]
    beside.plot([tau for tau, _ in shown], means, **style.line(0))
    epochs = np.arange(scale.epochs[0] + 1)
    for at, (tau, (kind, seeds)) in enumerate(shown):
        beside.plot([tau] * len(seeds), [averaged(one) for one in seeds], ".", color=style.COLOURS[0], alpha=0.6)
        beside.annotate(f"{kind.rate:g}", (tau, means[at]), textcoords="offset points", xytext=(4, 6), fontsize=7)
        percent = 100 * np.nanmean([one.at(epochs, "averaged_error") for one in seeds], axis=0)
        over.plot(epochs, percent, label=f"τ = {tau}, {kind.rate:g}", color=style.COLOURS[at % len(style.COLOURS)])
    lost = [(kind.tau, kind.rate) for kind in kinds(scale) for each in of_kind(scale, found, kind) if each.lost]
    for tau, rate in sorted(set(lost)):
        text = f"{rate:g}: {lost.count((tau, rate))} diverged"
        beside.annotate(text, (tau, 1), xycoords=("data", "axes fraction"), va="top", ha="center", fontsize=6, rotation=90)
    beside.set(xlabel="staleness τ", ylim=(0, 1.3 * max(means, default=1.0)))
    over.set(xlabel="epochs", yscale="log")
    over.legend(fontsize=7, frameon=False)
    figure.suptitle(f"[Chen16 Fig. 2] {scale.told}: {scale.epochs[0]} epochs, averaged weights, {len(SEEDS)} seeds", fontsize=11)
    return figure


if __name__ == "__main__":
    script(__doc__, (FULL, QUICK), curves, lambda scale, found, _: ([table(scale, found)], figure_of(scale, found)))
