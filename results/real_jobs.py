"""Three real jobs, each by hardsync, softsync and DiLoCo: error or perplexity against seconds, and against bytes.

The jobs are scripts as users write them, in `jobs/`: ResNet-20 on CIFAR-10 with crops and flips, a transformer on this project's
own pages, and the ResNet-20 fine-tuned to another camera. This script imports their models, data, steps and configurations, and
trains them on the virtual cluster with real gradients: four learners, one shard, and 1 Gbit/s into and out of each rank. A
mini-batch takes what one core of the machine of README.md takes for it, give or take 20 % (lognormal). Bytes are those of pushes
and pulls of all learners.

`MPISGD_DATA=... python results/real_jobs.py`; needs CIFAR-10; half an hour of one core. Every run is kept as a JSON
file in `real-jobs/` when it is done, and is not made again as long as its settings are the same: start the script again after an
interruption. `--draw` makes none, and draws those that are there.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter
from virtual_runs import Job, oldest, panels, show

from mpisgd.analysis import training
from mpisgd.analysis.tables import Cell, Column, Table
from mpisgd.config.config_file import from_mapping
from mpisgd.records.log.reader import Run
from mpisgd.report import style
from mpisgd.simulate import simulate

HERE = Path(__file__).parent
GIGABIT = 1e9 / 8
GIGABYTES = (0.1, 0.2, 0.5, 1, 2, 5, 10)
NUMBERS = (6, 8, 10, 15, 20, 50, 100, 200)
LEARNERS = 4
WAYS = {"hardsync": "hardsync", "softsync": "softsync n = λ, α₀/τ", "diloco": "DiLoCo"}


@dataclass(frozen=True)
class Task:
    """A script of `jobs/`, how long it runs, and what it is measured by.

    Attributes:
        compute_s: seconds of one mini-batch on one core, as measured.
        measure: column of evaluations that is shown; `unit` is "%" for a share.
        more: settings that are those of this script alone: when to evaluate.
        kwargs: arguments of the factory of its data.
        after: the task with whose hardsync weights it begins.
    """

    name: str
    told: str
    epochs: float
    compute_s: float
    measure: str
    unit: str
    more: Mapping[str, Any]
    model: str = "make_model"
    step: str = ""
    kwargs: Mapping[str, Any] | None = None
    after: str = ""

    @property
    def axis(self) -> str:
        return "test error [%]" if self.unit else f"test {self.measure}"

    @property
    def ways(self) -> dict[str, str]:
        return {**WAYS, "anew": "hardsync, not fine-tuned"} if self.after else WAYS


TASKS = (
    Task(
        "resnet20",
        "ResNet-20, 25,000 pictures of CIFAR-10",
        epochs=6.0,
        compute_s=0.042,
        measure="error",
        unit="%",
        more={"evaluation": {"every_epochs": 1.0, "buffers": "recalibrate", "recalibrate_batches": 2}},
        kwargs={"samples": 25_000, "test_samples": 2000},
    ),
    Task(
        "transformer",
        "transformer, 152 kB of docs/ as bytes",
        epochs=16.0,
        compute_s=0.018,
        measure="perplexity",
        unit="",
        more={"evaluation": {"every_epochs": 1.0}},
        model="Transformer",
        step="step",
    ),
    Task(
        "finetune",
        "ResNet-20, 1,000 pictures of another camera",
        epochs=8.0,
        compute_s=0.015,
        measure="error",
        unit="%",
        more={"evaluation": {"every_epochs": 2.0, "buffers": "recalibrate", "recalibrate_batches": 1}},
        kwargs={"test_samples": 2000},
        after="resnet20",
    ),
)


def job(task: Task, way: str) -> Job:
    """The configuration of the script, on the virtual cluster."""
    script = importlib.import_module(task.name)
    return {
        **script.CONFIG,
        **script.WAYS[way],
        **task.more,
        "epochs": task.epochs,
        "model": {"name": "custom", "factory": f"{task.name}:{task.model}"},
        "data": {"name": "custom", "factory": f"{task.name}:make_data", "kwargs": dict(task.kwargs or {})},
        **({"step": f"{task.name}:{task.step}"} if task.step else {}),
        "virtual": {"learners": LEARNERS},
        "compute": {"name": "lognormal", "mean_s": task.compute_s, "sigma": 0.2},
        "network": dict.fromkeys(("bandwidth", "node_bandwidth", "local_bandwidth"), GIGABIT),
        "threads": 1,
    }


def trained(task: Task, way: str, runs: Path) -> dict[str, Any]:
    """Train in a directory of `runs`, which stays; what is kept of it."""
    whole, begun_s = job(task, way), time.process_time()
    here: dict[str, Any] = {"out": str(runs / f"{task.name}-{way}"), "overwrite": True, "log": {"progress": "off"}}
    if whole.get("init_from"):
        start = runs / f"{task.after}-hardsync"
        if not (start / "DONE").is_file():  # it was made elsewhere, and what is kept of it has no weights
            trained(next(each for each in TASKS if each.name == task.after), "hardsync", runs)
        here["init_from"] = str(start)
    run = Run(simulate(from_mapping({**whole, **here})).path)
    found = training.on_test_data(run)
    if found is None:
        raise SystemExit("nothing was evaluated")
    value = found.error if task.unit else found.metrics[task.measure]
    nbytes = np.searchsorted(np.sort(run.pushes["arrival_s"]), found.seconds) * 2.0 * run.environment["parameter_nbytes"]
    return {
        "job": whole,
        "rows": np.column_stack([found.epochs, found.seconds, nbytes, found.loss, value]).tolist(),
        "columns": ["epochs", "seconds", "bytes", "test_loss", task.measure],
        "parameters": run.environment["parameter_nbytes"] // 4,
        "gradients": len(run.pushes),
        "updates": len(run.updates),
        "mean_staleness": round(float(run.pushes["staleness"].mean()), 4),
        "max_staleness": int(run.pushes["staleness"].max()),
        "cpu_s": round(time.process_time() - begun_s),
        "git_commit": run.environment["git_commit"],
        "versions": run.environment["versions"],
    }


def kept(path: Path, task: Task, way: str) -> dict[str, Any] | None:
    """None where it is not there, or was made with other settings."""
    if not path.is_file():
        return None
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found if found["job"] == json.loads(json.dumps(job(task, way))) else None


def shown(task: Task, found: Mapping[str, Mapping[str, Any]]) -> tuple[Sequence[Table], Figure]:
    """Of the ways that are there: a table, and a figure over seconds and over bytes."""
    figure, (over_s, over_bytes) = panels("", [("Over seconds", task.axis), ("Over bytes", task.axis)])
    rows: list[tuple[Cell, ...]] = []
    scale = 100 if task.unit else 1
    for number, (way, label) in enumerate(task.ways.items()):
        if way not in found:
            continue
        one = found[way]
        _, seconds, nbytes, _, value = np.array(one["rows"]).T
        steps = f", H = {one['job']['local_steps']}" if "local_steps" in one["job"] else ""
        for axes, x, first in ((over_s, seconds, 0), (over_bytes, nbytes / 1e9, 1)):
            look: dict[str, Any] = {"marker": ".", "markersize": 4, "color": style.COLOURS[number]}
            axes.plot(x[first:], scale * value[first:], label=label + steps, **look)
        last = (float(seconds[-1]), float(nbytes[-1]) / 1e9, one["mean_staleness"], one["updates"], scale * float(value[-1]))
        rows.append((label + steps, *last))
    scaled = "linear" if task.unit else "log"
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    over_s.set(xlabel="virtual seconds", yscale=scaled)
    over_bytes.set(xlabel="GB pushed and pulled by all", xscale="log", yscale=scaled)
    for axis, ticks in (
        (over_bytes.xaxis, GIGABYTES),
        *(((axes.yaxis, NUMBERS) for axes in (over_s, over_bytes)) if not task.unit else ()),
    ):
        low, high = axis.get_view_interval()
        axis.set_ticks([tick for tick in ticks if low <= tick <= high])
        axis.set_major_formatter(plain)
        axis.set_minor_formatter(NullFormatter())
    over_s.legend(fontsize=7)
    columns = (
        Column("way"),
        Column("virtual seconds", "s", ".0f"),
        Column("bytes", "GB", ".2f"),
        Column("mean τ", "", ".2f"),
        Column("updates"),
        Column(f"last test {task.measure}", task.unit, ".2f"),
    )
    return [Table(f"real-jobs-{task.name}", f"{task.told}, {task.epochs:g} epochs", columns, tuple(rows))], figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="make no run, draw those that are there")
    parser.add_argument("--only", choices=[task.name for task in TASKS], help="one of the jobs; default: all")
    parser.add_argument("--kept", type=Path, default=HERE / "real-jobs", help="folder of the JSON files")
    parser.add_argument("--runs", type=Path, default=HERE / "real-jobs-runs", help="folder of the runs, with logs and weights")
    parser.add_argument("--out", type=Path, default=HERE / "figures", help="folder of the figures")
    options = parser.parse_args()
    sys.path.insert(0, str(HERE / "jobs"))
    options.kept.mkdir(exist_ok=True)
    for task in TASKS:
        if options.only not in (None, task.name):
            continue
        found = {}
        for way in task.ways:
            path = options.kept / f"{task.name}-{way}.json"
            one = kept(path, task, way)
            if one is None and not options.draw:
                one = trained(task, way, options.runs)
                path.write_text(json.dumps(one, indent=1), encoding="utf-8")
                print(f"{path.name}: {task.measure} {one['rows'][-1][-1]:.4g}, {one['cpu_s']} s", file=sys.stderr, flush=True)
            if one is not None:
                found[way] = one
        about = oldest(each["git_commit"] for each in found.values())
        show(f"real-jobs-{task.name}", options.out, *shown(task, found), about)


if __name__ == "__main__":
    main()
