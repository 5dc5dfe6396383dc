"""Seconds and samples to a test error of 2 % on MNIST, protocol by protocol, each tuned under one budget, in three scenes.

What is compared: protocols and ways of 8 virtual learners with real gradients, one shard; `mnist_cnn`, mu = 32, SGD, fixed rates.
Each is tuned alike: six rates, each with momentum 0 and 0.9 (of DiLoCo: six inner rates, each with outer momentum 0 and 0.9), three
epochs where all learners are equal, one seed that is shown nowhere else; the least error on 5,000 training samples that are set
aside decides. Then ten epochs in three scenes, five seeds:

    equal       mini-batches normal, 0.1 s, 10 %
    one slow    the same, and learner 7 takes three times as long
    heavy tail  `heavy_tail` mini-batches: one in fifty has an extra delay of a Pareto distribution

Seconds are virtual. The rates are those of the equal scene in all three. Weights by staleness are each protocol's default.

Needs MNIST below $MPISGD_DATA/mnist. Each run is kept as a JSON, and not made again; several processes share the runs. 144 runs of
three epochs and 180 of ten take twelve hours of a core and more. `--quick`: digits and an MLP, two rates and one seed.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from curves import claimed
from matplotlib.figure import Figure
from virtual_runs import Job, logged, made_with, panels, show

from mpisgd.analysis import training
from mpisgd.analysis.tables import Cell, Column, Table
from mpisgd.analysis.training import Target
from mpisgd.base.errors import DataError
from mpisgd.config import Part
from mpisgd.report import style

HERE = Path(__file__).parent
LAMBDA = 8
TUNED_BY = 9
"""The seed of the runs that tune."""
MOMENTA = (0.0, 0.9)
NORMAL: dict[str, Any] = {"name": "normal", "mean_s": 0.1, "deviation_s": 0.01}
TAIL: dict[str, Any] = {"name": "heavy_tail", "mean_s": 0.1, "tail_probability": 0.02, "tail_scale_s": 0.1, "tail_most_s": 10.0}
SCENES: Mapping[str, dict[str, Any]] = {
    "equal": {"compute": NORMAL},
    "one slow": {"compute": NORMAL, "virtual": {"learners": LAMBDA, "slow_nodes": {str(LAMBDA): 3.0}}},  # node 0 has the shard
    "heavy tail": {"compute": TAIL},
}
LOCAL: dict[str, Any] = {"protocol": {"name": "hardsync"}, "local_steps": 8, "inner_optimizer": {"name": "adamw"}, "alpha0": 0.7}
WAYS: Mapping[str, dict[str, Any]] = {
    "hardsync": {"protocol": {"name": "hardsync"}},
    "backup, b = 2": {"protocol": {"name": "backup", "b": 2}},
    "backup, b = 2, abort": {"protocol": {"name": "backup", "b": 2, "abort": True}},
    "timeout 0.15 s, N_min = 4": {"protocol": {"name": "timeout", "timeout_s": 0.15, "N_min": 4}},
    "softsync, n = 1": {"protocol": {"name": "softsync", "n": 1}},
    "softsync, n = λ": {"protocol": {"name": "softsync", "n": LAMBDA}},
    "async": {"protocol": {"name": "async"}},
    "ssp, slack = 3": {"protocol": {"name": "ssp", "slack": 3}},
    "downpour, n_push = n_fetch = 2": {"protocol": {"name": "downpour", "n_push": 2, "n_fetch": 2}},
    "DC-ASGD": {"protocol": {"name": "async"}, "compensation": 0.04},
    "softsync, n = 1, dealt data": {"protocol": {"name": "softsync", "n": 1}, "sampling": "dealt"},
    "DiLoCo, H = 8": LOCAL,
}


@dataclass(frozen=True)
class Scale:
    """What is trained: parts of a job; rates of SGD and inner rates of DiLoCo; epochs of tuning and in the end; the target."""

    name: str
    settings: Job
    rates: tuple[float, ...]
    inner_rates: tuple[float, ...]
    epochs: tuple[float, float]
    seeds: tuple[int, ...]
    target: float


FULL = Scale(
    "protocols-tuned",
    {"model": {"name": "mnist_cnn"}, "data": {"name": "mnist", "validation": 5000}, "mu": 32},
    (0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
    (0.0003, 0.001, 0.002, 0.004, 0.008, 0.016),
    (3.0, 10.0),
    (1, 2, 3, 4, 5),
    0.02,
)
QUICK = Scale(
    "protocols-tuned-quick",
    {"model": {"name": "mlp", "hidden": [32]}, "data": {"name": "digits", "validation": 200}, "mu": 4},
    (0.03, 0.3),
    (0.001, 0.004),
    (1.0, 4.0),
    (1,),
    0.1,
)


@dataclass(frozen=True)
class Setting:
    """A rate and a momentum."""

    rate: float
    momentum: float

    def __str__(self) -> str:
        return f"{self.rate:g}, m = {self.momentum:g}"


def settings_of(scale: Scale, way: str) -> list[Setting]:
    rates = scale.inner_rates if "local_steps" in WAYS[way] else scale.rates
    return [Setting(rate, momentum) for momentum in MOMENTA for rate in rates]


def job(scale: Scale, way: str, setting: Setting, scene: str, seed: int, epochs: float) -> Job:
    rate = {"inner_alpha0" if "local_steps" in WAYS[way] else "alpha0": setting.rate}
    return {
        **scale.settings,
        **WAYS[way],
        **rate,
        "optimizer": {"name": "sgd", "momentum": setting.momentum},
        "seed": seed,
        "epochs": epochs,
        "threads": 1,
        "nonfinite": "continue",
        "evaluation": {"every_epochs": 0.5},
        "virtual": {"learners": LAMBDA},
        **SCENES[scene],
    }


def name_of(way: str, setting: Setting, scene: str, seed: int) -> str:
    """E.g. softsync-n-lambda-0.1-m-0.9-one-slow-seed3."""
    told = f"{way} {setting} {scene} seed{seed}".replace("λ", "lambda")
    return re.sub("[^a-zA-Z0-9.]+", "-", told)


@dataclass(frozen=True)
class Kept:
    """A run, as it is kept: lists over evaluations of test data, and of samples set aside."""

    job: Job
    epochs: list[float]
    seconds: list[float]
    error: list[float]
    validation: list[float]

    def reached(self, target: float) -> tuple[float, float] | None:
        """Seconds and epochs until a test error; None: never."""
        epochs, seconds, error = (np.array(each) for each in (self.epochs, self.seconds, self.error))
        curve = training.Curve(False, Part.TEST, epochs, seconds, error, error, updates=np.zeros(len(error)))
        found = curve.reached(Target("error", target))
        return None if found is None else (found.seconds, found.epochs)


def kept(folder: Path, name: str, wanted: Job) -> Kept | None:
    """None where the run is not there, or is of another job."""
    path = folder / f"{name}.json"
    if not path.is_file():
        return None
    told = json.loads(path.read_text("utf-8"))
    return Kept(**told["run"]) if told["run"]["job"] == json.loads(json.dumps(wanted)) else None


def run(folder: Path, name: str, wanted: Job) -> Kept | None:
    """A run, made if need be; None: another process makes it."""
    found = kept(folder, name, wanted)
    if found is None:
        with claimed(folder, name) as place:
            if place is None:
                return None
            if (found := kept(folder, name, wanted)) is None:
                began, log = time.monotonic(), logged(wanted)
                curves = {curve.part: curve for curve in training.curves(log) if not curve.averaged}
                test, aside = curves[Part.TEST], curves[Part.VALIDATION]
                columns = [[_plain(each) for each in column] for column in (test.epochs, test.seconds, test.error, aside.error)]
                found = Kept(json.loads(json.dumps(wanted)), *columns)
                about = {**made_with(), "seconds": round(time.monotonic() - began), "run": vars(found)}
                (place / "run.json").write_text(json.dumps(about) + "\n", "utf-8")
                (place / "run.json").replace(folder / f"{name}.json")
                print(f"{name}: {100 * found.error[-1]:.2f} %, {about['seconds']} s", file=sys.stderr, flush=True)
        shutil.rmtree(folder / f".{name}", ignore_errors=True)
    return found


def _plain(value: Any) -> float:
    return round(float(value), 6) if math.isfinite(value) else 1.0


def tune(folder: Path, scale: Scale, way: str, *, make: bool) -> Setting | None:
    """The setting with the least error on samples set aside; None where not all have been tried."""
    tried: list[tuple[float, Setting]] = []
    for setting in settings_of(scale, way):
        wanted = job(scale, way, setting, "equal", TUNED_BY, scale.epochs[0])
        name = "tuning-" + name_of(way, setting, "equal", TUNED_BY)
        found = run(folder, name, wanted) if make else kept(folder, name, wanted)
        if found is not None:
            tried.append((found.validation[-1], setting))
    return min(tried, key=lambda each: each[0])[1] if len(tried) == len(settings_of(scale, way)) else None


def runs(folder: Path, scale: Scale, *, make: bool) -> dict[tuple[str, str], tuple[Setting, list[Kept]]]:
    """By way and scene: the setting that was chosen, and the runs of its seeds that are there."""
    chosen = {way: tune(folder, scale, way, make=make) for way in WAYS}
    found: dict[tuple[str, str], tuple[Setting, list[Kept]]] = {}
    for seed in scale.seeds:
        for scene in SCENES:
            for way, setting in chosen.items():
                if setting is None:
                    continue
                wanted, name = job(scale, way, setting, scene, seed, scale.epochs[1]), name_of(way, setting, scene, seed)
                each = run(folder, name, wanted) if make else kept(folder, name, wanted)
                if each is not None:
                    found.setdefault((way, scene), (setting, []))[1].append(each)
    return found


def _over(values: Sequence[float]) -> str:
    return f"{np.mean(values):.1f} ({min(values):.1f}..{max(values):.1f})" if values else "never"


def table(scale: Scale, found: Mapping[tuple[str, str], tuple[Setting, list[Kept]]]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for scene in SCENES:
        for way in WAYS:
            if (way, scene) not in found:
                continue
            setting, seeds = found[way, scene]
            reached = [each for each in (one.reached(scale.target) for one in seeds) if each is not None]
            last = 100 * float(np.mean([one.error[-1] for one in seeds]))
            seconds, epochs = ([each[at] for each in reached] for at in (0, 1))
            rows.append((scene, way, str(setting), _over(seconds), _over(epochs), f"{len(reached)} of {len(seeds)}", last))
    columns = (
        Column("scene"),
        Column("protocol"),
        Column("rate, momentum"),
        Column("seconds", "s"),
        Column("epochs"),
        Column("reached by"),
        Column("last test error", "%", ".2f"),
    )
    note = f"Until a test error of {100 * scale.target:g} %: mean (least..largest) of the seeds that reached it."
    return Table("protocols_tuned", "Every protocol tuned under one budget", columns, tuple(rows), note)


def figure_of(scale: Scale, found: Mapping[tuple[str, str], tuple[Setting, list[Kept]]]) -> Figure:
    figure, axes = panels(f"virtual seconds to {100 * scale.target:g} %", [(scene, "") for scene in SCENES])
    for beside, scene in zip(axes, SCENES, strict=True):
        ways = [way for way in reversed(list(WAYS)) if (way, scene) in found]
        for at, way in enumerate(ways):
            reached = [each[0] for each in (one.reached(scale.target) for one in found[way, scene][1]) if each is not None]
            if reached:
                beside.plot([float(np.mean(reached))], [at], "D", color=style.COLOURS[0])
                beside.plot(reached, [at] * len(reached), "|", color=style.COLOURS[0])
            else:
                beside.annotate("never", (0.02, at), xycoords=("axes fraction", "data"), va="center", fontsize=8)
        beside.set(yticks=range(len(ways)), ylim=(-0.5, len(ways) - 0.5), xlim=(0, None))
        beside.set_yticklabels(ways if beside is axes[0] else [], fontsize=7.5)
    figure.suptitle(f"Each protocol tuned by 12 runs; {len(scale.seeds)} seeds: mean and each", fontsize=11)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="digits and an MLP, two rates and one seed")
    parser.add_argument("--draw", action="store_true", help="make no run, draw what there is")
    parser.add_argument("--runs", type=Path, help="folder of the runs; default: beside this file")
    parser.add_argument("--out", type=Path, help="folder of the figure; default: figures/, with --quick that of the runs")
    options = parser.parse_args()
    scale = QUICK if options.quick else FULL
    folder = options.runs or HERE / scale.name
    folder.mkdir(parents=True, exist_ok=True)
    try:
        found = runs(folder, scale, make=not options.draw)
    except DataError as error:
        raise SystemExit(f"this script trains on {scale.settings['data']['name']}: {error}") from error
    if not found:
        raise SystemExit(f"{folder} has no runs of these settings")
    show(scale.name, options.out or (folder if options.quick else HERE / "figures"), [table(scale, found)], figure_of(scale, found))


if __name__ == "__main__":
    main()
