"""Launches real ranks, with hard time-outs: nothing here may hang."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mpisgd.base.errors import ConfigError
from mpisgd.comm.mpi.launch import environment, mpirun
from tests.effort import EVERYTHING, PATTERNS, REST
from tests.faults.job import Job

DRIVE = Path(__file__).parent / "drive.py"
COMMANDS = Path(__file__).parent / "commands.py"
JOBS = Path(__file__).parents[1] / "jobs"


LONGEST = ("shared", "test_docs", "test_readme", "test_signals", "test_tolerant", "test_storage", "test_failures", "batch")
"""Groups of tests that two workers are dealt first."""


def group_of(nodeid: str) -> str:
    """Tests of one group run in one worker: those that share a launch, those of one module; of one cluster at a time."""
    path = Path(nodeid.partition("::")[0])
    if path.parent.name == "jobs":
        return "batch" if path.stem in ("test_slurm", "test_lsf") else path.stem
    if path.parent.name != "mpi":
        return path.stem
    return "shared" if re.search(r"^SHARED = ", (DRIVE.parent / path.name).read_text(), re.MULTILINE) else path.stem


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where the tests run on several workers, those of a group go to one (xdist's own marks do nothing under pytest 9.2)."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return ByGroup(config, log) if config.getoption("dist") == "loadscope" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest groups first."""
    groups = {item: group_of(item.nodeid) if item.path.parent in (DRIVE.parent, JOBS) else "" for item in items}
    items.sort(key=lambda item: LONGEST.index(groups[item]) if groups[item] in LONGEST else len(LONGEST))


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
        left = left_of(process.pid)
        for pid in left:  # MPI, or else Python, then prints where it is
            if pid != process.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGABRT)
        time.sleep(3.0)
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        there = "\n".join(left.values())
        pytest.fail(f"{shlex.join(command)[:200]}: no end after {timeout_s} s of\n{there}\n{out}\n{err}", pytrace=False)
    return Launched(process.returncode, out, err)


def left_of(session: int) -> dict[int, str]:
    """The processes of a session: by number, in words."""
    words = ("pid", "state", "wchan:24", "etime", "time", "args")
    ps = ["ps", "-s", str(session), *(f"-o{each}=" for each in words)]
    with contextlib.suppress(FileNotFoundError):  # a machine without procps
        lines = subprocess.run(ps, capture_output=True, text=True, check=False).stdout.splitlines()
        return {int(line.split()[0]): line[:160] for line in lines}
    return {}


@pytest.fixture
def started() -> Iterator[list[Job]]:
    """Jobs that a test begins; what is left of these is killed when it ends."""
    jobs: list[Job] = []
    yield jobs
    for job in jobs:
        job.end(0.0)


@pytest.fixture(autouse=True, scope="session")
def _needs_mpirun() -> None:
    try:
        mpirun(1)
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def tells_of_failures(_needs_mpirun: None) -> None:
    """This MPI does (ULFM)."""
    if "Open MPI" not in subprocess.run([mpirun(1)[0], "--version"], capture_output=True, text=True, check=False).stdout:
        pytest.skip("this MPI does not tell of failures (ULFM): fault-tolerant runs need Open MPI 5")


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


def drive(directory: Path, jobs: list[dict[str, Any]], ranks: int, timeout_s: float = 300, **env: str) -> None:
    """Run jobs (see drive.py) in one launch; all must succeed."""
    listing = directory / "jobs.json"
    listing.write_text(json.dumps(jobs))
    done = launch(ranks, str(DRIVE), str(listing), timeout_s=timeout_s, cwd=None, **env)
    assert done.status == 0, done.text


# ---------------------------------------------------------------------------------------------------- the shared launch

#: How messages are sent, and waited for.
SWITCHES = {
    "send": {"MPISGD_SSEND": "0"},
    "ssend": {"MPISGD_SSEND": "1"},
    "blocking": {"MPISGD_SSEND": "0", "MPISGD_WAIT": "blocking"},
}
Case = tuple[str, str]
"""A switch, and the name of a run that is made under it."""


def dealt(names: Iterable[str], once: Collection[str] = (), always: Collection[str] = ()) -> list[Case]:
    """Every run with synchronous sends, which find what rests on buffers; every second one, but for `once`, also otherwise.

    `make test` makes those of `always` alone, with synchronous sends (`effort.py`); under a second MPI one of them otherwise, too.
    The rest is each other run once, and with synchronous sends those of `once`, with which others are compared.
    The other switches take turns: all of the suite's other launches send as users do, and wait as the machine suggests. Ranks that
    block while others need their core are what costs most here.
    """
    all_names = list(names)
    if REST:
        left = [name for name in all_names if name not in always]
        switches = itertools.cycle(("ssend", "blocking", "ssend", "send"))
        compared = [("ssend", name) for name in left if name in once]
        return [*compared, *zip(switches, (name for name in left if name not in once), strict=False)]
    if not EVERYTHING:
        some = [name for name in all_names if name in always]
        others = [name for name in some if name not in once] if PATTERNS else []
        return [
            *(("ssend", name) for name in some),
            *(("blocking", name) for name in others[:1]),
            *(("send", name) for name in others[-1:]),
        ]
    turns = zip((name for name in all_names if name not in once), itertools.cycle(("blocking", None, "send", None)), strict=False)
    return [*(("ssend", name) for name in all_names), *((switch, name) for name, switch in turns if switch)]


def only(cases: Iterable[Case], *prefixes: str) -> list[Case]:
    """Those of the runs whose names begin so."""
    return [(switch, name) for switch, name in cases if name.startswith(prefixes)]


@dataclass(frozen=True)
class Shared:
    """The runs of one test module, which says so by a variable SHARED: they share a launch with those of all other modules.

    Args:
        cases: which runs are made under which switch.
        jobs: (directory, name) -> that run's job, as drive.py wants it; the run goes into that directory.
        before: makes, in the module's directory, what the jobs go on with.
    """

    cases: Sequence[Case]
    jobs: Callable[[Path, str], dict[str, Any]]
    before: Callable[[Path], None] = lambda _: None


def jobs_of(runs: Mapping[str, tuple[int, dict[str, Any]]], common: dict[str, Any]) -> Callable[[Path, str], dict[str, Any]]:
    """The jobs of `Shared`; a run's directory has its name."""

    def job(directory: Path, name: str) -> dict[str, Any]:
        ranks, special = runs[name]
        return {"ranks": ranks, "config": {**common, **special, "out": str(directory / name)}}

    return job


@pytest.fixture(scope="session")
def launched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Module -> the directory of its runs, SWITCH/NAME each; the first call launches those of all modules."""
    done: list[Path | BaseException] = []

    def launch_all() -> Path:
        directory = tmp_path_factory.mktemp("shared")
        modules = {item.module.__name__: item.module for item in request.session.items if hasattr(item, "module")}
        jobs: list[dict[str, Any]] = []
        for module, shared in ((name, module.SHARED) for name, module in modules.items() if hasattr(module, "SHARED")):
            top = directory / module.rpartition(".")[2]
            for switch in {switch for switch, _ in shared.cases}:
                (top / switch).mkdir(parents=True)
            shared.before(top)
            for switch, name in shared.cases:
                job = shared.jobs(top / switch, name)
                jobs.append({**job, "env": job.get("env", {}) | SWITCHES[switch]})
        drive(directory, jobs, ranks=max(job["ranks"] for job in jobs), timeout_s=900)
        return directory

    def of(module: str) -> Path:
        if not done:
            try:
                done.append(launch_all())
            except BaseException as error:  # every test that needs it is told, and it is not launched again
                done.append(error)
        if isinstance(done[0], BaseException):
            raise done[0]
        return done[0] / module.rpartition(".")[2]

    return of


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, launched: Callable[[str], Path]) -> Path:
    """The directory of the module's own runs of the shared launch, SWITCH/NAME each."""
    return launched(request.module.__name__)
