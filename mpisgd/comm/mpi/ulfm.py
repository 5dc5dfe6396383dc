"""MPI's User Level Failure Mitigation: whether it is on, which ranks have failed, and how a rank leaves what is broken (TRAPS 5).

It is on where the job was started so: `mpirun --with-ft ulfm`, Open MPI 5. Elsewhere the same calls are there and do nothing.
With it on, `MPI_Abort`, an uncaught exception and `sys.exit` of one rank leave the others hanging, and `MPI_Finalize` hangs now and
then once a rank has failed: so a rank that ends the job revokes the communicator, and nobody finalizes.
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
from mpisgd.comm.mpi.siblings import Siblings

if TYPE_CHECKING:
    from mpisgd.comm.mpi.library import MPI

_TURN_S = 0.2
"""Seconds between the first rank that speaks of lost ranks and the second."""
_SPREAD_S = 0.3
"""Seconds for the others to learn that the communicator was revoked, before a rank that goes could look like one that failed."""
_LAUNCHER_S = 3.0
"""Seconds for the launcher to end when its ranks have: now and then Open MPI's waits for a lock of its own, for ever."""


def enabled() -> bool:
    """Whether this rank was started with it; told by the environment, without MPI."""
    return with_failures()


def prepare() -> None:
    """To be called before MPI is initialised.

    Without this flag a learner that is killed in the middle of a large pull over TCP leaves its shard hanging in a lock.
    """
    if enabled():
        os.environ.setdefault("OMPI_MCA_btl_tcp_flags", "send")


def failed(comm: MPI.Intracomm) -> list[int]:
    """The ranks of `comm` that have failed; from now on receives from any source do not raise because of these."""
    group = comm.Get_failed()
    comm.Ack_failed(group.size)
    return _ranks(comm, group)


def seen_failed(comm: MPI.Intracomm) -> list[int]:
    """List failed ranks as `failed` does, but receives from any source still raise: for a thread that only watches."""
    return _ranks(comm, comm.Get_failed())


def _ranks(comm: MPI.Intracomm, group: MPI.Group) -> list[int]:
    from mpisgd.comm.mpi.library import MPI

    ranks = MPI.Group.Translate_ranks(group, list(range(group.size)), comm.Get_group())
    return sorted(rank for rank in ranks if rank >= 0)


def turn_s(place: int, each_s: float) -> float:
    """Seconds after which a rank speaks of what many ranks see, where `place` others speak before: the first is heard alone.

    The turns of the next ones lie ever closer: a node of 64 ranks that is gone holds up nobody for longer than six turns.
    """
    return each_s * math.log2(1 + place)


def has_turn(comm: MPI.Intracomm, over: Callable[[float], bool]) -> bool:
    """Wait for the turn of this rank to speak of lost ranks; whether no other has spoken. `over` sleeps: True = be silent."""
    lost = seen_failed(comm)
    place = sum(each not in lost for each in range(comm.Get_rank()))
    return not over(turn_s(place, _TURN_S)) and not comm.Is_revoked()


def is_failure(error: BaseException) -> bool:
    """Whether MPI says that a rank has failed."""
    from mpisgd.comm.mpi.library import MPI

    return isinstance(error, MPI.Exception) and error.Get_error_class() in (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING)


class Revoked(Exception):
    """Another rank has ended the job."""


def is_revoked(error: BaseException) -> bool:
    """Whether another rank has ended the job."""
    from mpisgd.comm.mpi.library import MPI

    return isinstance(error, Revoked) or (isinstance(error, MPI.Exception) and error.Get_error_class() == MPI.ERR_REVOKED)


def end_job(comm: MPI.Intracomm, status: int) -> NoReturn:
    """End the whole job: every rank's next call of MPI raises, and it comes here too."""
    comm.Revoke()
    if os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK") in ("0", "1"):  # either may be the one that is lost
        Siblings().end_launcher_within(_SPREAD_S + _LAUNCHER_S)
    time.sleep(_SPREAD_S)
    _leave(status)


def die_alone() -> NoReturn:
    """End this rank; the others are told by MPI, and go on without it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError  # not reached


def leave(status: int) -> None:
    """The end of a rank that has nothing more to do: where ULFM is on it goes at once."""
    if enabled():
        _leave(status)


def _leave(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
