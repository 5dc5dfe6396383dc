"""Git commit and local changes; git runs no program named by a repository."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_PATIENCE_S = 5.0
_OFF = ("core.fsmonitor=false", f"core.hooksPath={os.devnull}", "core.pager=cat", "diff.external=")
_WITHOUT_COMMANDS = ("clean=", "smudge=", "process=", "required=false")
_NO_TRANSPORT = {"GIT_ALLOW_PROTOCOL": "none", "GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0"}
"""A partial clone would fetch missing objects by its own command."""


class Commit(NamedTuple):
    """A commit; `name` is "" outside a repository."""

    name: str
    dirty: bool


def commit_of(directory: Path, files: Sequence[Path] = ()) -> Commit:
    """Return the current commit; dirty if a tracked file is changed, or any of `files` inside is untracked.

    Changes in submodules do not count: git would use their settings.
    """
    name = _said(directory, "rev-parse", "HEAD")
    if not name:
        return Commit("", dirty=False)
    filters = _filters_off(directory)
    asked = ("status", "--porcelain", "--untracked-files=no", "--ignore-submodules=dirty")
    changed = None if filters is None else _said(directory, *filters, *asked)
    root = Path(_said(directory, "rev-parse", "--show-toplevel") or directory).resolve()
    own = [str(file) for file in files if file.resolve().is_relative_to(root)]
    untracked = bool(own) and _said(directory, "ls-files", "--error-unmatch", *own) is None
    return Commit(name, dirty=changed is None or bool(changed) or untracked)


def commit_of_package(package: Path) -> Commit:
    """Return the commit of a checkout, not of a repository around an installed package."""
    tracked = _said(package, "ls-files", "--error-unmatch", "__init__.py")
    return commit_of(package) if tracked else Commit("", dirty=False)


def _filters_off(directory: Path) -> list[str] | None:
    """Return options that disable a repository's own filters; None if impossible."""
    listed = _said(directory, "config", "--null", "--show-scope", "--name-only", "--get-regexp", r"^filter\..*", statuses=(0, 1))
    if listed is None:
        return None
    words = listed.split("\0")
    own = {key.rpartition(".")[0] for scope, key in zip(words[::2], words[1::2], strict=False) if scope in ("local", "worktree")}
    if any("=" in name for name in own):
        return None
    return [word for name in sorted(own) for end in _WITHOUT_COMMANDS for word in ("-c", f"{name}.{end}")]


def _said(directory: Path, *words: str, statuses: Sequence[int] = (0,)) -> str | None:
    off = [word for setting in _OFF for word in ("-c", setting)]
    command = ["git", "--no-optional-locks", "--no-pager", *off, "-C", str(directory), *words]
    try:
        environment = {**os.environ, **_NO_TRANSPORT}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False, env=environment, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode in statuses else None
