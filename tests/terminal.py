"""A terminal for a command, and Ctrl-C pressed at it: what `subprocess` with pipes cannot show."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


def at_a_terminal(
    command: Sequence[str], ready: Callable[[str], bool], env: Mapping[str, str], cwd: Path, timeout_s: float = 240.0
) -> tuple[int, str]:
    """Run it, press Ctrl-C once when `ready` says so of what was printed; its status and all that stood on the screen.

    Nothing of it is left afterwards, whatever happens.
    """
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # where the tests run in the background, it may be ignored
        os.chdir(cwd)
        os.execvpe(command[0], list(command), dict(env))
    screen, pressed, until_s = "", False, time.monotonic() + timeout_s
    try:
        while time.monotonic() < until_s:
            if select.select([terminal], [], [], 0.05)[0]:
                try:
                    told = os.read(terminal, 1 << 16)
                except OSError:  # Linux says so when the last process has closed it
                    break
                if not told:
                    break
                screen += told.decode(errors="replace")
            if not pressed and ready(screen):
                os.write(terminal, b"\x03")
                pressed = True
        else:
            raise AssertionError(f"no end after {timeout_s:g} s:\n{screen}")
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), screen
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.close(terminal)
