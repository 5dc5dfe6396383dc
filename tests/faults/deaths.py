"""A shard is killed, or the user's code raises on some rank: the job goes on or ends as it has promised, and nobody is left.

`python -m tests.faults.deaths --count 40 --seed 1 --out results/faults` writes deaths.json there. Every second run is a shard's
death, the others are exceptions: in the model, on any rank, before the first message; or in the loss, on a learner in the middle of
the training, on the evaluator at its next snapshot. Half of each are fault-tolerant runs, in which an exception on a learner or the
evaluator in mid-training costs that rank alone; all else ends the job.
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

import numpy as np

from mpisgd.job.interruption import newest
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Event
from tests.faults.campaign import Found, configured, main
from tests.faults.job import ULFM, Job
from tests.faults.kills import PROTOCOLS

EVERY = 5
GONE_S = 10.0
LIMIT_S = 150.0
MESSAGE = "ValueError: the user has a bug"
USER = """
import os, pathlib, torch

def fails(where):
    here = os.environ["OMPI_COMM_WORLD_RANK"] == os.environ["FAIL_RANK"] and os.environ["FAIL_WHERE"] == where
    return here and pathlib.Path(os.environ["FAIL_WHEN"]).exists()

def model():
    if fails("model"):
        raise ValueError("the user has a bug")
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 100), torch.nn.ReLU(), torch.nn.Linear(100, 10))

def loss(output, target):
    if fails("loss"):
        raise ValueError("the user has a bug")
    return torch.nn.functional.cross_entropy(output, target)
"""


@dataclass(frozen=True)
class Draw:
    """What is run: shard s is rank s, learner l rank shards + l, and the evaluator, where there is one, the last."""

    tolerant: bool
    protocol: str
    shards: int
    ranks: int
    evaluator: bool

    def settings(self, out: Path, epochs: float) -> dict[str, Any]:
        return {
            "out": str(out),
            "protocol": {"name": self.protocol, **PROTOCOLS[self.protocol]},
            "model": "user:model",
            "loss": "user:loss",
            "shards": self.shards,
            "evaluator": self.evaluator,
            "epochs": epochs,
            "mu": 16,
            "alpha0": 0.02,
            "threads": 1,
            "straggler": {"delay": "exponential", "delay_mean_s": 0.02},
            "evaluation": {"train": False, "every_epochs": 1.0},
            "checkpoint": {"every_updates": EVERY},
            "log": {"progress": "plain", "progress_s": 0.1, "flush_s": 0.2},
        }

    def job(self, directory: Path, epochs: float, fails: tuple[int, str]) -> Job:
        """Under way; the user's code raises on this rank, at this place, once there is a file `now`."""
        told = {"FAIL_RANK": str(fails[0]), "FAIL_WHERE": fails[1], "FAIL_WHEN": str(directory / "now")}
        path = os.pathsep.join([str(directory), *filter(None, [os.environ.get("PYTHONPATH")])])
        words = [configured(directory, self.settings(directory / "run", epochs))]
        return Job(self.ranks, words, ULFM if self.tolerant else [], PYTHONPATH=path, **told)


def draw(generator: random.Random) -> Draw:
    tolerant, protocol, shards = generator.random() < 0.5, generator.choice(list(PROTOCOLS)), generator.choice((1, 2))
    ranks, evaluator = generator.randint(4, 7), generator.random() < 0.3
    ranks += shards + evaluator == ranks - 1  # at least two learners
    return Draw(tolerant, protocol, shards, ranks, evaluator)


def execute(generator: random.Random, directory: Path, number: int) -> Found:
    drawn = draw(generator)
    mode = "fault-tolerant" if drawn.tolerant else "fail-fast"
    found = Found([mode, drawn.protocol, f"S = {drawn.shards}", f"{drawn.ranks} ranks"])
    (directory / "user.py").write_text(USER)
    (_exception if number % 2 else _shard)(generator, directory, drawn, found)
    return found


def _ended(job: Job, out: Path, since_s: float, what: str, found: Found) -> None:
    """It must have ended with a status that is not 0 and without DONE, and nobody may be left, in ten seconds."""
    status = job.end(GONE_S)
    found.seconds[f"{what}: until all are gone"].append(time.monotonic() - since_s)
    found.expect(status not in (0, None), f"status {status}\n{job.text}")
    found.expect(job.left_s is not None and time.monotonic() - since_s < GONE_S, f"somebody was left after {GONE_S} s\n{job.text}")
    found.expect(not (out / "DONE").exists(), "there is a DONE")


def _shard(generator: random.Random, directory: Path, drawn: Draw, found: Found) -> None:
    shard, out = generator.randrange(drawn.shards), directory / "run"
    found.kinds.append("a shard's death")
    job = drawn.job(directory, 10_000.0, (-1, ""))
    try:
        job.wait_for("epoch ")
        time.sleep(generator.uniform(0.2, 1.5))
        killed_s = job.send(shard, signal.SIGKILL)
    except (TimeoutError, ProcessLookupError) as error:
        found.failures.append(f"not killed: {error}")
        return
    found.totals["killed: training / shard"] += 1
    _ended(job, out, killed_s, "a shard's death", found)
    saved = newest(out)
    if drawn.tolerant:
        found.expect(f"(shard {shard}) is lost" in job.text, f"shard {shard} is not named\n{job.text}")
        found.expect(f"to go on from the checkpoint of clock {saved:,} (" in job.text, f"the way on is not told\n{job.text}")
    else:
        found.expect(f"rank {shard} " in job.text, f"the launcher does not name rank {shard}\n{job.text}")
    if found.expect(saved is not None, "no checkpoint"):
        found.totals["updates lost"] += max(0, int(Run(out).updates["clock"].max(initial=0)) - (saved or 0))


def _exception(generator: random.Random, directory: Path, drawn: Draw, found: Found) -> None:
    rank, out = generator.randrange(drawn.ranks), directory / "run"
    where = "loss" if rank >= drawn.shards and generator.random() < 0.75 else "model"
    goes_on = drawn.tolerant and where == "loss"
    found.kinds.append(f"an exception in the {where}, {'goes on' if goes_on else 'ends'}")
    if where == "model":
        (directory / "now").touch()
    job = drawn.job(directory, 6.0 if goes_on else 10_000.0, (rank, where))
    try:
        if where == "loss":
            job.wait_for("epoch ")
            time.sleep(generator.uniform(0.2, 1.0))
            (directory / "now").touch()
        raised_s = job.wait_for(MESSAGE, 60)
    except TimeoutError as error:
        found.failures.append(f"nothing was raised: {error}")
        return
    what = f"an exception in the {where}"
    if not goes_on:
        _ended(job, out, raised_s, what, found)
        return
    status = job.end(LIMIT_S)
    if not found.well(job, status, out):
        return
    run = Run(out)
    found.balanced(run)
    is_learner = rank < drawn.ranks - drawn.evaluator
    lost = run.events[run.events["kind"] == Event.LOST]
    expected = [rank - drawn.shards] * drawn.shards if is_learner else []
    found.expect(
        lost["learner_id"].tolist() == expected, f"lost are {lost['learner_id'].tolist()}, expected {expected}\n{job.text}"
    )
    found.expect(len(run.evaluations) > 0 and bool(np.all(run.evaluations["error"] <= 1)), "nobody has evaluated")
    if is_learner:
        at = [at for at, line in job.lines if f"learner {rank - drawn.shards} is lost" in line]
        found.seconds["an exception: until the shards know"].append(max(at) - raised_s)


if __name__ == "__main__":
    sys.exit(main("deaths", "A shard's death, or an exception in the user's code.", 40, execute, sys.argv[1:]))
