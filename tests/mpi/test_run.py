"""`mpisgd run` on real ranks: it ends DONE, Ctrl-C saves, and what is killed goes on; no process is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpisgd import replay
from mpisgd.base.errors import EXIT_INTERRUPTED, EXIT_USAGE
from mpisgd.comm.mpi.launch import environment
from mpisgd.records.checkpoint.checkpoint import newest
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from tests.terminal import at_a_terminal
from tests.traps import MARKER, set_traps

from .test_signals import updates

COMMON = ["--model", "softmax", "--threads", "1", "--log.flush-s", "0.1", "--log.progress", "off"]

#: Learners are killed once, when there is a checkpoint, and long before the run ends.
DIES = """
import os, signal, time
from pathlib import Path
from torch.nn.functional import cross_entropy

calls = 0

def dies(output, target):
    global calls
    calls += 1
    if calls == 10 and not Path("died").exists():
        while not list(Path("run/checkpoint").glob("*/manifest.json")):
            time.sleep(0.01)
        Path("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return cross_entropy(output, target)
"""


def marked(mark: str) -> list[str]:
    """Processes that have this in their environment, or had: the command of each."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:  # it has ended
            continue
    return found


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Of commands, which are given there; nothing of what they start is left."""
    monkeypatch.chdir(tmp_path)
    mark = uuid.uuid4().hex
    yield {**environment(), "TERM": "dumb", "MARK": mark}
    assert marked(mark) == []


def run(env: dict[str, str], ranks: int, *words: str, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mpisgd", "run", "-n", str(ranks), *words]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"no end after {timeout_s} s")
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.mark.slow
def test_ctrl_c_saves_and_the_run_goes_on_to_its_end(tmp_path: Path, env: dict[str, str]) -> None:
    """Whatever the launcher makes of Ctrl-C: it is not told of it."""
    path, words = tmp_path / "run", ["--out", "run", "--epochs", "1e6", "--max-restarts", "3"]
    command = [sys.executable, "-m", "mpisgd", "run", "-n", "3", *COMMON, *words]
    status, screen = at_a_terminal(command, lambda _: updates(path, 0) > 0, env, tmp_path)
    assert status == EXIT_INTERRUPTED, screen
    assert "Traceback" not in screen
    assert "(nothing is lost); go on with: mpisgd run -n 3 --max-restarts 3 --resume run" in " ".join(screen.split())
    assert "restart 1" not in screen, "the user has asked for it"
    before = newest(path).clock
    assert before > 0
    made = Run(path)
    epochs = made.updates["samples"].sum() / made.environment["train_samples"] + 0.5
    done = run(env, 3, "--resume", "run", "--epochs", f"{epochs:.3f}")
    assert done.returncode == 0, done.stderr
    assert (path / schema.DONE).exists()
    assert Run(path).attempt == 1
    assert Run(path).final_clock(0) > before


@pytest.mark.slow
def test_killed_ranks_are_started_again(tmp_path: Path, env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run"
    (tmp_path / "own_loss.py").write_text(DIES)
    words = [*COMMON, "--epochs", "2", "--loss", "own_loss:dies", "--out", "run", "--checkpoint.every-updates", "2"]
    done = run(env, 3, *words, "--max-restarts", "1")
    assert done.returncode == 0, done.stderr
    assert "restart 1 of 1" in done.stderr
    assert "the run goes on from the checkpoint of clock" in done.stderr
    ended = Run(path)
    assert ended.done is not None
    assert ended.attempt == 1
    assert all(books.balanced for books in ended.books())
    monkeypatch.syspath_prepend(tmp_path)
    proof = replay.replay(path, trust=True)
    assert proof.reason == ""
    assert proof.lines()[-1].startswith("identical")


@pytest.mark.slow
def test_the_status_is_the_jobs(tmp_path: Path, env: dict[str, str]) -> None:
    """Without leave to begin again; a directory that another run has is refused once, and is not taken for this job's."""
    (tmp_path / "own_loss.py").write_text(DIES)
    words = [*COMMON, "--epochs", "2", "--loss", "own_loss:dies", "--out", "run", "--checkpoint.every-updates", "2"]
    done = run(env, 3, *words)
    assert done.returncode not in (0, EXIT_USAGE, EXIT_INTERRUPTED), done.stderr
    assert "restart" not in done.stderr
    assert not (tmp_path / "run" / schema.DONE).exists()
    again = run(env, 3, "--resume", "run", "--loss", "own_loss:dies")
    assert again.returncode == 0, again.stderr
    refused = run(env, 3, *words, "--max-restarts", "2")
    assert refused.returncode == EXIT_USAGE, "DONE is there, and is not this job's"
    assert "--overwrite" in refused.stderr
    assert "restart" not in refused.stderr


@pytest.mark.slow
def test_ranks_that_are_started_inside_a_strangers_run_execute_nothing_of_it(env: dict[str, str], tmp_path: Path) -> None:
    """It goes on there: neither modules of the directory nor its repository's settings are run."""
    theirs = tmp_path / "theirs"
    command = [str(Path(sys.executable).with_name("mpisgd")), "run", "-n", "2"]
    first = subprocess.Popen([*command, *COMMON, "--out", "theirs", "--epochs", "1e6"], env=env, start_new_session=True)
    until_s = time.monotonic() + 240
    while not updates(theirs, 0) and time.monotonic() < until_s:
        time.sleep(0.1)
    first.terminate()
    assert first.wait(timeout=240) == EXIT_INTERRUPTED
    made = Run(theirs)
    epochs = made.updates["samples"].sum() / made.environment["train_samples"] + 0.5
    set_traps(theirs, tmp_path / MARKER)
    again = [*command, "--resume", ".", "--epochs", f"{epochs:.3f}"]
    ended = subprocess.run(again, cwd=theirs, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    assert Run(theirs).attempt == 1
    assert not (tmp_path / MARKER).exists()
