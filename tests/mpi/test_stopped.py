"""A rank that is stopped (SIGSTOP), of which MPI never tells: the job ends with its name and the way on, whoever waits for it, and
whether anybody does. One that is merely late is waited for (DESIGN 4, law 9)."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.effort import thinned
from tests.faults import dying
from tests.faults.job import Job

from .test_tolerant import HELD, release_stopped, users_module

__all__ = ["users_module"]

pytestmark = pytest.mark.alone
RARE = [pytest.mark.slow, pytest.mark.rare]

PATIENCE_S = 5.0
LONG_S = 15
"""No rank may be silent for so long."""
HERE = {
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]),
    "MPISGD_WAIT": "polite",  # as where there are more ranks than cores
}
COMMON = ("--threads", "1", "--model", "softmax", "--faults.patience-s", f"{PATIENCE_S}", "--log.progress", "plain")
FOR_EVER = ("--epochs", "100000", "--straggler.delay", "constant", "--straggler.delay-mean-s", "0.02")
END_S = 90.0
Begin = Callable[..., Job]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    jobs: list[Job] = []

    def begun(ranks: int, *words: str, options: tuple[str, ...] = (), module: str = "tests.faults.dying", **env: str) -> Job:
        job = Job(ranks, [*COMMON, "--out", str(tmp_path / "run"), *words], options, module=module, **HERE, **env)
        jobs.append(job)
        return job

    yield begun
    for job in jobs:
        job.end(0.0)


def ended(job: Job, out: Path) -> str:
    """What the job said that was to end."""
    job.wait_for(dying.SAID)
    assert job.end(END_S) not in (0, None), job.text
    assert job.left_s is not None, "the one that was stopped is gone, too"
    assert not (out / "DONE").exists()
    return job.text


STOPPED = [
    pytest.param(2, "training", (), r"learner 1 \(rank 2 on \S+\)", r"shard 0 \(rank 0 on \S+\)", id="learner"),
    pytest.param(
        0, "serving", ("--shards", "2"), r"shard 0 \(rank 0 on \S+\)", r"(shard 1|learner \d) \(rank \d on \S+\)", id="shard"
    ),
    pytest.param(
        2, "evaluation", ("--evaluator",), r"evaluator \(rank 2 on \S+\)", r"shard 0 \(rank 0 on \S+\)", id="evaluator", marks=RARE
    ),
    pytest.param(
        1,
        "training",
        ("--protocol", "allreduce"),
        r"learner and shard 1 \(rank 1 on \S+\)",
        r"learner and shard 0 \(rank 0 on \S+\)",
        id="allreduce",
    ),
]


@pytest.mark.parametrize(("victim", "point", "words", "named", "by"), thinned(STOPPED, 3))
def test_a_rank_that_is_stopped_ends_the_job(
    begin: Begin, tmp_path: Path, victim: int, point: str, words: tuple[str, ...], named: str, by: str
) -> None:
    saved = ("--checkpoint.every-updates", "5")
    job = begin(3, *FOR_EVER, *saved, *words, DIE_AT=point, DIE_RANK=str(victim), DIE_BY="SIGSTOP")
    text = ended(job, tmp_path / "run")
    assert re.search(rf"mpisgd: {by} has heard nothing of {named} for \d+ s, ", text), text
    assert re.search(r"to go on from the checkpoint of clock [\d,]+.*: mpirun .*-n 3 mpisgd train --resume", text), text


def test_a_rank_that_is_stopped_in_the_start_ends_the_job(begin: Begin, tmp_path: Path) -> None:
    """The other is in a collective call, which keeps a core busy: two ranks are enough."""
    job = begin(2, *FOR_EVER, DIE_AT="check", DIE_RANK="1", DIE_BY="SIGSTOP")
    text = ended(job, tmp_path / "run")
    assert re.search(r"shard 0 \(rank 0 on \S+\) has heard nothing of learner 0 \(rank 1 on \S+\) for \d+ s, ", text), text


@pytest.mark.usefixtures("tells_of_failures")
@pytest.mark.parametrize(("mode", "point", "ranks"), [("fail-fast", "training", 3), ("tolerant", "model", 2)])
def test_where_mpi_tells_of_the_dead_too(begin: Begin, tmp_path: Path, mode: str, point: str, ranks: int) -> None:
    """It tells of none that is stopped; a fault-tolerant run, too, begins with all."""
    last, words = ranks - 1, (*FOR_EVER, "--faults.mode", mode)
    job = begin(ranks, *words, options=("--with-ft", "ulfm"), DIE_AT=point, DIE_RANK=str(last), DIE_BY="SIGSTOP")
    text = ended(job, tmp_path / "run")
    named = rf"learner {last - 1} \(rank {last} on \S+\)"
    assert re.search(rf"shard 0 \(rank 0 on \S+\) has heard nothing of {named} for \d+ s, ", text), text


@pytest.mark.slow
@pytest.mark.usefixtures("tells_of_failures")
def test_the_last_learner_that_is_stopped_ends_a_fault_tolerant_job(begin: Begin, tmp_path: Path) -> None:
    words = (*FOR_EVER, "--checkpoint.every-updates", "5")
    job = begin(2, *words, options=("--with-ft", "ulfm"), DIE_AT="training", DIE_RANK="1", DIE_BY="SIGSTOP")
    text = ended(job, tmp_path / "run")
    assert "rank 1 gave no sign of life, and nobody else goes on" in text
    assert "PeerError: no learner is left at clock" in text
    assert re.search(r"to go on from the checkpoint of clock [\d,]+", text), text


@pytest.mark.slow
@pytest.mark.usefixtures("tells_of_failures")
def test_who_evaluates_and_is_stopped_is_followed_by_a_learner(begin: Begin, tmp_path: Path) -> None:
    words, options = ("--epochs", "1", "--evaluator"), ("--with-ft", "ulfm")
    job = begin(3, *words, options=options, DIE_AT="evaluation", DIE_RANK="2", DIE_BY="SIGSTOP")
    job.wait_for(dying.SAID)
    assert job.end(END_S) == 0, job.text
    assert job.left_s is not None, "the one that was stopped is gone, too"
    assert "rank 2 gave no sign of life" in job.text
    assert (tmp_path / "run" / "DONE").exists()


@pytest.mark.parametrize("point", ["training", pytest.param("data", marks=RARE)])
def test_one_that_is_late_is_waited_for(begin: Begin, tmp_path: Path, point: str) -> None:
    job = begin(3, "--epochs", "1", DIE_AT=point, DIE_RANK="2", DIE_BY=str(LONG_S))
    job.wait_for(dying.SAID)
    assert job.end(END_S) == 0, job.text
    assert (tmp_path / "run" / "DONE").exists()


@pytest.mark.usefixtures("users_module")
def test_a_job_that_is_stopped_as_a_whole_goes_on(begin: Begin, tmp_path: Path) -> None:
    """As a batch system does that suspends jobs."""
    words = ("--epochs", "8", "--straggler.delay", "constant", "--straggler.delay-mean-s", "0.02", "--log.progress-s", "0.1")
    release_stopped(tmp_path, "twice")
    job = begin(3, *HELD, *words, module="mpisgd", ONCE="200")  # of 360 mini-batches of each: it is not over before it is stopped
    job.wait_for("epoch ")
    assert len(job.pids) == 3
    for rank in range(3):
        job.send(rank, signal.SIGSTOP)
    time.sleep(LONG_S)
    for rank in range(3):
        job.send(rank, signal.SIGCONT)
    release_stopped(tmp_path, "once")
    assert job.end(END_S) == 0, job.text
    assert (tmp_path / "run" / "DONE").exists()
