"""The only import of mpi4py (DESIGN 3). Importing this module initialises MPI."""

from __future__ import annotations

import ctypes
import os

from mpisgd.base.errors import ConfigError
from mpisgd.comm.mpi import node_processes, ulfm

# Open MPI's launcher and library refuse root without these; users of a container are root.
if hasattr(os, "geteuid") and os.geteuid() == 0:
    os.environ.setdefault("OMPI_ALLOW_RUN_AS_ROOT", "1")
    os.environ.setdefault("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")

ulfm.prepare()

EAGER_NBYTES = 2**21 + 2**12
"""A chunk (`vectors/chunks.py`) with MPI's own header."""
if not ulfm.enabled():  # a hanging learner is known by answers that it does not take
    # Over TCP, Open MPI asks before each larger message whether its receive is posted; a chunk's is.
    for _limit in ("eager_limit", "rndv_eager_limit", "max_send_size"):
        os.environ.setdefault(f"OMPI_MCA_btl_tcp_{_limit}", str(EAGER_NBYTES))


import mpi4py  # noqa: E402 - after settings read when MPI is initialised

mpi4py.rc.finalize = not ulfm.enabled()
mpi4py.rc.initialize = not (ulfm.enabled() or node_processes.several())

with node_processes.within(node_processes.start_s()):
    from mpi4py import MPI

    if not (mpi4py.rc.initialize or MPI.Is_initialized()):
        # Not by mpi4py, which lets no other thread run during this.
        with node_processes.watched(node_processes.STARTED_S if ulfm.enabled() else node_processes.PATIENT_S):
            ctypes.CDLL(MPI.__file__).MPI_Init_thread(None, None, MPI.THREAD_MULTIPLE, ctypes.byref(ctypes.c_int()))
        for _comm in (MPI.COMM_WORLD, MPI.COMM_SELF):  # as mpi4py would
            _comm.Set_errhandler(MPI.ERRORS_RETURN)

__all__ = ["MPI", "cuda_aware", "takes_gpu_memory"]


def cuda_aware() -> bool | None:
    """Return whether MPI says that it takes GPU memory; None = no such query."""
    if os.environ.get("MPICH_GPU_SUPPORT_ENABLED") == "1":  # Cray's MPICH
        return True
    try:
        return bool(ctypes.CDLL(MPI.__file__).MPIX_Query_cuda_support())  # of Open MPI and MPICH
    except (AttributeError, OSError):
        return None


def takes_gpu_memory() -> bool:
    """Return whether to give MPI GPU memory: by MPISGD_GPU_MEMORY, else if CUDA-aware. Raises ConfigError."""
    said = os.environ.get("MPISGD_GPU_MEMORY")
    if said is None:
        return cuda_aware() is True
    if said not in ("direct", "staged"):
        raise ConfigError(f"MPISGD_GPU_MEMORY = {said!r}: expected direct or staged")
    return said == "direct"
