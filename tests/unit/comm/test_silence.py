"""Where there is nobody to tell of, or it is another node's launcher that listens, no shell is started (`comm/mpi/silence.py`)."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpisgd.comm.mpi import silence
from mpisgd.comm.mpi.node_processes import NodeProcesses

END_S = 60.0


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A process in the place of mpirun."""
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    assert process.stdin and process.stdout
    process.stdin.write(b"\n")
    process.stdout.read(1)  # Popen may be back before the kernel renames the process
    monkeypatch.setattr(NodeProcesses, "launcher_of_this_job", process.pid)
    monkeypatch.setattr(NodeProcesses, "__init__", lambda self: self.__dict__.update(launcher=process.pid, _proc=Path("/proc")))
    monkeypatch.setattr(silence, "WAIT_S", 0)
    yield process
    silence.leave_in_order()
    process.kill()
    process.communicate()


def test_a_launcher_that_is_gone_or_unknown_is_left(launcher: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    launcher.kill()
    launcher.wait()
    silence.tell_of_silence()
    monkeypatch.setattr(NodeProcesses, "launcher_of_this_job", 0)
    silence.tell_of_silence()
    assert silence._open == []


def test_a_daemon_is_left(launcher: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence, "_DAEMON", "cat")
    silence.tell_of_silence()
    assert silence._open == []


def test_who_leaves_in_order_leaves_the_launcher(launcher: subprocess.Popen[bytes]) -> None:
    silence.tell_of_silence()
    assert silence._open
    silence.leave_in_order()
    with pytest.raises(subprocess.TimeoutExpired):
        launcher.wait(1.0)


def test_who_is_gone_without_order_ends_the_launcher(launcher: subprocess.Popen[bytes]) -> None:
    silence.tell_of_silence()
    os.close(silence._open.pop())
    assert launcher.wait(END_S) == -signal.SIGTERM
