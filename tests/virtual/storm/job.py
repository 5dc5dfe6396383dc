"""One attempt of a job: it runs to its end, whatever befalls it."""

from __future__ import annotations

import contextlib
import functools
import io
from dataclasses import dataclass, field
from unittest import mock

from mpisgd.base.errors import ConfigError, MpisgdError, PeerError, RunInterrupted
from mpisgd.comm.signals import HEARD
from mpisgd.job import roles, tensors
from mpisgd.job.finish import finished
from mpisgd.liveness.reaper import GRACE_S
from mpisgd.records import lock
from mpisgd.records.log import schema
from tests.virtual.storm import package
from tests.virtual.storm.disk import Disk
from tests.virtual.storm.draw import LIMIT_S, Fault
from tests.virtual.storm.machine import Hangs, Process
from tests.virtual.storm.mpi import MPIError
from tests.virtual.storm.package import VIRTUAL
from tests.virtual.storm.ranks import Ranks
from tests.virtual.storm.standins import Takes


@dataclass
class End:
    """How an attempt ended. `done`: rank 0 has said DONE; `why`: per rank that failed, what it said; `said`: what all printed."""

    done: bool = False
    interrupted: str = ""
    why: dict[int, str] = field(default_factory=dict)
    killed: list[int] = field(default_factory=list)
    outside: str = ""
    hangs: str = ""
    let_in: bool = False
    """Another job, into the directory of this one."""
    said: str = ""
    events: int = 0
    seconds: float = 0.0

    @property
    def named(self) -> str:
        """What ended the job, if it did not end itself."""
        return self.outside or next(iter(self.why.values()), "")


class Job(Ranks):
    """One attempt of a job: its ranks, and what befalls them."""

    # ---------------------------------------------------------------------------------------------------------------- the run

    def run(self) -> End:
        machine, end = self.machine, End(why=self.why)
        said = io.StringIO()
        for rank, process in enumerate(machine.processes):
            process.on_death.append(functools.partial(self._drop_files, rank))
            if self.drawn.freed in ("deaths", "both"):
                process.on_death.append(machine.free)
            process.begin(functools.partial(self._main, process))
        for fault in self.faults:
            self._arrange(fault)
        disk = Disk(self.path) if any(fault.what == "power" for fault in self.faults) else None
        with (
            package.on(machine),
            package.dated(machine, self.begun),
            mock.patch.object(roles.role, "TableFile", self.open_file),
            mock.patch.object(roles.batch, "TableFile", self.open_file),
            mock.patch.object(tensors, "Evaluations", Takes),
            contextlib.redirect_stderr(said),
            disk.watched() if disk else contextlib.nullcontext(),
        ):
            try:
                machine.run(round(LIMIT_S * 1e9))
            except Hangs as hangs:
                end.hangs = str(hangs)
                machine.end("it hangs")
            with contextlib.suppress(ConfigError):
                lock.Lock(self.path).release()
                end.let_in = True
            if not machine.over_why:  # rank 0 has come to its end, well or not
                self.lock.release()
        if disk is not None and machine.over_why == "the power is lost":
            disk.lose_power()
        if disk is not None:
            disk.close()
        end.killed = [process.rank for process in machine.processes if process.dead and not machine.over_why]
        end.interrupted = self.interrupted
        end.done, end.outside = (self.path / schema.DONE).is_file(), machine.over_why
        end.said, end.events, end.seconds = said.getvalue(), machine.events, machine.now_ns * 1e-9
        return end

    def _main(self, process: Process) -> None:
        """One rank, to its end: what `guard.failing_fast` and `run.Rank.run` do."""
        try:
            try:
                self._rank(process.rank)
            except VIRTUAL.tolerant.RankLost:
                if finished(self.path) is None:
                    raise
            self._leave(process)
        except RunInterrupted as error:
            self.interrupted = str(error)
            self._leave(process)
        except (MpisgdError, MPIError, VIRTUAL.ulfm.Revoked) as error:
            if VIRTUAL.ulfm.is_revoked(error):
                self.machine.leave(process)
                return
            alone = process.rank in self.built and self.built[process.rank].expendable and not _is_of_others(error)
            if not (alone and self._is_given_up(process.rank)):  # others do its work: it is in their way
                self.fails(process, f"{self.roles.describe(process.rank)}: {type(error).__name__}: {error}")
            if alone:
                self.machine.kill(process.rank)
            elif self.machine.tells:
                self.machine.revoke(process.rank)
                self._drop_files(process.rank)
                self.machine.leave(process)
            else:
                self.machine.end(f"{self.roles.describe(process.rank)} failed: {error}")
        except BaseException as error:  # a bug: it must not be lost in a greenlet
            self.machine.end(f"{type(error).__name__}: {error}")
            raise

    def _leave(self, process: Process) -> None:
        """In order. Where rank 0 of a tolerant job has left, reapers end who is left a while later (`liveness/reaper.py`)."""
        if self.drawn.freed in ("end", "both") and not any(each.left for each in self.machine.processes):
            self.machine.free()
        self.machine.leave(process)
        if process.rank == 0 and self.drawn.tolerant:
            self.machine.at(round(GRACE_S * 1e9), self._usher)

    def _usher(self) -> None:
        for process in self.machine.processes:
            process.left |= not process.gone

    def _end_where_all_are_stopped(self) -> None:
        """By who watches over the job, for no rank can."""
        if all(process.stopped for process in self.machine.processes if not process.gone):
            self.machine.end("all are stopped")

    def _is_given_up(self, rank: int) -> bool:
        return any(rank in self.wires[shard].presence.given_up() for shard in self.roles.shard_ranks if shard in self.wires)

    def _drop_files(self, rank: int) -> None:
        """The process is dead: what it had not written is lost."""
        for file in self.files[rank]:
            handle, file._file = file._file, None
            if handle is not None:
                file._data.clear()
                handle.close()

    # -------------------------------------------------------------------------------------------------------------- the faults

    def _arrange(self, fault: Fault) -> None:
        if fault.rank >= len(self.hosts) or fault.other >= len(self.hosts):
            return  # this attempt has fewer ranks
        process = self.machine.processes[fault.rank]
        if fault.at_call:
            process.at_call[fault.at_call] = functools.partial(self._befalls, fault)
        else:
            self.machine.at(round(fault.at_s * 1e9), functools.partial(self._befalls, fault))

    def _befalls(self, fault: Fault) -> None:
        machine, lasts_ns = self.machine, round(fault.lasts_s * 1e9)
        process = machine.processes[fault.rank]
        match fault.what:
            case "kill":
                machine.kill(fault.rank)
            case "stop":
                process.stop()
                machine.at(lasts_ns, process.go_on)
                machine.at(round(0.5 * LIMIT_S * 1e9), self._end_where_all_are_stopped)
            case "cut":
                for source, dest in ((fault.rank, fault.other), (fault.other, fault.rank))[: 1 + fault.both]:
                    machine.cut(source, dest)
                    machine.at(lasts_ns, functools.partial(machine.heal, source, dest))
            case "slow":
                machine.slow[fault.rank] = 30.0
                machine.at(lasts_ns, lambda: machine.slow.update({fault.rank: 1.0}))
            case "full" | "unsaved" | "hang":
                self.broken[fault.what, fault.rank] = fault.at_s + fault.lasts_s
            case "jump":
                machine.wall_s[fault.rank] += fault.by_s * (fault.at_s > 0)
            case "signal":
                for each in machine.processes:
                    each.at_work(functools.partial(self._hears, each))
            case "end" | "power":
                machine.end("all are killed" if fault.what == "end" else "the power is lost")

    def _hears(self, process: Process) -> None:
        wire = self.wires.get(process.rank)
        if wire is not None and not process.gone:
            wire.signal = HEARD[0]
            process.changed()


def _is_of_others(error: BaseException) -> bool:
    return isinstance(error, PeerError) or VIRTUAL.ulfm.is_failure(error) or VIRTUAL.ulfm.is_revoked(error)
