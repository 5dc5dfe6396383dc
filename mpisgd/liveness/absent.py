"""A rank whose program ends without `mpisgd.train` tells ranks 0 and 1, which may wait there for it (`muster.py`)."""

from __future__ import annotations

import atexit
import sys
import threading

GONE = 32_102
"""Tag of the message that a rank sends as its program ends."""
came: list[bool] = []
"""Not empty once this rank has called `train`."""


def tell_if_absent() -> None:
    """Register what tells ranks 0 and 1."""
    # Where Python has it, before all that is registered with atexit: mpi4py, which finalizes MPI there, may be imported later.
    getattr(threading, "_register_atexit", atexit.register)(_tell)


def _tell() -> None:
    """Import nothing: Python is shutting down."""
    mpi = sys.modules.get("mpi4py.MPI")
    if came or mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return
    world = mpi.COMM_WORLD
    for dest in range(min(2, world.Get_size())):
        if dest != world.Get_rank():
            world.Isend(bytearray(1), dest, GONE).Free()
