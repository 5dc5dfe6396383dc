"""Launches real ranks, with hard time-outs: nothing here may hang."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from mpisgd.errors import ConfigError
from mpisgd.launch import environment, mpirun

DRIVE = Path(__file__).parent / "drive.py"
COMMANDS = Path(__file__).parent / "commands.py"


@dataclass(frozen=True)
class Launched:
    """How a job ended."""

    status: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err


def launch(ranks: int, *words: str, timeout_s: float = 120, cwd: Path | None = None, **env: str) -> Launched:
    """`mpirun -n ranks python words...`; the whole process group is killed, and the test fails, after `timeout_s`."""
    command = [*mpirun(ranks), sys.executable, *words]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=environment() | env,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"{' '.join(command)}: no end after {timeout_s} s\n{out}\n{err}", pytrace=False)
    return Launched(process.returncode, out, err)


@pytest.fixture(autouse=True, scope="session")
def _needs_mpirun() -> None:
    try:
        mpirun(1)
    except ConfigError as error:
        pytest.skip(str(error))


def execute(
    directory: Path, commands: list[tuple[int, Path, tuple[str, ...]]], ranks: int, timeout_s: float = 300
) -> list[Launched]:
    """Run commands of mpisgd, each (ranks, directory, words), in one launch, see commands.py; how each ended."""
    listing = directory / "commands.json"
    listing.write_text(json.dumps([{"ranks": n, "cwd": str(cwd), "words": words} for n, cwd, words in commands]))
    done = launch(ranks, str(COMMANDS), str(listing), timeout_s=timeout_s)
    assert done.status == 0, done.text
    said = json.loads(listing.with_suffix(".json.done").read_text())
    assert [len(each) for each in said] == [n for n, _, _ in commands]
    return [Launched(max(s for s, _, _ in each), "".join(o for _, o, _ in each), "".join(e for _, _, e in each)) for each in said]


def drive(directory: Path, jobs: list[dict], ranks: int, timeout_s: float = 300, **env: str) -> None:
    """Run jobs (see drive.py) in one launch; all must succeed."""
    listing = directory / "jobs.json"
    listing.write_text(json.dumps(jobs))
    done = launch(ranks, str(DRIVE), str(listing), timeout_s=timeout_s, **env)
    assert done.status == 0, done.text
