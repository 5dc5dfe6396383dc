"""One rank: it agrees with the others on what to do, then does its part, and comes to the common end."""

from __future__ import annotations

import sys
from collections.abc import Callable

from mpisgd.base.draws import kept
from mpisgd.base.version import __version__
from mpisgd.comm.mpi import launch
from mpisgd.comm.mpi.library import MPI
from mpisgd.comm.mpi.wire import Wire
from mpisgd.comm.signals import Signals
from mpisgd.config import Config
from mpisgd.config.trust import resume_line
from mpisgd.job.building.roles import Built, build
from mpisgd.job.finish import Outcome, headline
from mpisgd.job.parts import NOTHING_BROUGHT, Brought
from mpisgd.job.run.claim import Claim
from mpisgd.job.run.end import End
from mpisgd.job.run.start import agree_on
from mpisgd.job.run.world import MpiWorld, make_wire
from mpisgd.liveness import tolerance
from mpisgd.liveness.guard import failing_fast, is_single
from mpisgd.liveness.pulse import Pulse
from mpisgd.liveness.vigil import Vigil
from mpisgd.liveness.watchdog import Watchdog
from mpisgd.records.checkpoint.checkpoint import way_on


def run(config: Config, comm: MPI.Intracomm, brought: Brought = NOTHING_BROUGHT, resumed: bool = False) -> Outcome:
    """Run one rank of a job to its end; every rank of `comm` calls this.

    `resumed`: go on with the run that there is in `config.out`, from its newest checkpoint.

    Raises:
        AgreedError: on every rank alike, where the job cannot start; before the first message is sent.
        RunInterrupted: on every rank alike, where a signal has interrupted the run, and it can go on from a checkpoint.
    Any other failure ends the job (`guard.failing_fast`).
    """
    ranks: list[Rank] = []

    def who() -> str:
        return ranks[0].describe if ranks else "starting"

    def how() -> str:
        return ranks[0].way_on() if ranks else ""

    def expendable() -> bool:
        return bool(ranks) and ranks[0].expendable

    def before_leaving() -> None:
        vigil.stop()
        pulse.stop()

    with (
        failing_fast(comm, who, how, expendable),
        Signals() as signals,
        Vigil(comm, who, how) as vigil,
        Pulse(comm, config.faults.patience_s, how) as pulse,
        kept(),
    ):
        ranks.append(Rank(config, comm, brought, resumed, signals, pulse))
        if ranks[0].start.tolerant:
            vigil.stop()
        try:
            return ranks[0].run(before_leaving)
        finally:
            if is_single(comm):  # after a failure the process goes on, and may begin the run anew
                ranks[0].claim.unlock()


class Rank:
    """One rank, which has agreed with the others on what to do.

    Attributes:
        start, claim: what was agreed on, and the directory.
        describe: its role.
        built: that role, once it is built.
    """

    def __init__(
        self, config: Config, comm: MPI.Intracomm, brought: Brought, resumed: bool, signals: Signals, pulse: Pulse
    ) -> None:
        self._comm = comm
        self._signals = signals
        self._pulse = pulse
        self.start = agree_on(config, comm, brought, pulse)
        self.claim = Claim(comm, self.start, brought, resumed)
        self.setup = self.claim.setup
        self.rank = self.start.rank
        self.describe = self.setup.roles.describe(self.rank)
        self.built: Built | None = None

    @property
    def expendable(self) -> bool:
        """Whether the others can go on without this rank, now."""
        return self.built is not None and self.built.expendable

    @property
    def _resuming(self) -> str:
        """The command that goes on with this run, and brings what it was brought."""
        return f"{launch.words(self.start.ranks.size)} {resume_line(self.setup.path, self.setup.config)}"

    def way_on(self) -> str:
        """How this run can be continued, as the last words of one that fails."""
        return way_on(self.setup.path, self.built.newest_clock() if self.built is not None else None, self._resuming)

    def run(self, before_leaving: Callable[[], None]) -> Outcome:
        """The loop of this rank's role, then the common end. `before_leaving`: as in `End`."""
        start, hosts = self.start, self.start.ranks.hosts
        wire = make_wire(self._comm, start, self._pulse)
        end = End(self.claim, start.ranks, self._signals, self._resuming, before_leaving)
        self._signals.listen(wire.hear)
        if self.rank == 0:
            self._signals.listen(end.tell_the_terminal)
        self._watch(wire, lambda: wire.describe(start.name))
        if self.rank == 0:
            self._say(f"mpisgd {__version__}: {self._headline()}")
            for note in self.setup.resumption.notes if self.setup.resumption is not None else ():
                self._say(f"mpisgd: {note}")
        world = MpiWorld(start, wire)
        with world.closing:
            self.built = built = build(self.setup, world, self.rank)
            self._watch(wire, lambda: wire.describe(start.name) or built.waits_for(hosts))
            said = built.run()
        wire.meet()
        built.leave()
        built.expendable = False
        return end.end(wire, said)

    def _watch(self, wire: Wire, describe: Callable[[], str]) -> None:
        """From now on the watchdog says this of a wait that is long."""
        quiet_s = self.setup.config.log.quiet_s
        self._signals.every_second = Watchdog(wire, quiet_s, self.start.name(self.rank), describe).look

    def _headline(self) -> str:
        setup, start = self.setup, self.start
        learners, ranks = setup.roles.lambda_, len(setup.roles.computing_ranks)
        return (
            f"{headline(setup.config, learners, ranks, start.parameters, setup.meta.train_samples)},"
            f" {len(set(start.ranks.hosts))} host(s)"
            f"{', more ranks than cores: waiting politely' if start.ranks.oversubscribed else ''};"
            f" {tolerance.said(setup.config, start.tolerant, self._pulse.beats)}; log in {setup.path}{self._going_on()}"
        )

    def _going_on(self) -> str:
        resumption, protocol = self.setup.resumption, self.setup.protocol
        if resumption is None:
            return ""
        bits = "asynchronously"
        if protocol.consistent and protocol.ordered:
            same = resumption.same_layout and self.setup.config.push_format == "float32"
            bits = "to the bits of a run without interruption" if same else "no longer to the bits of a run without interruption"
        return f"; attempt {resumption.attempt} goes on at clock {resumption.checkpoint.clock:,}, {bits}"

    def _say(self, text: str) -> None:
        if self.setup.config.log.progress != "off":
            print(text, file=sys.stderr, flush=True)
