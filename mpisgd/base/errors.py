"""Exceptions, one for each party at fault (DESIGN 8).

User errors (`ConfigError`, `DataError`, `CheckpointError`) end a run before the first message, without a traceback; others name the
rank.
"""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable

#: Exit statuses of the command line, after BSD's sysexits: scripts can tell the user's error from ours.
EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 85
"""Interrupted, with a checkpoint to resume from; LSF users pass this number to `bsub -Q`."""
EXIT_STOPPED = 130
"""Stopped by Ctrl-C, without a checkpoint: 128 + SIGINT, as in shells."""


def in_words(error: BaseException) -> str:
    """Describe an error by its text, or, without text, by the line that raised it."""
    if str(error).strip():
        return f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename}:{frames[-1].lineno}, `{frames[-1].line}`" if frames else ""
    return f"{type(error).__name__}{where}"


class MpisgdError(Exception):
    """Anything that this package refuses or reports."""

    exit_status = EXIT_FAILED


class ConfigError(MpisgdError):
    """An impossible configuration or option; names the field, the value and the expectation."""

    exit_status = EXIT_USAGE


class DataError(MpisgdError):
    """A missing, truncated or foreign data file, data set or run log."""

    exit_status = EXIT_USAGE


class CheckpointError(MpisgdError):
    """A checkpoint or saved weights that cannot be loaded."""

    exit_status = EXIT_USAGE


class StorageError(MpisgdError):
    """A failed write of a run's file in mid-run: a full disk, a quota, a vanished directory."""


class PeerError(MpisgdError):
    """An impossible message: wrong size, sender, tag or timestamp. `rank`: the sender, -1 = unknown."""

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class ProtocolError(MpisgdError):
    """A broken law of DESIGN 4: a bug of mpisgd."""


class DivergenceError(MpisgdError):
    """A gradient or loss that is not finite, where the policy is to stop."""


class DeadlockError(MpisgdError):
    """A deadlock of virtual ranks; names each waiting rank and the rank it waits for."""


class LaunchError(MpisgdError):
    """A failure of ranks started by `mpisgd.launch`; ends with the traceback. `rank`: the failed rank, -1 = unknown."""

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class RunInterrupted(SystemExit):
    """A run ended by a signal, resumable from a checkpoint; raised on every rank alike.

    If uncaught, Python exits with EXIT_INTERRUPTED on the first rank, which sets the job's status.
    """

    def __init__(self, text: str) -> None:
        super().__init__(EXIT_INTERRUPTED)
        self.text = text

    def __str__(self) -> str:
        return self.text


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a hint for a misspelt word, or all known words if none is near."""
    words = sorted(known)
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; expected one of: {', '.join(words)}"
