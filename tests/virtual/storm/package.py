"""The package's modules that talk to MPI, loaded a second time, over the virtual one and its clock: `VIRTUAL.tolerant`, say.

So the real wires and the real heartbeat run in virtual time, and nothing here needs mpi4py.
"""

from __future__ import annotations

import datetime
import importlib
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from mpisgd.job import provenance
from mpisgd.records import lock
from tests.virtual.storm.machine import Machine
from tests.virtual.storm.mpi import ANY, BYTE, Comm, Group, Message, MPIError, Request, Status


class _Clock:
    """In the place of `time`, for whoever polls (`looks_away`) or not."""

    def __init__(self, *, looks_away: bool) -> None:
        self._looks_away = looks_away

    def perf_counter(self) -> float:
        return self.perf_counter_ns() * 1e-9

    def perf_counter_ns(self) -> int:
        machine = _machines[-1]
        if self._looks_away and machine.looks_in_vain:
            machine.look_away()
        return machine.now_ns

    def monotonic(self) -> float:
        return _machines[-1].now_ns * 1e-9

    def sleep(self, seconds: float) -> None:
        machine = _machines[-1]
        if machine.looks_in_vain:
            machine.look_away()
        else:
            machine.pause(round(seconds * 1e9))


class _Dates:
    """In the place of `datetime.datetime`: the clock that jumps."""

    @staticmethod
    def now(zone: datetime.tzinfo | None = None) -> datetime.datetime:
        return datetime.datetime.fromtimestamp(_wall_s(), zone)


BEGIN_S = 2e9
"""The date at which a machine begins."""


def _wall_s() -> float:
    """The date of the running rank; of rank 0, before any runs."""
    machine = _machines[-1]
    return BEGIN_S + machine.now_ns * 1e-9 + machine.wall_s[machine.rank if machine.runs else 0]


_machines: list[Machine] = []
MPI = SimpleNamespace(
    **{name: name for name in ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED", "ERR_TRUNCATE", "ERR_IN_STATUS")},
    **{"Exception": MPIError, "ANY_SOURCE": ANY, "ANY_TAG": ANY, "BYTE": BYTE, "THREAD_MULTIPLE": 3, "Query_thread": lambda: 3},
    **{"Status": Status, "Request": Request, "Group": Group, "Message": Message, "Intracomm": Comm},
)
_LIBRARY = "mpisgd.comm.mpi.library"
_OF_MPI = ("ulfm", "clock", "transfers", "message_queue", "collectives", "wire", "tolerant")
_AGAIN = ("comm.politeness", *(f"comm.mpi.{name}" for name in _OF_MPI), "liveness.heartbeat")


def _load() -> SimpleNamespace:
    """The modules a second time; whoever imports them later has the first ones."""
    names = [f"mpisgd.{name}" for name in _AGAIN]
    library = ModuleType(_LIBRARY)
    library.MPI, library.cuda_aware = MPI, lambda: None  # type: ignore[attr-defined]
    packages = [importlib.import_module(name) for name in ("mpisgd.comm", "mpisgd.comm.mpi", "mpisgd.liveness")]
    before = [dict(vars(each)) for each in packages]
    loaded: dict[str, Any] = {}
    with mock.patch.dict(sys.modules):
        for name in names:
            sys.modules.pop(name, None)
            parent, _, own = name.rpartition(".")
            vars(sys.modules[parent]).pop(own, None)
        sys.modules[_LIBRARY] = library
        for name in names:
            loaded[name.rpartition(".")[2]] = importlib.import_module(name)
    for package, attributes in zip(packages, before, strict=True):
        vars(package).clear()
        vars(package).update(attributes)
    loaded["ulfm"].enabled = lambda: _machines[-1].tells
    polling, plain = _Clock(looks_away=True), _Clock(looks_away=False)
    for name in ("politeness", "tolerant"):
        loaded[name].time = polling
    for name in ("message_queue", "wire", "clock", "heartbeat"):
        loaded[name].time = plain
    for name in ("politeness", "tolerant"):
        loaded[name].os = SimpleNamespace(sched_yield=lambda: None)
    return SimpleNamespace(library=library, **loaded)


VIRTUAL = _load()


@contextmanager
def on(machine: Machine) -> Iterator[None]:
    """Meanwhile this is the MPI that there is."""
    _machines.append(machine)
    there = sys.modules.get(_LIBRARY)
    sys.modules[_LIBRARY] = VIRTUAL.library
    try:
        yield
    finally:
        _machines.pop()
        if there is None:
            del sys.modules[_LIBRARY]
        else:
            sys.modules[_LIBRARY] = there  # this one alone: what else was imported meanwhile stays, torch cannot do it twice


@contextmanager
def dated(machine: Machine, begun: str) -> Iterator[None]:
    """Meanwhile whoever asks for the date is told the machine's; `begun`: when this process did, as its lock has it."""
    _machines.append(machine)
    try:
        with mock.patch.multiple(lock, datetime=_DATETIME, _begun=lambda process: begun):  # noqa: SIM117
            with mock.patch.object(provenance, "datetime", _DATETIME), mock.patch.object(time, "time", _wall_s):
                yield
    finally:
        _machines.pop()


_DATETIME = SimpleNamespace(datetime=_Dates, UTC=datetime.UTC)


def sleep(seconds: float) -> None:
    """The running rank computes for so long."""
    _machines[-1].pause(round(seconds * 1e9))
