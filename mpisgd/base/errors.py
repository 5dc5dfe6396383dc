"""The exceptions, one for each party that can be at fault (DESIGN 8).

`MpisgdError` is never raised itself. Errors of the user (`ConfigError`, `DataError`, `CheckpointError`) end a run before the
first message is sent, without a traceback; the others are found in mid-run and name the rank that saw them.
"""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable

#: Exit statuses of the command line, in the manner of BSD's sysexits: scripts can tell the user's error from ours.
EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 85
"""Interrupted by a signal, with a checkpoint from which the run can go on (the number that LSF's users give to `bsub -Q`)."""
EXIT_STOPPED = 130
"""Ctrl-C where there is nothing to go on from: 128 + SIGINT, as shells say."""


def in_words(error: BaseException) -> str:
    """Describe an error by its text, or, where it has none (StopIteration, an assertion), by the line that raised it."""
    if str(error).strip():
        return f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename}:{frames[-1].lineno}, `{frames[-1].line}`" if frames else ""
    return f"{type(error).__name__}{where}"


class MpisgdError(Exception):
    """Anything that this package refuses or reports."""

    exit_status = EXIT_FAILED


class ConfigError(MpisgdError):
    """A configuration or option that cannot be; names the field, the value, and what was expected."""

    exit_status = EXIT_USAGE


class DataError(MpisgdError):
    """A data file, data set or run log is missing, truncated or foreign."""

    exit_status = EXIT_USAGE


class CheckpointError(MpisgdError):
    """A checkpoint or saved weights that cannot be loaded."""

    exit_status = EXIT_USAGE


class StorageError(MpisgdError):
    """A file of the run could not be written in mid-run: the disk is full, a quota, the directory has vanished."""


class PeerError(MpisgdError):
    """A message that cannot be: wrong size, sender, tag or timestamp. `rank`: who sent it, -1 = it does not say."""

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class ProtocolError(MpisgdError):
    """A law of DESIGN 4 is broken: a bug of mpisgd."""


class DivergenceError(MpisgdError):
    """A gradient or loss is not finite and the policy is to stop."""


class DeadlockError(MpisgdError):
    """No virtual rank can go on; names who waits for whom."""


class LaunchError(MpisgdError):
    """Ranks that `mpisgd.launch` has started failed; ends with the traceback. `rank`: which one, -1 = none could say."""

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class RunInterrupted(SystemExit):
    """A signal has interrupted the run; it can go on from a checkpoint (`mpisgd train --resume`). Raised on every rank alike.

    Where nobody catches it, Python ends with its `code`: EXIT_INTERRUPTED, on the first rank, whose status is the job's.
    """

    def __init__(self, text: str) -> None:
        super().__init__(EXIT_INTERRUPTED)
        self.text = text

    def __str__(self) -> str:
        return self.text


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint for a misspelt word: `"; did you mean 'mu'?"`, or the list of what is known where nothing is near."""
    words = sorted(known)
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; expected one of: {', '.join(words)}"
