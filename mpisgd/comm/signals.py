"""Signals that tell a run to end: a batch system's warning, a preemption, a person at a terminal.

A Python handler waits until a blocking MPI call returns, but the interpreter writes a signal's number to a pipe at once
(`signal.set_wakeup_fd`). A thread reads the pipe, calls no MPI, and sets a flag for loops.

The first signal asks for a checkpoint and an orderly end; a second ends the process. Batch systems may warn script and children:
signals within `AGAIN_S` are the same.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from mpisgd.base.errors import RunInterrupted
from mpisgd.base.terminal import last_words

#: TERM is sent by all; USR1 and USR2 are warnings of SLURM and LSF on request, passed on by mpirun; INT is Ctrl-C, passed on by
#: MPICH's launcher.
HEARD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)

AGAIN_S = 1.0
"""Seconds after which another signal counts as a second."""

HURRY_S = 2.0
"""Most seconds from CONT to TERM when Open MPI's launcher ends ranks: TERM comes 0.25 s after CONT, and KILL as long after TERM."""


#: Handlers that end the process: Python's own for Ctrl-C raises KeyboardInterrupt.
_DEADLY = (signal.SIG_DFL, signal.default_int_handler)


def name_of(number: int) -> str:
    return signal.Signals(number).name


class Signals:
    """Context in which signals are heard (`listen`); its end restores earlier handlers.

    If RunInterrupted passes, deadly handlers are not restored: a late warning must not spoil the exit status. Outside the main
    thread Python allows no handlers.
    """

    def __init__(self) -> None:
        self.received = 0
        """Number of the first signal; 0 = none."""
        self.hurried = False
        """A launcher about to kill sent the first signal (`HURRY_S`)."""
        self._received_s = 0.0
        self._continued_s = -HURRY_S
        self._listeners: list[Callable[[int], None]] = []
        self._before: dict[int, Any] = {}
        self._wakeup_before = -1
        self._reads, self._writes = -1, -1
        self._thread: threading.Thread | None = None

    def listen(self, listener: Callable[[int], None]) -> None:
        """Call `listener` with the first signal's number: from the signal thread, or now if past."""
        self._listeners.append(listener)
        if self.received:
            listener(self.received)

    def __enter__(self) -> Signals:
        self._reads, self._writes = os.pipe()
        os.set_blocking(self._writes, False)
        os.set_blocking(self._reads, False)
        if threading.current_thread() is threading.main_thread():
            self._wakeup_before = signal.set_wakeup_fd(self._writes, warn_on_full_buffer=False)
            for number in (*HEARD, signal.SIGCONT):
                self._before[number] = signal.signal(number, _nothing)
                signal.siginterrupt(number, False)  # reads of files and waits for locks go on
        self._thread = threading.Thread(target=self._serve, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._before:
            for number, before in self._before.items():
                if not (isinstance(error, RunInterrupted) and before in _DEADLY):
                    signal.signal(number, signal.SIG_DFL if before is None else before)
            signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._writes)  # ends the thread
        if self._thread is not None:
            self._thread.join()
        os.close(self._reads)

    def _serve(self) -> None:
        poll = select.poll()  # not select(): the pipe's number may be too large for it
        poll.register(self._reads, select.POLLIN)
        while True:
            poll.poll()
            numbers = b""
            with contextlib.suppress(BlockingIOError):
                numbers = os.read(self._reads, 64)
                if not numbers:
                    return
            for number in numbers:
                if number == signal.SIGCONT:
                    self._continued_s = time.monotonic()
                elif number in HEARD:
                    self._hear(number)

    def _hear(self, number: int) -> None:
        now_s = time.monotonic()
        if not self.received:
            self.hurried = number == signal.SIGTERM and now_s - self._continued_s < HURRY_S
            self.received, self._received_s = number, now_s
            for listener in self._listeners:
                listener(number)
        elif now_s - self._received_s >= AGAIN_S:
            text = f"mpisgd: {name_of(number)} after {name_of(self.received)}: process {os.getpid()} ends at once, nothing is saved"
            last_words(text)
            os._exit(128 + number)


def ignore_from_now_on() -> None:
    """Ignore late signals, which must not spoil a complete run's exit status."""
    for number in HEARD:
        if signal.getsignal(number) in _DEADLY:
            signal.signal(number, _nothing)


def _nothing(number: int, frame: FrameType | None) -> None:
    """Do nothing: without a handler a signal would end the process, or be lost."""
