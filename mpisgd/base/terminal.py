"""Progress lines of a rank, by the logger `mpisgd`: on standard error, unless a program gives it a handler.

Set the level WARNING to silence progress. Import configures nothing, and never the root logger.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping
from typing import Any

from mpisgd.base.errors import DataError

LOGGER = logging.getLogger("mpisgd")
# In foreign text, control characters move the cursor, colour or hide text; direction marks change its reading.
_CONTROL = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)


class _Stderr(logging.Handler):
    """A handler for the current `sys.stderr`: one write per text; errors are raised."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(f"{record.getMessage()}\n")
        sys.stderr.flush()


def say(text: str, level: int = logging.INFO) -> None:
    """Log progress; add a handler for standard error if none exists."""
    if not LOGGER.handlers:
        LOGGER.addHandler(_Stderr())
        LOGGER.propagate = False
        if LOGGER.level == logging.NOTSET:
            LOGGER.setLevel(logging.INFO)
    LOGGER.log(level, "%s", text)


def warn(text: str) -> None:
    say(text, logging.WARNING)


def last_words(text: str) -> None:
    """Log why the process ends, and flush: `os._exit` may follow."""
    say(text, logging.CRITICAL)
    for handler in LOGGER.handlers:
        handler.flush()


def visible(text: str, kept: str = "") -> str:
    """Escape control characters, except `kept`, as Python does."""
    return _CONTROL.sub(lambda found: found[0] if found[0] in kept else repr(found[0])[1:-1], text)


def all_visible(value: Any) -> Any:
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, Mapping):
        return {visible(str(key)): all_visible(each) for key, each in value.items()}
    return [all_visible(each) for each in value] if isinstance(value, list | tuple) else value


def check_visible(where: str, value: Any, *, free: str = "") -> None:
    """Raise DataError if texts of a table have control characters; the value named `free` may."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            check_visible(where, str(key))
            if key != free:
                check_visible(f"{where}: {key}", each, free=free)
    elif isinstance(value, list | tuple):
        for each in value:
            check_visible(where, each, free=free)
    elif isinstance(value, str) and _CONTROL.search(value):
        raise DataError(f"{visible(where)} = {visible(value)!r} has control characters: runs write none")
