"""Who holds a run's directory, and when it can be known that he is no more (`records/lock.py`)."""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from mpisgd.base.errors import ConfigError
from mpisgd.records import lock as module
from mpisgd.records.directory import claim
from mpisgd.records.lock import Lock
from mpisgd.records.log import schema, sums
from tests.effort import spread
from tests.unit.fabricate import run_of

HOLD = """
import sys
from pathlib import Path
from mpisgd.base.errors import ConfigError
from mpisgd.records.lock import Lock
try:
    Lock(Path(sys.argv[1]))
except ConfigError as error:
    print(error, flush=True)
else:
    print("held", flush=True)
sys.stdin.read()
"""
SPACES = {"a process space of its own": ["--fork", "--pid"], "with its own /proc": ["--fork", "--pid", "--mount-proc"]}


@contextmanager
def holder(run: Path, *before: str) -> Iterator[str]:
    """Another process that takes the lock, and what it says; it is there until the end."""
    process = subprocess.Popen(
        [*before, sys.executable, "-c", HOLD, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.stdin.close()
        process.wait(20)


def unshared(space: str) -> list[str]:
    words = ["unshare", *SPACES[space]]
    try:
        done = subprocess.run([*words, "true"], capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(str(error))
    if done.returncode:
        pytest.skip(done.stderr.strip())
    return words


def test_who_is_alive_and_who_is_not(tmp_path: Path) -> None:
    with holder(tmp_path) as said:
        assert said == "held"
        with pytest.raises(ConfigError, match="is being written by another job, process"):
            Lock(tmp_path)
    Lock(tmp_path).release()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("space", spread(reversed(SPACES), 2))
def test_a_container_with_the_same_host_name(space: str, tmp_path: Path) -> None:
    """Its process numbers mean others here, and these others there."""
    words = unshared(space)
    with holder(tmp_path, *words) as said:
        assert said == "held"
        with pytest.raises(ConfigError, match=r"process \d+ on .* in another container, since .*remove .*LOCK"):
            Lock(tmp_path)
    with pytest.raises(ConfigError, match="if the other job has ended, remove"):
        Lock(tmp_path)
    (tmp_path / schema.LOCK).unlink()
    mine = Lock(tmp_path)
    with holder(tmp_path, *words) as said:
        assert "in another container" in said
    mine.release()


@pytest.mark.parametrize("space", spread(SPACES, 2))
def test_within_a_container(space: str, tmp_path: Path) -> None:
    """Also where /proc shows the processes outside of it: who is gone is gone, who is there is there."""
    script = f"""
import os, pathlib, sys, subprocess
from mpisgd.base.errors import ConfigError
from mpisgd.records.lock import Lock
run = pathlib.Path(sys.argv[1])
subprocess.run([sys.executable, "-c", {HOLD!r}, sys.argv[1]], stdin=subprocess.DEVNULL)
Lock(run)
try:
    Lock(run)
except ConfigError as error:
    print("refused")
"""
    words = [*unshared(space), sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=3000)
    assert done.stdout.splitlines() == ["held", "refused"], done.stderr


def left_by(run: Path, monkeypatch: pytest.MonkeyPatch, env: dict[str, str], **other: Any) -> None:
    """The lock of a process with these variables, on another host."""
    with monkeypatch.context() as patched:
        for name, value in env.items():
            patched.setenv(name, value)
        told = module._mine()
    (run / schema.LOCK).write_text(json.dumps({**told, "host": "elsewhere", "boot": "another", **other}))


SLURM, LSF, PBS = {"SLURM_JOB_ID": "7"}, {"LSB_JOBID": "7", "LSB_JOBINDEX": "1"}, {"PBS_JOBID": "7.server"}


@pytest.mark.parametrize(
    ("left", "mine", "taken"),
    [
        (SLURM, SLURM | {"SLURM_RESTART_COUNT": "1"}, True),
        (SLURM | {"SLURM_RESTART_COUNT": "1"}, SLURM | {"SLURM_RESTART_COUNT": "2"}, True),
        (SLURM | {"SLURM_STEP_ID": "0"}, SLURM | {"SLURM_STEP_ID": "1"}, False),
        (SLURM, SLURM, False),
        (SLURM | {"SLURM_CLUSTER_NAME": "a"}, SLURM | {"SLURM_CLUSTER_NAME": "b", "SLURM_RESTART_COUNT": "1"}, False),
        (SLURM, {"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1"}, False),
        (LSF | {"LS_JOBPID": "50"}, LSF | {"LS_JOBPID": "70"}, True),
        (LSF | {"LS_JOBPID": "50"}, LSF | {"LS_JOBPID": "50"}, False),
        (LSF | {"LS_JOBPID": "50"}, LSF | {"LSB_JOBINDEX": "2", "LS_JOBPID": "70"}, False),
        (LSF, LSF, False),
        (PBS | {"PBS_JOBCOOKIE": "secret"}, PBS | {"PBS_JOBCOOKIE": "another"}, True),
        (PBS | {"PBS_JOBCOOKIE": "secret"}, PBS | {"PBS_JOBCOOKIE": "secret"}, False),
        ({}, {}, False),
    ],
)
def test_a_batch_job_that_began_anew(
    left: dict[str, str], mine: dict[str, str], taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not another element of its array, nor another step of the same start."""
    left_by(tmp_path, monkeypatch, left)
    assert "secret" not in (tmp_path / schema.LOCK).read_text()
    for name, value in mine.items():
        monkeypatch.setenv(name, value)
    if taken:
        Lock(tmp_path).release()
    else:
        with pytest.raises(ConfigError, match=r"process \d+ on elsewhere.*; if the other job has ended, remove"):
            Lock(tmp_path)


@pytest.mark.parametrize("other", [{"boot": "another"}, {"boot": ""}, {"processes": "pid:[1]"}, {"processes": None}])
def test_another_kernel_or_process_space_is_not_asked(
    other: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of this host's name, and no such process here: which says nothing."""
    told = {**module._mine(), "begun": "1", "pid": os.getpid()}
    (tmp_path / schema.LOCK).write_text(json.dumps({**told, **other}))
    with pytest.raises(ConfigError, match="if the other job has ended, remove"):
        Lock(tmp_path)
    (tmp_path / schema.LOCK).write_text(json.dumps(told))
    Lock(tmp_path).release()


def test_a_lock_of_an_earlier_mpisgd(tmp_path: Path) -> None:
    old = {"host": "elsewhere", "pid": 7, "begun": "7", "job": "", "since": "2026-01-01T00:00:00+00:00"}
    (tmp_path / schema.LOCK).write_text(json.dumps(old))
    with pytest.raises(ConfigError, match="process 7 on elsewhere, since 2026-01-01"):
        Lock(tmp_path)


FORK = multiprocessing.get_context("fork")
JOBS, ROUNDS = 8, 50


def replace(run: Path) -> Lock:
    return claim(run, overwrite=True)


def compete(take: Callable[[Path], Lock], runs: list[Path], barrier: Any, won: Any, number: int) -> None:
    """Each round, try to take the lock; the winner keeps the lock until all have tried, the others are told of the winner."""
    for at, run in enumerate(runs):
        barrier.wait(60)
        lock = None
        try:
            lock = take(run)
            won[at * JOBS + number] = 1
        except ConfigError as error:
            if "is being written by another job" not in str(error):
                barrier.abort()
                raise
        barrier.wait(60)
        if lock is not None:
            lock.release()


def of_the_dead(nonce: object, **other: Any) -> str:
    """The lock of a process that has ended."""
    child = FORK.Process(target=os.getpid)
    child.start()
    child.join(20)
    return json.dumps({**module._mine(), "pid": child.pid, "begun": "1", "nonce": str(nonce), **other})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("left", "links"),
    [
        *(("stale", True), ("chain", False), ("nothing", True)),
        *(pytest.param(*case, marks=pytest.mark.rare) for case in (("stale", False), ("chain", True), ("nothing", False))),
    ],
)
def test_of_many_jobs_one_has_the_lock(left: str, links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that come at the same time, find the lock of one that was killed, or of several that were as they took it over."""
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(errno.EPERM, "no links here")))
    runs = [tmp_path / str(at) for at in range(ROUNDS)]
    first, second = of_the_dead(1), of_the_dead(2)
    for run in runs:
        run.mkdir()
        if left != "nothing":
            (run / schema.LOCK).write_text(first)
        if left == "chain":
            module._after(run, first).write_text(second)
    one_wins(Lock, runs)


@pytest.mark.parametrize("left", ["a run", "a dead job's run"])
def test_of_many_jobs_that_replace_a_run_one_does(left: str, tmp_path: Path) -> None:
    """The others' own files are among the files that the winner removes."""
    run_of(tmp_path / "run")
    lock = tmp_path / "run" / schema.LOCK
    lock.unlink()
    if left != "a run":
        lock.write_text(of_the_dead(1))
    one_wins(replace, [shutil.copytree(tmp_path / "run", tmp_path / str(at)) for at in range(ROUNDS)])


def one_wins(take: Callable[[Path], Lock], runs: list[Path]) -> None:
    """Many jobs take the lock of each run at the same time; nothing is left at the end."""
    barrier, won = FORK.Barrier(JOBS), FORK.Array("b", JOBS * ROUNDS)
    jobs = [FORK.Process(target=compete, args=(take, runs, barrier, won, number)) for number in range(JOBS)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(120)
    assert [job.exitcode for job in jobs] == [0] * JOBS
    assert [sum(won[at * JOBS : (at + 1) * JOBS]) for at in range(ROUNDS)] == [1] * ROUNDS
    assert not any(path for run in runs for path in run.iterdir()), "nothing is left of it"


def test_who_looked_before_another_took_it_over_and_gave_it_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It saw the lock of a dead job, and comes to follow it when somebody else's is there: the third has no part of it."""
    (tmp_path / schema.LOCK).write_text(of_the_dead(1))
    others: list[Lock] = []
    make = Lock._make

    def late(self: Lock, place: Path, text: str) -> bool:
        if not others:
            monkeypatch.setattr(Lock, "_make", make)
            others.append(Lock(tmp_path))
            others[0].release()
            others.append(Lock(tmp_path))
        return make(self, place, text)

    monkeypatch.setattr(Lock, "_make", late)
    with pytest.raises(ConfigError, match=f"is being written by another job, process {os.getpid()}"):
        Lock(tmp_path)
    before = (tmp_path / schema.LOCK).read_text()
    assert json.loads(before)["pid"] == os.getpid()
    assert [path.name for path in tmp_path.iterdir()] == [schema.LOCK]
    others[0].release()
    assert (tmp_path / schema.LOCK).read_text() == before, "that of the other, not its own"
    others[1].release()
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_damaged_one_keeps_others_out(tmp_path: Path) -> None:
    """Whatever bit of it is another, or however much is missing: its holder, this process, lives."""
    lock = Lock(tmp_path)
    path = tmp_path / schema.LOCK
    whole = path.read_bytes()
    for place in range(len(whole)):
        for spoilt in (bytes([*whole[:place], whole[place] ^ 1 << place % 5, *whole[place + 1 :]]), whole[:place]):
            path.write_bytes(spoilt)
            with pytest.raises(ConfigError, match=r"is being written by another job"):
                Lock(tmp_path)
    lock.release()


def held(path: Path) -> dict[str, Any]:
    """What a lock says, without its checksum."""
    return {name: value for name, value in json.loads(path.read_text()).items() if name != "crc32"}


def test_two_jobs_in_one_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = Lock(tmp_path)
    path = tmp_path / schema.LOCK
    with pytest.raises(ConfigError, match=rf"is being written by another job, process {os.getpid()} on .*remove .*LOCK"):
        Lock(tmp_path)
    holder = held(path)

    path.write_text(sums.sealed_json({**holder, "host": "elsewhere", "job": "77"}))
    with pytest.raises(ConfigError, match=r"on elsewhere \(batch job 77\), since 20"):
        Lock(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with pytest.raises(ConfigError, match=r"on elsewhere \(batch job 77\)"):
        Lock(tmp_path)
    path.write_text(sums.sealed_json({**holder, "host": "elsewhere", "boot": "another", "job": "77", "start": "f4dbdf21"}))
    lock = Lock(tmp_path)  # the same job, requeued on another host

    path.write_text(sums.sealed_json({**holder, "begun": "1"}))
    lock = Lock(tmp_path)  # another process has the number by now
    path.write_text("{")
    with pytest.raises(ConfigError, match="with an unreadable LOCK"):
        Lock(tmp_path)
    path.unlink()
    lock = Lock(tmp_path)
    lock.release()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
def test_a_lock_where_there_are_no_hard_links(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpisgd.records.lock.os.link", Mock(side_effect=OSError(number, os.strerror(number))))
    lock = Lock(tmp_path)
    with pytest.raises(ConfigError, match="is being written by another job"):
        Lock(tmp_path)
    path = tmp_path / schema.LOCK
    path.write_text(sums.sealed_json({**held(path), "begun": "1"}))
    lock = Lock(tmp_path)  # of a process that has ended
    lock.release()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC])
def test_a_directory_that_cannot_be_locked(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpisgd.records.lock.os.link", Mock(side_effect=OSError(number, os.strerror(number))))
    with pytest.raises(ConfigError, match=f"{tmp_path} cannot be locked: LOCK cannot be made: {os.strerror(number)}: "):
        Lock(tmp_path)
    assert not list(tmp_path.iterdir())


def test_who_holds_a_lock_does_not_rest_on_the_clock(tmp_path: Path) -> None:
    """Of another host, whose clock may be hours off: whatever its age, it is a lock."""
    Lock(tmp_path)
    path = tmp_path / schema.LOCK
    for since in ("1970-01-01T00:00:00+00:00", "2100-01-01T00:00:00+00:00"):
        path.write_text(sums.sealed_json({**held(path), "host": "elsewhere", "since": since}))
        os.utime(path, (0, 0))
        with pytest.raises(ConfigError, match=f"on elsewhere, since {since[:4]}"):
            Lock(tmp_path)


def test_who_is_slower_than_a_job_that_empties_the_directory_is_told_of_that_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that was to become the lock is gone with the rest."""
    with contextlib.ExitStack() as stack:
        said = list[str]()

        def sync(path: Path) -> None:
            if not said:
                said.append(stack.enter_context(holder(tmp_path)))
                path.unlink()

        monkeypatch.setattr(module.durable, "sync", sync)
        with pytest.raises(ConfigError, match="is being written by another job"):
            Lock(tmp_path)
        assert said == ["held"]


@pytest.mark.parametrize("length", [1, 3])
def test_a_lock_that_is_its_own_successor_is_refused(length: int, tmp_path: Path) -> None:
    """Whoever follows it would go round for ever."""
    run = tmp_path / "run"
    run.mkdir()
    texts = [f"{number}" for number in range(length)]
    (run / schema.LOCK).write_text(texts[0])
    for text, following in zip(texts, [*texts[1:], texts[0]], strict=True):
        module._after(run, text).write_text(following)
    with pytest.raises(ConfigError, match="with an unreadable LOCK"):
        Lock(run)


@pytest.mark.parametrize("kind", ["pipe", "link", "endless"])
def test_a_lock_that_is_no_file_of_a_few_letters_is_refused(kind: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    if kind == "pipe":
        os.mkfifo(run / "LOCK")
    elif kind == "link":
        (tmp_path / "elsewhere").write_text("{}")
        (run / "LOCK").symlink_to(tmp_path / "elsewhere")
    else:
        with (run / "LOCK").open("wb") as file:
            file.truncate(1 << 40)
    with pytest.raises(ConfigError, match="is being written by another job, with an unreadable LOCK"):
        Lock(run)
