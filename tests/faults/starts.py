"""A rank is killed at a named point, from its launch to the end of the run: the job ends with the reason, or goes on without it.

`python -m tests.faults.starts --seed 1 --out results/faults` writes starts.json there. The cells of the table point
(`dying.py`) x role take turns; what is trained, with how many shards, in which form, and whether a run is continued, is drawn: all
protocols, layerwise exchange, aggregation. `totals` counts each cell.

In the fail-fast form (with and without ULFM), which is the only one of allreduce and of teams, any death ends the job. In the
fault-tolerant one it does until all have agreed how to start, and that of a shard always; that of a learner or of the evaluator
must not.
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

from mpisgd.job.interruption import newest
from mpisgd.records.log.reader import Run
from tests.faults.campaign import Found, configured, main
from tests.faults.dying import BEFORE_MPI, LATER, POINTS, SAID, START, TORCH
from tests.faults.job import HERE, ULFM, Job

TEAM = 2
EPOCHS = 2.0
WAYS: dict[str, dict[str, Any]] = {
    "hardsync": {"protocol": {"name": "hardsync"}},
    "softsync": {"protocol": {"name": "softsync", "n": 2}},
    "backup": {"protocol": {"name": "backup", "b": 1}},
    "timeout": {"protocol": {"name": "timeout", "timeout_s": 0.05}},
    "versioned": {"protocol": {"name": "versioned"}},
    "async": {"protocol": {"name": "async"}},
    "downpour": {"protocol": {"name": "downpour"}},
    "ssp": {"protocol": {"name": "ssp", "slack": 1}},
    "layerwise": {"protocol": {"name": "async"}, "per_layer": True},
    "allreduce": {"protocol": {"name": "allreduce"}},
    "aggregation": {"protocol": {"name": "hardsync"}, "aggregation": "node", "team_size": TEAM},
}
ROLES = ("shard", "learner", "evaluator", "learner and shard", "leader", "member")
"""Leaders and members are those of teams."""
FORMS = {
    "fault-tolerant": ("tolerant", ULFM),
    "fail-fast, ULFM": ("fail-fast", ULFM),
    "fail-fast": ("fail-fast", []),
}
LIMIT_S = 120.0
GONE_S = 10.0
WITHIN_S = 5.0
"""In which a job that ends must have ended."""


@dataclass(frozen=True)
class Draw:
    """One run: shard s is rank s, the evaluator, where there is one, the last."""

    way: str
    form: str
    shards: int
    ranks: int
    evaluator: bool
    resumed: bool
    point: str
    victim: int

    @property
    def role(self) -> str:
        if self.evaluator and self.victim == self.ranks - 1:
            return "evaluator"
        if self.way == "allreduce":
            return "learner and shard"
        if self.victim < self.shards:
            return "shard"
        return "learner" if self.way != "aggregation" else ("member" if (self.victim - self.shards) % TEAM else "leader")

    @property
    def possible(self) -> bool:
        """Whether there is such a job, and the victim comes to the point."""
        if self.form == "fault-tolerant" and self.way in ("allreduce", "aggregation"):
            return False
        if self.point == "evaluation":
            if self.evaluator:
                return self.role == "evaluator"
            by_shard = self.way == "allreduce" or self.form == "fault-tolerant"  # else by learner 0, after its goodbye
            return self.victim == (0 if by_shard else self.shards)
        return self.point != "finish" or self.victim == 0

    @property
    def ends(self) -> bool:
        """Whether the death must end the job."""
        return self.form != "fault-tolerant" or self.point in (*BEFORE_MPI, TORCH, *START) or self.role == "shard"

    @property
    def late(self) -> bool:
        """Whether the point is at the end of the training, which so must have one."""
        return self.point in ("last update", "end", "books", "finish") or (self.point == "evaluation" and not self.evaluator)

    def settings(self, out: Path) -> dict[str, Any]:
        return WAYS[self.way] | {
            "out": str(out),
            "model": {"name": "mlp", "hidden": (64, 64)},
            "shards": 1 if self.way == "allreduce" else self.shards,
            "evaluator": self.evaluator,
            "epochs": EPOCHS if self.late or not self.ends else 10_000.0,
            "mu": 16,
            "alpha0": 0.02,
            "threads": 1,
            "straggler": {"delay": "constant", "delay_mean_s": 0.01},
            "evaluation": {"train": False, "every_epochs": 1.0},
            "checkpoint": {"every_updates": 5},
            "log": {"progress": "plain", "progress_s": 0.1},
            "faults": {"mode": FORMS[self.form][0]},
        }


def comes_to(point: str, role: str) -> bool:
    """Whether ranks of that role come to that point."""
    computes = ("learner", "learner and shard", "leader", "member")
    serves = ("shard", "learner and shard")
    some = {
        "first pull": ("learner", "leader"),
        "last update": ("learner", "leader"),
        "first gradient": computes,
        "training": computes,
        "serving": serves,
        "evaluation": ("evaluator", "shard", "learner", "learner and shard", "leader"),
        "books": serves,
        "finish": serves,
    }
    return role in some.get(point, ROLES)


_TIMES = dict.fromkeys(LATER, 3)
CELLS = [
    (point, role)
    for turn in range(3)
    for point in POINTS
    for role in ROLES
    if turn < _TIMES.get(point, 1) and comes_to(point, role)
]
"""One turn; what comes after the agreement, where forms and protocols matter, stands in it three times."""


def draw(generator: random.Random, number: int) -> Draw:
    """The cells take turns; all else is drawn."""
    point, role = CELLS[number % len(CELLS)]
    while True:
        way, form, shards = generator.choice(list(WAYS)), generator.choice(list(FORMS)), generator.choice((1, 1, 2, 3))
        evaluator, resumed = generator.random() < 0.3, generator.random() < 0.15
        if way == "allreduce":
            shards = 0
        ranks = shards + evaluator + (2 * TEAM if way == "aggregation" else generator.randint(2, 3))
        drawn = Draw(way, form, shards, ranks, evaluator, resumed, point, generator.randrange(ranks))
        if drawn.form != "fault-tolerant" and role in ("shard", "learner", "evaluator") and generator.random() < 0.6:
            continue  # the form that has more to do
        if drawn.role == role and drawn.possible:
            return drawn


def interrupted(drawn: Draw, directory: Path, found: Found) -> bool:
    """Begin a run, and interrupt it: the one that is to die goes on with it."""
    settings = drawn.settings(directory / "run") | {"epochs": 10_000.0}
    job = Job(drawn.ranks, [configured(directory, settings)], FORMS[drawn.form][1])
    try:
        job.wait_for("epoch ")
        while newest(directory / "run") is None:
            time.sleep(0.01)
        job.send(drawn.shards, signal.SIGTERM)
    except (TimeoutError, ProcessLookupError, KeyError) as error:
        return found.expect(False, f"not interrupted: {error}")
    status = job.end(LIMIT_S)
    return found.expect(status == 85 and newest(directory / "run") is not None, f"interrupted with {status}\n{job.text}")


def execute(generator: random.Random, directory: Path, number: int) -> Found:
    drawn = draw(generator, number)
    out = directory / "run"
    found = Found([drawn.point, drawn.role, drawn.way, drawn.form, f"S = {drawn.shards or 'all'}", f"{drawn.ranks} ranks"])
    words = [configured(directory, drawn.settings(out))]
    if drawn.resumed:
        found.kinds.append("resumed")
        if not interrupted(drawn, directory, found):
            return found
        words = ["--resume", str(out), "--epochs", str(_epochs(out) + EPOCHS) if drawn.late or not drawn.ends else "10000"]
    told = {"DIE_AT": drawn.point, "DIE_RANK": str(drawn.victim), "DIE_MARK": str(directory / "mark")}
    told["DIE_WAITS"] = str((drawn.victim + 1) % drawn.ranks)
    job = Job(drawn.ranks, words, FORMS[drawn.form][1], module="tests.faults.dying", PYTHONPATH=HERE, **told)
    try:
        dead_s = job.wait_for(SAID, LIMIT_S)
    except TimeoutError as error:
        return Found(found.kinds, failures=[f"nobody died: {error}"])
    found.totals[f"killed: {drawn.point} / {drawn.role}"] += 1
    if drawn.resumed:
        found.totals["killed: during --resume"] += 1
    if drawn.ends:
        _ended(job, out, dead_s, drawn, found)
    else:
        _went_on(job, out, drawn, found)
    return found


def _epochs(out: Path) -> float:
    run = Run(out)
    return float(run.updates["samples"].max(initial=0) / run.environment["train_samples"])


def _ended(job: Job, out: Path, dead_s: float, drawn: Draw, found: Found) -> None:
    status = job.end(GONE_S)
    took_s = time.monotonic() - dead_s
    found.seconds[
        f"{'before the agreement' if drawn.point in (*BEFORE_MPI, TORCH, *START) else 'later'}: until all are gone"
    ].append(took_s)
    found.totals["ended"] += 1
    busy = os.getloadavg()[0] > 3 * (os.cpu_count() or 1)  # with other things: processes that are to end wait for a core
    found.totals[f"ended after more than {WITHIN_S:g} s, on a busy machine"] += busy and took_s > WITHIN_S
    found.expect(took_s < (GONE_S if busy else WITHIN_S), f"ended after {took_s:.1f} s")
    found.expect(status not in (0, None), f"status {status}\n{job.text}")
    found.expect(job.left_s is not None, f"somebody was left\n{job.text}")
    if drawn.form == "fail-fast":  # the launcher alone sees it; of a rank that dies in MPI_Init it may say another thing
        named = f"rank {drawn.victim} " in job.text
        found.totals["the launcher does not name the rank"] += not named
        found.expect(named or drawn.point in BEFORE_MPI, f"the reason is not told\n{job.text}")
    else:
        found.expect("lost" in job.text or "before any other looked" in job.text, f"the reason is not told\n{job.text}")
    found.expect(not (out / "DONE").exists(), "there is a DONE")


def _went_on(job: Job, out: Path, drawn: Draw, found: Found) -> None:
    status = job.end(LIMIT_S)
    found.totals["went on"] += 1
    if found.well(job, status, out, drawn):
        found.balanced(Run(out))
        found.proved(out)


if __name__ == "__main__":
    sys.exit(main("starts", "A rank killed at every point of a run.", len(CELLS), execute, sys.argv[1:]))
