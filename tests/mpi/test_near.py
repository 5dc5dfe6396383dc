"""States on nodes: a job that loses all its ranks, and a node, goes on from what the other node has in memory, to the same bits."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from mpisgd import replay
from mpisgd.job import interruption
from mpisgd.job.run.partners import near_of
from mpisgd.records.checkpoint.near import Near
from tests.faults.job import Job
from tests.mpi import laws

RANKS = 4
JOB = ("--shards", "2", "--model", "mlp", "--threads", "1", "--epochs", "12", "--log.progress", "plain", "--log.progress-s", "0.1")
SLOW = ("--straggler.delay", "constant", "--straggler.delay-mean-s", "0.02", "--checkpoint.partner-updates", "7")
END_S = 120.0


def begin(started: list[Job], *words: str) -> Job:
    started.append(Job(RANKS, words, module="tests.mpi.two_nodes"))
    return started[-1]


def nears(run: Path) -> list[Near]:
    return [near_of(run, f"node{number}") for number in range(2)]


def killed(started: list[Job], run: Path, clock: int, *words: str) -> None:
    """A run whose ranks are killed when both nodes hold each shard's state of this clock, or a later one."""
    job = begin(started, *JOB, *SLOW, *words, "--out", str(run))
    job.wait_for("states in memory of each shard's node and a partner's every 7 updates")
    job.wait_for("epoch ")
    until_s = time.monotonic() + END_S
    while any(len([each for each in near.held(0) if each.clock >= clock]) < 2 for near in nears(run)):
        assert time.monotonic() < until_s, job.text
        time.sleep(0.05)
    job.end(0.0)


def went_on(started: list[Job], run: Path) -> Job:
    job = begin(started, "--resume", str(run))
    assert job.end(END_S) == 0, job.text
    assert not any(near.path.exists() for near in nears(run)), "the run is DONE: nodes hold nothing any more"
    return job


def test_a_job_goes_on_from_what_the_other_node_has(started: list[Job], tmp_path: Path) -> None:
    whole = begin(started, *JOB, "--out", str(tmp_path / "whole"))
    assert whole.end(END_S) == 0, whole.text
    killed(started, tmp_path / "run", 70, "--checkpoint.every-updates", "49")
    lost, left = nears(tmp_path / "run")
    clock = max(each.clock for each in left.held(0))
    assert interruption.newest(tmp_path / "run") in range(49, clock)
    lost.forget()
    job = went_on(started, tmp_path / "run")
    assert f"goes on from clock {clock:,}, whose state was in memory on node1; the newest checkpoint in" in job.text
    assert f"attempt 1 goes on at clock {clock:,}, to the bits of a run without interruption" in job.text
    laws.same_bits(tmp_path / "run", tmp_path / "whole")
    proof = replay.replay(tmp_path / "run")
    assert proof.lines()[-1].startswith("identical"), proof.lines()


@pytest.mark.slow
def test_a_run_that_replaces_another_leaves_nothing_of_it_on_nodes(started: list[Job], tmp_path: Path) -> None:
    run = tmp_path / "run"
    killed(started, run, 7)
    before = nears(run)
    job = begin(started, *JOB, "--epochs", "1", "--checkpoint.partner-updates", "7", "--overwrite", "--out", str(run))
    assert job.end(END_S) == 0, job.text
    assert not any(near.path.exists() for near in (*before, *nears(run)))


@pytest.mark.slow
def test_what_is_damaged_on_one_node_is_taken_from_the_other(started: list[Job], tmp_path: Path) -> None:
    run = tmp_path / "run"
    killed(started, run, 21)
    first, second = nears(run)
    clock = max(each.clock for each in second.held(0))
    for near, shard in ((first, 0), (second, 1)):
        path = near.files(clock, shard)[0]
        content = bytearray(path.read_bytes())
        content[-5] ^= 1
        path.write_bytes(content)
    job = went_on(started, run)
    assert (
        f"goes on from clock {clock:,}, whose state was in memory on node0, node1; the run's directory has no checkpoint"
        in job.text
    )


@pytest.mark.slow
def test_where_nodes_have_not_all_shards_the_directory_is_gone_on_with(started: list[Job], tmp_path: Path) -> None:
    run = tmp_path / "run"
    killed(started, run, 35, "--checkpoint.every-updates", "21")
    for near in nears(run):
        for path in near.path.glob("clock-*/shard-001.h5"):
            path.unlink()
    saved = interruption.newest(run)
    job = went_on(started, run)
    assert f"attempt 1 goes on at clock {saved:,}" in job.text and "was in memory" not in job.text
