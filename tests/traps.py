"""Traps that a stranger may lay in a run's directory: whatever runs one of them leaves a file."""

from __future__ import annotations

import subprocess
from pathlib import Path

#: Modules that commands, their workers and their interpreters import.
MODULES = ("mpisgd", "numpy", "torch", "h5py", "mpi4py", "matplotlib", "tyro", "json", "signal", "multiprocessing", "sitecustomize")
MARKER = "executed"


def git(directory: Path, *words: str) -> None:
    own = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", *own, *words], cwd=directory, capture_output=True, check=True)


def set_traps(directory: Path, marker: Path) -> None:
    """Whatever runs one of these leaves the marker."""
    for module in MODULES:
        (directory / f"{module}.py").write_text(f"import os; os.close(os.open({str(marker)!r}, os.O_CREAT | os.O_WRONLY))\n")
    (directory / "matplotlibrc").write_text("text.usetex: True\n")
    for program in ("latex", "git", "mpirun", "uname"):
        (directory / program).write_text(f"#!/bin/sh\ntouch {marker}\n")
        (directory / program).chmod(0o755)
    git(directory, "init")
    (directory / ".gitattributes").write_text("*.toml filter=theirs\n")
    git(directory, "add", "config.toml", ".gitattributes")
    git(directory, "commit", "-m", "one")
    for name in (
        "core.fsmonitor",
        "core.pager",
        "core.sshCommand",
        "filter.theirs.clean",
        "filter.theirs.process",
        "diff.external",
    ):
        git(directory, "config", name, f"touch {marker}; cat")
    git(directory, "config", "remote.origin.url", f"ext::sh -c touch% {marker}")
    git(directory, "config", "remote.origin.promisor", "true")
    git(directory, "config", "extensions.partialClone", "origin")
    git(directory, "config", "protocol.ext.allow", "always")
