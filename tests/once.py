"""A process that runs many jobs asks git once about a directory, and reads the digits once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from unittest import mock

from mpisgd.base.git import Commit, commit_of, commit_of_package
from mpisgd.data import digits
from mpisgd.job import provenance


@contextmanager
def once() -> Iterator[None]:
    """Keep what git has said, and the digits, for as long as the context is open."""
    asked = cache(commit_of)

    def of(directory: Path, files: Sequence[Path] = ()) -> Commit:
        return asked(directory, tuple(files))

    with (
        mock.patch.object(provenance, "commit_of", of),
        mock.patch.object(provenance, "commit_of_package", cache(commit_of_package)),
        mock.patch.object(digits, "_read", cache(digits._read)),
    ):
        yield
