"""A run made again: its loops, on virtual ranks, with messages in the order of the log.

All rows and weights are compared but for seconds. Behind the end of a killed run's log, a shard takes nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpisgd.base import durable
from mpisgd.base.errors import DeadlockError, MpisgdError, PeerError
from mpisgd.base.without_gc import without_gc
from mpisgd.comm.virtual.cluster import Cluster
from mpisgd.comm.virtual.scripted import EagerWire, ScriptedWire
from mpisgd.comm.virtual.wire import Signal
from mpisgd.config import CheckpointOptions, Config, config_file
from mpisgd.config.config_virtual import ConstantComputeOptions, FailureOptions, NetworkOptions
from mpisgd.job import resume
from mpisgd.job.parts import UserObjects
from mpisgd.job.resume import Resumption
from mpisgd.job.roles import RankRole
from mpisgd.job.world import Setup
from mpisgd.records import directory, weights
from mpisgd.records.checkpoint.checkpoints import Checkpoints, Share
from mpisgd.records.log import schema
from mpisgd.records.log.rank_file import read_summary, read_tables
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Event
from mpisgd.replay.checks.finding import Finding, Untrue, refuse
from mpisgd.replay.checks.record import Record
from mpisgd.replay.environment import compare
from mpisgd.replay.proof import Proof
from mpisgd.replay.rerun.compare import compare_rows
from mpisgd.replay.rerun.fates import ByLog, costs_of
from mpisgd.replay.rerun.script import ShardScript
from mpisgd.replay.rerun.seam import resumption
from mpisgd.serving.fault_tolerant import FaultTolerant
from mpisgd.simulate.failures import LearnerFailed
from mpisgd.simulate.job import Job
from mpisgd.simulate.world import SizedWorld, TensorWorld, VirtualWorld
from mpisgd.update.slice_update import SliceUpdate

_LOSSES = (Event.LOST, Event.MISSED, Event.STUCK, Event.PASSED)


def run_again(record: Record, user_objects: UserObjects, proof: Proof) -> None:
    """Make a run again, attempt by attempt; the first disagreement goes into `proof`."""
    with tempfile.TemporaryDirectory(prefix="mpisgd-replay-") as made, durable.thrown_away():
        path, begun, unmade = Path(made) / "run", None, set[int]()
        attempts = [*record.earlier, record]
        try:
            for attempt, following in zip(attempts, [*attempts[1:], None], strict=True):
                _check_numbers(attempt)
                job = _job(attempt, path, user_objects, proof.threads, begun, -1 if following is None else following.start_clock)
                if following is None:
                    compare(record, job.environment())
                job.do()
                _compare_shards(attempt, path)
                if following is not None:
                    begun = resumption(attempt, following, path, proof, unmade)
            if record.computed:
                told_anew = 0 if begun is None or not record.recut else len(begun.checkpoint.parts[0].account.snapshots)
                _compare_results(record, path, unmade, told_anew)
            proof.seams += [f"snapshot {number} cannot be evaluated again: the logs do not lead to all slices" for number in unmade]
        except Untrue as untrue:
            proof.find(untrue.finding)
        except MpisgdError as error:
            proof.find(Finding(f"run again: {error}", -1, schema.CONFIG))


def _never(clock: int) -> int:
    """Return no clock."""
    return -1


def _check_numbers(record: Record) -> None:
    """Raise Untrue for numbers that no script can have."""
    for log in record.shards:
        for table, rows in (("pushes", log.pushes), ("events", log.events)):
            last = log.final_clock
            wrong = {
                "learner_id": (rows["learner_id"] < -(table == "events")) | (rows["learner_id"] >= record.lambda_),
                "clock": (rows["clock"] < log.start.clock) | (rows["clock"] > last),
            }
            if table == "pushes":
                wrong["timestamp"] = (rows["timestamp"] < 0) | (rows["timestamp"] > rows["clock"])
                wrong["arrival_s"] = ~np.isfinite(rows["arrival_s"])
            for name, places in wrong.items():
                if places.any():
                    row = int(np.flatnonzero(places)[0])
                    refuse(f"{name} {rows[name][row]}", log.shard, table, row=row, clock=int(rows["clock"][row]))


def _job(record: Record, path: Path, user_objects: UserObjects, threads: int, begun: Resumption | None, seam: int) -> Again:
    """Return the job. Raises Untrue: no job has this configuration."""
    config = record.config
    log = dataclasses.replace(config.log, enabled=True, progress="off")
    virtual = dataclasses.replace(config.virtual, learners=record.ranks if config.in_teams else record.lambda_)
    checkpoint = CheckpointOptions(every_updates=max(0, seam), keep=2 + len(record.earlier))
    config = dataclasses.replace(config, out=str(path), overwrite=False, threads=threads, device="cpu", log=log, virtual=virtual)
    config = dataclasses.replace(config, receive="in-turn", network=NetworkOptions(), checkpoint=checkpoint)
    config = dataclasses.replace(config, compute=ConstantComputeOptions(0.0), failures=FailureOptions(then="leave"))
    try:
        return Again(record, config, user_objects, begun, seam)
    except MpisgdError as error:
        refuse(f"no run can have this configuration: {error}", -1, schema.CONFIG)


class _LogWorld(VirtualWorld):
    """World of a run made again: learners fare as logged."""

    record: Record
    scripts: dict[int, ShardScript]

    def follow(self, record: Record, scripts: dict[int, ShardScript]) -> None:
        self.record, self.scripts = record, scripts

    def presence_of(self, rank: int) -> Callable[..., FaultTolerant]:
        return functools.partial(ByLog, self.scripts[rank])

    def part_with(self, role: RankRole, failure: LearnerFailed) -> None:
        """Let a learner leave that said goodbye. Raises LearnerFailed for others."""
        if not any(Event.GOODBYE in log.events_of[failure.learner_id]["kind"] for log in self.record.shards):
            raise failure
        super().part_with(role, failure)

    def _next_ns(self, rank: int) -> Callable[[], int]:
        return costs_of(self.record, self.roles.index(rank), functools.partial(self._signal, rank)).__next__

    def _signal(self, rank: int) -> None:
        """End all ranks after the round in which the log has a signal."""
        if self.config.protocol.collective:
            events = self.record.shards[self.roles.index(rank)].events
            for number in events["value"][(events["kind"] == Event.INTERRUPTED) & (events["value"] > 0)].tolist():
                Signal(self.wires[rank], int(number), takes=False).happen(0)


class _AtSeam(Checkpoints):
    """Checkpoints at one clock, and after a signal."""

    def __init__(self, seam: int, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._seam = seam

    def lasts(self, clock: int) -> bool:
        return clock == self._seam

    def busy(self) -> bool:
        self.wait()
        return False


class _SizedLogWorld(_LogWorld, SizedWorld):
    """World of sizes."""


class _TensorLogWorld(_LogWorld, TensorWorld):
    """World of tensors, with checkpoints where attempts meet."""

    setup: Setup
    seam: int
    made: list[Checkpoints]

    def goes_on(self, setup: Setup, seam: int) -> None:
        self.setup, self.seam, self.saves, self.made = setup, seam, seam >= 0, []

    def update(self, rank: int, gradients_per_update: float) -> SliceUpdate:
        update = super().update(rank, gradients_per_update)
        if (before := self.setup.account(self.roles.index(rank))) is not None:
            update.restore(self.saved(rank), before.samples)
        return update

    def saved(self, rank: int) -> dict[str, Tensor]:
        assert self.setup.resumption is not None
        saved = self.setup.resumption.checkpoint.tensors(self.roles.index(rank))
        return {name: torch.from_numpy(array) for name, array in saved.items()}

    def checkpoints(self, rank: int, update: Any, rows: list[list[int]]) -> Checkpoints | None:
        if not self.saves:
            return None
        setup, shard, model = self.setup, self.roles.index(rank), self.tensors.model
        share = Share(
            setup.path,
            shard,
            bounds=setup.bounds[shard],
            shards=self.config.shards,
            learners=self.roles.lambda_,
            model=model.fingerprint,
            attempt=setup.attempt,
            continues=rows,
        )
        self.made.append(_AtSeam(self.seam, share, self.config.checkpoint, update))
        return self.made[-1]


class Again(Job):
    """The job of an attempt, its shards by their scripts.

    Args:
        begun: the checkpoint to go on from.
        seam: clock at which the following attempt goes on; -1 = none.
    """

    world: _TensorLogWorld | _SizedLogWorld

    def __init__(self, record: Record, config: Config, user_objects: UserObjects, begun: Resumption | None, seam: int) -> None:
        told = record.run.environment
        kinds = np.unique(np.concatenate([log.events["kind"] for log in record.shards]))
        hosts = record.run.entries_of(record.attempt).get("hosts", told.get("hosts"))
        super().__init__(config, user_objects, kept=False, hosts=hosts, tolerant=bool(np.isin(kinds, _LOSSES).any()))
        self._record = record
        self._scripts: dict[int, ShardScript] = {}
        self.world.follow(record, self._scripts)
        if isinstance(self.world, _TensorLogWorld):
            if begun is not None:
                fingerprint = self.world.tensors.model.fingerprint
                begun = resume.lay_out(begun, config, self.roles.lambda_, self.setup.bounds, fingerprint, config.averaging > 0)
            self.setup = dataclasses.replace(self.setup, resumption=begun)
            self.world.goes_on(self.setup, seam)

    def _make_world(self, nodes: list[int], evaluated: bool) -> VirtualWorld:
        if self.config.virtual.gradients:
            return _TensorLogWorld(self.config, self.user_objects, self.roles, nodes, evaluated)
        return _SizedLogWorld(self.config, self.user_objects, self.roles, nodes)

    def do(self) -> None:
        """Do all that the log says. Raises Untrue: the log's order leads nowhere."""
        with ExitStack() as held:
            if self.setup.resumption is None:
                held.callback(directory.claim(self.path, overwrite=False).release)
            told = self.environment()
            if self.setup.resumption is not None:
                told = self.setup.resumption.environment(told, self.config)
            directory.write_config(self.path, config_file.dumps(self.config, told))
            with without_gc():
                self._train()
                self.world.wires.clear()
            if isinstance(self.world, _TensorLogWorld):
                for each in self.world.made:
                    each.wait()

    def _let_go(self, cluster: Cluster, mains: list[Callable[[], None]]) -> None:
        """Run until only lost learners are left, or all wait for a killed shard."""
        try:
            super()._let_go(cluster, mains)
        except DeadlockError as error:
            if (stuck := self._stuck()) is not None:
                raise Untrue(stuck) from error

    def _main_of(self, role: RankRole, accounts: dict[int, np.ndarray]) -> Callable[[], None]:
        """Return a main that ends early as the log does."""
        main = super()._main_of(role, accounts)

        def as_logged() -> None:
            try:
                main()
            except LearnerFailed:
                return  # lost in the run, too
            except PeerError:
                script = self._scripts.get(role.rank)
                if self._record.whole or script is None or not script.at_end:
                    raise

        return as_logged

    def _wire(self, cluster: Cluster, rank: int) -> None:
        if self.config.protocol.collective or rank not in self.roles.shard_ranks:
            EagerWire(cluster, self.world.network, self.world.wires)
            return
        log, ranks = self._record.shards[self.roles.index(rank)], self.setup.seen_by(rank).roles.learner_ranks
        asks = _never if self.config.agrees else self.setup.protocol.next_clock  # norms are agreed on before any pull
        self._scripts[rank] = script = ShardScript(log, ranks, asks, both_ways=self.config.both_ways)
        ScriptedWire(cluster, self.world.network, self.world.wires, script)

    def _stuck(self) -> Finding | None:
        """Return a row that never comes, unless a killed shard holds up all ranks."""
        ended = {rank for rank, script in self._scripts.items() if script.at_end and not self._record.whole}
        for rank, script in self._scripts.items():
            if not (script.at_end or self.world.wires[rank].dead) and self._waits_for(rank, ended) is None:
                return script.stuck()
        return None

    def _waits_for(self, rank: int, ended: set[int]) -> int | None:
        """Return the ended shard that holds up a rank, by way of others, or None."""
        seen = set[int]()
        while rank not in seen:
            if rank in ended:
                return rank
            seen.add(rank)
            waiting = self.world.wires[rank].waiting
            held_up_by = None if waiting is None else waiting.describe()[1]
            if held_up_by is None:
                return None
            if self._has_lost(held_up_by, rank):
                return held_up_by
            rank = held_up_by
        return None

    def _has_lost(self, shard_rank: int, rank: int) -> bool:
        """Return whether a killed shard's log has nothing more of a learner's rank."""
        script = self._scripts.get(shard_rank)
        return script is not None and not self._record.whole and not script.expects(self.roles.index(rank))


def _compare_shards(record: Record, path: Path) -> None:
    tables = ("pushes", "updates", "events")
    for log in record.shards:
        name = schema.shard_file(log.shard, record.attempt)
        theirs = (np.delete(log.pushes, sorted(log.inserted)), log.updates, log.events)
        for table, rows, said in zip(tables, read_tables(path / name, tables), theirs, strict=True):
            compare_rows(rows, said, log.shard, table, whole=record.whole)
        if record.whole:
            ours, summary = read_summary(path / name)[0], log.summary
            for column in schema.SUMMARY.names or ():
                if ours[column] != summary[column]:
                    refuse(f"{column} {summary[column]}, run again {ours[column]}", log.shard, "summary")


def _compare_results(record: Record, path: Path, unmade: set[int], told_anew: int) -> None:
    """Raise Untrue for other evaluations or weights, but for clocks of `told_anew` snapshots."""
    ours, theirs = (
        rows[~np.isin(rows["snapshot"], list(unmade))].copy() for rows in (Run(path).evaluations, record.run.evaluations)
    )
    for rows in (ours, theirs):
        rows["clock_min"][rows["snapshot"] < told_anew] = rows["clock_max"][rows["snapshot"] < told_anew] = -1
    compare_rows(ours, theirs, -1, "evaluations", whole=record.done is not None)
    if record.done is not None:
        for averaged in (False, True)[: 1 + (record.config.averaging > 0)]:
            said, found = (weights.of_run(run, averaged=averaged) for run in (record.run, Run(path)))
            other = [name for name in sorted({*said, *found}) if not _same(said.get(name), found.get(name))]
            if other:
                refuse(f"run again, {', '.join(other)} have other bits", -1, schema.WEIGHTS)


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and one.dtype == other.dtype and one.numpy().tobytes() == other.numpy().tobytes()
