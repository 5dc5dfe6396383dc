"""A rank is killed at a named point, from its launch to the end of the run: the job ends with the reason, or goes on without it.

`python -m tests.faults.starts --count 150 --seed 1 --out results/faults` writes starts.json there. Each run draws the point
(`dying.py`), the rank, and what is trained how: all protocols, layerwise exchange, aggregation, the evaluator, and whether a run is
continued. All runs are started with ULFM; those of allreduce and with aggregation are fail-fast there, too.

Until all have agreed how to start, a death must end the job. Later, that of a learner or of the evaluator must not, in a
fault-tolerant run.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpisgd.interruption import newest
from mpisgd.records.reader import Run
from tests.faults.campaign import Found, configured, main
from tests.faults.dying import BEFORE_MPI, POINTS, SAID, START
from tests.faults.job import Job

WAYS: dict[str, dict[str, Any]] = {
    "hardsync": {"protocol": {"name": "hardsync"}},
    "softsync": {"protocol": {"name": "softsync", "n": 2}},
    "backup": {"protocol": {"name": "backup", "b": 1}},
    "timeout": {"protocol": {"name": "timeout", "timeout_s": 0.05}},
    "versioned": {"protocol": {"name": "versioned"}},
    "async": {"protocol": {"name": "async"}},
    "downpour": {"protocol": {"name": "downpour"}},
    "ssp": {"protocol": {"name": "ssp", "slack": 1}},
    "layerwise": {"protocol": {"name": "async"}, "exchange": "layerwise"},
    "allreduce": {"protocol": {"name": "allreduce"}},
    "aggregation": {"protocol": {"name": "hardsync"}, "aggregation": "node", "team_size": 2},
}
FAIL_FAST = ("allreduce", "aggregation")
LIMIT_S = 120.0
GONE_S = 15.0
WITHIN_S = 5.0
"""In which a job that ends must have ended."""


@dataclass(frozen=True)
class Draw:
    """One run: shard s is rank s, the evaluator, where there is one, the last."""

    way: str
    shards: int
    ranks: int
    evaluator: bool
    resumed: bool
    point: str
    victim: int

    @property
    def role(self) -> str:
        if self.way == "allreduce":
            return "learner and shard"
        if self.victim < self.shards:
            return "shard"
        return "evaluator" if self.evaluator and self.victim == self.ranks - 1 else "learner"

    @property
    def ends(self) -> bool:
        """Whether the death must end the job."""
        return self.point in (*BEFORE_MPI, *START) or self.way in FAIL_FAST or self.role == "shard"

    def settings(self, out: Path) -> dict[str, Any]:
        return WAYS[self.way] | {
            "out": str(out),
            "model": {"name": "mlp", "hidden": (64, 64)},
            "shards": 1 if self.way == "allreduce" else self.shards,
            "evaluator": self.evaluator,
            "epochs": 3.0,
            "mu": 16,
            "alpha0": 0.02,
            "threads": 1,
            "straggler": {"delay": "constant", "delay_mean_s": 0.01},
            "evaluation": {"train": False, "every_epochs": 1.0},
            "checkpoint": {"every_updates": 5},
            "log": {"progress": "plain", "progress_s": 0.1},
        }


def comes_to(point: str, role: str, victim: int) -> bool:
    """Whether a rank of that role comes to that point."""
    if point in ("first pull", "last update"):
        return role == "learner"
    if point in ("first gradient", "training"):
        return role in ("learner", "learner and shard")
    if point == "serving":
        return role in ("shard", "learner and shard")
    if point == "evaluation":
        return role == "evaluator"
    return point != "finish" or victim == 0


def draw(generator: random.Random, number: int) -> Draw:
    """The points take turns; all else is drawn."""
    point = POINTS[number % len(POINTS)]
    while True:
        way, shards, evaluator = generator.choice(list(WAYS)), generator.choice((1, 1, 2)), generator.random() < 0.3
        ranks = shards + evaluator + (4 if way == "aggregation" else generator.randint(2, 3))
        drawn = Draw(way, shards, ranks, evaluator, generator.random() < 0.2, point, generator.randrange(ranks))
        if way in FAIL_FAST and evaluator:
            continue
        if way == "aggregation" and (drawn.victim - shards) % 2 and not comes_to(point, "member", drawn.victim):
            continue
        if comes_to(point, drawn.role, drawn.victim):
            return drawn


def interrupted(drawn: Draw, directory: Path, found: Found) -> bool:
    """Begin a run, and interrupt it: the one that is to die goes on with it."""
    settings = drawn.settings(directory / "run") | {"epochs": 10_000.0}
    job = Job(drawn.ranks, [configured(directory, settings)], ["--with-ft", "ulfm"])
    try:
        job.wait_for("epoch ")
        time.sleep(0.3)
        job.send(drawn.shards, signal.SIGTERM)
    except (TimeoutError, ProcessLookupError, KeyError) as error:
        return found.expect(False, f"not interrupted: {error}")
    status = job.end(LIMIT_S)
    return found.expect(status == 85 and newest(directory / "run") is not None, f"interrupted with {status}\n{job.text}")


def execute(generator: random.Random, directory: Path, number: int) -> Found:
    drawn = draw(generator, number)
    out = directory / "run"
    found = Found([drawn.point, drawn.role, drawn.way, f"S = {drawn.shards}", f"{drawn.ranks} ranks"])
    words = [configured(directory, drawn.settings(out))]
    if drawn.resumed:
        found.kinds.append("resumed")
        if not interrupted(drawn, directory, found):
            return found
        words = ["--resume", str(out), "--epochs", "10000" if drawn.ends else str(_epochs(out) + 3.0)]
    elif drawn.ends and drawn.point not in ("end", "finish"):
        words += ["--epochs", "10000"]
    told = {"DIE_AT": drawn.point, "DIE_RANK": str(drawn.victim), "DIE_MARK": str(directory / "mark")}
    told["DIE_WAITS"] = str((drawn.victim + 1) % drawn.ranks)
    path = os.pathsep.join([str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])])
    job = Job(drawn.ranks, words, ["--with-ft", "ulfm"], module="tests.faults.dying", PYTHONPATH=path, **told)
    try:
        dead_s = job.wait_for(SAID, LIMIT_S)
    except TimeoutError as error:
        found.failures.append(f"nobody died: {error}")
        job.end(0)
        return found
    if drawn.ends:
        _ended(job, out, dead_s, drawn, found)
    else:
        _went_on(job, out, drawn, found)
    return found


def _epochs(out: Path) -> float:
    run = Run(out)
    return float(run.updates["samples"].max(initial=0)) / run.environment["train_samples"]


def _ended(job: Job, out: Path, dead_s: float, drawn: Draw, found: Found) -> None:
    status = job.end(GONE_S)
    took_s = time.monotonic() - dead_s
    found.seconds[f"{'before the agreement' if drawn.point in (*BEFORE_MPI, *START) else 'later'}: until all are gone"].append(
        took_s
    )
    found.totals["ended"] += 1
    found.totals[f"ended after more than {WITHIN_S:g} s"] += took_s > WITHIN_S
    found.expect(status not in (0, None), f"status {status}\n{job.text}")
    found.expect(job.left_s is not None, f"somebody was left\n{job.text}")
    found.expect("lost" in job.text or "before any other looked" in job.text, f"the reason is not told\n{job.text}")
    found.expect(not (out / "DONE").exists(), "there is a DONE")


def _went_on(job: Job, out: Path, drawn: Draw, found: Found) -> None:
    status = job.end(LIMIT_S)
    well = status == 0 and job.left_s is not None and (out / "DONE").is_file()
    found.totals["went on"] += 1
    if found.expect(well, f"status {status}, gone {job.left_s}, {drawn}\n{job.text}"):
        for books in Run(out).books():
            found.expect(books.balanced, f"{books}")


if __name__ == "__main__":
    sys.exit(main("starts", "A rank killed at every point of a run.", 150, execute, sys.argv[1:]))
