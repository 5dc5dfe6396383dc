"""A failure is loud, quick and named (DESIGN 4, law 9): a wrapper around a rank's main, and agreement before the start."""

from __future__ import annotations

import faulthandler
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn, TypeVar

from mpisgd.base.errors import EXIT_FAILED, MpisgdError, PeerError, RunInterrupted, in_words
from mpisgd.base.terminal import last_words
from mpisgd.comm.mpi import ulfm
from mpisgd.comm.mpi.node_processes import leave_within

if TYPE_CHECKING:
    from mpisgd.comm.mpi.library import MPI

T = TypeVar("T")

FORWARD_S = 0.5
"""Seconds for the launcher to pass on last words; MPICH's drops unread lines."""

END_S = 5.0
"""Seconds for MPI to end the job: over a dead link MPI may wait for ever."""

RANK_VARIABLES = (
    *("OMPI_COMM_WORLD_RANK", "JSM_NAMESPACE_RANK", "PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK"),
    *("PALS_RANKID", "ALPS_APP_PE", "FLUX_TASK_RANK", "SLURM_PROCID"),
)
SIZE_VARIABLES = (
    *("OMPI_COMM_WORLD_SIZE", "JSM_NAMESPACE_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "FLUX_JOB_SIZE"),
    *("SLURM_STEP_NUM_TASKS", "MPISGD_RANKS"),
)
"""Variables with the number of started ranks, the nearest launcher's first.

SLURM_NTASKS is left out: batch scripts have it without ranks. For ALPS, without any, scripts set MPISGD_RANKS.
"""


def said_by_launcher(names: Sequence[str], environ: Mapping[str, str] = os.environ) -> Iterator[tuple[str, int]]:
    """Yield variables with a number."""
    return ((name, int(environ[name])) for name in names if environ.get(name, "").isdecimal())


def launched_rank() -> int:
    """Return the launcher's rank, without initialising MPI; 0 = no launcher."""
    return next((rank for _, rank in said_by_launcher(RANK_VARIABLES)), 0)


def is_single(comm: MPI.Intracomm) -> bool:
    """Return whether this process is the whole job."""
    return comm.Get_size() == 1 and launched_size() == 1


def launched_size() -> int:
    """Return the launcher's number of ranks, without initialising MPI; 1 = no launcher."""
    return next((size for _, size in said_by_launcher(SIZE_VARIABLES)), 1)


_TOLD: list[Callable[[str], None]] = []


def tell_failures(to: Callable[[str], None]) -> None:
    """Call `to` with the traceback if this rank fails."""
    _TOLD.append(to)


class AgreedError(MpisgdError):
    """Refusal to start, raised on all ranks: nobody is left waiting."""

    def __init__(self, message: str, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status


def agree(comm: MPI.Intracomm, action: Callable[[], T]) -> T:
    """Do an action that ranks may refuse; if any refuses, all do, before the first message.

    Raises AgreedError: MpisgdError on any rank. Other exceptions end the job (`failing_fast`).
    """
    problem: tuple[str, int] | None = None
    try:
        result = action()
    except MpisgdError as error:
        problem = (f"{type(error).__name__}: {error}", error.exit_status)
    problems = comm.allgather(problem)
    found = [(rank, each) for rank, each in enumerate(problems) if each is not None]
    if not found:
        return result
    by_text: dict[str, list[int]] = {}
    for rank, (text, _) in found:
        by_text.setdefault(text, []).append(rank)
    lines = [text if len(ranks) == len(problems) else f"rank {ranges(ranks)}: {text}" for text, ranks in by_text.items()]
    raise AgreedError("\n".join(lines), found[0][1][1])


def ranges(ranks: list[int]) -> str:
    """Return [0, 1, 2, 5] as "0-2, 5"."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][-1] == rank - 1:
            parts[-1] = [parts[-1][0], rank]
        else:
            parts.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


@contextmanager
def failing_fast(
    comm: MPI.Intracomm,
    who: Callable[[], str],
    way_on: Callable[[], str] = lambda: "",
    expendable: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """End the job in seconds if this rank fails; last lines give rank, host, cause and how to go on.

    `expendable`: whether others can go on, told by MPI (`ulfm.py`); then this rank alone dies. AgreedError and RunInterrupted,
    raised on all ranks, pass, as does anything in a single process (a notebook).
    """
    hang_s = float(os.environ.get("MPISGD_HANG_S", "0"))
    if hang_s > 0:
        faulthandler.dump_traceback_later(hang_s, repeat=True)
    try:
        yield
    except (AgreedError, RunInterrupted):
        raise
    except BaseException as error:
        if is_single(comm):
            raise
        status = error.exit_status if isinstance(error, MpisgdError) else EXIT_FAILED
        alone = ulfm.enabled() and expendable() and not is_of_others(error)
        if not (ulfm.enabled() and _has_been_said(comm, error)):
            where = "" if isinstance(error, MpisgdError) or _is_failure(comm, error) else traceback.format_exc()
            what = "the others go on without this rank" if alone else "the job is ended"
            text = f"mpisgd: rank {comm.Get_rank()} ({who()}) on {socket.gethostname()} failed, {what}"
            for tell in _TOLD:
                tell(traceback.format_exc())
            sys.stdout.flush()
            speak("\n".join([where, text, _cause(comm, error)]), str if alone else way_on)
        if alone:
            ulfm.die_alone()
        if ulfm.enabled():
            ulfm.end_job(comm, status)
        abort(comm, status)
    finally:
        if hang_s > 0:
            faulthandler.cancel_dump_traceback_later()


def speak(text: str, way_on: Callable[[], str] = str) -> None:
    """Say last words, and how to go on; leave in time, whatever hangs."""
    leave_within(FORWARD_S + END_S)
    last_words(text)
    if said := way_on():  # reads files, perhaps across a broken link
        last_words(said)
    time.sleep(FORWARD_S)


def abort(comm: MPI.Intracomm, status: int) -> NoReturn:
    """End the job by MPI and the launcher, and leave, whatever MPI does.

    MPICH's call may return if two ranks abort at once; Open MPI's waits for an unreachable launcher.
    """
    leave_within(END_S)
    comm.Abort(status)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def is_of_others(error: BaseException) -> bool:
    """Return whether another rank caused the failure."""
    return isinstance(error, PeerError) or ulfm.is_failure(error) or ulfm.is_revoked(error)


def _is_failure(comm: MPI.Intracomm, error: BaseException) -> bool:
    """Return whether a rank has failed, by MPI or a torn message."""
    torn = isinstance(error, pickle.UnpicklingError | EOFError)
    return ulfm.is_failure(error) or (torn and ulfm.enabled() and len(ulfm.failed(comm)) > 0)


def _has_been_said(comm: MPI.Intracomm, error: BaseException) -> bool:
    """Return whether another rank told the cause; many learn of a loss, and speak in turn."""
    return ulfm.is_revoked(error) or (_is_failure(comm, error) and not ulfm.has_turn(comm, _sleep))


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _cause(comm: MPI.Intracomm, error: BaseException) -> str:
    if ulfm.enabled() and _is_failure(comm, error):
        return f"PeerError: rank {', '.join(map(str, ulfm.failed(comm)))} is lost, and this run goes on only with all ranks"
    return in_words(error)
