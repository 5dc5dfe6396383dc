"""Begin of an attempt's log, from the rows before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpisgd.records.log import schema
from mpisgd.records.log.layouts import begins
from mpisgd.records.log.rank_file import continued
from mpisgd.records.log.schema import Event, LogRows, Verdict


@dataclass(frozen=True)
class Start:
    """Begin of a shard's log: clock 0, or the end of earlier attempts.

    Attributes:
        received: earlier pushes.
        applied_seq: last mini-batch applied, per learner; -1 = none.
        next_seq: mini-batch after the last not rejected, per learner.
        since_s: end of the last update, or time of the checkpoint.
    """

    clock: int
    samples: int
    time_s: float
    received: int
    applied_seq: list[int]
    next_seq: list[int]
    since_s: float = 0.0
    portions: Sequence[int] = ()


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
        applied_seq=_last_seq(pushes[pushes["verdict"] == Verdict.APPLY], first),
        next_seq=[1 + seq for seq in _last_seq(pushes[pushes["verdict"] != Verdict.REJECT], first)],
        since_s=float(updates["time_s"][-1]) if len(updates) else here.time_s,
        portions=[*_dealt_before(path), *_portions(pushes)],
    )


def _portions(pushes: LogRows) -> list[int]:
    if "portion" not in (pushes.dtype.names or ()):
        return []
    applied: list[int] = pushes["portion"][pushes["verdict"] == Verdict.APPLY].tolist()
    return applied


def _dealt_before(path: Path) -> list[int]:
    """Return portions applied by shard 0 in earlier layouts, for all shards here."""
    here = begins(path)
    if not here.before:
        return []
    last = max(attempt for shard, attempt, _ in here.before if shard == 0)
    pushes = schema.joined("pushes", [each.rows("pushes") for each in here.rows_before(path.parent)[0]])
    return [*_dealt_before(path.with_name(schema.shard_file(0, last))), *_portions(pushes)]


def _last_seq(pushes: LogRows, first: list[int]) -> list[int]:
    return [int(pushes["seq"][pushes["learner_id"] == learner_id].max(initial=at - 1)) for learner_id, at in enumerate(first)]
