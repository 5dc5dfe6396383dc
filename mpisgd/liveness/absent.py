"""Sign of a rank whose program ended without `mpisgd.train`, for ranks that wait on its node (`muster.py`).

A socket's name of this user, gone with the process.
"""

from __future__ import annotations

import atexit
import os
import re
import sys
import threading
from pathlib import Path

from mpisgd.comm.mpi.node_processes import hold, is_held

came: list[bool] = []
"""Not empty once this rank has called `train`."""


def tell_if_absent() -> None:
    # Where Python has it, before all functions of atexit: mpi4py may register later, and waits for all ranks there.
    getattr(threading, "_register_atexit", atexit.register)(_leave_sign)


def gone(sockets: Path = Path("/proc/net/unix")) -> list[int]:
    """Return this node's ranks that left a sign."""
    try:
        lines = sockets.read_text()
    except OSError:  # not Linux
        return []
    names = set(re.findall(rf"@({re.escape(_prefix())}(\d+)-\d+)$", lines, re.MULTILINE))
    return sorted({int(rank) for name, rank in names if is_held(name)})


def _prefix() -> str:
    return f"mpisgd-gone-{os.environ.get('PMIX_NAMESPACE') or os.getppid()}-"  # of all ranks of a launcher on this node


def _leave_sign() -> None:
    """Import nothing: Python is shutting down."""
    mpi = sys.modules.get("mpi4py.MPI")
    if came or mpi is None or sys.platform != "linux" or not mpi.Is_initialized() or mpi.Is_finalized():
        return
    if mpi.COMM_WORLD.Get_size() > 1:
        sign = hold(f"{_prefix()}{mpi.COMM_WORLD.Get_rank()}-{os.getpid()}")
        if sign is not None:
            sign.detach()  # open until the process ends: MPI finalizes when Python's objects are gone
