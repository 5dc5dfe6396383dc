"""One job of real ranks for half an hour, with all that writes switched on: no rank's memory grows.

`python -m tests.faults.soak --count 30 --out results/faults` writes soak.json there; `count` is minutes. Two shards, three learners
and an evaluator, softsync with n = 2, a small model and short delays, so that many gradients pass; log, checkpoints and
snapshots are on. Every few seconds the resident memory of each rank is read. SETTLED_S after the start of training it must be
flat: the median of the last quarter of what follows at most GROWTH above the median of the first. Then a signal interrupts the
run, and it is gone on with to a DONE, for which its books must balance.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from mpisgd.bench.parts.measured import write
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from tests.faults.campaign import configured, kept, launcher, machine
from tests.faults.job import Job, end_all, stop_orderly

SETTLED_S = 120.0
GROWTH = 0.05
EVERY_S = 5.0
ROLES = ("shard 0", "shard 1", "learner 0", "learner 1", "learner 2", "evaluator")


def settings(out: Path) -> dict[str, Any]:
    return {
        "out": str(out),
        "protocol": {"name": "softsync", "n": 2},
        "model": {"name": "mlp", "hidden": (64,)},
        "shards": 2,
        "evaluator": True,
        "epochs": 1e9,
        "mu": 8,
        "alpha0": 0.001,
        "threads": 1,
        "straggler": {"delay": "constant", "delay_mean_s": 0.01},  # for what runs beside it
        "evaluation": {"train": False, "every_epochs": 50.0},
        "log": {"progress": "plain", "progress_s": 5.0},
        "checkpoint": {"every_updates": 5_000},
    }


def resident(pid: int) -> dict[str, float]:
    """Of a process, in MiB: all, and that of its own (not files, nor memory shared with others)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    words = {line.partition(":")[0]: line.split()[1] for line in lines if line.startswith(("VmRSS", "RssAnon"))}
    return {"resident": int(words["VmRSS"]) / 1024, "own": int(words["RssAnon"]) / 1024}


def flat(seconds: list[float], mib: list[float]) -> tuple[float, float]:
    """Medians of the first and of the last quarter of what lies after SETTLED_S; of a shorter soak, after its first half."""
    late = np.array(mib)[np.array(seconds) >= min(SETTLED_S, seconds[-1] / 2)]
    quarter = max(1, len(late) // 4)
    return float(np.median(late[:quarter])), float(np.median(late[-quarter:]))


def soak(minutes: float, out: Path) -> dict[str, Any]:
    failures: list[str] = []
    job = Job(len(ROLES), [configured(out.parent, settings(out))])
    begun_s = job.wait_for("epoch ")
    seconds: list[float] = []
    read: dict[str, list[dict[str, float]]] = {role: [] for role in ROLES}
    while time.monotonic() < begun_s + 60 * minutes and not job.over:
        time.sleep(EVERY_S)
        seconds.append(time.monotonic() - begun_s)
        for rank, role in enumerate(ROLES):
            read[role].append(resident(job.pids[rank]))
    if job.over:
        failures.append(f"it has ended by itself:\n{job.text[-3000:]}")
    else:
        job.send(0, signal.SIGTERM)
    status = job.end(60)
    if status != 85:
        failures.append(f"status {status}:\n{job.text[-3000:]}")
    ranks = {}
    for role in ROLES:
        table: dict[str, Any] = {}
        for kind in ("resident", "own"):
            values = [each[kind] for each in read[role]]
            first, last = flat(seconds, values)
            table[kind] = {"first": round(first, 1), "last": round(last, 1), "growth": round(last / first - 1, 4)}
            table[kind]["each minute"] = [round(value, 1) for value in values[:: max(1, round(60 / EVERY_S))]]
        ranks[role] = table
        if table["resident"]["growth"] > GROWTH:
            failures.append(f"{role}: {table['resident']['first']} MiB, later {table['resident']['last']} MiB")
    run = Run(out)
    pushes, epochs = len(run.pushes), float(run.updates["samples"].max(initial=0)) / run.environment["train_samples"]
    again = Job(len(ROLES), ["--resume", str(out), "--epochs", str(epochs + 1)])
    if again.end(300) != 0 or not (out / schema.DONE).is_file():
        failures.append(f"not gone on with to its end:\n{again.text[-3000:]}")
    return {
        "minutes": round(seconds[-1] / 60, 1),
        "gradients": pushes,
        "gradients/s": round(pushes / seconds[-1]),
        "updates": len(run.updates),
        "evaluations": len(run.evaluations),
        "log": f"{sum(path.stat().st_size for path in out.glob('*.h5')) / 2**20:.0f} MiB",
        "memory, MiB": ranks,
        "failures": failures,
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description="Half an hour of one job: no memory grows.")
    parser.add_argument("--count", type=float, default=30.0, help="minutes")
    parser.add_argument("--out", type=Path, help="a directory for soak.json")
    options = parser.parse_args(argv)
    stop_orderly()
    head = {"seed": 1, "commit": machine()["commit"]}
    found = kept(options.out / "soak.json", head) if options.out is not None else {}
    if found.get("count", 0) < options.count:
        where = machine(launcher())  # before: somebody may commit meanwhile
        found = {"count": options.count, "seed": 1, **_soaked(options.count), **where}
        if options.out is not None:
            write(options.out / "soak.json", found)
    print(json.dumps(found, indent=1))
    return 1 if found["failures"] else 0


def _soaked(minutes: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        try:
            return soak(minutes, Path(directory) / "run")
        finally:
            end_all()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
