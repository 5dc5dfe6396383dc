"""An MPI rank: agreement with the others, its part, the common end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np

from mpisgd.base.draws import kept
from mpisgd.base.errors import EXIT_FAILED, CheckpointError, RunInterrupted
from mpisgd.base.terminal import say, warn
from mpisgd.base.version import __version__
from mpisgd.comm.mpi import launch
from mpisgd.comm.mpi.library import MPI
from mpisgd.comm.mpi.tolerant import RankLost, TolerantWire
from mpisgd.comm.mpi.wire import Wire
from mpisgd.comm.signals import Signals, name_of
from mpisgd.config import Config
from mpisgd.config.trust import resume_line
from mpisgd.exchange import link_load, ways
from mpisgd.job import interruption
from mpisgd.job.finish import (
    Outcome,
    accounts_of,
    all_checked,
    check_books,
    end_of,
    farewell,
    finish,
    finished,
    headline,
    outcome_of,
    refusals,
)
from mpisgd.job.parts import NO_OBJECTS, UserObjects
from mpisgd.job.roles import RankRole, build
from mpisgd.job.run import partners
from mpisgd.job.run.mpi_world import MpiWorld
from mpisgd.job.run.partners import Partners
from mpisgd.job.run.start import Claim, Start, name
from mpisgd.liveness import tolerance
from mpisgd.liveness.failure_watch import FailureWatch
from mpisgd.liveness.guard import AgreedError, failing_fast, is_single
from mpisgd.liveness.heartbeat import Heartbeat
from mpisgd.liveness.muster import muster
from mpisgd.liveness.watch import Watch
from mpisgd.liveness.watchdog import Watchdog
from mpisgd.records.callbacks import End, call
from mpisgd.records.checkpoint.checkpoint import way_on
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from mpisgd.records.loggers import Loggers


def run(config: Config, comm: MPI.Intracomm, user_objects: UserObjects = NO_OBJECTS, resumed: bool = False) -> Outcome:
    """Run a rank of a job to its end; collective over `comm`.

    `resumed`: go on with the run in `config.out`, from its newest checkpoint.

    Raises:
        AgreedError: on every rank, if the job cannot start; before the first message.
        RunInterrupted: on every rank, after a signal, with a checkpoint.
    Any other failure ends the job (`guard.failing_fast`).
    """
    rank = Rank(comm, config.faults.patience_s)
    with (
        failing_fast(comm, rank.who, rank.way_on, rank.is_expendable),
        Signals() as rank.signals,
        Watch() as rank.watch,
        kept(),
    ):
        muster(comm)
        rank.watch.begin(rank.failure_watch)
        rank.watch.begin(rank.heartbeat)
        rank.agree(config, user_objects, resumed)
        try:
            return rank.run()
        except RankLost:  # this rank hung, perhaps until after the end
            if (outcome := finished(rank.path)) is None:
                raise
            return outcome
        finally:
            if is_single(comm):  # after a failure the process goes on, and may begin the run anew
                rank.claim.unlock()


class Rank:
    """A rank; `signals` and `watch` are set before `agree`."""

    signals: Signals
    watch: Watch

    def __init__(self, comm: MPI.Intracomm, patience_s: float) -> None:
        self.comm = comm
        self.failure_watch = FailureWatch(comm, self.who, self.way_on)
        self.heartbeat = Heartbeat(comm, patience_s, self.way_on)
        self._ready = False
        self._partners: Partners | None = None
        self.role: RankRole | None = None

    def agree(self, config: Config, user_objects: UserObjects, resumed: bool) -> None:
        start = Start(config, self.comm, user_objects, self.heartbeat, resumed=resumed)
        self.claim = Claim(start)
        self.ranks = self.claim.ranks
        self.rank = self.ranks.rank
        self.setup = self.claim.setup
        self.roles = self.setup.roles
        self.path = self.setup.path
        self.loggers = Loggers(self.setup.config.loggers, self.path)
        self.callbacks = self.loggers.with_own(start.callbacks)
        self._ready = True
        if self.setup.roles.tolerant:
            self.watch.end(self.failure_watch)

    def who(self) -> str:
        return self.roles.describe(self.rank) if self._ready else "starting"

    def is_expendable(self) -> bool:
        return self.role is not None and self.role.expendable

    def way_on(self) -> str:
        clock = self.role.newest_clock() if self.role is not None else None
        return way_on(self.path, clock, self._resuming, near=self._partners is not None) if self._ready else ""

    @property
    def _resuming(self) -> str:
        return launch.again(self.ranks.size, resume_line(self.path, self.setup.config))

    def run(self) -> Outcome:
        wire = self._wire()
        self.signals.listen(lambda signal: setattr(wire, "signal", signal))
        if self.rank == 0:
            self.signals.listen(self._tell_the_terminal)

        def waits_for() -> str:
            return wire.waiting.describe(self._name) or (self.role.waits_for() if self.role is not None else "")

        quiet_s = self.setup.config.log.quiet_s
        self.watch.begin(Watchdog(wire.waiting, quiet_s, self._name(self.rank), waits_for))
        if self.rank == 0:
            carried, wasted = link_load.said(self.setup.config, self.roles, self.setup.hosts, self.setup.bounds)
            self._say(f"mpisgd {__version__}: {self._headline(carried)}")
            if wasted:
                self._say(f"mpisgd: warning: {wasted}")
            for note in self.setup.resumption.notes if self.setup.resumption is not None else ():
                self._say(f"mpisgd: {note}")
        self._partners = self._keeps_near()
        world = MpiWorld(self.claim, wire, self._partners, self.callbacks)
        self.role = role = build(self.setup, world, self.rank)
        try:
            wire.clock.begin(wire.meet, self.setup.begins_s)
            role.train()
            world.close()
            said = role.end()
        finally:
            role.close()
            world.close()
        self.loggers.close()
        wire.meet()
        if self._partners is not None:
            self._partners.close()
        role.leave()
        world.disband()
        role.expendable = False
        return self._end(wire, said)

    def _wire(self) -> Wire:
        ranks, polite = self.ranks, self.ranks.oversubscribed
        if not self.setup.roles.tolerant:
            return Wire(self.comm, polite=polite, ranks_per_core=ranks.ranks_per_core, hosts=ranks.hosts)
        vital, patience_s = self.roles.vital_ranks, self.setup.config.faults.patience_s
        wire = TolerantWire(self.comm, polite=polite, vital=vital, describe=self.roles.describe, patience_s=patience_s)
        self.heartbeat.tolerate(vital, wire.waiting, wire.presence)
        return wire

    def _keeps_near(self) -> Partners | None:
        if not self.setup.config.checkpoint.partner_updates:
            return None
        complain: Callable[[str], None] = lambda text: warn(f"mpisgd: {self._name(self.rank)}: {text}")  # noqa: E731
        return Partners(self.comm, self.path, self.ranks.hosts, self.roles.shard_ranks, complain)

    def _name(self, rank: int) -> str:
        return name(self.roles, self.ranks, rank)

    # --------------------------------------------------------------------------------------------------------- the end

    def _end(self, wire: Wire, said: np.ndarray) -> Outcome:
        """Check the books on shards; join the logs and say DONE on rank 0. Nobody leaves before."""
        logged, batch = self.setup.config.log.enabled, self.setup.config.protocol.batch
        interrupted, accounts = accounts_of(wire, said, self.roles.shard_ranks)
        outcome = outcome_of(self.path, accounts)
        if interrupted:
            raise self._interrupted(wire, outcome)
        if logged:
            for shard, rank in enumerate(self.roles.shard_ranks):
                if rank == self.rank:
                    check_books(Run(self.path), shard, int(said[0]))
            all_checked(wire, self.path)
        given_up: Iterable[int] = ()
        if self.rank == 0:
            log = Run(outcome.path) if logged else None
            outcome = finish(outcome, log)
            for spool in self.path.glob(f"{schema.SPOOL}*"):  # of earlier layouts, too
                spool.unlink(missing_ok=True)
            self.claim.unlock()
            self._say(farewell(outcome, log, batch=batch))
            end = End(outcome.path, outcome.clocks, outcome.samples, outcome.diverged, outcome.training_s)
            call("on_end", self.callbacks.on_end, end)
            given_up = wire.presence.given_up()
        diverged, given_up = end_of(wire, outcome.diverged, given_up, self.ranks.size)
        self._forget_near()
        self._part(wire)
        self.ranks.end(given_up)
        why = refusals(accounts, self.roles.describe)
        if why:
            raise AgreedError(f"PeerError: {why}", EXIT_FAILED)
        return dataclasses.replace(outcome, diverged=diverged)

    def _forget_near(self) -> None:
        if self._partners is not None:
            self._partners.forget()

    def _part(self, wire: Wire) -> None:
        self.watch.close()
        self.heartbeat.drain()
        away = wire.presence.away()
        wire.part()
        self.claim.leave(away)

    def _interrupted(self, wire: Wire, outcome: Outcome) -> RunInterrupted | AgreedError:
        """Return the error of all ranks; rank 0 says how the run can go on."""
        (signal,) = wire.settle(np.array([self.signals.received]), lambda received: received.max(axis=0), 1).tolist()
        text, status = f"{self.path} was interrupted by {name_of(signal)}", 0
        if self.rank == 0:
            try:
                text = interruption.farewell(self.path, signal, outcome.clocks, self._resuming)
                say(text)
                if self.signals.hurried:
                    interruption.tell_terminal(text)
            except CheckpointError as error:
                text, status = f"{type(error).__name__}: {error}", error.exit_status
            self.claim.unlock()
        (status,) = wire.settle(np.zeros(0, np.int64), lambda _: np.array([status]), 1).tolist()
        if not status:
            self._forget_near()
        self._part(wire)
        return AgreedError(text, status) if status else RunInterrupted(text)

    def _tell_the_terminal(self, signal: int) -> None:
        """Print last words, and unlock, if the launcher is about to kill its ranks."""
        # Without a terminal it was no Ctrl-C: a batch system leaves half a minute to save, and may begin the job anew meanwhile,
        # against the lock.
        if self.signals.hurried and interruption.tell_terminal(interruption.last_words(self.path, signal, self._resuming)):
            self.claim.unlock()

    def _headline(self, carried: str) -> str:
        setup, learners, ranks = self.setup, self.roles.lambda_, self.roles.streams
        parameters = self.claim.tensors.model.size
        return (
            f"{headline(setup.config, learners, ranks, parameters, setup.meta.train_samples)},"
            f" {len(set(setup.hosts))} host(s), {ways.said(setup.config)}"
            f"{f', {carried}' if carried else ''}"
            f"{', more ranks than cores: waiting politely' if self.ranks.oversubscribed else ''}"
            f"{partners.said(setup.config.checkpoint.partner_updates, setup.hosts)};"
            f" {tolerance.said(setup.config, setup.roles.tolerant, self.heartbeat.beats)}; log in {self.path}{self._going_on()}"
        )

    def _going_on(self) -> str:
        resumption, protocol = self.setup.resumption, self.setup.protocol
        if resumption is None:
            return ""
        bits = "with its history" if self.setup.config.protocol.batch else "asynchronously"
        if protocol.consistent and protocol.ordered:
            exact = self.setup.config.push_format == self.setup.config.pull_format == "float32"
            same = resumption.same_layout and exact
            bits = "to the bits of a run without interruption" if same else "no longer to the bits of a run without interruption"
        return f"; attempt {resumption.attempt} goes on at clock {resumption.checkpoint.clock:,}, {bits}"

    def _say(self, text: str) -> None:
        if self.setup.config.log.progress != "off":
            say(text)
