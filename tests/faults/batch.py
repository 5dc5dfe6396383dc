"""Learners of a batch optimisation killed on real ranks, at all times of it: they cost their portions, and replay proves every sum.

`python -m tests.faults.batch --count 20 --seed 1 --out results/faults` writes batch.json there. Each run draws its shards, its
learners (3 to 6), how sums are made, and who is killed, by SIGKILL, when: all learners but one, in the middle of evaluations and of
line searches, at the start, and towards the end. A third of the runs is interrupted by a signal, and goes on, perhaps with another
number of shards, and those kills fall into what goes on. In a sixth a learner is stopped for good (SIGSTOP), not killed.
"""

from __future__ import annotations

import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpisgd.base.errors import EXIT_INTERRUPTED
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Event, Outcome
from tests.faults.campaign import Found, configured, main
from tests.faults.job import ULFM, Job

LIMIT_S = 200.0
ITERATIONS = 16
PATIENCE_S = 3.0


@dataclass(frozen=True)
class Draw:
    """One run. Learner l is rank shards + 1 + l.

    Attributes:
        kills: (learner_id, the iteration that is waited for, seconds after it).
        again: shards after a signal at that iteration; 0 = there is none.
        stopped: the first of `kills` is stopped instead.
    """

    shards: int
    learners: int
    options: dict[str, Any]
    kills: list[tuple[int, int, float]]
    again: int
    stopped: bool


def draw(generator: random.Random) -> Draw:
    learners = generator.randint(3, 6)
    victims = generator.sample(range(learners), learners - 1)
    return Draw(
        shards=generator.randint(1, 2),
        learners=learners,
        options=generator.choice(({"push_every": 2}, {"order": "portions"}, {"duplicates": False}, {"history": 4})),
        kills=sorted(
            ((each, generator.randint(1, ITERATIONS), generator.uniform(0, 0.3)) for each in victims), key=lambda it: it[1:]
        ),
        again=generator.randint(1, 2) if generator.random() < 1 / 3 else 0,
        stopped=generator.random() < 1 / 6,
    )


def config_of(drawn: Draw, out: Path) -> dict[str, Any]:
    return {
        "out": str(out),
        "protocol": {"name": "sandblaster", "iterations": ITERATIONS, "tolerance_change": 0.0, **drawn.options},
        "model": {"name": "mlp", "hidden": [120]},
        "shards": drawn.shards,
        "mu": 64,
        "threads": 1,
        "straggler": {"delay": "exponential", "delay_mean_s": 0.02},
        "evaluation": {"train": False, "every_epochs": 0.0},
        "log": {"progress": "plain", "progress_s": 0.0, "flush_s": 0.2},
        "faults": {"mode": "tolerant", "patience_s": PATIENCE_S},
    }


def execute(generator: random.Random, directory: Path, number: int) -> Found:
    """Run it, kill, and look at what is left."""
    drawn, out = draw(generator), directory / "run"
    found = Found([f"S = {drawn.shards}", f"{drawn.learners} learners", *map(str, drawn.options)])
    words, shards = [configured(directory, config_of(drawn, out))], drawn.shards
    if drawn.again:
        found.kinds.append(f"goes on with {drawn.again} shards")
        job = _job(shards, drawn.learners, words)
        job.wait_for(f"iteration {drawn.kills[0][1]}/")
        for rank in range(shards + 1 + drawn.learners):
            job.send(rank, signal.SIGUSR1)
        status = job.end(LIMIT_S)
        if status == EXIT_INTERRUPTED:
            words, shards = ["--resume", str(out), "--shards", str(drawn.again)], drawn.again
        elif not found.expect(status == 0 and (out / "DONE").is_file(), f"interrupted: status {status}\n{job.text}"):
            return found
        else:
            return _look(out, found)
    job = _job(shards, drawn.learners, words)
    for learner_id, iteration, after_s in drawn.kills:
        stops = drawn.stopped and learner_id == drawn.kills[0][0]
        try:
            seen_s = job.wait_for("iteration " if drawn.again else f"iteration {iteration}/")
            time.sleep(after_s if drawn.again else max(0.0, seen_s + after_s - time.monotonic()))
            job.send(shards + 1 + learner_id, signal.SIGSTOP if stops else signal.SIGKILL)
        except (TimeoutError, ProcessLookupError, KeyError):
            if not job.over:
                found.failures.append(f"not killed: learner {learner_id}\n{job.text}")
            break  # it has come to its end before
        found.totals["stopped" if stops else "killed"] += 1
        found.totals["after a signal"] += bool(drawn.again)
    status = job.end(LIMIT_S)
    if not found.well(job, status, out, drawn):
        return found
    return _look(out, found)


def _job(shards: int, learners: int, words: list[str]) -> Job:
    return Job(shards + 1 + learners, words, ULFM)


def _look(out: Path, found: Found) -> Found:
    run = Run(out)
    found.balanced(run)
    portions = run.of_coordinator("portions")
    for outcome in Outcome:
        found.totals[f"portions {outcome.name.lower()}"] += int((portions["outcome"] == outcome).sum())
    found.totals["evaluations"] += int(portions["clock"].max()) + 1
    for kind in (Event.LOST, Event.STUCK):
        found.totals[kind.name.lower()] += int(((run.events["kind"] == kind) & (run.events["shard"] == 0)).sum())
    found.proved(out)
    found.totals["replayed"] += 1
    return found


if __name__ == "__main__":
    sys.exit(main("batch", "Learners of a batch optimisation, killed.", 20, execute, sys.argv[1:]))
