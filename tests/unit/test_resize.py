"""`mpisgd run --resize`: whom it tells to save and leave, and whom it leaves alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mpisgd.base.errors import ConfigError
from mpisgd.cli import run as command
from mpisgd.launching import resize
from mpisgd.records import lock
from mpisgd.records.lock import Lock


def tree(proc: Path, *processes: tuple[int, int, str]) -> Path:
    """(pid, parent, command line)."""
    for pid, parent, words in processes:
        (proc / str(pid)).mkdir(parents=True)
        (proc / str(pid) / "cmdline").write_text(words.replace(" ", "\0") + "\0")
        (proc / str(pid) / "stat").write_text(f"{pid} (a (b) c) S {parent} 0 0")
    return proc


@pytest.mark.parametrize("words", ["python -m mpisgd run -n 3 job.toml", "/usr/bin/python /venv/bin/mpisgd run -n 3 job.toml"])
def test_who_has_started_a_rank_is_found(words: str, tmp_path: Path) -> None:
    proc = tree(tmp_path, (40, 30, "python -m mpisgd train job.toml"), (30, 20, "mpirun -n 3 python"), (20, 1, words))
    assert resize._starter(40, proc) == 20


def test_a_rank_of_mpirun_has_no_starter(tmp_path: Path) -> None:
    proc = tree(tmp_path, (40, 30, "python -m mpisgd train run"), (30, 20, "mpirun -n 3 python"), (20, 1, "bash run mpisgd"))
    assert resize._starter(40, proc) == 0


def test_the_first_rank_is_told_and_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import signal; print('ready', flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        job.stdout.readline()
        monkeypatch.setattr(lock, "holder", lambda run: (job.pid, "") if job.poll() is None else (0, ""))
        resize.interrupt(tmp_path, tree(tmp_path / "proc"))
        assert job.returncode == -10, "SIGUSR1, to which a rank would have listened"


def test_a_run_that_nobody_writes_is_not_resized(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no job of this machine writes there.*--resume"):
        resize.interrupt(tmp_path)


def test_a_batch_job_is_left_to_its_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "holder", lambda run: (1, "17"))
    with pytest.raises(ConfigError, match="it is of batch job 17"):
        resize.interrupt(tmp_path)


def test_the_holder_of_a_lock_is_told_while_it_lives(tmp_path: Path) -> None:
    assert lock.holder(tmp_path) == (0, "")
    held = Lock(tmp_path)
    pid, _ = lock.holder(tmp_path)
    assert (Path("/proc") / str(pid)).exists()
    held.release()
    assert lock.holder(tmp_path) == (0, "")
    (tmp_path / "LOCK").write_text("no lock")
    assert lock.holder(tmp_path) == (0, "")


def test_too_few_ranks_interrupt_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.toml").write_text('evaluator = true\nout = "run"\n')
    monkeypatch.setattr(resize, "interrupt", lambda run: pytest.fail("it was interrupted"))
    with pytest.raises(ConfigError, match="too few ranks: found 2, needed at least 3"):
        command.main(["-n", "2", "--resize", str(tmp_path)])
