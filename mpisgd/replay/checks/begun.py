"""Begin of an attempt's log, from the rows before."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mpisgd.records.log import schema
from mpisgd.records.log.continuing import begins, continued
from mpisgd.records.log.schema import Event, LogRows, Verdict


@dataclass(frozen=True)
class Start:
    """Begin of a shard's log: clock 0, or the end of earlier attempts.

    Attributes:
        received: earlier pushes.
        next_seq: mini-batch after the last not rejected, per learner.
        since_s: end of the last update, or time of the checkpoint.
    """

    clock: int
    samples: int
    time_s: float
    received: int
    next_seq: list[int]
    since_s: float = 0.0


def begun(path: Path, lambda_: int, events: LogRows) -> Start:
    """Return the begin by earlier rows."""
    before = continued(path)[:-1]
    pushes, updates = (schema.joined(table, [each.rows(table) for each in before]) for table in ("pushes", "updates"))
    here = begins(path)
    first = here.next_seq or [0] * lambda_
    resumed_s = events["time_s"][events["kind"] == Event.RESUMED]
    return Start(
        clock=here.clock + len(updates),
        samples=int(updates["samples"][-1]) if len(updates) else here.samples,
        time_s=float(resumed_s[0]) if len(resumed_s) else 0.0,
        received=len(pushes),
        next_seq=[1 + seq for seq in _last_seq(pushes[pushes["verdict"] != Verdict.REJECT], first)],
        since_s=float(updates["time_s"][-1]) if len(updates) else here.time_s,
    )


def _last_seq(pushes: LogRows, first: list[int]) -> list[int]:
    return [int(pushes["seq"][pushes["learner_id"] == learner_id].max(initial=at - 1)) for learner_id, at in enumerate(first)]
