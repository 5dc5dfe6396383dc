"""Every command in README.md is executed, in order, in one directory: what is written there works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mpisgd.launch import environment

README = Path(__file__).parents[2] / "README.md"

#: Commands that are executed elsewhere.
ELSEWHERE = {
    "make demo": ".ci/run",
    "make test": ".ci/run",
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    return [line for block in blocks("sh") for line in block.splitlines() if line and line not in ELSEWHERE]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the files that the README shows, and `mpisgd` on the PATH."""
    directory = tmp_path_factory.mktemp("readme")
    for language in ("toml", "python"):
        for block in blocks(language):
            name = re.match(r"# (\S+)\n", block)
            assert name is not None, "a shown file begins with its name"
            (directory / name[1]).write_text(block)
    programs = directory / "bin"
    programs.mkdir()
    for name, words in {"mpisgd": "-m mpisgd", "python": ""}.items():
        script = programs / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        script.chmod(0o755)
    return directory


@pytest.mark.parametrize("command", commands())
def test_command(workplace: Path, command: str) -> None:
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False, env=env(workplace)).stdout
    if "Open MPI" not in version:
        command = command.replace("--oversubscribe ", "")
    done = subprocess.run(
        command, shell=True, cwd=workplace, env=env(workplace), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def env(workplace: Path) -> dict[str, str]:
    path = f"{workplace / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**environment(), "PATH": path, "PYTHONPATH": str(README.parent)}


def test_ci_executes_the_rest() -> None:
    script = (README.parent / ".ci" / "run").read_text()
    for command in ELSEWHERE:
        assert re.search(rf"^{command}$", script, re.MULTILINE)
