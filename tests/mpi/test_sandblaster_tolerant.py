"""Ranks of a batch optimisation are killed and stopped, on real ranks: learners are done without, others are not."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from mpisgd import replay
from mpisgd.job import interruption
from mpisgd.records.log.schema import Event
from tests.faults.job import Job

from .test_tolerant import (
    END_S,
    HELD,
    PATIENCE_S,
    SLOWLY,
    ULFM,
    ended,
    release_stopped,
    started,
    told,
    users_module,
)

__all__ = ["started", "users_module"]

pytestmark = pytest.mark.usefixtures("tells_of_failures")

BATCH = ["--protocol", "sandblaster", "--protocol.iterations", "12", "--model", "softmax", "--mu", "64", "--threads", "1"]
BATCH += ["--log.progress", "plain", "--log.progress-s", "0", *HELD, *SLOWLY]


@pytest.mark.slow
@pytest.mark.usefixtures("users_module")
def test_learners_of_a_batch_optimisation_die_and_hang_and_each_portion_counts_once(started: list[Job], tmp_path: Path) -> None:
    """Learner 0, which was to evaluate, dies; learner 2 hangs for good."""
    release_stopped(tmp_path, "once", "twice")
    words = [*BATCH, "--shards", "2", "--faults.patience-s", PATIENCE_S, "--out", str(tmp_path / "run")]
    job = Job(7, words, ULFM, ACTS="3:8:SIGKILL 5:16:SIGSTOP")
    started.append(job)
    run = ended(job, tmp_path / "run")
    for shard in (0, 1):
        assert told(run, Event.LOST, shard) == [0, 2]
    assert "learner 0 is lost: others take over" in job.text
    assert len(run.of_coordinator("iterations")) == 12
    assert len(run.evaluations) > 0
    proof = replay.replay(tmp_path / "run", trust=True)
    assert proof.lines()[-1].startswith("identical"), proof.lines()


@pytest.mark.slow
@pytest.mark.usefixtures("users_module")
@pytest.mark.parametrize(("rank", "name"), [pytest.param(1, "shard 1", marks=pytest.mark.rare), (2, "coordinator")])
def test_without_a_shard_or_the_coordinator_of_a_batch_optimisation_there_is_no_job(
    started: list[Job], tmp_path: Path, rank: int, name: str
) -> None:
    out = tmp_path / "run"
    release_stopped(tmp_path, "once", "twice")
    job = Job(5, [*BATCH, "--shards", "2", "--checkpoint.every-updates", "1", "--out", str(out)], ULFM, CLOCK="3")
    started.append(job)
    job.until(lambda: (interruption.newest(out) or 0) >= 3)
    job.send(rank, signal.SIGKILL)
    assert job.end(END_S) not in (0, None), job.text
    assert f"rank {rank} ({name}) is lost, and the job needs this rank" in job.text
    assert re.search(rf"to go on from the checkpoint of clock \d+ .*--resume {re.escape(str(out))}", job.text)
