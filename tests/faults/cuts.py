"""All ranks of a job killed at random moments, again and again: it can always be gone on with, and nothing is lost or doubled.

`python -m tests.faults.cuts --count 20 --seed 1 --out results/faults` writes cuts.json there. Each of the 20 jobs is killed ten
times, and then finished. Before each kill the log is read; what stood in it must stand there afterwards, and up to
the checkpoint that the job goes on from, for ever. Synchronous jobs must end with the bits of the same job left alone.
"""

from __future__ import annotations

import random
import signal
import sys
import time
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from mpisgd.base.errors import MpisgdError
from mpisgd.job.interruption import newest
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Reason
from tests.faults.campaign import Found, configured, left_alone, main
from tests.faults.job import Job

KILLS = 10
"""Of one job."""
OVER_S = 1.0
LIMIT_S = 120.0
#: name -> (ranks, what differs from COMMON)
JOBS: dict[str, tuple[int, dict[str, Any]]] = {
    "hardsync, S = 2": (4, {"shards": 2, "optimizer": "adam", "alpha0": 0.002, "averaging": 0.9}),
    "allreduce": (3, {"protocol": "allreduce"}),
    "backup, b = 0": (3, {"protocol": {"name": "backup", "b": 0}, "optimizer": "adagrad"}),
    "softsync, S = 2": (5, {"protocol": {"name": "softsync", "n": 2}, "shards": 2}),
    "ssp": (4, {"protocol": {"name": "ssp", "slack": 1}}),
    "async, evaluator": (4, {"protocol": "async", "evaluator": True}),
}
SYNCHRONOUS = ("hardsync, S = 2", "allreduce", "backup, b = 0")
"""Whose bits are the same each time; backup's, because it waits for both of two learners."""
COMMON: dict[str, Any] = {
    "epochs": 14.0,
    "mu": 16,
    "alpha0": 0.02,
    "threads": 1,
    "straggler": {"delay": "constant", "delay_mean_s": 0.02},
    "evaluation": {"train": False, "every_epochs": 2.0},
    "log": {"progress": "plain", "progress_s": 0.1, "flush_s": 0.2},
    "checkpoint": {"every_updates": 5, "keep": 2},
}
TABLES = ("pushes", "updates")


def settings(name: str, out: Path) -> dict[str, Any]:
    return {**COMMON, **JOBS[name][1], "out": str(out)}


@cache
def whole(name: str) -> Path:
    """The same job left alone."""
    return left_alone(JOBS[name][0], partial(settings, name), LIMIT_S)


def rows(out: Path, name: str) -> dict[str, np.ndarray]:
    """The tables, each shard's rows in the order in which it wrote them."""
    run = Run(out)
    tables = {table: run.table(table).copy() for table in TABLES}
    tables["pushes"]["answer_s"] = 0  # is filled in later, when the learner has been answered
    return {table: array[np.argsort(array["shard"], kind="stable")] for table, array in tables.items()}


def within(part: np.ndarray, all_: np.ndarray, below: int) -> bool:
    """Whether each shard's rows with a clock up to `below` begin, as they stand in `part`, its rows in `all_`."""
    for shard in np.unique(part["shard"]):
        mine, there = part[part["shard"] == shard], all_[all_["shard"] == shard]
        mine = mine[mine["clock"] <= below]
        if mine.tobytes() != there[: len(mine)].tobytes():
            return False
    return True


def execute(generator: random.Random, directory: Path, number: int) -> Found:
    """One job, killed `KILLS` times, then finished."""
    name = list(JOBS)[number % len(JOBS)]
    found, out = Found([name]), directory / "run"
    words = [configured(directory, settings(name, out))]
    for _ in range(KILLS):
        before_s = time.monotonic()
        job = Job(JOBS[name][0], words)
        try:
            begun_s = job.wait_for("epoch ")
            while newest(out) is None:
                time.sleep(0.01)
            time.sleep(generator.uniform(0, OVER_S))
            before = rows(out, name)
            for rank in range(job.ranks):
                job.send(rank, signal.SIGKILL)
        except (TimeoutError, ProcessLookupError, MpisgdError) as error:
            found.failures.append(f"{type(error).__name__}: {error}")
            return found
        found.seconds["started_s"].append(begun_s - before_s)
        found.expect(job.end(10) not in (0, None) and job.left_s is not None, "the launcher says 0, or somebody is left")
        after, saved = rows(out, name), newest(out)
        found.totals["kills"] += 1
        for table in TABLES:
            found.expect(within(before[table], after[table], sys.maxsize), f"{table}: rows that were read before the kill are gone")
        found.totals["updates lost"] += int(after["updates"]["clock"].max(initial=0)) - (saved or 0)
        words = ["--resume", str(out)]
        earlier = (after, saved or 0)
    job = Job(JOBS[name][0], words)
    if not found.expect(job.end(LIMIT_S) == 0 and (out / schema.DONE).is_file(), f"not finished:\n{job.text}"):
        return found
    last = rows(out, name)
    for table in TABLES:
        found.expect(within(earlier[0][table], last[table], earlier[1] - (table == "pushes")), f"{table}: rows are lost or doubled")
    _look_at_the_whole(Run(out), found)
    found.proved(out)
    if name in SYNCHRONOUS:
        found.same_bits(out, whole(name))
    return found


def _look_at_the_whole(run: Run, found: Found) -> None:
    found.totals["jobs"] += 1
    found.balanced(run)
    for shard, summary in enumerate(run.summaries):
        updates = found.no_update_lost(run, shard, summary["final_clock"])
        # What another shard had not applied at the cut was computed again; a shard that had drops the second one, and says so.
        pushes = run.pushes[(run.pushes["shard"] == shard) & (run.pushes["reason"] != Reason.REPEATED)]
        found.totals["repeated"] += int(
            np.count_nonzero((run.pushes["shard"] == shard) & (run.pushes["reason"] == Reason.REPEATED))
        )
        for learner_id in range(run.lambda_):
            mine = pushes["seq"][pushes["learner_id"] == learner_id].tolist()
            found.expect(mine == list(range(len(mine))), f"shard {shard}, learner {learner_id}: pushes are lost or doubled")
        found.totals["updates"] += updates
    found.expect(len(run.environment["attempts"]) == KILLS + 1, "the run does not know of each time")


if __name__ == "__main__":
    sys.exit(main("cuts", "All ranks killed at random moments, and gone on with.", 20, execute, sys.argv[1:]))
