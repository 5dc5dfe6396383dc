"""A silent end is told: with ULFM mpirun leaves with status 0, without a word, if all ranks are killed.

mpirun waits while a process has a rank's output. So a shell holds rank 0's; if mpirun is there `WAIT_S` after rank 0 left without
order, the shell speaks, and ends mpirun. If rank 0 is on another node than mpirun, only a missing DONE tells.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shlex
import socket
from pathlib import Path

from mpisgd.comm.mpi.node_processes import END_S, FORWARD_S, NodeProcesses

WAIT_S = 5  # other ranks tell sooner, a reaper kills mpirun later
_DAEMON = "prted"
_open: list[int] = []  # the pipe that a death closes


def tell_of_silence() -> None:
    """Start the shell, by rank 0."""
    processes = NodeProcesses()
    launcher = processes.launcher_of_this_job
    try:
        if Path(f"/proc/{launcher}/comm").read_text().strip() == _DAEMON:
            return
    except OSError:  # unknown, or gone
        return
    words = (
        f"mpisgd: rank 0 on {socket.gethostname()} was killed, or has crashed, and no other rank has ended the job: it is ended;"
        " a run that has a checkpoint goes on with mpisgd train --resume"
    )
    tell = f"echo {shlex.quote(words)} >&2; sleep {FORWARD_S}; kill -TERM {launcher}; sleep {END_S}"
    heard, said = os.pipe()
    _open.append(said)
    processes.end_launcher_after(f"read -r _ && exit; sleep {WAIT_S}; there || exit; {tell}", stdin=heard, output=None)
    os.close(heard)
    atexit.register(leave_in_order)


def leave_in_order() -> None:
    while _open:
        with contextlib.suppress(OSError):
            os.write(_open[-1], b"in order\n")
        os.close(_open.pop())
