"""Signals are heard at once, whatever the main thread is doing; a second one ends the process; what was there before comes back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from mpisgd.base.errors import EXIT_INTERRUPTED
from mpisgd.comm.signals import HEARD, Signals, name_of


def wait_for(heard: list[int]) -> None:
    until_s = time.monotonic() + 20
    while not heard and time.monotonic() < until_s:
        time.sleep(0.001)


@pytest.mark.parametrize("number", HEARD)
def test_the_first_signal_is_told(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpisgd.comm.signals.AGAIN_S", 60.0)  # however late this process comes to a core
    heard: list[int] = []
    with Signals() as signals:
        signals.listen(heard.append)
        assert signals.received == 0
        os.kill(os.getpid(), number)
        wait_for(heard)
        for _ in range(3):  # soon afterwards it is the same warning, delivered again
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        late: list[int] = []
        signals.listen(late.append)
    assert heard == late == [number] == [signals.received]


def test_what_was_there_before_is_there_again() -> None:
    def mine(number: int, frame: object) -> None:
        """Somebody's own handler."""

    before = signal.signal(signal.SIGUSR1, mine)
    try:
        with Signals():
            assert signal.getsignal(signal.SIGUSR1) is not mine
        assert signal.getsignal(signal.SIGUSR1) is mine
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.set_wakeup_fd(-1) == -1
        assert "signals" not in [thread.name for thread in threading.enumerate()]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_late_warnings_do_not_kill_who_leaves_with_a_checkpoint() -> None:
    left = "import os, signal\nfrom mpisgd.comm.signals import Signals\nfrom mpisgd.base.errors import RunInterrupted\n" + (
        "try:\n    with Signals(): raise RunInterrupted('at clock 3')\n"
        "finally:\n    os.kill(os.getpid(), signal.SIGUSR1)\n    os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    assert subprocess.run([sys.executable, "-c", left], timeout=300, check=False).returncode == EXIT_INTERRUPTED


def test_late_warnings_do_not_kill_who_leaves_a_complete_run() -> None:
    left = "import os, signal\nfrom mpisgd.comm.signals import Signals, ignore_from_now_on\n" + (
        "with Signals(): pass\n"
        "signal.signal(signal.SIGUSR2, lambda number, frame: print('mine'))\n"
        "ignore_from_now_on()\n"
        "for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR2): os.kill(os.getpid(), number)\n"
    )
    ended = subprocess.run([sys.executable, "-c", left], timeout=300, check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "mine\n")


def test_other_signals_are_nobodys_business() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGWINCH, lambda number, frame: seen.append(number))
    heard: list[int] = []
    try:
        with Signals() as signals:
            signals.listen(heard.append)
            os.kill(os.getpid(), signal.SIGWINCH)
            wait_for(seen)
            time.sleep(0.2)
    finally:
        signal.signal(signal.SIGWINCH, before)
    assert (seen, heard) == ([signal.SIGWINCH], [])


def test_outside_of_the_main_thread_nothing_is_touched() -> None:
    found = []

    def elsewhere() -> None:
        with Signals() as signals:
            found.append(signal.getsignal(signal.SIGTERM))
            found.append(signals.received)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(20)
    assert found == [signal.SIG_DFL, 0]


#: The main thread is in C and stays there, where no Python handler runs; as in a blocking MPI call, other threads may.
BLOCKED = """
import os, sys, threading
from mpisgd.comm.signals import Signals
with Signals() as signals:
    signals.listen(lambda number: os.write(1, b"heard"))
    os.write(1, b"ready")
    reads, _ = os.pipe()
    os.read(reads, 1)
"""


def test_a_second_signal_ends_a_process_that_is_blocked() -> None:
    process = subprocess.Popen([sys.executable, "-c", BLOCKED], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        assert process.stdout.read(5) == b"ready"
        process.send_signal(signal.SIGUSR1)
        assert process.stdout.read(5) == b"heard"
        time.sleep(1.1)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM
        said = process.stderr.read().decode()
        assert f"mpisgd: SIGTERM after SIGUSR1: process {process.pid} ends at once, nothing is saved" in said
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def test_names() -> None:
    assert name_of(15) == "SIGTERM"


@pytest.mark.parametrize("continued", [False, True])
def test_a_launcher_that_kills_its_ranks_is_known_by_what_it_sends_first(continued: bool) -> None:
    """CONT and then TERM: Open MPI's, after Ctrl-C."""
    heard: list[int] = []
    with Signals() as signals:
        signals.listen(heard.append)
        if continued:
            os.kill(os.getpid(), signal.SIGCONT)
            time.sleep(0.2)
        assert not heard, "CONT alone means nothing"
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(heard)
        assert heard == [signal.SIGTERM]
        assert signals.hurried is continued


def test_ctrl_c_raises_again_afterwards() -> None:
    """As it does by default; whoever started the tests may have it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGINT)
            until_s = time.monotonic() + 20
            while not signals.received and time.monotonic() < until_s:
                time.sleep(0.001)
            assert signals.received == signal.SIGINT
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
