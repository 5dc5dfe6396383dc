"""Commit of a file or directory, and whether the file differs from it."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_PATIENCE_S = 5.0


class Commit(NamedTuple):
    """`name` is "" outside of a repository; `dirty`: files differ from the commit, or are not in it."""

    name: str
    dirty: bool


def commit_of(directory: Path, files: Sequence[Path] = ()) -> Commit:
    """The commit checked out in `directory`. Dirty: a tracked file was changed, or one of `files` below it is not tracked."""
    name = _said(directory, "rev-parse", "HEAD")
    if not name:
        return Commit("", dirty=False)
    changed = _said(directory, "status", "--porcelain", "--untracked-files=no")
    root = Path(_said(directory, "rev-parse", "--show-toplevel") or directory).resolve()
    own = [str(file) for file in files if file.resolve().is_relative_to(root)]
    untracked = bool(own) and _said(directory, "ls-files", "--error-unmatch", *own) is None
    return Commit(name, dirty=changed is None or bool(changed) or untracked)


def commit_of_package(package: Path) -> Commit:
    """Commit of a package's sources, where they are a checkout; not of a repository in which it is merely installed."""
    tracked = _said(package, "ls-files", "--error-unmatch", "__init__.py")
    return commit_of(package) if tracked else Commit("", dirty=False)


def _said(directory: Path, *words: str) -> str | None:
    """Run git; returns what it says, or None where it fails, or takes too long."""
    command = ["git", "--no-optional-locks", "-C", str(directory), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
