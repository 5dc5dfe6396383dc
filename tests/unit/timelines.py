"""Logs whose timelines are known."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpisgd.analysis.timeline import Timeline
from mpisgd.records.log.reader import Run
from tests.unit import fabricate
from tests.unit.fabricate import Log, row, rows

SOFTSYNC = {"name": "softsync", "n": 1}
PROTOCOLS = [("hardsync", 5), ("softsync", 2), ("backup", 4)]


def make(path: Path, log: Log, learners: int, **options: Any) -> Run:
    return Run(fabricate.write_run(path / "run", log, options.pop("protocol", SOFTSYNC), learners, **options))


def by_hand() -> Log:
    """One learner, one shard. In truth: prepares until 0.1 s, waits until 0.3, pulls until 0.4, computes until 1.4, is delayed
    until 1.9, pushes until 2.2, prepares until 2.25, waits until 2.4, pulls until 2.5, computes until 3.5, pushes."""
    first = {"arrival_s": 2.0, "answer_s": 2.4, "wait_s": 0.2, "pull_s": 0.1, "compute_s": 1.0, "delay_s": 0.5, "loss": np.nan}
    second = {"arrival_s": 3.6, "push_s": 0.3, "wait_s": 0.15, "pull_s": 0.1, "compute_s": 1.0, "seq": 1, "loss": 0.5}
    return Log(
        pushes=rows("pushes", [row("pushes", **first), row("pushes", **second, clock=1, timestamp=1)]),
        updates=rows("updates", [row("updates", clock=1, gradients=1, samples=4, time_s=2.3, update_s=0.05, mean_loss=np.nan)]),
    )


def true_log(seed: int, learners: int = 3, shards: int = 2, pushes: int = 30) -> tuple[Log, np.ndarray, np.ndarray]:
    """A log whose truth is known: (log, begin of each push, its end), the latter two (learners, pushes) in seconds.

    Pushes queue for long or not at all, answers take their time to arrive, and the learner does things that no row tells of.
    """
    random = np.random.default_rng(seed)
    some = [0.0, 1e-6, 1e-3, 0.02]

    def take() -> float:
        return float(random.choice(some) * random.random())

    begin, end = np.zeros((learners, pushes)), np.zeros((learners, pushes))
    table: list[np.ndarray] = []
    for learner_id in range(learners):
        now, push = 0.0, 0.0
        for at in range(pushes):
            now += take()
            asked = now
            answers = [asked + take() for _ in range(shards)]
            for old, moment in zip(table[len(table) - shards :] if at else [], answers, strict=False):
                old["answer_s"] = moment
            began = answers[0] + take()
            ended = max([began, *answers]) + take()
            compute, delay = 0.01 + take(), take()
            begin[learner_id, at] = ended + compute + delay
            arrivals = [begin[learner_id, at] + take() for _ in range(shards)]
            told = {"learner_id": learner_id, "seq": at, "wait_s": began - asked, "pull_s": ended - began, "push_s": push}
            for shard, arrival_s in enumerate(arrivals):
                more = {"shard": shard, "arrival_s": arrival_s, "compute_s": compute, "delay_s": delay}
                table.append(row("pushes", **told, **more))
            now = end[learner_id, at] = max(arrivals) + take()
            push = now - begin[learner_id, at]
    log = rows("pushes", table)
    return Log(pushes=log[np.argsort(log["arrival_s"], kind="stable")]), begin, end


def overlaps(spans: Sequence[tuple[int, int]]) -> list[Any]:
    ordered = sorted(spans)
    return [(one, other) for one, other in itertools.pairwise(ordered) if one[1] > other[0] or one[0] > one[1]]


def of(found: Timeline, learner_id: int) -> np.ndarray:
    edges: np.ndarray = found.cycles.edges[found.cycles.learner_id == learner_id]
    return edges


def evaluated(log: Log) -> Log:
    """Two snapshots, of 0 and 1 s, each evaluated on test and training data in 0.7 s."""
    log.evaluations = rows(
        "evaluations",
        [row("evaluations", snapshot=at, taken_s=at, train=train, evaluate_s=0.7, error=0.5) for at in (0, 1) for train in (0, 1)],
    )
    return log
