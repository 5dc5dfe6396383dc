"""A continued run: its attempts computed one after another, through the seams between them.

At a seam each shard's tensors in the checkpoint must equal its log's. After a kill, asynchronous shards' logs may lack gradients
taken by other shards before the checkpoint: then the checkpoint's slices are taken, and `proof.seams` tells.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mpisgd.base.errors import CheckpointError, DataError
from mpisgd.data import DataSet
from mpisgd.job.parts import UserObjects
from mpisgd.records.checkpoint import checkpoint as disk
from mpisgd.records.log.schema import LogRows
from mpisgd.replay.checks.finding import Finding, refuse
from mpisgd.replay.checks.record import Record, ShardRecord
from mpisgd.replay.proof import Proof
from mpisgd.replay.recompute import Reach, Recompute
from mpisgd.replay.serial import Serial
from mpisgd.replay.snapshots import Kept

Tensors = Mapping[str, np.ndarray]


class Last(NamedTuple):
    """Result of all attempts; `diverged`: per shard, whether nonfinite values were met and the run continued."""

    serial: Serial
    diverged: list[bool]


def through_attempts(record: Record, user_objects: UserObjects, data: DataSet, proof: Proof, kept: Kept, reach: Reach) -> Last:
    """Compute attempts as in `prove.replay`, with findings in `proof`; return the last reached."""
    until, at_first, on_row = reach
    diverged = [False]
    begun: Sequence[Tensors] = []
    before: Serial | None = None
    attempts: list[Record] = [*record.earlier, record]
    for attempt, following in zip(attempts, [*attempts[1:], None], strict=True):
        serial = _goes_on(attempt, before, user_objects, data, begun, proof)
        seam = None if following is None else following.start_clock
        here = until if until is not None and (seam is None or until < seam) else None
        recompute = Recompute(attempt, serial, proof, on_row, kept, seam)
        recompute.run(until=here, at_first=at_first)
        diverged = _diverged(attempt, serial, diverged, following)
        if following is None or here is not None or (at_first and proof.finding is not None):
            break
        begun = [_begun(record, following, shard, recompute.at_seam.get(shard), proof) for shard in range(len(attempt.shards))]
        before = serial
    return Last(serial, diverged)


def _goes_on(
    attempt: Record, before: Serial | None, user_objects: UserObjects, data: DataSet, begun: Sequence[Tensors], proof: Proof
) -> Serial:
    """Begin an attempt, or continue another from its slices, cut anew if bounds differ."""
    serial = Serial(attempt, user_objects, data, begun, None if before is None else before.bounds)
    if before is not None and (before.record.lambda_, before.bounds) != (attempt.lambda_, serial.bounds):
        proof.seams.append(
            f"attempt {attempt.attempt}: {before.record.lambda_} learners and {len(before.bounds)} shards before,"
            f" {attempt.lambda_} and {len(serial.bounds)} from here on"
        )
    return serial


def _diverged(attempt: Record, serial: Serial, before: Sequence[bool], following: Record | None) -> list[bool]:
    seam = math.inf if following is None else following.start_clock
    goes_on = attempt.config.nonfinite == "continue"
    begun = [any(before)] * len(attempt.shards) if attempt.recut or len(before) != len(attempt.shards) else before
    return [
        was or (goes_on and any(clock < seam for clock, _, _ in found)) for was, found in zip(begun, serial.nonfinite, strict=True)
    ]


def check_start(record: Record, shard: ShardRecord) -> None:
    """Raise Untrue if shards continue from different clocks."""
    start = shard.start
    if start.clock != record.start_clock:
        why = f"this shard continues clock {start.clock}, shard {record.shards[0].shard} continues clock {record.start_clock}"
        refuse(why, shard.shard, "updates")


def _begun(record: Record, following: Record, shard: int, computed: Tensors | None, proof: Proof) -> Tensors:
    """Return a shard's tensors at an attempt's begin.

    Raises DataError: neither log nor checkpoint has the tensors.
    """
    clock = following.start_clock
    try:
        kept = disk.read(disk.directory_of(record.path, clock)).tensors(shard)
    except CheckpointError as error:
        if computed is None:
            raise DataError(
                f"the log of shard {shard} does not lead to clock {clock}, and no checkpoint gives the state: {error}"
            ) from error
        proof.seams.append(f"attempt {following.attempt}, shard {shard}: goes on at clock {clock}; {error}")
        return computed
    if computed is None:
        proof.seams.append(
            f"attempt {following.attempt}, shard {shard}: goes on at clock {clock} with the slice of the checkpoint: the logs of"
            " the attempt before end too early for this slice"
        )
        return kept
    other = [name for name in sorted({*kept, *computed}) if not _same(kept.get(name), computed.get(name))]
    if other and proof.finding is None and not proof.tolerance:
        why = f"attempt {following.attempt} begins with {', '.join(other)} of the checkpoint: the log before gives other values"
        proof.finding = Finding(why, shard, "updates", clock=clock)
    proof.seams.append(f"attempt {following.attempt}, shard {shard}: goes on at clock {clock}")
    return kept


def _same(one: LogRows | None, other: LogRows | None) -> bool:
    return one is not None and other is not None and one.tobytes() == other.tobytes()
