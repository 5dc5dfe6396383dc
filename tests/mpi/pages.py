"""The commands of a Markdown page: blocks of `sh` are executed, in order; those of `bash` say before them why they are not.

A page's blocks of `toml` and `python` are files, whose first line says their name. Those of `diff` are two whole files.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from mpisgd.comm.mpi.launch import environment

ROOT = Path(__file__).parents[2]

#: Commands that are executed elsewhere, and by what.
ELSEWHERE = {
    "make demo": ".ci/run",
    "make test": ".ci/run",
}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def both(diff: str) -> dict[str, str]:
    """The two files that a whole diff shows: name -> text."""
    old, new, *lines = diff.splitlines(keepends=True)
    shown = {old: "-", new: "+"}
    return {
        name[4:].strip(): "".join(line[1:] or line for line in lines if line[0] in (" ", "\n", sign))
        for name, sign in shown.items()
    }


def commands(page: Path) -> list[str]:
    return [line for block in blocks(page, "sh") for line in block.splitlines() if line and line not in ELSEWHERE]


def lay_out(directory: Path, *pages: Path) -> None:
    """Write the files that the pages show, and put `mpisgd` on the PATH of `execute`."""
    for page in pages:
        for block in [*blocks(page, "toml"), *blocks(page, "python")]:
            first = re.match(r"# (\S+)\n", block)
            assert first is not None, f"{page}: a shown file begins with its name"
            (directory / first[1]).write_text(block)
        for block in blocks(page, "diff"):
            for name, text in both(block).items():
                (directory / name).write_text(text)
    programs = directory / "bin"
    programs.mkdir()
    for name, words in {"mpisgd": "-m mpisgd", "python": ""}.items():
        script = programs / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        script.chmod(0o755)


def execute(directory: Path, command: str) -> None:
    """Run one command there, under whichever MPI this is; it must succeed."""
    path = f"{directory / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**environment(), "PATH": path, "PYTHONPATH": str(ROOT)}
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False, env=env).stdout
    if "Open MPI" not in version:
        command = command.replace("--oversubscribe ", "")
    done = subprocess.run(command, shell=True, cwd=directory, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
