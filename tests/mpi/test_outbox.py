"""A shard that answers from a copy goes on before the answer is received, and may change the weights."""

from __future__ import annotations

import subprocess
import sys

from mpisgd.launch import environment, mpirun

SIZE = 300_000
SCRIPT = f"""
import numpy as np
from mpisgd.messages import Tag
from mpisgd.mpi import MPI
from mpisgd.wire import Wire

comm = MPI.COMM_WORLD
wire, weights = Wire(comm, polite=True), np.full({SIZE}, 7.0, np.float32)
if comm.rank == 0:
    wire.finish(wire.start(1, Tag.ANSWER, (0, 3, 0, 0, 0, weights.nbytes), wire.aside(weights)))
    weights.fill(8.0)
    comm.send("it has gone on", 1, 99)
else:
    assert comm.recv(source=0, tag=99) == "it has gone on"  # only now is there anywhere for the answer to go
    posted = wire.post(0, Tag.ANSWER, weights)
    assert wire.header(posted) == (0, 3, 0, 0, 0, weights.nbytes)
    wire.finish(posted)
    assert (weights == 7.0).all(), weights
    print("received what was sent")
assert wire.gather(np.array([comm.rank])).tolist() == [[0], [1]]
"""


def test_nobody_waits_for_what_leaves_from_a_copy() -> None:
    """Larger than MPI's own buffers: sent from the weights themselves, this would be a deadlock."""
    done = subprocess.run(
        [*mpirun(2), sys.executable, "-m", "mpi4py", "-c", SCRIPT],
        env=environment() | {"MPISGD_SSEND": "0", "MPISGD_WAIT": "polite"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "received what was sent" in done.stdout
