"""`mpisgd.launch` on real ranks: a result comes back, a failure is raised in the parent, which lives on; no process is left."""

from __future__ import annotations

import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from mpisgd.comm.mpi.launch import environment

from .test_run import marked

MODULE = """
import os
import signal
import threading

import mpisgd


def ranks():
    from mpisgd.comm.mpi.library import MPI

    return MPI.COMM_WORLD


def adds(first, *, second):
    print("heard from rank", ranks().Get_rank())
    return first + second, ranks().allreduce(1)


def fails(who):
    if ranks().Get_rank() == who:
        raise ValueError(f"on purpose, {who}")
    ranks().recv(source=who)  # for ever


def dies(who):
    if ranks().Get_rank() == who:
        os.kill(os.getpid(), signal.SIGKILL)
    ranks().recv(source=who)


def returns_what_cannot_be_sent():
    return threading.Lock() if ranks().Get_rank() == 0 else None


def trains(out):
    config = {"epochs": 1, "model": "softmax", "threads": 1, "out": out, "log": {"progress": "off"}}
    return mpisgd.train(config=config)


def no_model():
    raise ValueError("no such layer")
"""

PARENT = """
import mpisgd
import functions

def refused(error, function, *args, **kwargs):
    try:
        mpisgd.launch(function, *args, **kwargs)
    except error as found:
        return found
    raise AssertionError("it was taken")

assert mpisgd.launch(functions.adds, 3, second=4, ranks=3) == (7, 3)

found = refused(mpisgd.LaunchError, functions.fails, 1, ranks=3)
assert found.rank == 1, found.rank
assert str(found).startswith("rank 1 of 3 failed:\\nTraceback"), found
assert str(found).endswith("ValueError: on purpose, 1"), found

found = refused(mpisgd.LaunchError, functions.dies, 0, ranks=2)
assert found.rank == -1
assert "have ended with status" in str(found)

found = refused(mpisgd.LaunchError, mpisgd.train, model=functions.no_model, config={"epochs": 1, "out": "never"}, ranks=3)
assert 0 <= found.rank < 3
assert str(found).startswith(f"rank {found.rank} of 3 failed:\\nTraceback"), found
assert "in no_model" in str(found) and str(found).endswith("ValueError: no such layer"), found

assert refused(mpisgd.LaunchError, functions.returns_what_cannot_be_sent, ranks=2).rank == 0

outcome = mpisgd.launch(functions.trains, "trained", ranks=3)
assert outcome.path.joinpath("DONE").exists()
print("the parent lives on")
"""


@pytest.mark.slow
def test_launch(tmp_path: Path) -> None:
    (tmp_path / "functions.py").write_text(MODULE)
    (tmp_path / "parent.py").write_text(PARENT)
    mark = uuid.uuid4().hex
    command = [sys.executable, "-X", "faulthandler", "parent.py"]
    env = {**environment(), "MARK": mark, "MPISGD_HANG_S": "60"}
    with (tmp_path / "said").open("w+") as said:
        parent = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=said, stderr=subprocess.STDOUT)
        try:
            status = parent.wait(200)
        except subprocess.TimeoutExpired:
            parent.send_signal(signal.SIGABRT)  # says where it waits
            status = parent.wait()
        text = (tmp_path / "said").read_text()
    assert status == 0, f"status {status}, last words: {text[-3000:]}"
    assert text.endswith("the parent lives on\n")
    assert all(f"heard from rank {rank}\n" in text for rank in range(3))
    assert marked(mark) == []
