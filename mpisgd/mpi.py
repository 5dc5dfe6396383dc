"""The one place that imports mpi4py (DESIGN 3). Importing this module initialises MPI."""

from __future__ import annotations

import os

# As root in a container, Open MPI's launcher and library refuse to start without these; users of a container are root.
if hasattr(os, "geteuid") and os.geteuid() == 0:
    os.environ.setdefault("OMPI_ALLOW_RUN_AS_ROOT", "1")
    os.environ.setdefault("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")

from mpi4py import MPI

__all__ = ["MPI"]
