"""Disks that fill up, directories that vanish, two jobs in one directory: real ranks, each job in a launch of its own.

All are started at once, since they mostly wait; what they left is then continued, in one launch.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from mpisgd import replay
from mpisgd.comm.mpi.launch import environment, mpirun
from mpisgd.records.checkpoint import checkpoint as disk
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Event

from .conftest import Launched, execute

pytestmark = pytest.mark.slow

USER = '''
import datetime, os, pathlib, resource, time
from torch import nn
from mpisgd.records.checkpoint import checkpoint as disk

def model():
    """Every rank makes it, before the first message."""
    from mpisgd.comm.mpi.library import MPI
    rank = MPI.COMM_WORLD.rank
    if "LIMIT" in os.environ:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(os.environ["LIMIT"]), resource.RLIM_INFINITY))
    if "SKEW" in os.environ:
        now, day = time.time, datetime.datetime
        time.time = lambda: now() + 3600 * (rank - 1)
        class Skewed(day):
            @classmethod
            def now(cls, tz=None):
                return day.now(tz) + datetime.timedelta(hours=rank - 1)
        datetime.datetime = Skewed
    if "NAN" in os.environ:
        layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Linear(10, 10))
        calls = [0]
        def spoil(gradient):
            """Bad in mini-batch 129 of the learner, which waits until the checkpoint before is complete."""
            calls[0] += 1
            if calls[0] != 130 or rank != 1:
                return gradient
            while not (disk.directory_of(pathlib.Path("results/run"), 120) / disk.MANIFEST).exists():
                time.sleep(0.01)
            return gradient * float("nan")
        layers[1].bias.register_hook(spoil)
        return layers
    width = int(os.environ.get("WIDTH", 10))
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, 10))
'''
COMMON = ("--threads", "1", "--log.progress", "off", "--log.flush-s", "0.1", "--mu", "4", "--model", "user:model")
SLOWLY = ("--straggler.delay", "constant", "--straggler.delay-mean-s", "0.005")
OFTEN = ("--checkpoint.every-updates", "40")
AGES_S = 120.0


@dataclass
class Job:
    """A job under way."""

    process: subprocess.Popen[str]
    begun_s: float
    lines: list[str] = field(default_factory=list)
    ended_s: float = 0.0

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(iter(self.process.stdout.readline, ""))
        self.ended_s = time.monotonic()

    def end(self) -> Launched:
        status = self.process.wait(AGES_S)
        return Launched(status, self.text, "")


@contextmanager
def begun(ranks: int, directory: Path, *words: str, **env: str) -> Iterator[Job]:
    """A training job, killed at the end if it is still there."""
    directory.mkdir(exist_ok=True)
    (directory / "user.py").write_text(USER)
    command = [*mpirun(ranks), sys.executable, "-m", "mpisgd", "train", *COMMON, *words]
    process = subprocess.Popen(
        command,
        cwd=directory,
        env=environment() | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    job = Job(process, time.monotonic())
    reader = threading.Thread(target=job.read, daemon=True)
    reader.start()
    try:
        yield job
        job.end()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        reader.join(10)


def until(what: str, job: Job, condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + AGES_S
    while not condition():
        assert job.process.poll() is None, f"ended before {what}:\n{job.text}"
        assert time.monotonic() < deadline_s, f"not seen: {what}\n{job.text}"
        time.sleep(0.01)


def complete(run: Path) -> list[int]:
    """Clocks of the checkpoints that have a manifest, the newest first."""
    return [int(path.name[6:]) for path in disk.directories(run) if (path / disk.MANIFEST).is_file()]


# ------------------------------------------------------------------------------------------------------------ what happens


def vanishing(directory: Path) -> Launched:
    """Somebody removes the directory of a run that is under way."""
    run = directory / "results" / "run"
    with begun(2, directory, *SLOWLY, *OFTEN, "--epochs", "1000") as job:
        until("a checkpoint", job, lambda: complete(run))
        removed_s = time.monotonic()
        while run.exists():  # ranks make files in it meanwhile
            shutil.rmtree(run, ignore_errors=True)
    assert job.ended_s - removed_s < 30, "seconds"
    return job.end()


def two_at_once(directory: Path) -> tuple[Launched, Launched]:
    """Two jobs that both want to replace a run."""
    words = ("--overwrite", "--epochs", "2")
    with begun(2, directory, *words) as one, begun(2, directory, *words) as other:
        pass
    return one.end(), other.end()


@dataclass
class Ended:
    """How the jobs ended, and where."""

    top: Path
    jobs: dict[str, Launched]

    def run(self, name: str) -> Path:
        return self.top / name / "results" / "run"


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    top = tmp_path_factory.mktemp("storage")
    jobs: dict[str, Launched] = {}
    problems: list[BaseException] = []

    def limited() -> None:
        """The log of shard 0 comes to a limit when its second chunk of pushes begins."""
        with begun(3, top / "limited", *OFTEN, "--shards", "2", "--epochs", "4", LIMIT="300000") as job:
            pass
        jobs["limited"] = job.end()
        # One checkpoint, which another so cannot keep from being written.
        with begun(2, top / "nan", "--checkpoint.every-updates", "120", "--epochs", "1", NAN="yes") as job:
            pass
        jobs["nan"] = job.end()

    def skewed() -> None:
        with begun(3, top / "skewed", *OFTEN, "--shards", "2", "--epochs", "1", SKEW="yes") as job:
            pass
        jobs["skewed"] = job.end()

    def vanished() -> None:
        jobs["vanished"] = vanishing(top / "vanished")

    def together() -> None:
        shutil.copytree(top / "skewed", top / "two")
        jobs["one"], jobs["other"] = two_at_once(top / "two")

    def guarded(*actions: Callable[[], None]) -> None:
        try:
            for action in actions:
                action()
        except BaseException as error:  # raised again in the test's own thread
            problems.append(error)

    threads = [threading.Thread(target=guarded, args=each) for each in ((limited,), (vanished,), (skewed, together))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]
    shutil.copytree(top / "limited", top / "resumed")
    shutil.copytree(top / "limited", top / "short")
    newest = disk.directory_of(top / "short" / "results" / "run", complete(top / "short" / "results" / "run")[0])
    os.truncate(newest / disk.part_file(1), 99)
    shutil.copytree(top / "nan", top / "dropped")
    words = ("train", "--log.progress", "plain", "--log.progress-s", "60", "--resume", "results/run", "--trust")
    resumed = {"resumed": (3, ()), "short": (3, ()), "dropped": (2, ("--nonfinite", "drop"))}
    commands = [(ranks, top / name, (*words, *more)) for name, (ranks, more) in resumed.items()]
    jobs |= dict(zip(resumed, execute(top, commands, ranks=3), strict=True))
    return Ended(top, jobs)


def test_a_log_that_cannot_be_written_ends_the_job_with_the_way_on(ended: Ended) -> None:
    done = ended.jobs["limited"]
    newest = complete(ended.run("limited"))[:2]  # the other shard may have completed one more meanwhile
    assert done.status not in (0, 139, -signal.SIGSEGV), done.text
    assert "(shard 0) on " in done.text or "(shard 1) on " in done.text, "rank and host"
    assert "attempt-0.h5 cannot be written: File too large: raise the limit of file sizes" in done.text
    assert any(f"to go on from the checkpoint of clock {clock:,} (" in done.text for clock in newest), done.text
    lost = r"later updates are lost, as far as is known here\): mpirun (--oversubscribe )?-n 3 mpisgd train --resume results/run"
    assert re.search(lost, done.text), done.text
    assert "Traceback" not in done.text
    assert not (ended.run("limited") / schema.DONE).exists()


@pytest.fixture
def users_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replay finds the model, too."""
    (tmp_path / "user.py").write_text(USER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "user", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("users_module")
def test_it_goes_on_when_there_is_room(ended: Ended) -> None:
    assert ended.jobs["resumed"].status == 0, ended.jobs["resumed"].text
    run = Run(ended.run("resumed"))
    assert run.done is not None
    assert all(books.balanced for books in run.books())
    assert [each["clock"] for each in run.environment["attempts"][1:]] == complete(ended.run("limited"))[:1]
    assert replay.check(ended.run("resumed"), trust=True) == ""


def test_a_torn_checkpoint_is_named_and_passed_over(ended: Ended) -> None:
    done, clocks = ended.jobs["short"], complete(ended.run("limited"))
    assert done.status == 0, done.text
    assert f"clock-{clocks[0]:06d} is passed over: " in done.text
    assert "shard-001.h5 is torn: 99 bytes" in done.text
    assert [each["clock"] for each in Run(ended.run("short")).environment["attempts"][1:]] == clocks[1:2]


@pytest.mark.usefixtures("users_module")
def test_a_gradient_that_is_not_finite_leaves_good_weights_behind(ended: Ended) -> None:
    done = ended.jobs["nan"]
    assert done.status != 0
    assert "DivergenceError: gradient of learner 0, mini-batch 129, clock 129, loss " in done.text
    lost = r"to go on from the checkpoint of clock 120 \(9 later updates are lost, as far as is known here\): mpirun "
    assert re.search(lost + "(--oversubscribe )?-n 2", done.text), done.text
    assert ended.jobs["dropped"].status == 0, ended.jobs["dropped"].text
    run = Run(ended.run("dropped"))
    assert [each["clock"] for each in run.environment["attempts"][1:]] == [120]
    assert run.evaluations["error"][-1] < 0.5
    assert replay.check(ended.run("dropped"), trust=True) == ""


def test_a_directory_that_vanishes_is_missed_in_seconds(ended: Ended) -> None:
    done = ended.jobs["vanished"]
    assert done.status != 0
    why = "No such file or directory: check that the file system is mounted"
    assert f"results/run/shard-000.attempt-0.h5 cannot be written: {why}" in done.text
    assert not ended.run("vanished").exists(), "and is not made again"


def test_of_two_jobs_in_one_directory_one_is_refused(ended: Ended) -> None:
    one, other = sorted((ended.jobs["one"], ended.jobs["other"]), key=lambda job: job.status)
    assert one.status == 0, one.text + other.text
    assert Run(ended.run("two")).done is not None
    if other.status:  # else one had ended before the other began
        assert other.status == 2
        assert "is being written by another job, process" in other.text
        assert f"remove results/run/{schema.LOCK} and try again" in other.text


def test_clocks_of_nodes_may_differ_by_hours(ended: Ended) -> None:
    """Ranks 0, 1, 2 believe that it is -1, 0, 1 hours later."""
    assert ended.jobs["skewed"].status == 0, ended.jobs["skewed"].text
    run = Run(ended.run("skewed"))
    seconds = np.concatenate([run.pushes["arrival_s"], run.updates["time_s"], run.evaluations["taken_s"], run.events["time_s"]])
    assert ((seconds >= 0) & (seconds < AGES_S)).all(), "seconds since the start barrier"
    skipped = set(run.events["clock"][run.events["kind"] == Event.SKIPPED].tolist())  # of either shard
    made = [clock for clock in range(run.updates["clock"].max() - 1, 0, -1) if clock % 40 == 0 and clock not in skipped]
    assert made
    assert complete(ended.run("skewed")) == made[:2]


# --------------------------------------------------------------------------------------------------------- a disk that is full


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB: the log of the first attempt, whatever its length, leaves room for the second."""
    path = tmp_path / "disk"
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(path)], capture_output=True, check=False).returncode:
        pytest.skip("a small file system cannot be mounted here: needs root; limits of file sizes stand for it in the other tests")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def fill(path: Path, leave_nbytes: int) -> None:
    """Take the room of a disk, but for so many bytes; also what has become free since the last time."""
    status = os.statvfs(path.parent)
    with contextlib.suppress(OSError), path.open("ab", buffering=0) as file:  # OSError: somebody has taken it meanwhile
        file.write(bytes(max(0, status.f_bavail * status.f_bsize - leave_nbytes)))


@pytest.mark.alone
@pytest.mark.usefixtures("users_module")
def test_a_full_disk(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints are lost, training goes on; they are written again when there is room; the log without any ends the job."""
    run, ballast = small_disk / "results" / "run", small_disk / "ballast"
    words = (*SLOWLY, *OFTEN, "--shards", "2", "--epochs", "1000", "--evaluation.every-epochs", "0")
    with begun(3, small_disk, *words, WIDTH="1500") as job:
        until("two checkpoints", job, lambda: len(complete(run)) == 2)
        kept = complete(run)[0]

        def complains_of_a_full_disk() -> bool:
            """Filled again and again: a checkpoint that was under way makes room by removing an older one."""
            fill(ballast, 250_000)
            return "could not be written" in job.text

        until("the complaint", job, complains_of_a_full_disk)
        assert kept in complete(run) or complete(run)[0] > kept, "the newest complete one is still there"
        lost = Run(run).events
        until("training going on", job, lambda: len(Run(run).updates) > len(lost) + 60)
        ballast.unlink()
        until("it is written again", job, lambda: "could be written again" in job.text)
        newest = complete(run)[0]
        fill(ballast, 0)
        filled_s = time.monotonic()
    done = job.end()
    assert done.status not in (0, 139, -signal.SIGSEGV), done.text
    assert job.ended_s - filled_s < 60
    assert "No space left on device: make room; training goes on, and tries again at the next" in done.text
    assert "attempt-0.h5 cannot be written: No space left on device: make room\n" in done.text
    assert "checkpoint of clock" in done.text.split("cannot be written")[-1]
    assert "mpisgd train --resume results/run" in done.text
    assert complete(run)[0] >= newest
    events = Run(run).events
    assert np.count_nonzero(events["kind"] == Event.UNSAVED) >= 1
    ballast.unlink()
    last = complete(run)[0]
    with begun(3, small_disk, "--resume", "results/run", "--trust", "--epochs", str(last * 8 / 1437 + 1), WIDTH="1500") as job:
        pass
    assert job.end().status == 0, job.text
    assert Run(run).done is not None
    monkeypatch.setenv("WIDTH", "1500")
    assert replay.check(run, trust=True) == ""


def test_a_read_only_file_system(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with begun(2, small_disk.parent / "here", "--out", str(small_disk / "run")) as job:
        pass
    assert job.end().status == 2
    assert f"ConfigError: out = '{small_disk}/run' cannot be made: Read-only file system: mount it for writing" in job.text
