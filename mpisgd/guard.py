"""A failure is loud, quick and named (DESIGN 4, law 9): the wrapper around a rank's main, and agreement before the start."""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from mpisgd.errors import EXIT_FAILED, MpisgdError

if TYPE_CHECKING:
    from mpisgd.mpi import MPI

T = TypeVar("T")

FORWARD_S = 0.5
"""Seconds for the launcher to pass on a rank's last lines before it is told to end the job: MPICH's drops what it has not read."""

_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID", "MV2_COMM_WORLD_RANK")
SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS", "MV2_COMM_WORLD_SIZE")


def launched_rank() -> int:
    """The rank that the launcher gave this process, without initialising MPI; 0 where there is no launcher."""
    return next((int(os.environ[name]) for name in _RANK_VARIABLES if os.environ.get(name, "").isdigit()), 0)


def launched_size() -> int:
    """How many ranks the launcher started, without initialising MPI; 1 where there is no launcher."""
    return next((int(os.environ[name]) for name in SIZE_VARIABLES if os.environ.get(name, "").isdigit()), 1)


class AgreedError(MpisgdError):
    """All ranks know that some of them cannot start; raised on every rank, so nobody is left waiting."""

    def __init__(self, message: str, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status


def agree(comm: MPI.Intracomm, action: Callable[[], T]) -> T:
    """Do something on every rank that may be refused; where one refuses, all do, before the first message is sent.

    Raises AgreedError on all ranks where `action` raised MpisgdError on any. Any other exception is a bug, or the user's: it
    passes through and ends the job (`failing_fast`).
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
    lines = [text if len(ranks) == len(problems) else f"rank {_ranges(ranks)}: {text}" for text, ranks in by_text.items()]
    raise AgreedError("\n".join(lines), found[0][1][1])


def _ranges(ranks: list[int]) -> str:
    """[0, 1, 2, 5] as "0-2, 5"."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][-1] == rank - 1:
            parts[-1] = [parts[-1][0], rank]
        else:
            parts.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


@contextmanager
def failing_fast(comm: MPI.Intracomm, who: Callable[[], str], way_on: Callable[[], str] = lambda: "") -> Iterator[None]:
    """End the whole job in seconds when this rank fails, with rank, host, cause and how to go on on the last lines.

    An AgreedError is raised on all ranks alike and passes through. `MPISGD_HANG_S=60` dumps the stack of every rank that is
    still busy after so many seconds, again and again.
    """
    hang_s = float(os.environ.get("MPISGD_HANG_S", "0"))
    if hang_s > 0:
        faulthandler.dump_traceback_later(hang_s, repeat=True)
    try:
        yield
    except AgreedError:
        raise
    except BaseException as error:
        where = "" if isinstance(error, MpisgdError) else traceback.format_exc()
        text = f"mpisgd: rank {comm.Get_rank()} ({who()}) on {socket.gethostname()} failed, the job is ended"
        lines = [where, text, f"{type(error).__name__}: {error}", *filter(None, [way_on()])]
        sys.stdout.flush()
        print("\n".join(lines), file=sys.stderr, flush=True)  # in one write
        time.sleep(FORWARD_S)
        comm.Abort(error.exit_status if isinstance(error, MpisgdError) else EXIT_FAILED)
        raise
    finally:
        if hang_s > 0:
            faulthandler.cancel_dump_traceback_later()
