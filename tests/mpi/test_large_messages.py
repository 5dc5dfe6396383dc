"""A push of more than 2 GiB, which MPI counts no more in an int: seen refused as one of -32766 bytes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mpisgd.launch import environment, mpirun

SIZE = 540_000_000
"""Elements: 2.16 GB."""
NEEDED_NBYTES = 6 * 10**9
SCRIPT = f"""
import numpy as np
from mpisgd.messages import Tag
from mpisgd.mpi import MPI
from mpisgd.wire import Wire

comm = MPI.COMM_WORLD
wire, gradient = Wire(comm, polite=False), np.zeros({SIZE}, np.float32)
fields = (0, 1, 2, 3, 1, 0, 0, 0, 0, 0, gradient.nbytes, 0.5)
if comm.rank == 1:
    gradient[-1] = 7.0
    wire.finish(wire.start(0, Tag.PUSH, fields, gradient))
else:
    assert wire.take(((None, None),)) == (1, Tag.PUSH, fields)
    assert wire.take_body(gradient)
    assert gradient[-1] == 7.0 and not gradient[:-1].any()
    print("received as it was sent")
"""


@pytest.mark.alone
def test_a_push_of_more_than_2_gib() -> None:
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if available < NEEDED_NBYTES:
        pytest.skip(f"{available / 1e9:.1f} GB of memory are free here: needs {NEEDED_NBYTES / 1e9:g}")
    done = subprocess.run(
        [*mpirun(2), sys.executable, "-m", "mpi4py", "-c", SCRIPT],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "received as it was sent" in done.stdout
