"""Lines that a rank says while it works, by the logger `mpisgd`: on standard error, unless a program has given it a handler.

Set its level to WARNING for no progress; give it a handler, and a level, to have all elsewhere.
Nothing is configured at import, and never the root logger.
"""

from __future__ import annotations

import logging
import sys

LOGGER = logging.getLogger("mpisgd")


class _Stderr(logging.Handler):
    """Writes each text as it is to what is `sys.stderr` now, in one write; an error of the stream is raised."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(f"{record.getMessage()}\n")
        sys.stderr.flush()


def say(text: str, level: int = logging.INFO) -> None:
    """Say how far the work is. The first text makes a handler for standard error, where the logger has none."""
    if not LOGGER.handlers:
        LOGGER.addHandler(_Stderr())
        LOGGER.propagate = False
        if LOGGER.level == logging.NOTSET:
            LOGGER.setLevel(logging.INFO)
    LOGGER.log(level, "%s", text)


def warn(text: str) -> None:
    """Say what went wrong, and did not end the job."""
    say(text, logging.WARNING)


def last_words(text: str) -> None:
    """Say why the process ends; what handlers keep back is flushed, for it may end by `os._exit`."""
    say(text, logging.CRITICAL)
    for handler in LOGGER.handlers:
        handler.flush()
