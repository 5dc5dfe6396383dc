"""Suites of tests in a scratch copy of a checkout: pytest with a plugin that reports, and an end for all that it has started."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.run import REAL_JOBS, together, unit

PACKAGE = "mpisgd"
#: What `make test` runs: tests without ranks, tests of real ranks.
SUITE = (unit("some", "2"), together("some", "2"))
ALWAYS = ("-q", "-p", "planted_probe", "-p", "no:cacheprovider", "-p", "no:randomly")


@dataclass
class Copy:
    """A scratch copy of the checkout, in which one suite at a time is run."""

    directory: Path
    limit_s: float
    stop: threading.Event
    runs: Iterator[int] = field(default_factory=itertools.count)


@dataclass
class Ran:
    """The end of a suite: pytest's exit status (None: no test ended for too long), outcomes, reached sites, output."""

    status: int | None
    reports: list[dict[str, Any]]
    reached: set[tuple[str, str]]
    output: str

    def found_by(self) -> tuple[str, str]:
        """Return the first test that failed, or what else was wrong, and what was said; two empty texts where all is well."""
        for each in self.reports:
            if each["outcome"] == "failed":
                return "import" if each["when"] == "collect" else each["test"], each["said"]
        if self.status is None:
            return "time-out", ""
        return ("", "") if self.status in (0, 5) else ("import" if self.status > 0 else "crash", self.output.strip()[-400:])


def git(root: Path, *words: str) -> bytes:
    return subprocess.run(["git", "-C", str(root), *words], check=True, capture_output=True).stdout


def copied(root: Path, revision: str, directory: Path) -> None:
    """Copy a checkout, what git ignores left out, with the tests of a revision if one is named."""
    for name in git(root, "ls-files", "-coz", "--exclude-standard").decode().split("\0"):
        if name and (root / name).is_file():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, directory / name, follow_symlinks=False)
    if revision:
        shutil.rmtree(directory / "tests")
        with tarfile.open(fileobj=io.BytesIO(git(root, "archive", revision, "tests"))) as archive:
            archive.extractall(directory, filter="tar")
    shutil.copyfile(Path(__file__).with_name("probe.py"), directory / "planted_probe.py")


def environment(copy: Path, folder: Path) -> dict[str, str]:
    """Return the environment of a suite: the package, temporary files and notes of the scratch copy; nothing of a pytest around."""
    gone = re.compile("PYTHONPYCACHEPREFIX|PLANTED_|PYTEST_(?!PLUGINS|DISABLE_PLUGIN_AUTOLOAD)")
    kept = {name: value for name, value in os.environ.items() if not gone.match(name)}
    path = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")])
    leave = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    leave["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
    here = {"PATH": path, "PYTHONPATH": str(copy), "TMPDIR": str(folder), "PLANTED": str(folder)}
    return {"MPISGD_TESTS": "some", **leave, **kept, **here}


def module_of(test: str) -> str:
    return test.partition("::")[0]


def place(test: str) -> int:
    """Return 0 for a test without ranks, 1 for one of real ranks, 2 where nodes are pretended: one at a time on a machine."""
    module = module_of(test)
    return 2 if module.startswith("tests/nodes/") or module in REAL_JOBS else int(module.startswith("tests/mpi/"))


def run(copy: Copy, words: Sequence[str], wanted: Sequence[str] = ()) -> Ran:
    """Run pytest in a scratch copy; where no test ends for too long, everything that it started is killed."""
    folder = copy.directory.with_name(f"{copy.directory.name}.{next(copy.runs)}")
    folder.mkdir()
    if wanted:
        (folder / "wanted").write_text(json.dumps(wanted))
        words = [*words, *dict.fromkeys(map(module_of, wanted))]
    reports, size, since = folder / "reports", 0, time.monotonic()
    reports.touch()
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *ALWAYS, *words],
            cwd=copy.directory, env=environment(copy.directory, folder), stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
        try:
            while process.poll() is None and not copy.stop.is_set() and time.monotonic() - since < copy.limit_s:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.2)
                if size != (size := reports.stat().st_size):
                    since = time.monotonic()
            status = process.poll()
        finally:
            end(folder, process)
    noted = [line.split("\t") for file in folder.glob("reached.*") for line in file.read_text(errors="replace").splitlines()]
    told, said = (nameless(path.read_text(errors="replace"), copy.directory, folder) for path in (reports, folder / "output"))
    shutil.rmtree(folder, ignore_errors=True)
    if copy.stop.is_set():
        raise KeyboardInterrupt
    return Ran(status, [json.loads(line) for line in told.splitlines()], {(what, whom) for what, whom in noted}, said)


def nameless(text: str, *folders: Path) -> str:
    """Return what was said without the names of folders that are not the same the next time."""
    for folder in (*folders, Path(sys.prefix)):
        text = text.replace(f"{folder}/", "")
    return text


def end(folder: Path, process: subprocess.Popen[bytes]) -> None:
    """Kill what a suite has left, in whatever session: all that have its folder in their environment."""
    mark = f"PLANTED={folder}\0".encode()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for _ in range(50):
        left = 0
        for each in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in each.read_bytes():
                    os.kill(int(each.parent.name), signal.SIGKILL)
                    left += 1
        if not left:
            break
        time.sleep(0.05)
    process.wait()


def write(path: Path, source: bytes) -> None:
    """Write a module, and forget how it was compiled, since a fault may be as old and as long as what it replaces."""
    path.write_bytes(source)
    for each in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        each.unlink()
