"""Signals that tell a run to come to an end: the batch system's warning, a preemption, somebody at a terminal.

A Python handler waits until a blocking MPI call returns. What the interpreter does at once, whatever Python is doing, is to write
the signal's number to a pipe (`signal.set_wakeup_fd`); a thread reads it, since MPI's calls let other threads run. It makes no
call of MPI itself: it sets a flag, at which the rank's loops look when they can (`communicator.Communicator.signal`).

The first signal asks for a checkpoint and an orderly end. A second one ends the process at once; but batch systems may deliver one
warning twice, to the script and to its children, so what comes within `AGAIN_S` is the same one.
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
from mpisgd.base.speech import last_words

#: TERM is what everybody sends; USR1 and USR2 are what SLURM and LSF can be told to warn with, and what mpirun passes on; INT is
#: Ctrl-C, as MPICH's launcher passes it on.
HEARD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)

AGAIN_S = 1.0
"""Seconds after which another signal is a second one."""

TICK_S = 1.0

HURRY_S = 2.0
"""Open MPI's launcher ends its ranks by CONT, TERM a quarter of a second later, and KILL after as long again: TERM so soon after
CONT leaves next to no time."""


#: What would end the process: Python's own for Ctrl-C raises KeyboardInterrupt.
_DEADLY = (signal.SIG_DFL, signal.default_int_handler)


def name_of(number: int) -> str:
    """`SIGUSR1`."""
    return signal.Signals(number).name


class Signals:
    """While this context is open, signals are heard: `listen` says by whom. What was there before is there again afterwards.

    Unless RunInterrupted passes: then the process is about to end, with a status that a warning delivered late is not to spoil.

    Outside of the main thread, where Python allows no handlers, nothing is heard.

    Attributes:
        every_second: called by the thread that waits for signals, now and then.
    """

    def __init__(self) -> None:
        self.received = 0
        """The number of the first signal; 0 = none has come."""
        self.every_second: Callable[[], None] | None = None
        self.hurried = False
        """Whether the first signal was that of a launcher which is about to kill its ranks (`HURRY_S`)."""
        self._received_s = 0.0
        self._continued_s = -HURRY_S
        self._listeners: list[Callable[[int], None]] = []
        self._before: dict[int, Any] = {}
        self._wakeup_before = -1
        self._reads, self._writes = -1, -1
        self._thread: threading.Thread | None = None

    def listen(self, listener: Callable[[int], None]) -> None:
        """Call this with the number of the first signal, from a thread of its own or, where one has come already, now."""
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
                signal.siginterrupt(number, False)  # what is reading a file or waiting for a lock goes on
        self._thread = threading.Thread(target=self._serve, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._before:
            for number, before in self._before.items():
                if not (isinstance(error, RunInterrupted) and before in _DEADLY):
                    signal.signal(number, signal.SIG_DFL if before is None else before)
            signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._writes)  # which ends the thread
        if self._thread is not None:
            self._thread.join()
        os.close(self._reads)

    def _serve(self) -> None:
        poll = select.poll()  # not select(): the pipe's number may be beyond what that can take
        poll.register(self._reads, select.POLLIN)
        while True:
            if poll.poll(1000 * TICK_S):
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
            elif self.every_second is not None:
                self.every_second()

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
    """The run is complete, and the process about to end: a warning that comes now is not to spoil its status."""
    for number in HEARD:
        if signal.getsignal(number) in _DEADLY:
            signal.signal(number, _nothing)


def _nothing(number: int, frame: FrameType | None) -> None:
    """Do nothing: the thread does what is to be done. Without a handler a signal would end the process, or be lost."""
