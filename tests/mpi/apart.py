"""`mpirun ... python -m tests.mpi.apart COMMAND ...`: `mpisgd`, whose ranks take each other to be on nodes of their own."""

from __future__ import annotations

import socket
import sys

from mpisgd.__main__ import main
from mpisgd.liveness.guard import launched_rank

if __name__ == "__main__":
    socket.gethostname = lambda: f"node{launched_rank()}"
    sys.exit(main())
