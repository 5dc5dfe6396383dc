"""Lines that a rank says while it works, by the logger `mpisgd`: on standard error, unless a program has given it a handler.

Set its level to WARNING for no progress; give it a handler, and a level, to have all elsewhere.
Nothing is configured at import, and never the root logger.

Of text that others wrote, a run's configuration for one, no letter is a command: control characters move the cursor, and colour or
hide what stands there; marks of direction let a text read as another.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping
from typing import Any

from mpisgd.base.errors import DataError

LOGGER = logging.getLogger("mpisgd")
_CONTROL = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)


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


def visible(text: str, kept: str = "") -> str:
    """A text whose control characters, but those `kept`, are written as Python writes them."""
    return _CONTROL.sub(lambda found: found[0] if found[0] in kept else repr(found[0])[1:-1], text)


def all_visible(value: Any) -> Any:
    """Write the control characters of all texts of a table, names too, as `visible` does."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, Mapping):
        return {visible(str(key)): all_visible(each) for key, each in value.items()}
    return [all_visible(each) for each in value] if isinstance(value, list | tuple) else value


def check_visible(where: str, value: Any, *, free: str = "") -> None:
    """Raises DataError where a text of a table has control characters; in tables of the name `free` they may be."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            check_visible(where, str(key))
            if key != free:
                check_visible(f"{where}: {key}", each, free=free)
    elif isinstance(value, list | tuple):
        for each in value:
            check_visible(where, each, free=free)
    elif isinstance(value, str) and _CONTROL.search(value):
        raise DataError(f"{visible(where)} = {visible(value)!r} has control characters: no run writes such")
