"""`mpirun ... python -m tests.mpi.two_nodes COMMAND ...`: `mpisgd`, whose even and odd ranks take themselves to be on two nodes."""

from __future__ import annotations

import socket
import sys

from mpisgd.__main__ import main
from mpisgd.liveness.guard import launched_rank

if __name__ == "__main__":
    socket.gethostname = lambda: f"node{launched_rank() % 2}"
    sys.exit(main())
