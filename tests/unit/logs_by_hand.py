"""Two tiny logs whose every number can be checked with a pencil."""

from __future__ import annotations

import numpy as np

from mpisgd.records.log.schema import Reason, Verdict
from tests.unit.fabricate import Log, row, rows

#: n = 1, λ = 2, c = 2: (learner_id, seq, timestamp, clock, arrival_s); all applied but the last two.
SOFTSYNC = [
    (0, 0, 0, 0, 1.0),
    (1, 0, 0, 0, 2.0),
    (0, 1, 0, 1, 3.0),
    (0, 2, 1, 1, 4.0),
    (0, 3, 1, 2, 5.0),
    (0, 4, 2, 2, 6.0),
    (1, 1, 0, 3, 7.0),
    (0, 5, 3, 3, 8.0),
    (0, 6, 4, 4, 9.0),  # summed, but its update never came
    (1, 2, 3, 4, 10.0),  # late
]


def softsync(shards: int = 1) -> Log:
    """Updates 0.05 s after the arrival that completes them, answers 0.1 s after each arrival but the last two."""
    pushes, updates = [], []
    for shard in range(shards):
        for at, (learner_id, seq, timestamp, clock, arrival_s) in enumerate(SOFTSYNC):
            late = at == len(SOFTSYNC) - 1
            pushes.append(
                row(
                    "pushes",
                    shard=shard,
                    learner_id=learner_id,
                    seq=seq,
                    timestamp=timestamp,
                    clock=clock,
                    arrival_s=arrival_s,
                    answer_s=arrival_s + 0.1 if at < 8 else float("nan"),
                    verdict=Verdict.LATE if late else Verdict.APPLY,
                    reason=Reason.FINISHED if late else Reason.NONE,
                    compute_s=0.5 + learner_id,
                    delay_s=0.125,
                    push_s=0.0 if seq == 0 else 0.01,
                    wait_s=0.02,
                    pull_s=0.03,
                )
            )
        for clock, time_s in enumerate((2.05, 4.05, 6.05, 8.05), start=1):
            updates.append(row("updates", shard=shard, clock=clock, gradients=2, samples=8 * clock, time_s=time_s, update_s=0.25))
    return Log(pushes=rows("pushes", pushes), updates=rows("updates", updates))


#: N = 2, b = 1, λ = 3: (learner_id, seq, timestamp, clock, arrival_s, verdict).
BACKUP = [
    (0, 0, 0, 0, 1.0, Verdict.APPLY),
    (1, 0, 0, 0, 2.0, Verdict.APPLY),
    (2, 0, 0, 1, 3.0, Verdict.DROP),
    (1, 1, 1, 1, 3.5, Verdict.APPLY),
    (0, 1, 1, 1, 4.0, Verdict.APPLY),
    (2, 1, 1, 2, 5.5, Verdict.LATE),
]


def backup() -> Log:
    """Update 1 at 2.5 s, update 2 at 4.5 s."""
    pushes = [
        row("pushes", learner_id=learner_id, seq=seq, timestamp=timestamp, clock=clock, arrival_s=arrival_s, verdict=verdict)
        for learner_id, seq, timestamp, clock, arrival_s, verdict in BACKUP
    ]
    updates = [
        row("updates", clock=1, gradients=2, samples=8, time_s=2.5, update_s=0.1),
        row("updates", clock=2, gradients=2, samples=16, time_s=4.5, update_s=0.1),
    ]
    return Log(pushes=rows("pushes", pushes), updates=rows("updates", updates))


def evaluation(snapshot: int, epochs: float, error: float, averaged: bool = False, train: bool = False) -> np.ndarray:
    """One row of `evaluations`: taken after 10 s per epoch, loss = 2 error."""
    return row(
        "evaluations",
        snapshot=snapshot,
        epochs=epochs,
        taken_s=10 * epochs,
        error=error,
        loss=2 * error,
        averaged=averaged,
        train=train,
    )
