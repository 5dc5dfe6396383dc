"""Launches real ranks, with hard time-outs: nothing here may hang."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    seconds: float = math.nan

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
    columns = [list(zip(*each, strict=True)) for each in said]
    return [Launched(max(status), "".join(out), "".join(err), max(seconds)) for status, out, err, seconds in columns]


def drive(directory: Path, jobs: list[dict], ranks: int, timeout_s: float = 300, **env: str) -> None:
    """Run jobs (see drive.py) in one launch; all must succeed."""
    listing = directory / "jobs.json"
    listing.write_text(json.dumps(jobs))
    done = launch(ranks, str(DRIVE), str(listing), timeout_s=timeout_s, **env)
    assert done.status == 0, done.text


# --------------------------------------------------------------------------------------------------------- shared launches

#: How messages are sent, and waited for.
SWITCHES = {
    "send": {"MPISGD_SSEND": "0"},
    "ssend": {"MPISGD_SSEND": "1"},
    "blocking": {"MPISGD_SSEND": "0", "MPISGD_WAIT": "blocking"},
}
Runs = dict[str, tuple[int, dict[str, Any]]]
"""Name -> ranks, and what differs from what all have in common."""


@dataclass(frozen=True)
class Shared:
    """The runs of one test module, which says so by a variable SHARED: they share a launch with those of all other modules.

    Args:
        switches: each is one more launch.
        jobs: (directory, switch) -> the module's jobs, as drive.py wants them; their runs go into that directory.
    """

    switches: Sequence[str]
    jobs: Callable[[Path, str], list[dict]]


def jobs_of(runs: Runs, common: dict[str, Any]) -> Callable[[Path, str], list[dict]]:
    """The jobs of `Shared`, the same for every switch; a run's directory has its name."""
    return lambda directory, switch: [
        {"ranks": ranks, "config": {**common, **special, "out": str(directory / name)}} for name, (ranks, special) in runs.items()
    ]


@pytest.fixture(scope="session")
def launched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """(switch, module) -> the directory of that module's runs; the first call of a switch launches those of all modules."""
    done: dict[str, Path | BaseException] = {}

    def launch_all(switch: str) -> Path:
        directory = tmp_path_factory.mktemp(switch)
        modules = {item.module.__name__: item.module for item in request.session.items if hasattr(item, "module")}
        jobs: list[dict] = []
        for name, module in modules.items():
            shared = getattr(module, "SHARED", None)
            if shared is not None and switch in shared.switches:
                place = directory / name.rpartition(".")[2]
                place.mkdir()
                jobs += shared.jobs(place, switch)
        drive(directory, jobs, ranks=max(job["ranks"] for job in jobs), timeout_s=900, **SWITCHES[switch])
        return directory

    def of(switch: str, module: str) -> Path:
        if switch not in done:
            try:
                done[switch] = launch_all(switch)
            except BaseException as error:  # every test that needs it is told, and it is not launched again
                done[switch] = error
        found = done[switch]
        if isinstance(found, BaseException):
            raise found
        return found / module.rpartition(".")[2]

    return of
