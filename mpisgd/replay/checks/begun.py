"""Where the log of one attempt begins: what the rows before it come to."""

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
    """Begin of a shard's log: at clock 0, or, where an attempt continues another, after the rows that come before.

    Attributes:
        time_s: when it began.
        received: pushes before.
        applied_seq: per learner, the last mini-batch that was applied before; -1 = none.
        next_seq: per learner, the one after the last that this shard has not rejected.
        since_s: when the last update before was done, or, of slices that were cut anew, the checkpoint was taken.
        portions: those that were applied before, where they are dealt.
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
    """How a shard's log begins: by the rows before, not the checkpoint, so that the log alone says how the run went on."""
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
    """Those that were applied; none where learners draw by themselves."""
    if "portion" not in (pushes.dtype.names or ()):
        return []
    applied: list[int] = pushes["portion"][pushes["verdict"] == Verdict.APPLY].tolist()
    return applied


def _dealt_before(path: Path) -> list[int]:
    """The portions that shard 0 had applied before the layout that this file is of: so all shards of it go on."""
    here = begins(path)
    if not here.before:
        return []
    last = max(attempt for shard, attempt, _ in here.before if shard == 0)
    pushes = schema.joined("pushes", [each.rows("pushes") for each in here.rows_before(path.parent)[0]])
    return [*_dealt_before(path.with_name(schema.shard_file(0, last))), *_portions(pushes)]


def _last_seq(pushes: LogRows, first: list[int]) -> list[int]:
    """Per learner the largest seq, or that before its first."""
    return [int(pushes["seq"][pushes["learner_id"] == learner_id].max(initial=at - 1)) for learner_id, at in enumerate(first)]
