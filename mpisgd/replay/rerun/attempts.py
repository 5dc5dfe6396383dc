"""A run made again: its loops, on virtual ranks, with messages in the order of the log.

All rows and weights are compared but for seconds. Behind the end of a killed run's log, a shard takes nothing.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mpisgd.base import durable
from mpisgd.config import CheckpointOptions, Config
from mpisgd.config.config_virtual import ConstantComputeOptions, FailureOptions, NetworkOptions
from mpisgd.job.parts import UserObjects
from mpisgd.records.log import schema
from mpisgd.records.log.rank_file import read_summary, read_tables
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Event, LogRows
from mpisgd.replay.checks.environment import check_attempts, compare
from mpisgd.replay.checks.finding import Untrue, refuse
from mpisgd.replay.checks.proof import Proof, Waypoint
from mpisgd.replay.checks.record import Record, Row
from mpisgd.replay.rerun.compare import as_before, compare_rows, count_losses
from mpisgd.replay.rerun.evaluations import Told, why_not
from mpisgd.replay.rerun.job import Again, Stretch
from mpisgd.replay.rerun.results import compare_best, compare_diverged, compare_weights
from mpisgd.replay.rerun.seam import resumption
from mpisgd.replay.rerun.world import TensorLogWorld
from mpisgd.simulate.world import VirtualWorld

OnRow = Callable[[int, Row, float], None]
OnPush = Callable[[int, int], None]


class Reach(NamedTuple):
    """Extent of a rerun.

    Attributes:
        until: clock of all shards at which to stop; -1 = none.
        on_row: called with each row number, row, and loss, shard by shard.
        on_push: called in the rerun's order, with shard and row number.
    """

    until: int = -1
    on_row: OnRow = lambda number, row, loss: None
    on_push: OnPush = lambda shard, row: None


def run_again(record: Record, user_objects: UserObjects, proof: Proof, reach: Reach = Reach()) -> None:  # noqa: B008 - frozen
    """Make a run again, attempt by attempt; the first disagreement goes into `proof`.

    Raises ConfigError, DataError: parts cannot be made, or have other sizes; weights cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="mpisgd-replay-") as made, durable.thrown_away():
        path, begun, unmade, taken_s = Path(made) / "run", None, set[int](), dict[int, float]()
        attempts = [*record.earlier, record]
        with _noting(proof):
            for attempt, following in zip(attempts, [*attempts[1:], None], strict=True):
                seam = -1 if following is None else following.start_clock
                stops = reach.until >= 0 and (seam < 0 or reach.until < seam)
                told = Told(record, attempt, proof, unmade, taken_s)
                stretch = Stretch(attempt, told, begun, reach.until if stops else seam, stops, reach.on_push, proof.on_gpu)
                job = Again(stretch, _config(stretch, path, proof.threads), user_objects)
                _look_at(record, attempt, job, proof)
                try:
                    job.do()
                finally:  # where the order leads nowhere, earlier rows may say why
                    with _noting(proof):
                        _compare_shards(stretch, path, proof, reach.on_row, part=stops or not job.ended)
                with _noting(proof):
                    told.compare()
                if stops:
                    proof.waypoints += _waypoints(stretch, path, job.world, proof.clocks)
                    return
                if following is not None:
                    if proof.finding is not None:
                        return
                    begun = resumption(attempt, following, path, proof, unmade)
            if record.computed:
                told_anew = 0 if begun is None or not record.recut else len(begun.checkpoint.parts[0].account.snapshots)
                with _noting(proof):
                    _compare_evaluations(record, path, unmade, told_anew, part=not job.ended)
                _compare_results(record, path, job, proof)
        proof.seams += [f"snapshot {number} cannot be evaluated again: the logs do not lead to all slices" for number in unmade]


@contextmanager
def _noting(proof: Proof) -> Iterator[None]:
    try:
        yield
    except Untrue as untrue:
        proof.find(untrue.finding)


def _look_at(record: Record, attempt: Record, job: Again, proof: Proof) -> None:
    tensors = job.world.tensors
    if attempt.attempt == 0 and tensors is not None and (why := why_not(record, tensors.model.module)):
        proof.which = "none"
        proof.seams.append(f"not evaluated again: {why}")
    proof.parameters = job.world.parameters
    if job.roles.lambda_ != attempt.lambda_:
        refuse(f"{job.roles.lambda_} learners, expected {attempt.lambda_} by [environment]", -1, schema.CONFIG)
    if attempt is record:
        compare(record, {"teams": [], "groups": [], "stages": [], **job.environment()})
        check_attempts(record)


def _config(stretch: Stretch, path: Path, threads: int) -> Config:
    """Return the configuration of a job of virtual ranks without costs."""
    record, config = stretch.record, stretch.record.config
    return dataclasses.replace(
        config,
        out=str(path),
        overwrite=False,
        threads=threads,
        device=config.device if stretch.on_gpu else "cpu",
        shard_device="cpu",  # `TensorLogWorld` knows
        pipeline=config.pipeline if config.in_groups else "gpipe",
        log=dataclasses.replace(config.log, enabled=True, progress="off"),
        virtual=dataclasses.replace(config.virtual, learners=record.ranks if config.in_teams else record.lambda_, batched=False),
        checkpoint=CheckpointOptions(every_updates=max(0, stretch.seam), keep=2 + len(record.earlier)),
        network=NetworkOptions(),
        compute=ConstantComputeOptions(0.0),
        failures=FailureOptions(then="leave"),
    )


def _compare_shards(stretch: Stretch, path: Path, proof: Proof, on_row: OnRow, *, part: bool) -> None:
    """Find the first other row of an attempt, or of a rerun of a `part`."""
    record = stretch.record
    if not (path / schema.shard_file(0, record.attempt)).is_file():
        return
    tables, found = ("pushes", "updates", "events"), list[tuple[LogRows, LogRows, int, str]]()
    clocks, whole = [], record.whole and not part
    for log in record.shards:
        ours = read_tables(path / schema.shard_file(log.shard, record.attempt), tables)
        theirs = (log.pushes, log.updates, log.events)
        clocks.append(log.start.clock + min(len(ours[1]), len(log.updates)))
        pushes, updates, events = ours
        events = events[events["kind"] != Event.GOODBYE] if record.rules < 2 else events  # older logs have no goodbyes
        for table, rows, said in zip(tables, (as_before(pushes, theirs[0].dtype), updates, events), theirs, strict=True):
            found.append((rows, said, log.shard, table))
        for number, loss in enumerate(pushes["loss"][: len(log.pushes)].tolist()):
            on_row(number, log.row(number), loss)
    if record.computed:
        count_losses(*found[0][:2], proof)
    proof.clocks = tuple(clocks)
    for rows, said, shard, table in found:
        compare_rows(rows, said, shard, table, whole=whole, part=part, tolerance=proof.tolerance)
    for log in record.shards if whole else ():
        made, told = read_summary(path / schema.shard_file(log.shard, record.attempt))[0], log.summary
        for column in schema.SUMMARY.names or ():
            if made[column] != told[column] and not (proof.tolerance and column == "diverged"):
                refuse(f"{column} {told[column]}, run again {made[column]}", log.shard, "summary")


def _compare_evaluations(record: Record, path: Path, unmade: set[int], told_anew: int, *, part: bool) -> None:
    """Raise Untrue for other evaluations, but for clocks of `told_anew` snapshots."""
    ours, theirs = (
        rows[~np.isin(rows["snapshot"], list(unmade))].copy() for rows in (Run(path).evaluations, record.run.evaluations)
    )
    if ours.dtype != theirs.dtype:
        metrics = [", ".join(schema.extra("evaluations", rows.dtype)) or "none" for rows in (theirs, ours)]
        refuse(f"metrics {metrics[0]}, run again {metrics[1]}", -1, "evaluations")
    for rows in (ours, theirs):
        rows["clock_min"][rows["snapshot"] < told_anew] = rows["clock_max"][rows["snapshot"] < told_anew] = -1
    compare_rows(ours, theirs, -1, "evaluations", whole=record.done is not None, part=part)


def _compare_results(record: Record, path: Path, job: Again, proof: Proof) -> None:
    world = job.world
    if record.done is None or not isinstance(world, TensorLogWorld):
        return
    compare_weights(record, path, world.tensors.model, world.initial, world.bounds, proof)
    compare_best(record, path, proof)
    if not proof.tolerance:
        compare_diverged(record, path, job.diverged)


def _waypoints(stretch: Stretch, path: Path, world: VirtualWorld, clocks: Sequence[int]) -> list[Waypoint]:
    record, clock, found = stretch.record, stretch.seam, []
    for log in record.shards if isinstance(world, TensorLogWorld) else ():
        assert isinstance(world, TensorLogWorld)
        if clocks[log.shard] < clock:
            continue
        losses, at = [math.nan, math.nan], clock - log.start.clock - 1
        if at >= 0:
            (ours,) = read_tables(path / schema.shard_file(log.shard, record.attempt), ["updates"])
            losses = [rows["mean_loss"][at].item() for rows in (ours, log.updates)]
        weights = world.slice_at_seam(log.shard)
        norm = float((weights.astype(float) ** 2).sum() ** 0.5)
        found.append(Waypoint(log.shard, clock, zlib.crc32(weights.tobytes()), norm, *losses))
    return found
