"""Begin of an attempt: the attempt before, run again, to its checkpoint.

A killed run's logs may lead to some slices only: the checkpoint gives the others; `proof.seams` tells.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from mpisgd.base.errors import CheckpointError, DataError
from mpisgd.job.resume import Resumption
from mpisgd.records.checkpoint import checkpoint as disk
from mpisgd.records.checkpoint.checkpoint import Account, Checkpoint, Part
from mpisgd.records.log import schema
from mpisgd.records.log.rank_file import read_tables
from mpisgd.replay.checks.finding import refuse
from mpisgd.replay.checks.proof import Proof
from mpisgd.replay.checks.record import Record

_OF_THE_MACHINE = ("rows", "now_s", "snapshots")
"""Fields of an account that no run has again."""


def resumption(before: Record, following: Record, path: Path, proof: Proof, unmade: set[int]) -> Resumption:
    """Return the resumption of a following attempt; `path`: of attempts before, run again.

    Snapshots without all slices are added to `unmade`. Raises Untrue; DataError: neither log nor checkpoint has a slice.
    """
    clock = following.start_clock
    directory, kept = disk.directory_of(path, clock), _kept(before.path, clock)
    sizes = [f"{each.lambda_} learners and {len(each.shards)} shards" for each in (before, following)]
    if following.recut:
        proof.seams.append(f"attempt {following.attempt}: {sizes[0]} before, {sizes[1]} from here on")
    for shard in range(len(before.shards)):
        text = f"attempt {following.attempt}, shard {shard}: goes on at clock {clock}"
        part = _made(directory, shard)
        if part is None:
            if isinstance(kept, CheckpointError):
                why = f"the log of shard {shard} does not lead to clock {clock}, and no checkpoint gives the state: {kept}"
                raise DataError(why) from kept
            unmade |= _take(kept, shard, path, before)
            text += " with the slice of the checkpoint: the logs of the attempt before end too early for this slice"
        elif isinstance(kept, CheckpointError):
            text += f"; {kept}"
        elif not proof.tolerance:
            _compare(part, directory / disk.part_file(shard), kept, following.attempt)
        proof.seams.append(text)
    disk.seal(directory, clock, len(before.shards), before.attempt)
    for learner_id in range(following.lambda_):
        _hand_on(following, path, learner_id)
    entries = [each for each in before.run.environment.get("attempts", []) if each["attempt"] <= before.attempt]
    checkpoint = disk.read(directory)
    for shard, log in enumerate(() if following.recut else following.shards):
        received, said = checkpoint.parts[shard].account.received, log.start.received
        if received != said and not following.recut:
            refuse(f"attempt {following.attempt} continues {said} pushes, the checkpoint {received}", shard, "pushes", clock=clock)
    return Resumption(following.attempt, checkpoint, entries, [])


def _hand_on(following: Record, path: Path, learner_id: int) -> None:
    """Let a learner begin with the run's own state beside parameters."""
    for each in path.glob(f"{schema.SPOOL}learner-{learner_id}.*"):
        each.unlink()
    name = schema.learner_file(learner_id, following.attempt)
    if (following.path / name).is_file():
        shutil.copy(following.path / name, path / name)


def _kept(run: Path, clock: int) -> Checkpoint | CheckpointError:
    """Return the run's checkpoint, or why it cannot be read."""
    try:
        kept = disk.read(disk.directory_of(run, clock))
        for shard in range(len(kept.parts)):
            kept.tensors(shard)
    except CheckpointError as error:
        return error
    return kept


def _made(directory: Path, shard: int) -> Part | None:
    """Return a part of the run again, if the shard came so far."""
    try:
        return disk.read_part(directory, shard)
    except CheckpointError:
        return None


def _compare(part: Part, path: Path, kept: Checkpoint, attempt: int) -> None:
    """Raise Untrue if the run's checkpoint has another state than the run again."""
    shard, ours, theirs = part.account.shard, part.tensors(path), kept.tensors(part.account.shard)
    told, found = part.account, kept.parts[shard].account
    fields = [item.name for item in dataclasses.fields(Account) if item.name not in _OF_THE_MACHINE]
    other = [name for name in fields if getattr(told, name) != getattr(found, name)]
    other += [name for name in sorted({*ours, *theirs}) if not _same(ours.get(name), theirs.get(name))]
    if other:
        why = f"attempt {attempt} begins with {', '.join(other)} of the checkpoint: the log before gives other values"
        refuse(why, shard, "updates", clock=kept.clock)


def _same(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    return one is not None and other is not None and one.tobytes() == other.tobytes()


def _take(kept: Checkpoint, shard: int, path: Path, before: Record) -> set[int]:
    """Take a part of the run's checkpoint; return unmade snapshots, now zeros."""
    directory, part = disk.directory_of(path, kept.clock), kept.parts[shard]
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copy(kept.path / disk.part_file(shard), directory / disk.part_file(shard))
    made = map(len, read_tables(path / schema.shard_file(shard, before.attempt), list(schema.TABLES)))
    first, (_, *said) = part.account.rows[0][0], part.account.rows[-1]
    rows = [*part.account.rows[:-1], [before.attempt, *map(min, said, made)]]
    (start, end), snapshots = part.account.bounds, part.account.snapshots
    nbytes = 4 * (end - start) * (2 if before.config.averaging > 0 else 1)
    with (path / schema.spool_file(shard, first)).open("ab") as spool:
        there = spool.tell() // nbytes
        spool.truncate(max(spool.tell(), len(snapshots) * nbytes))
    summed = [(*each[:3], each[3] if number < there else -1) for number, each in enumerate(snapshots)]
    account = dataclasses.replace(part.account, rows=rows, snapshots=summed)
    told: dict[str, Any] = {"account": dataclasses.asdict(account), "nbytes": part.nbytes, disk.CRC: part.crc32}
    head = {"schema_version": schema.SCHEMA_VERSION, "attempt": before.attempt, "learners": kept.learners, "model": kept.model}
    disk.write_json(directory / disk.account_file(shard), {**head, "part": told})
    return set(range(there, len(snapshots)))
