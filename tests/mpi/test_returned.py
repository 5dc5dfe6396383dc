"""A learner of a fault-tolerant run hangs for a while, on real ranks: it is missed, and is back."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest

from mpisgd import replay
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Event
from tests.faults.job import Job

from .test_tolerant import HELD, PATIENCE_S, begin, ended, release_stopped, started, told, users_module

__all__ = ["started", "users_module"]

pytestmark = pytest.mark.usefixtures("tells_of_failures")

ROUNDED = ("--push-format", "bfloat16", "--pull-format", "bfloat16")


@pytest.mark.alone
@pytest.mark.usefixtures("users_module")
def test_one_that_is_missed_comes_back_and_its_shards_know_what_it_holds(started: list[Job], tmp_path: Path) -> None:
    """The others go on meanwhile; weights travel as the way from what it held."""
    out = tmp_path / "run"
    words = ("--shards", "2", "--epochs", "3", "--faults.patience-s", PATIENCE_S, "--log.flush-s", "0.1")
    release_stopped(tmp_path, "once", "twice")
    job = begin(started, out, 4, *HELD, *ROUNDED, *words, ACTS="3:30:SIGSTOP", SLOW="")
    job.wait_for("learner 1 was not heard of for")
    job.until(lambda: np.count_nonzero(Run(out).updates["gradients"] == 1) >= 10)
    job.send(3, signal.SIGCONT)
    job.wait_for("learner 1 is back")
    job.until(lambda: all(1 in told(Run(out), Event.RETURNED, shard) for shard in (0, 1)))
    release_stopped(tmp_path, "soon")
    run = ended(job, out)
    for shard in (0, 1):
        assert told(run, Event.MISSED, shard).count(1) == told(run, Event.RETURNED, shard).count(1) >= 1
        gradients = run.updates["gradients"][run.updates["shard"] == shard]
        assert gradients[-1] == 2 and np.count_nonzero(gradients == 1) >= 5, "with it, and without"
    assert replay.check(out, trust=True) == ""
