"""The files that a rank writes into the run's directory: those of this attempt, which go on from the checkpoint's."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from mpisgd.job.building.setup import Setup
from mpisgd.job.building.world import World
from mpisgd.records.checkpoint.checkpoints import Checkpoints
from mpisgd.records.log import schema
from mpisgd.records.log.bounded import open_tables
from mpisgd.records.log.progress import Progress
from mpisgd.records.log.reader import counted, evaluated
from mpisgd.records.log.writer import EvaluatorLog, ShardLog, TableFile
from mpisgd.records.shard_records import ShardRecords


def shard_records(setup: Setup, world: World, rank: int, update: Any) -> ShardRecords:
    """All that a shard writes to; `world` closes the log, and who made this the snapshots."""
    config, shard = setup.config, setup.roles.index(rank)
    account = setup.account(shard)
    snapshots = world.snapshots(setup.spool(shard), update, () if account is None else account.snapshots)
    rows = [] if account is None else account.rows
    counts = [] if account is None else account.counts
    if account is not None and config.log.max_bytes and not counts:  # it had no bound before: its rows are all there to count
        counts = counted(setup.path, shard, rows)
    file = _open(setup, schema.shard_file(shard, setup.attempt), shard, rows, counts)
    mode = config.log.progress if shard == 0 and world.shows_progress else "off"
    progress = Progress(mode, config.epochs, config.log.progress_s)
    world.closing.callback(progress.close)
    world.closing.callback(file.close)  # after a failure too: the last rows are what one wants to see then
    checkpoints = _checkpoints(setup, world, rank, update, rows) if world.saves else None
    return ShardRecords(ShardLog(file, shard), progress, snapshots, checkpoints)


def _checkpoints(setup: Setup, world: World, rank: int, update: Any, rows: list[list[int]]) -> Checkpoints:
    """What writes a shard's checkpoints, after these rows of the log: if nothing else, a signal asks for one."""
    config, shard = setup.config, setup.roles.index(rank)
    log = [setup.path / schema.shard_file(shard, setup.attempt)] if config.log.enabled else []
    return Checkpoints(
        setup.path,
        config.checkpoint,
        update,
        shard,
        bounds=setup.bounds[shard],
        shards=config.shards,
        learners=setup.roles.lambda_,
        model=setup.fingerprint,
        attempt=setup.attempt,
        continues=rows,
        pinned=() if setup.resumption is None else setup.resumption.pinned,
        beside=[*log, setup.spool(shard)],
        complain=functools.partial(world.warn, rank),
    )


def evaluator_log(setup: Setup, world: World, rank: int) -> tuple[int, EvaluatorLog]:
    """The first snapshot that is to be evaluated, and the log, which goes on after the rows of those before."""
    config, resumption = setup.config, setup.resumption
    first, before = 0, list[list[int]]()
    if resumption is not None and config.log.enabled:
        snapshots = min(len(part.account.snapshots) for part in resumption.checkpoint.parts)
        rows_each = (2 if config.averaging > 0 else 1) * (2 if config.evaluation.train else 1)
        warn = functools.partial(world.warn, rank)
        first, before = evaluated(setup.path, resumption.checkpoint.attempts, snapshots, rows_each, warn)
    # One who died has left it; who follows evaluates all again.
    file = _open(setup, schema.evaluator_file(setup.attempt), -1, before, instead=world.tolerance.tolerant)
    return first, EvaluatorLog(file)


def _open(
    setup: Setup, name: str, shard: int, before: list[list[int]], counts: Sequence[int] = (), *, instead: bool = False
) -> TableFile:
    """A log file of this attempt, which continues the rows before, and these counts; -1 is the evaluator's."""
    log = setup.config.log
    return open_tables(
        setup.path / name if log.enabled else None,
        max_bytes=log.max_bytes if shard >= 0 else 0,
        counts=counts,
        shard=shard,
        flush_rows=log.flush_rows,
        flush_s=log.flush_s,
        attributes={} if setup.resumption is None else setup.resumption.attributes(before),
        instead=instead,
    )
