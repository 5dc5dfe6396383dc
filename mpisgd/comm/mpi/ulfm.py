"""MPI's User Level Failure Mitigation: whether on, which ranks failed, how to leave a broken job (TRAPS 5).

On by `mpirun --with-ft ulfm`, Open MPI 5; elsewhere the same calls do nothing. With ULFM, `MPI_Abort`, an uncaught exception and
`sys.exit` leave other ranks hanging, and `MPI_Finalize` sometimes hangs after a failure. So a rank that ends the job revokes the
communicator, and nobody finalizes.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from mpisgd.comm.mpi.launch import with_failures
from mpisgd.comm.mpi.node_processes import NodeProcesses
from mpisgd.comm.mpi.silence import leave_in_order, tell_of_silence

if TYPE_CHECKING:
    from mpisgd.comm.mpi.library import MPI

_TURN_S = 0.2
"""Seconds between the first and second speaker on lost ranks."""
_SPREAD_S = 0.3
"""Seconds for others to learn of the revocation, before a leaving rank looks failed."""
_LAUNCHER_S = 3.0
"""Seconds for the launcher to end: Open MPI's sometimes waits for its own lock for ever."""


def enabled() -> bool:
    """Return whether this rank was started with ULFM."""
    return with_failures()


def prepare() -> None:
    """Set a flag before MPI starts: else a learner killed in a large pull over TCP leaves its shard hanging in a lock."""
    if enabled():
        os.environ.setdefault("OMPI_MCA_btl_tcp_flags", "send")
        if os.environ.get("OMPI_COMM_WORLD_RANK") == "0":
            tell_of_silence()


def failed(comm: MPI.Intracomm) -> list[int]:
    """Return failed ranks of `comm`, for which receives from any source no longer raise."""
    group = comm.Get_failed()
    comm.Ack_failed(group.size)
    return _ranks(comm, group)


def seen_failed(comm: MPI.Intracomm) -> list[int]:
    """Return failed ranks, but let receives from any source raise: for watching threads."""
    return _ranks(comm, comm.Get_failed())


def _ranks(comm: MPI.Intracomm, group: MPI.Group) -> list[int]:
    from mpisgd.comm.mpi.library import MPI

    ranks = MPI.Group.Translate_ranks(group, list(range(group.size)), comm.Get_group())
    return sorted(rank for rank in ranks if rank >= 0)


def turn_s(place: int, each_s: float) -> float:
    """Return seconds until a rank speaks, after `place` others; the first is heard alone."""
    return each_s * math.log2(1 + place)


def has_turn(comm: MPI.Intracomm, over: Callable[[float], bool]) -> bool:
    """Wait for this rank's turn; return whether no other has spoken. `over` sleeps: True = be silent."""
    lost = seen_failed(comm)
    place = sum(each not in lost for each in range(comm.Get_rank()))
    return not over(turn_s(place, _TURN_S)) and not comm.Is_revoked()


def is_failure(error: BaseException) -> bool:
    from mpisgd.comm.mpi.library import MPI

    return isinstance(error, MPI.Exception) and error.Get_error_class() in (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING)


class Revoked(Exception):
    """The job's end by another rank."""


def is_revoked(error: BaseException) -> bool:
    from mpisgd.comm.mpi.library import MPI

    return isinstance(error, Revoked) or (isinstance(error, MPI.Exception) and error.Get_error_class() == MPI.ERR_REVOKED)


def end_job(comm: MPI.Intracomm, status: int) -> NoReturn:
    """End the job: every rank's next MPI call raises, and comes here."""
    comm.Revoke()
    if os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK") in ("0", "1"):  # either may be lost
        NodeProcesses().end_launcher_within(_SPREAD_S + _LAUNCHER_S)
    time.sleep(_SPREAD_S)
    _leave(status)


def die_alone() -> NoReturn:
    """Kill this rank; MPI tells the others, and they go on."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError  # not reached


def leave(status: int) -> None:
    """End a finished rank; with ULFM, at once."""
    if enabled():
        _leave(status)


def _leave(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    leave_in_order()
    os._exit(status)
