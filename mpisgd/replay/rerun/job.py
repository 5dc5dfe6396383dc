"""Job of an attempt that is made again (`attempts.py`)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np

from mpisgd.base.errors import DeadlockError, MpisgdError, PeerError
from mpisgd.base.without_gc import without_gc
from mpisgd.comm.virtual.cluster import Cluster
from mpisgd.comm.virtual.scripted import EagerWire, ScriptedWire
from mpisgd.config import Config, config_file
from mpisgd.job import resume
from mpisgd.job.parts import UserObjects
from mpisgd.job.resume import Resumption
from mpisgd.job.roles import RankRole
from mpisgd.records import directory
from mpisgd.records.log import schema
from mpisgd.records.log.schema import Event, Reason
from mpisgd.replay.checks.finding import Finding, Untrue, refuse
from mpisgd.replay.checks.record import Record
from mpisgd.replay.rerun.evaluations import Told
from mpisgd.replay.rerun.fates import given_last
from mpisgd.replay.rerun.pulls import Asks, Given, given_elsewhere
from mpisgd.replay.rerun.script import ShardScript
from mpisgd.replay.rerun.world import SizedLogWorld, Stopped, TensorLogWorld
from mpisgd.simulate.failures import LearnerFailed
from mpisgd.simulate.job import Job
from mpisgd.simulate.world import VirtualWorld

_LOSSES = (Event.LOST, Event.MISSED, Event.STUCK, Event.PASSED)


@dataclasses.dataclass(frozen=True)
class Stretch:
    """An attempt, or its first part.

    Attributes:
        begun: the checkpoint to go on from; None = a new run.
        seam: clock at which the following attempt goes on, or the rerun `stops`; -1 = none.
        on_gpu: compute on a GPU, as the run did.
    """

    record: Record
    told: Told
    begun: Resumption | None
    seam: int
    stops: bool
    on_push: Callable[[int, int], None]
    on_gpu: bool


class Again(Job):
    """The job of an attempt, its shards by their scripts."""

    world: TensorLogWorld | SizedLogWorld
    diverged = False
    """Any shard has diverged."""
    ended = False
    """Not held up by a killed shard: the other logs may go further."""

    def __init__(self, stretch: Stretch, config: Config, user_objects: UserObjects) -> None:
        self._stretch = stretch
        self._record = record = stretch.record
        losses = [np.isin(log.events["kind"], _LOSSES).any() for log in record.shards]
        losses += [np.isin(log.pushes["reason"], (Reason.TORN, Reason.MISSED)).any() for log in record.shards]
        hosts = record.run.entries_of(record.attempt).get("hosts", record.run.environment.get("hosts"))
        super().__init__(config, user_objects, kept=False, hosts=hosts, tolerant=any(losses))
        self._scripts = self.world.scripts
        if isinstance(self.world, TensorLogWorld):
            model, begun = self.world.tensors.model, stretch.begun
            if begun is not None:
                how = self.roles.lambda_, self.setup.bounds, model.fingerprint, config.averaging > 0
                begun = resume.lay_out(begun, config, *how)
            self.setup = dataclasses.replace(self.setup, resumption=begun)
            self.world.goes_on(self.setup, stretch.told, stretch.seam, stops=stretch.stops)

    def _make_world(self, nodes: list[int], evaluated: bool) -> VirtualWorld:
        if self.config.virtual.gradients:
            asked = self.config, self.user_objects, self.roles, nodes, evaluated
            return TensorLogWorld(self._record, *asked, on_gpu=self._stretch.on_gpu)
        return SizedLogWorld(self._record, self.config, self.user_objects, self.roles, nodes)

    def do(self) -> None:
        """Do all that the log says. Raises Untrue: the log's order leads nowhere, or to an error."""
        with ExitStack() as held:
            if self.setup.resumption is None:
                held.callback(directory.claim(self.path, overwrite=False).release)
            told = self.environment()
            if self.setup.resumption is not None:
                told = self.setup.resumption.environment(told, self.config)
            directory.write_config(self.path, config_file.dumps(self.config, told))
            with without_gc():
                try:
                    accounts = self._train()
                    self.diverged = any(accounts[rank][2] for rank in self.roles.shard_ranks if rank in accounts)
                except Stopped:
                    self.diverged = False
                except MpisgdError as error:
                    refuse(f"run again: {error}", -1, schema.CONFIG)
                self.world.wires.clear()
                self.world.eager.clear()
            if isinstance(self.world, TensorLogWorld):
                for each in self.world.made.values():
                    each.wait()

    def _let_go(self, cluster: Cluster, mains: list[Callable[[], None]]) -> None:
        """Run until only lost learners are left, or all wait for a killed shard."""
        if isinstance(self.world, TensorLogWorld) and self.world.there:
            raise Stopped
        try:
            super()._let_go(cluster, mains)
            self.ended = True
        except DeadlockError as error:
            if (stuck := self._stuck() or self._unheard()) is not None:
                raise Untrue(stuck) from error
            self.ended = self._record.whole

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
        world, late = self.world, self.world.late
        if self.config.protocol.collective or rank not in self.roles.shard_ranks:
            late = late and rank in self.roles.learner_ranks
            world.eager[rank] = EagerWire(cluster, world.network, world.wires, late=late)
            return
        log, ranks = self._record.shards[self.roles.index(rank)], self.setup.seen_by(rank).roles.learner_ranks
        protocol = self.setup.protocol
        next_clock = (lambda _: -1) if self.config.agrees else protocol.next_clock  # norms are agreed on before any pull
        on_push = functools.partial(self._stretch.on_push, log.shard)
        elsewhere = given_elsewhere(log, self._record.shards, consistent=protocol.consistent)
        given = Given(elsewhere, self._given_last)
        asks = Asks(next_clock, protocol.pushes_per_pull)
        self._scripts[rank] = script = ShardScript(
            log, ranks, asks, on_push, given, both_ways=self.config.ahead > 0, agrees=self.config.agrees, late=self._late
        )
        ScriptedWire(cluster, world.network, world.wires, script, world.eager, late=late)

    @functools.cached_property
    def _given_last(self) -> dict[int, int]:
        return given_last(self._record) if self.setup.protocol.consistent else {}

    @property
    def _late(self) -> bool:
        """Return whether a shard ended by its learners' departures: these heard of the end, not of a signal."""
        ended = (log.events["kind"] for log in self._record.shards if log.finished)
        return any(not np.isin((Event.STOPPED, Event.ENOUGH), kinds).any() for kinds in ended)

    def _stuck(self) -> Finding | None:
        """Return a row that never comes, unless a killed shard holds up all ranks."""
        ended = {rank for rank, script in self._scripts.items() if script.at_end and not self._record.whole}
        for rank, script in self._scripts.items():
            if not (script.at_end or self.world.wires[rank].dead) and self._waits_for(rank, ended) is None:
                return script.stuck()
        return None

    def _unheard(self) -> Finding | None:
        """Return a learner that pushes more than whole logs tell; lost learners may wait for ever."""
        for learner_id, rank in enumerate(self.roles.learner_ranks if self._record.whole else ()):
            lost = any(np.isin(log.events_of[learner_id]["kind"], _LOSSES).any() for log in self._record.shards)
            if not (self.world.wires[rank].dead or lost):
                return Finding("run again, the learner goes on after its last push", -1, "pushes", learner_id=learner_id)
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
