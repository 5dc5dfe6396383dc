"""Run under mpirun: many commands of mpisgd, and scripts, one after the other, in one job (starting ranks is what takes long).

`python commands.py listing.json`, a list of {"ranks": n, "cwd": directory, "words": [...]}. The first n ranks take themselves for
all, in that directory; the others wait. What each rank said and its exit status come back in `listing.json.done`. Nothing here
may end the job: commands of which one rank fails alone need a launch of their own.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any, cast
from unittest import mock

from drive import say_size, wait_politely

from mpisgd.__main__ import main
from mpisgd.comm.mpi.library import MPI
from mpisgd.liveness.guard import failing_fast
from tests.once import once

WORLD = MPI.COMM_WORLD


def execute(job: dict[str, Any], comm: MPI.Intracomm) -> tuple[int, str, str, float]:
    """The exit status, standard output and standard error of this rank, and its seconds."""
    setattr(MPI, "COMM_WORLD", comm)  # noqa: B010 - final, to who reads its types
    say_size(comm.size)
    os.chdir(job["cwd"])
    sys.path[0] = job["cwd"]
    for name in ("user",):  # each command has its own
        sys.modules.pop(name, None)
    importlib.invalidate_caches()
    out, err = io.StringIO(), io.StringIO()
    start_s = time.monotonic()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = script(job["words"]) if job["words"][0].endswith(".py") else main(job["words"])
    return status, out.getvalue(), err.getvalue(), time.monotonic() - start_s


def script(words: list[str]) -> int:
    with mock.patch.object(sys, "argv", words):
        runpy.run_path(str(Path(words[0]).resolve()), run_name="__main__")  # workers of a DataLoader look for it
    return 0


def everything() -> None:
    said = []
    for job in json.loads(Path(sys.argv[1]).read_text()):
        comm = WORLD.Split(0 if job["ranks"] > WORLD.rank else MPI.UNDEFINED, WORLD.rank)
        mine = execute(job, cast(MPI.Intracomm, comm)) if comm != MPI.COMM_NULL else None
        wait_politely(WORLD)
        said.append([each for each in WORLD.gather(mine) or () if each is not None])
        if comm != MPI.COMM_NULL:
            comm.Free()
    if WORLD.rank == 0:
        Path(sys.argv[1] + ".done").write_text(json.dumps(said))


if __name__ == "__main__":
    with failing_fast(WORLD, lambda: "commands"), once():
        everything()
