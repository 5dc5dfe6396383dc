"""A run that was interrupted and continued: one attempt after the other is computed again, through the seams between them.

At a seam each shard has the tensors of the checkpoint, which must be those that its log gives. Where shards are asynchronous they
may lack the other half of gradients that some of them had taken before it, when the job was killed before that came into a file:
then no log gives the slices of that clock, and the checkpoint's are taken as they are, which is said.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mpisgd.base.errors import CheckpointError, DataError
from mpisgd.data import DataSet
from mpisgd.job.parts import Brought
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
    """Result when all is computed; `diverged`: of each shard, whether something was not finite, and the run went on."""

    serial: Serial
    diverged: list[bool]


def through_attempts(record: Record, brought: Brought, data: DataSet, proof: Proof, kept: Kept, reach: Reach) -> Last:
    """Compute all attempts again; the arguments are those of `prove.replay`, what is found is in `proof`.

    Returns what there is at the end, of the last attempt that was come to.
    """
    until, at_first, told = reach
    diverged = [False]
    begun: Sequence[Tensors] = []
    before: Serial | None = None
    attempts: list[Record] = [*record.earlier, record]
    for attempt, following in zip(attempts, [*attempts[1:], None], strict=True):
        serial = _goes_on(attempt, before, brought, data, begun, proof)
        seam = None if following is None else following.start_clock
        here = until if until is not None and (seam is None or until < seam) else None
        recompute = Recompute(attempt, serial, proof, told, kept, seam)
        recompute.run(until=here, at_first=at_first)
        diverged = _diverged(attempt, serial, diverged, following)
        if following is None or here is not None or (at_first and proof.finding is not None):
            break
        begun = [_begun(record, following, shard, recompute.at_seam.get(shard), proof) for shard in range(len(attempt.shards))]
        before = serial
    return Last(serial, diverged)


def _goes_on(
    attempt: Record, before: Serial | None, brought: Brought, data: DataSet, begun: Sequence[Tensors], proof: Proof
) -> Serial:
    """An attempt as it begins: after another one, from slices that are cut anew where it has others, or other learners.

    Its model says which slices these are: that of the attempt before may have been cut elsewhere.
    """
    serial = Serial(attempt, brought, data, begun, None if before is None else before.bounds)
    if before is not None and (before.record.lambda_, before.bounds) != (attempt.lambda_, serial.bounds):
        proof.seams.append(
            f"attempt {attempt.attempt}: {before.record.lambda_} learners and {len(before.bounds)} shards before,"
            f" {attempt.lambda_} and {len(serial.bounds)} from here on"
        )
    return serial


def _diverged(attempt: Record, serial: Serial, before: Sequence[bool], following: Record | None) -> list[bool]:
    """Tell for each shard whether it had something that was not finite, and went on; up to the next attempt's checkpoint."""
    seam = math.inf if following is None else following.start_clock
    goes_on = attempt.config.nonfinite == "continue"
    begun = [any(before)] * len(attempt.shards) if attempt.recut or len(before) != len(attempt.shards) else before
    return [
        was or (goes_on and any(clock < seam for clock, _, _ in found)) for was, found in zip(begun, serial.nonfinite, strict=True)
    ]


def check_start(record: Record, shard: ShardRecord) -> None:
    """Raises Untrue where the rows that an attempt continues are not those of one clock."""
    start = shard.start
    if start.clock != record.start_clock:
        why = f"it continues clock {start.clock}, shard {record.shards[0].shard} continues clock {record.start_clock}"
        refuse(why, shard.shard, "updates")


def _begun(record: Record, following: Record, shard: int, computed: Tensors | None, proof: Proof) -> Tensors:
    """Give what a shard begins an attempt with.

    Raises DataError where its log does not give it, and its checkpoint is not there any more.
    """
    clock = following.start_clock
    try:
        kept = disk.read(disk.directory_of(record.path, clock)).tensors(shard)
    except CheckpointError as error:
        if computed is None:
            raise DataError(
                f"the log of shard {shard} does not lead to clock {clock}, and without its checkpoint: {error}"
            ) from error
        proof.seams.append(f"attempt {following.attempt}, shard {shard}: goes on at clock {clock}; {error}")
        return computed
    if computed is None:
        proof.seams.append(
            f"attempt {following.attempt}, shard {shard}: goes on at clock {clock} with the slice of the checkpoint: the logs of"
            " the attempt before were cut off too early to give it"
        )
        return kept
    other = [name for name in sorted({*kept, *computed}) if not _same(kept.get(name), computed.get(name))]
    if other and proof.finding is None and not proof.tolerance:
        why = f"attempt {following.attempt} begins with {', '.join(other)} of the checkpoint, which are not what its log gives"
        proof.finding = Finding(why, shard, "updates", clock=clock)
    proof.seams.append(f"attempt {following.attempt}, shard {shard}: goes on at clock {clock}")
    return kept


def _same(one: LogRows | None, other: LogRows | None) -> bool:
    return one is not None and other is not None and one.tobytes() == other.tobytes()
