"""The one place that imports mpi4py (DESIGN 3). Importing this module initialises MPI."""

from __future__ import annotations

import ctypes
import os

from mpisgd.base.errors import ConfigError
from mpisgd.comm.mpi import siblings, ulfm

# As root in a container, Open MPI's launcher and library refuse to start without these; users of a container are root.
if hasattr(os, "geteuid") and os.geteuid() == 0:
    os.environ.setdefault("OMPI_ALLOW_RUN_AS_ROOT", "1")
    os.environ.setdefault("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")

# Windows are only for memory that a node shares, which is another component's; this one, of Open MPI 5, fails its query aloud (its
# issue 14086).
os.environ.setdefault("OMPI_MCA_osc", "^ucx")

ulfm.prepare()


import mpi4py  # noqa: E402 - after what must be said before MPI is initialised

mpi4py.rc.finalize = not ulfm.enabled()
mpi4py.rc.initialize = not (ulfm.enabled() or siblings.several())

with siblings.within(siblings.start_s()):
    from mpi4py import MPI

    if not (mpi4py.rc.initialize or MPI.Is_initialized()):
        # Not by mpi4py, which lets no other thread run meanwhile.
        with siblings.watched(siblings.STARTED_S if ulfm.enabled() else siblings.PATIENT_S):
            ctypes.CDLL(MPI.__file__).MPI_Init_thread(None, None, MPI.THREAD_MULTIPLE, ctypes.byref(ctypes.c_int()))
        for _comm in (MPI.COMM_WORLD, MPI.COMM_SELF):  # as mpi4py would
            _comm.Set_errhandler(MPI.ERRORS_RETURN)

__all__ = ["MPI", "cuda_aware", "takes_gpu_memory"]


def cuda_aware() -> bool | None:
    """Whether the library takes a GPU's memory: it is asked itself. Open MPI and MPICH have one function for it; None where it has
    none."""
    if os.environ.get("MPICH_GPU_SUPPORT_ENABLED") == "1":  # Cray's MPICH
        return True
    try:
        return bool(ctypes.CDLL(MPI.__file__).MPIX_Query_cuda_support())
    except (AttributeError, OSError):
        return None


def takes_gpu_memory() -> bool:
    """Whether it is to be given a GPU's memory: what MPISGD_GPU_MEMORY says, or, where that is not set, where it takes it.

    Raises ConfigError for another word than direct or staged.
    """
    said = os.environ.get("MPISGD_GPU_MEMORY")
    if said is None:
        return cuda_aware() is True
    if said not in ("direct", "staged"):
        raise ConfigError(f"MPISGD_GPU_MEMORY = {said!r}: expected direct or staged")
    return said == "direct"
