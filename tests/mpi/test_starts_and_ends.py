"""A rank that dies before training has begun, where MPI tells of failures: the job ends with the reason; and how ranks leave at the
end, of which nobody counts as lost (DESIGN 4, laws 8, 9). The whole campaign is `tests.faults.starts`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpisgd.comm.mpi.launch import environment, mpirun
from mpisgd.job import interruption
from mpisgd.records.log.reader import Run
from tests.faults import dying
from tests.faults.job import Job

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("tells_of_failures")]

ULFM = ("--with-ft", "ulfm")
HERE = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])}
COMMON = ("--threads", "1", "--epochs", "1", "--model", "softmax", "--log.progress", "plain")
END_S = 60.0


def begin(started: list[Job], out: Path, ranks: int, module: str, *words: str, **env: str) -> Job:
    job = Job(ranks, [*COMMON, "--out", str(out), *words], ULFM, module=module, **HERE, **env)
    started.append(job)
    return job


@pytest.mark.parametrize(
    ("point", "victim", "words"),
    [
        ("launch", 3, ()),
        ("mpi-init", 2, ()),
        ("meta", 1, ("--evaluator",)),
        pytest.param("load", 0, ("--protocol", "allreduce"), marks=pytest.mark.rare),
    ],
)
def test_a_death_in_the_start_ends_the_job(
    started: list[Job], tmp_path: Path, point: str, victim: int, words: tuple[str, ...]
) -> None:
    out = tmp_path / "run"
    told = {"DIE_AT": point, "DIE_RANK": str(victim), "DIE_WAITS": "1", "DIE_MARK": str(tmp_path / "mark")}
    job = begin(started, out, 4, "tests.faults.dying", *words, **told)
    job.wait_for(dying.SAID)
    assert job.end(END_S) not in (0, None), job.text
    assert job.left_s is not None, "all processes are gone"
    if point in dying.BEFORE_MPI:
        who = ["1 rank, before any other looked"] if point != "mpi-init" else []
        assert any(f"while MPI was starting: {each}" in job.text for each in (*who, f"rank {victim} (process ")), job.text
    else:
        assert f"rank {victim} is lost" in job.text
    assert not (out / "DONE").exists()


def test_a_death_while_torch_is_imported_is_seen_before_the_others_have_imported_it(started: list[Job], tmp_path: Path) -> None:
    out = tmp_path / "run"
    job = begin(started, out, 4, "tests.faults.dying", DIE_AT=dying.TORCH, DIE_RANK="2", DIE_SLOW_S="300")
    job.wait_for(dying.SAID)
    assert job.end(END_S) not in (0, None), job.text
    assert "rank 0 (starting) on" in job.text and "sees that rank 2 is lost" in job.text, job.text
    assert not out.exists()


def test_a_member_of_a_team_that_dies_ends_the_job(started: list[Job], tmp_path: Path) -> None:
    """The others of its team are at a barrier of their own, of which nobody else knows."""
    out = tmp_path / "run"
    words = ("--aggregation", "node", "--team-size", "2", "--epochs", "1000")
    job = begin(started, out, 5, "tests.faults.dying", *words, DIE_AT="training", DIE_RANK="2")
    job.wait_for(dying.SAID)
    assert job.end(END_S) not in (0, None), job.text
    assert job.left_s is not None
    assert "rank 2 is lost" in job.text


def test_nobody_who_has_finished_counts_as_lost(started: list[Job], tmp_path: Path) -> None:
    """The first rank is late to see that the others have heard its last word: they have left by then."""
    out = tmp_path / "run"
    job = begin(started, out, 4, "tests.faults.late", "--shards", "2")
    assert job.end(END_S) == 0, job.text
    assert job.left_s is not None
    assert "lost" not in job.text
    assert Run(out).done is not None


def test_a_shard_that_is_late_to_the_end_is_waited_for(started: list[Job], tmp_path: Path) -> None:
    """Any other rank would be given up."""
    out = tmp_path / "run"
    told = {"DIE_AT": "end", "DIE_RANK": "1", "DIE_BY": "12", "DIE_MEET_S": "5"}
    job = begin(started, out, 4, "tests.faults.dying", "--shards", "2", "--faults.patience-s", "5", **told)
    assert job.end(END_S) == 0, job.text
    assert Run(out).done is not None


@pytest.mark.parametrize("point", ["end", "books"])
def test_a_shard_that_is_stopped_at_the_end_ends_the_job(point: str, started: list[Job], tmp_path: Path) -> None:
    """The log may lack the last rows of the shard."""
    out = tmp_path / "run"
    told = {"DIE_AT": point, "DIE_RANK": "1", "DIE_BY": "SIGSTOP"}
    job = begin(started, out, 4, "tests.faults.dying", "--shards", "2", "--faults.patience-s", "5", **told)
    assert job.end(END_S) not in (0, None), job.text
    assert re.search(r"has heard nothing of shard 1 \(rank 1 on .*\) for \d+ s, ", job.text), job.text
    assert not (out / "DONE").exists()


def test_one_that_comes_when_all_is_over_leaves(started: list[Job], tmp_path: Path) -> None:
    """Rank 0 has waited for it long enough in the last meeting, and is gone: the run is DONE, and nothing is lost."""
    out = tmp_path / "run"
    told = {"DIE_AT": "last meeting", "DIE_RANK": "3", "DIE_BY": "8", "DIE_MEET_S": "5"}
    job = begin(started, out, 4, "tests.faults.dying", "--shards", "2", "--evaluator", **told)
    assert job.end(END_S) == 0, job.text
    assert dying.SAID in job.text and "Error" not in job.text and "lost" not in job.text, job.text
    assert Run(out).done is not None


def test_a_shard_that_hangs_ends_the_job(started: list[Job], tmp_path: Path) -> None:
    """Nobody is told of it by MPI; the learners, who wait for it, ask."""
    out = tmp_path / "run"
    words = ("--shards", "2", "--epochs", "100000", "--checkpoint.every-updates", "5", "--faults.patience-s", "5")
    job = begin(started, out, 4, "mpisgd", *words, "--log.progress-s", "0.1")
    job.wait_for("epoch ")
    until_s = time.monotonic() + END_S
    while interruption.newest(out) is None:
        assert time.monotonic() < until_s, job.text
        time.sleep(0.05)
    job.send(1, signal.SIGSTOP)
    assert job.end(END_S) not in (0, None), job.text
    assert job.left_s is not None, "it is gone, too"
    assert re.search(r"learner \d \(rank \d on .*\) has heard nothing of shard 1 \(rank 1 on .*\) for \d+ s, ", job.text)
    assert re.search(f"mpirun --with-ft ulfm (--oversubscribe )?-n 4 mpisgd train --resume {out}", job.text), job.text
    assert not (out / "DONE").exists()


def test_ranks_that_are_all_killed_at_once_are_told_of(started: list[Job], tmp_path: Path) -> None:
    """The launcher alone is left, which tells of nothing, with status 0."""
    out = tmp_path / "run"
    job = begin(started, out, 3, "mpisgd", "--epochs", "100000", "--checkpoint.every-updates", "5")
    until_s = time.monotonic() + END_S
    while interruption.newest(out) is None:
        assert time.monotonic() < until_s, job.text
        time.sleep(0.05)
    for pid in list(job.pids.values()):
        os.kill(pid, signal.SIGKILL)
    assert job.end(END_S) not in (0, None), job.text
    assert job.text.count("mpisgd: rank 0 on ") == 1, job.text
    assert job.left_s is not None, "nothing is left"
    assert not (out / "DONE").exists()
    assert not (out / "RUNNING").exists()


KILLED_AFTER = """
import os, time, mpisgd
mpisgd.train(config={{"out": {out!r}, "threads": 1, "epochs": 1, "model": "softmax"}})
if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
    os.kill(os.getpid(), {signum})
{then}
"""


@pytest.mark.long
@pytest.mark.parametrize(("signum", "then"), [(0, ""), (signal.SIGKILL, ""), (signal.SIGSEGV, "time.sleep(1000)")])
def test_a_script_whose_rank_0_is_killed_after_the_run_has_no_status_0(tmp_path: Path, signum: int, then: str) -> None:
    script = KILLED_AFTER.format(out=str(tmp_path / "run"), signum=int(signum), then=then)
    command = [*mpirun(3), *ULFM, sys.executable, "-c", script]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=END_S, check=False)
    assert (done.returncode == 0) == (signum == 0), done.stderr
    assert done.stderr.count("mpisgd: rank 0 on ") == bool(signum), done.stderr
    assert (tmp_path / "run" / "DONE").exists()
