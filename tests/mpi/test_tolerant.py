"""Fault-tolerant runs on real ranks: learners are killed, stopped, or fail, and the others go on (DESIGN 4, laws 4, 8, 9)."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mpisgd import replay
from mpisgd.analysis import books, timeline
from mpisgd.job import interruption
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Event, Reason
from tests.faults.job import Job

pytestmark = pytest.mark.usefixtures("tells_of_failures")

ULFM = ("--with-ft", "ulfm")
SLOWLY = ["--straggler.delay", "constant", "--straggler.delay-mean-s", "0.02"]
COMMON = ["--threads", "1", "--log.progress", "plain", "--log.progress-s", "0.1", *SLOWLY]
END_S = 180.0

USER = """
import os, pathlib, signal, time, torch
from mpisgd.job import interruption
calls, holds = 0, ((int(os.environ.get("ONCE", 30)), "once"), (110, "twice"))
acts = {(rank, int(at)): what for rank, at, what in (each.split(":") for each in os.environ.get("ACTS", "").split())}
def loss(output, target):
    global calls
    calls += 1
    what = acts.get((os.environ.get("OMPI_COMM_WORLD_RANK"), calls))
    if what:
        os.kill(os.getpid(), signal.Signals[what])
    while any(calls > at and not pathlib.Path(name).exists() for at, name in holds):
        time.sleep(0.01)
    while "CLOCK" in os.environ and (interruption.newest(pathlib.Path("run")) or 0) >= int(os.environ["CLOCK"]):
        time.sleep(0.01)
    if "SLOW" in os.environ and calls > 30 and not pathlib.Path("soon").exists():
        time.sleep(0.5)
    return torch.nn.functional.cross_entropy(output, target)
"""
HELD = ("--loss", "user:loss")
"""Learners do not go far ahead of a test, however it comes to a core: after 30 mini-batches, or ONCE, they wait until there is a
file `once`, after 110 for `twice`; with CLOCK they wait for ever when there is a checkpoint of it. ACTS: what a rank does to itself
in which call. SLOW: those that nobody may miss go on, so slowly that the run is not over before there is a file `soon`."""
PATIENCE_S = "6"
"""Of runs in which one hangs: no other one is silent for so long, unless the machine is."""


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[Job]]:
    jobs: list[Job] = []
    yield jobs
    for job in jobs:
        job.end(0.0)


@pytest.fixture
def users_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replay finds the loss, too."""
    (tmp_path / "user.py").write_text(USER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "user", raising=False)


def release_stopped(tmp_path: Path, *names: str) -> None:
    for name in names:
        (tmp_path / name).touch()


def begin(started: list[Job], out: Path, ranks: int, *words: str, options: tuple[str, ...] = ULFM, **env: str) -> Job:
    """A job whose training has been seen to go on."""
    job = Job(ranks, [*COMMON, "--out", str(out), *words], options, **env)
    started.append(job)
    job.wait_for("epoch ")
    return job


def ended(job: Job, out: Path) -> Run:
    assert job.end(END_S) == 0, job.text
    assert job.left_s is not None, "all processes are gone"
    run = Run(out)
    assert run.done is not None
    assert all(books.balanced for books in run.books())
    return run


def told(run: Run, kind: Event, shard: int = 0) -> list[int]:
    events = run.events
    return events["learner_id"][(events["kind"] == kind) & (events["shard"] == shard)].tolist()


@pytest.mark.slow
@pytest.mark.usefixtures("users_module")
def test_learners_are_killed_and_shard_0_evaluates(started: list[Job], tmp_path: Path) -> None:
    out = tmp_path / "run"
    job = begin(started, out, 5, *HELD, "--shards", "2", "--epochs", "4", "--evaluation.every-epochs", "1")
    assert "fault-tolerant: learners may die" in job.text
    for rank in (2, 4):
        job.send(rank, signal.SIGKILL)
        time.sleep(0.2)
    release_stopped(tmp_path, "once", "twice")
    run = ended(job, out)
    for shard in (0, 1):
        assert told(run, Event.LOST, shard) == [0, 2]
    last = run.updates[run.updates["shard"] == 0][-1]
    assert last["gradients"] == 1, "the divisor is counted"
    table = books.fault_table(run)
    assert table.cells("learner") == [0, 0, 2, 2]
    assert all(isinstance(clock, int) and clock > 0 for clock in table.cells("lost at clock"))
    counts = np.array([table.cells("mini-batches here"), table.cells("on all shards")])
    assert np.abs(counts[0] - counts[1]).max() <= 1
    test = run.evaluations[run.evaluations["train"] == 0]
    assert test["snapshot"].tolist() == list(range(len(test))), "all are evaluated"
    assert timeline.look(run).ranks.evaluator == 0, "by shard 0"
    assert test["error"][-1] < test["error"][0]
    assert (out / "weights.pt").is_file()
    proof = replay.replay(out, trust=True)
    assert proof.lines()[-1].startswith("identical"), proof.lines()


@pytest.mark.slow
@pytest.mark.usefixtures("users_module")
def test_what_a_dead_learner_was_dealt_is_done_by_others_and_what_it_had_rounded_off_is_in_nobodys_books(
    started: list[Job], tmp_path: Path
) -> None:
    """Every sample of every epoch counts once on the shard that deals, and at most once on the other; replay has every bit."""
    out = tmp_path / "run"
    words = ("--protocol", "softsync", "--shards", "2", "--epochs", "2", "--sampling", "dealt", "--log.flush-s", "0.1")
    job = begin(started, out, 4, *HELD, *words, "--push-format", "bfloat16")
    job.until(lambda: 1 in Run(out).pushes["learner_id"])
    job.send(3, signal.SIGKILL)
    release_stopped(tmp_path, "once", "twice")
    run = ended(job, out)
    assert told(run, Event.LOST, 0) == told(run, Event.LOST, 1) == [1]
    assert (run.pushes["learner_id"] == 1).any()
    assert (run.pushes["rounded"] > 0).all()
    portions = -(-2 * run.environment["train_samples"] // run.config["mu"])
    for shard, least in ((0, 1), (1, 0)):
        rows = run.pushes[(run.pushes["shard"] == shard) & (run.pushes["verdict"] == schema.Verdict.APPLY)]
        counts = np.bincount(rows["portion"], minlength=portions)
        assert len(counts) == portions
        assert counts.max() == 1
        assert counts.min() >= least
    assert replay.check(out, trust=True) == ""


@pytest.mark.slow
@pytest.mark.usefixtures("users_module")
def test_the_evaluator_is_killed_and_shard_0_follows(started: list[Job], tmp_path: Path) -> None:
    out = tmp_path / "run"
    job = begin(started, out, 3, *HELD, "--evaluator", "--epochs", "3", "--evaluation.every-epochs", "0.25")
    job.until(lambda: (out / schema.evaluator_file()).exists() and len(Run(out).evaluations) >= 2)
    job.send(2, signal.SIGKILL)
    release_stopped(tmp_path, "once", "twice")
    run = ended(job, out)
    test = run.evaluations[run.evaluations["train"] == 0]
    assert test["snapshot"].tolist() == list(range(13)), "all again, each once"
    assert (out / "weights.pt").is_file()
    assert replay.replay(out, trust=True).lines()[-1].startswith("identical")


@pytest.mark.rare
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.usefixtures("users_module")
def test_one_that_hangs_for_good_does_not_hold_up_the_end(started: list[Job], tmp_path: Path) -> None:
    out = tmp_path / "run"
    release_stopped(tmp_path, "once", "twice")
    words = ("--epochs", "3", "--faults.patience-s", PATIENCE_S, "--protocol", "async")
    job = begin(started, out, 4, *HELD, *words, ACTS="3:30:SIGSTOP", SLOW="")
    job.wait_for("learner 2 was not heard of for")
    release_stopped(tmp_path, "soon")
    run = ended(job, out)
    assert told(run, Event.LOST) == [2]


@pytest.mark.alone
@pytest.mark.usefixtures("users_module")
def test_one_that_hangs_and_is_the_last_is_not_waited_for(started: list[Job], tmp_path: Path) -> None:
    """The others are done long before it would be missed; on a busy machine it is missed before, which is as well."""
    out = tmp_path / "run"
    release_stopped(tmp_path, "once", "twice")
    words = ("--shards", "2", "--epochs", "2", "--faults.patience-s", "20", "--protocol", "async")
    job = begin(started, out, 4, *HELD, *words, ACTS="3:30:SIGSTOP")
    run = ended(job, out)
    for shard in (0, 1):
        assert told(run, Event.GOODBYE, shard) == [0]
        assert told(run, Event.LOST, shard) == [1]
    assert replay.check(out, trust=True) == ""


@pytest.mark.slow
def test_a_dead_shard_ends_the_job(started: list[Job], tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ["--shards", "2", "--epochs", "1000", "--checkpoint.every-updates", "5"]
    job = begin(started, out, 3, *words)
    job.until(lambda: interruption.newest(out))
    job.send(1, signal.SIGKILL)
    assert job.end(END_S) not in (0, None), job.text
    assert job.left_s is not None
    assert "(shard 1) is lost" in job.text
    assert re.search(
        r"to go on from the checkpoint of clock [\d,]+ \([\d,]+ later updates are lost, as far as is known here\): "
        rf"mpirun --with-ft ulfm (--oversubscribe )?-n 3 mpisgd train --resume {out}$",
        job.text,
        re.MULTILINE,
    )
    assert not (out / "DONE").exists()


@pytest.mark.slow
def test_an_exception_on_a_shard_ends_the_job(started: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user.py").write_text(
        "import pathlib, torch\n"
        "def loss(output, target):\n"
        "    factor = float('nan') if pathlib.Path('nan').exists() and torch.is_grad_enabled() else 1.0\n"
        "    return factor * torch.nn.functional.cross_entropy(output, target)\n"
    )
    monkeypatch.chdir(tmp_path)
    job = begin(started, tmp_path / "run", 4, "--loss", "user:loss", "--epochs", "1000", "--shards", "2")
    job.send(3, signal.SIGKILL)
    job.wait_for("learner 1 is lost")
    (tmp_path / "nan").touch()
    assert job.end(END_S) not in (0, None), job.text
    assert job.left_s is not None
    assert "DivergenceError" in job.text


@pytest.mark.slow
def test_an_exception_in_one_learners_code_costs_that_learner(
    started: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "user.py").write_text(
        "import os, pathlib, time, torch\n"
        "calls = 0\n"
        "def loss(output, target):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    while calls > 20 and not pathlib.Path('fail').exists(): time.sleep(0.01)\n"  # none is far ahead of the test
        "    if os.environ.get('OMPI_COMM_WORLD_RANK') == '2' and pathlib.Path('fail').exists():\n"
        "        raise ValueError('the user has a bug')\n"
        "    return torch.nn.functional.cross_entropy(output, target)\n"
    )
    out = tmp_path / "run"
    monkeypatch.chdir(tmp_path)
    job = begin(started, out, 3, "--loss", "user:loss", "--epochs", "2")
    (tmp_path / "fail").touch()
    run = ended(job, out)
    assert "ValueError: the user has a bug" in job.text
    assert "failed, the others go on without this rank" in job.text
    assert told(run, Event.LOST) == [1]


@pytest.mark.slow
def test_a_signal_after_a_death_leads_to_a_checkpoint_all_the_same(started: list[Job], tmp_path: Path) -> None:
    out = tmp_path / "run"
    job = begin(started, out, 4, "--shards", "2", "--epochs", "1000", "--protocol", "ssp")
    job.send(3, signal.SIGKILL)
    job.wait_for("learner 1 is lost")
    job.send(2, signal.SIGTERM)
    assert job.end(END_S) == 85, job.text
    assert job.left_s is not None
    assert "nothing is lost" in job.text
    assert re.search("go on with: mpirun --with-ft ulfm (--oversubscribe )?-n 4 mpisgd train --resume", job.text), job.text


@pytest.mark.slow
def test_allreduce_fails_fast_there_too(started: list[Job], tmp_path: Path) -> None:
    job = begin(started, tmp_path / "run", 3, "--protocol", "allreduce", "--epochs", "1000")
    assert "fail-fast" in job.text
    job.send(1, signal.SIGKILL)
    assert job.end(END_S) not in (0, None), job.text
    assert job.left_s is not None
    assert "rank 1 is lost" in job.text


@pytest.mark.rare
@pytest.mark.slow
@pytest.mark.usefixtures("users_module")
def test_what_is_torn_is_in_no_update(started: list[Job], tmp_path: Path) -> None:
    """A slice of 8 MB takes a while to travel: some of those killed meanwhile leave half of one behind; replay knows."""
    out = tmp_path / "run"
    words = ["--model", "mlp", "--model.hidden", "1400", "1360", "--epochs", "1", "--protocol", "softsync", "--protocol.n", "2"]
    job = begin(started, out, 6, *HELD, *words, options=(*ULFM, "--mca", "btl", "tcp,self"), ONCE="8")
    for rank in (2, 3, 5):
        job.send(rank, signal.SIGKILL)
    release_stopped(tmp_path, "once", "twice")
    run = ended(job, out)
    torn = run.pushes[run.pushes["reason"] == Reason.TORN]
    assert set(torn["learner_id"].tolist()) <= {1, 2, 4}
    assert set(told(run, Event.LOST)) == {1, 2, 4}
    assert replay.replay(out, trust=True).lines()[-1].startswith("identical")
