"""A rank of a group is killed, on real ranks: its learner leaves as one, the group's other ranks in order, and the others go on
(DESIGN 4, laws 4, 8, 9)."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from mpisgd import replay
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Event
from tests.faults import dying
from tests.faults.job import Job

from .test_tolerant import END_S, HELD, PATIENCE_S, ULFM, ended, release_stopped, started, told, users_module

__all__ = ["started", "users_module"]

pytestmark = pytest.mark.usefixtures("tells_of_failures")

HERE = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])}
MODEL = ("--model", "mlp", "--model.hidden", "16", "12", "10")
COMMON = ("--threads", "1", "--log.progress", "plain", "--epochs", "0.5", "--mu", "16", *MODEL)
TWO = ("--shards", "2", "--group-size", "2", "--micro-batches", "2")  # 2 shards, then groups (2, 3), (4, 5), ...
PIECES = ("--group-form", "partition", "--model", "speech", "--model.hidden", "16", "12")
THREE = ("--shards", "3", "--group-size", "3", "--micro-batches", "4")  # 3 shards, then (3, 4, 5), (6, 7, 8)


def dies(started: list[Job], out: Path, ranks: int, point: str, victim: int, *words: str, **env: str) -> Job:
    """A job of which a rank kills itself at a point."""
    told = {"DIE_AT": point, "DIE_RANK": str(victim), **env}
    job = Job(ranks, [*COMMON, "--out", str(out), *words], ULFM, module="tests.faults.dying", **HERE, **told)
    started.append(job)
    job.wait_for(dying.SAID)
    return job


def in_ci(cases: list[tuple[str, int, str, tuple[str, ...], int]], often: str) -> list[Any]:
    """CI has the case of one point, the others are `rare`."""
    return [
        pytest.param(*case, id=f"{case[0]} {case[1]} {case[2]}", marks=[] if case[0] == often else pytest.mark.rare)
        for case in cases
    ]


WHERE = [
    ("forward", 2, "hardsync", TWO, 6),
    ("backward", 4, "softsync", THREE, 9),
    ("pushing", 3, "hardsync", TWO, 6),
    ("agreed", 4, "backup", (*TWO, "--clip-norm", "0.5"), 8),
]


@pytest.mark.slow
@pytest.mark.parametrize(("point", "victim", "protocol", "words", "ranks"), in_ci(WHERE, "pushing"))
def test_its_group_leaves_as_one_learner(
    started: list[Job], tmp_path: Path, point: str, victim: int, protocol: str, words: tuple[str, ...], ranks: int
) -> None:
    out = tmp_path / "run"
    job = dies(started, out, ranks, point, victim, *words, "--protocol", protocol)
    run = ended(job, out)
    assert "fault-tolerant: learners may die" in job.text
    shards = run.shards
    learners = (ranks - shards) // shards
    gone = (victim - shards) // shards
    others = [learner for learner in range(learners) if learner != gone]
    for shard in range(shards):
        assert told(run, Event.LOST, shard) == [gone], job.text
        assert sorted(told(run, Event.GOODBYE, shard)) == others
    assert len(run.evaluations)
    assert (out / "weights.pt").is_file()
    assert replay.check(out) == ""


HANGS = [
    ("first pull", 5, "softsync", TWO, 8),
    ("forward", 2, "hardsync", TWO, 8),
    ("in a call", 4, "softsync", (*TWO, *PIECES), 6),
    ("agreeing", 7, "hardsync", THREE, 9),
    ("pushing", 3, "hardsync", TWO, 8),
]


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize(("point", "victim", "protocol", "words", "ranks"), in_ci(HANGS, "in a call"))
def test_a_group_of_which_one_hangs_is_missed_as_one_learner(
    started: list[Job], tmp_path: Path, point: str, victim: int, protocol: str, words: tuple[str, ...], ranks: int
) -> None:
    """It stops itself, and nobody wakes it: the others of its group wait for it, and are not waited for."""
    out = tmp_path / "run"
    more = ("--protocol", protocol, "--faults.patience-s", PATIENCE_S)
    job = dies(started, out, ranks, point, victim, *words, *more, DIE_BY="SIGSTOP")
    run = ended(job, out)
    shards = run.shards
    gone = (victim - shards) // shards
    assert gone in run.events["learner_id"][run.events["kind"] == Event.MISSED], job.text
    for shard in range(shards):
        assert told(run, Event.LOST, shard) == [gone], job.text
        assert sorted(told(run, Event.GOODBYE, shard)) == [each for each in range(run.lambda_) if each != gone]
    assert len(run.evaluations)
    assert (out / "weights.pt").is_file()
    assert replay.check(out) == ""


@pytest.mark.alone
@pytest.mark.slow
def test_one_of_a_group_hangs_with_its_goodbye(started: list[Job], tmp_path: Path) -> None:
    """Its own shard has told it that the run is over, and misses its goodbye."""
    out = tmp_path / "run"
    more = ("--protocol", "softsync", "--faults.patience-s", PATIENCE_S)
    run = ended(dies(started, out, 6, "last update", 5, *TWO, *more, DIE_BY="SIGSTOP"), out)
    assert told(run, Event.GOODBYE, 1) == [0] and told(run, Event.LOST, 1) == [1]
    assert (out / "weights.pt").is_file()
    assert replay.check(out) == ""


@pytest.mark.slow
@pytest.mark.parametrize("form", [pytest.param((), marks=pytest.mark.rare), PIECES], ids=["stages", "pieces"])
def test_the_evaluator_of_groups_dies_and_a_learner_follows(started: list[Job], tmp_path: Path, form: tuple[str, ...]) -> None:
    """Killed when it begins to evaluate: a learner's rank makes the whole model, and evaluates all again."""
    out = tmp_path / "run"
    words = ("--evaluator", "--protocol", "hardsync", "--evaluation.every-epochs", "0.1")
    run = ended(dies(started, out, 5, "evaluation", 4, *TWO, *form, *words), out)
    for shard in range(run.shards):
        assert told(run, Event.LOST, shard) == [], "no learner is lost"
        assert told(run, Event.GOODBYE, shard) == [0]
    test = run.evaluations[run.evaluations["train"] == 0]
    assert test["snapshot"].tolist() == list(range(6)), "each once"
    assert (out / "weights.pt").is_file()
    assert replay.check(out) == ""


@pytest.mark.rare
@pytest.mark.slow
@pytest.mark.usefixtures("users_module")
def test_killed_from_outside_at_any_moment(started: list[Job], tmp_path: Path) -> None:
    """Two of three groups break, one rank after the other; what each had computed by then is proved."""
    out = tmp_path / "run"
    words = [
        *COMMON,
        "--epochs",
        "2",
        "--log.progress-s",
        "0.1",
        "--straggler.delay",
        "constant",
        "--straggler.delay-mean-s",
        "0.02",
    ]
    job = Job(8, [*words, *HELD, "--out", str(out), *TWO], ULFM, **HERE)
    started.append(job)
    job.wait_for("epoch ")
    job.send(4, signal.SIGKILL)
    job.wait_for("learner 1 is lost")
    job.send(7, signal.SIGKILL)
    release_stopped(tmp_path, "once", "twice")
    run: Run = ended(job, out)
    for shard in (0, 1):
        assert sorted(told(run, Event.LOST, shard)) == [1, 2], job.text
        assert told(run, Event.GOODBYE, shard) == [0]
    assert replay.check(out, trust=True) == ""


@pytest.mark.slow
@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.rare), 1])
def test_a_death_before_training_ends_the_job(started: list[Job], tmp_path: Path, victim: int) -> None:
    out = tmp_path / "run"
    job = dies(started, out, 6, "load", 2 + victim, *TWO)
    assert job.end(END_S) not in (0, None), job.text
    assert job.left_s is not None, "all processes are gone"
    assert f"rank {2 + victim} is lost" in job.text
    assert not (out / "DONE").exists()


@pytest.mark.slow
def test_the_last_group_breaks_and_the_job_ends_with_the_reason(started: list[Job], tmp_path: Path) -> None:
    out = tmp_path / "run"
    job = dies(started, out, 4, "backward", 3, *TWO)
    assert job.end(END_S) not in (0, None), job.text
    assert job.left_s is not None
    assert "no learner is left at clock" in job.text
    assert not (out / "DONE").exists()
