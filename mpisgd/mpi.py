"""The one place that imports mpi4py (DESIGN 3). Importing this module initialises MPI."""

from __future__ import annotations

import os

from mpisgd import ulfm

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

from mpi4py import MPI  # noqa: E402

__all__ = ["MPI"]
