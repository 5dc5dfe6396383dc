"""A rank whose program ends without `mpisgd.train` leaves a sign on its node, for ranks that wait there for it (`muster.py`).

The sign is the name of a socket, which goes with the process: no message of MPI's could come between those of the user's program.
A name that another user's process holds is no sign.
"""

from __future__ import annotations

import atexit
import os
import re
import sys
import threading
from pathlib import Path

from mpisgd.comm.mpi.siblings import hold, is_held

came: list[bool] = []
"""Not empty once this rank has called `train`."""


def tell_if_absent() -> None:
    """Register what leaves the sign."""
    # Where Python has it, before all that is registered with atexit: mpi4py, which waits for all ranks there, may come later.
    getattr(threading, "_register_atexit", atexit.register)(_leave_sign)


def gone(sockets: Path = Path("/proc/net/unix")) -> list[int]:
    """The ranks of this node that have left a sign."""
    try:
        lines = sockets.read_text()
    except OSError:  # not Linux
        return []
    names = set(re.findall(rf"@({re.escape(_prefix())}(\d+)-\d+)$", lines, re.MULTILINE))
    return sorted({int(rank) for name, rank in names if is_held(name)})


def _prefix() -> str:
    """The same for all ranks that a launcher has started on this node."""
    return f"mpisgd-gone-{os.environ.get('PMIX_NAMESPACE') or os.getppid()}-"


def _leave_sign() -> None:
    """Import nothing: Python is shutting down."""
    mpi = sys.modules.get("mpi4py.MPI")
    if came or mpi is None or sys.platform != "linux" or not mpi.Is_initialized() or mpi.Is_finalized():
        return
    if mpi.COMM_WORLD.Get_size() > 1:
        sign = hold(f"{_prefix()}{mpi.COMM_WORLD.Get_rank()}-{os.getpid()}")
        if sign is not None:
            sign.detach()  # open until the process ends: MPI finalizes when Python's objects are gone
