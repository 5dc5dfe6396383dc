"""Real ranks on several nodes: a link is cut, a learner alone on its node hangs, and the job ends for everybody."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpisgd import replay
from mpisgd.job import interruption
from mpisgd.records.log.reader import Run
from tests.nodes.cluster import Cluster
from tests.nodes.job import Job

pytestmark = pytest.mark.slow

SPREAD = (2, 1, 1)
"""A shard and a learner on the first node, a learner alone on each other one."""
FAR = 2
"""A node, and the learner on it; its rank is one more."""
LIMIT_S = 60.0
COMMON = {
    "threads": "1",
    "log.progress": "plain",
    "log.progress-s": "0.1",
    "straggler.delay": "constant",
    "straggler.delay-mean-s": "0.01",
}


@pytest.fixture
def cluster(open_mpi: None) -> Iterator[Cluster]:
    with Cluster(len(SPREAD)) as made:
        yield made


def begin(cluster: Cluster, out: Path, *options: str, spread: tuple[int, ...] = SPREAD, **more: str) -> Job:
    settings = COMMON | {"out": str(out)} | {name.replace("__", ".").replace("_", "-"): value for name, value in more.items()}
    job = Job(cluster, spread, [word for name, value in settings.items() for word in (f"--{name}", value)], options)
    try:
        job.wait_for("epoch ")
    except TimeoutError:
        job.end(0)
        raise
    return job


@pytest.mark.long
@pytest.mark.parametrize("protocol", ["hardsync", "softsync"])
def test_a_cut_link_ends_a_fail_fast_job_on_both_sides(cluster: Cluster, tmp_path: Path, protocol: str) -> None:
    job = begin(cluster, tmp_path / "run", protocol=protocol, epochs="10000", faults__patience_s="5")
    cluster.cut(FAR)
    assert job.end(LIMIT_S) not in (0, None), job.text
    assert job.left_s is not None, job.text
    assert "has heard nothing of" in job.text
    assert not (tmp_path / "run" / "DONE").exists()


@pytest.mark.parametrize("how", ["stopped", pytest.param("cut off", marks=pytest.mark.long)])
def test_a_learner_that_hangs_alone_on_its_node_does_not_hold_up_the_end(cluster: Cluster, tmp_path: Path, how: str) -> None:
    out = tmp_path / "run"
    job = begin(cluster, out, "--with-ft", "ulfm", epochs="3", faults__patience_s="1")
    if how == "stopped":
        job.send(FAR + 1, signal.SIGSTOP)
    else:
        cluster.cut(FAR)
    assert job.end(LIMIT_S) == 0, job.text
    assert job.left_s is not None, "nothing is left on any node"
    run = Run(out)
    assert run.done is not None
    assert all(books.balanced for books in run.books())
    assert not (out / "RUNNING").exists()
    assert replay.replay(out).lines()[-1].startswith("identical")


@pytest.mark.long
@pytest.mark.parametrize("near", [2, 14])
def test_a_complete_run_has_status_0_however_late_its_reaper_hears_so(open_mpi: None, tmp_path: Path, near: int) -> None:
    """The launcher, which waits for the daemon behind a cut link, is let go, not killed; more ranks leave than a socket queues."""
    with Cluster(2) as cluster:
        job = begin(cluster, tmp_path / "run", "--with-ft", "ulfm", spread=(near, 1), epochs="3", faults__patience_s="5")
        reaper = next(pid for pid in cluster.processes(0) if "reaper.py" in Path(f"/proc/{pid}/cmdline").read_text())
        ranks = [pid for rank, pid in job.pids.items() if rank < near]
        os.kill(reaper, signal.SIGSTOP)
        cluster.cut(1)
        job.until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks))
        os.kill(reaper, signal.SIGCONT)
        assert job.end(LIMIT_S) == 0, job.text
    assert job.left_s is not None, f"no rank is left: {job.stayed}"
    assert (tmp_path / "run" / "DONE").exists()


def test_a_learner_that_hangs_does_not_hold_up_the_end_of_a_job_that_fails(cluster: Cluster, tmp_path: Path) -> None:
    job = begin(cluster, tmp_path / "run", "--with-ft", "ulfm", epochs="10000", faults__patience_s="1")
    job.send(FAR + 1, signal.SIGSTOP)
    job.wait_for(f"learner {FAR} was not heard of")
    job.send(0, signal.SIGKILL)
    assert job.end(LIMIT_S) not in (0, None), job.text
    assert job.left_s is not None, "nothing is left on any node"
    assert not (tmp_path / "run" / "DONE").exists()


@pytest.mark.long
def test_a_fault_tolerant_job_whose_ranks_are_all_killed_is_told_of(cluster: Cluster, tmp_path: Path) -> None:
    job = begin(cluster, tmp_path / "run", "--with-ft", "ulfm", spread=(2, 1), epochs="10000")
    for pid in list(job.pids.values()):
        os.kill(pid, signal.SIGKILL)
    assert job.end(LIMIT_S) not in (0, None), job.text
    assert job.text.count("mpisgd: rank 0 on ") == 1, job.text
    assert job.left_s is not None, job.stayed
    assert not (tmp_path / "run" / "DONE").exists()


def test_a_fault_tolerant_job_whose_shard_is_cut_off_from_all_learners_ends_on_all_nodes(cluster: Cluster, tmp_path: Path) -> None:
    """Who is left on the shard's side misses all learners but the last one, which gives no sign of life; theirs hears no shard."""
    saved = {"checkpoint__every_updates": "5"}
    out = tmp_path / "run"
    job = begin(cluster, out, "--with-ft", "ulfm", spread=(1, 1, 1), epochs="10000", faults__patience_s="1", **saved)
    job.until(lambda: interruption.newest(out))
    cluster.cut(0)
    assert job.end(LIMIT_S) not in (0, None), job.text
    assert job.left_s is not None, f"no rank is left: {job.stayed}"
    assert "gave no sign of life" in job.text
    assert "to go on from the checkpoint of clock" in job.text
    assert not (out / "DONE").exists()


def test_a_fail_fast_job_on_several_nodes_ends_in_order_and_leaves_nothing(cluster: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "run"
    job = begin(cluster, out, epochs="1", faults__patience_s="60")
    assert (out / "RUNNING").exists(), "reapers look at it"
    assert job.end(LIMIT_S) == 0, job.text
    assert job.left_s is not None, job.stayed
    assert not job.daemons_left
    assert (out / "DONE").exists()
    assert not (out / "RUNNING").exists()


@pytest.mark.long
@pytest.mark.parametrize("seconds", [0.0, 0.2, 0.4])
def test_a_link_that_is_cut_as_all_leave_does_not_hold_up_the_end(cluster: Cluster, tmp_path: Path, seconds: float) -> None:
    """In a fail-fast job: some ranks are in MPI_Finalize, some wait for the heartbeat's last word, or only mpirun is there."""
    out = tmp_path / "run"
    job = begin(cluster, out, epochs="1", faults__patience_s="5")
    job.wait_for("finished")
    time.sleep(seconds)
    cluster.cut(FAR)
    assert job.end(LIMIT_S) is not None, job.text
    assert job.left_s is not None, f"no rank is left: {job.stayed}"
    assert (out / "DONE").exists()


@pytest.mark.long
def test_a_launcher_that_cannot_tell_its_daemons_is_ended_where_no_rank_is_left_to_do_it(cluster: Cluster, tmp_path: Path) -> None:
    """In a fail-fast job, whose launcher kills the ranks of its own node at the first failure that it hears of."""
    job = begin(cluster, tmp_path / "run", epochs="10000", faults__patience_s="60")
    cluster.cut(0, "from")
    job.send(0, signal.SIGKILL)
    assert job.end(LIMIT_S) not in (0, None), job.text
    assert job.left_s is not None, f"no rank is left: {job.stayed}"
    assert not (tmp_path / "run" / "DONE").exists()
