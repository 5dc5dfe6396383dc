"""Processor seconds of tests, by phase and fixture: `PYTEST_ADDOPTS='-p tests.spent' MPISGD_SPENT=FOLDER make test`.

Each process of pytest writes one file of JSON lines into the folder: own seconds, seconds of its children (ranks, commands), and
programs started. `python -m tests.spent FOLDER` prints the tables of results/tests/README.md.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest

_started = [0]


def _audit(event: str, _: Any) -> None:
    if event in ("subprocess.Popen", "os.posix_spawn"):
        _started[0] += 1


def _now() -> tuple[float, float, float, int]:
    times = os.times()
    return time.monotonic(), times.user + times.system, times.children_user + times.children_system, _started[0]


class Spent:
    """Writes a line per phase of a test and per fixture."""

    def __init__(self, file: TextIO) -> None:
        self.file = file

    def line(self, kind: str, name: str, since: tuple[float, float, float, int], **more: Any) -> None:
        wall, own, children, programs = (now - then for now, then in zip(_now(), since, strict=True))
        said = {"kind": kind, "name": name, "wall": wall, "own": own, "children": children, "programs": programs, **more}
        rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in said.items()}
        print(json.dumps(rounded), file=self.file)

    def _phase(self, item: pytest.Item, phase: str) -> Iterator[None]:
        since = _now()
        yield
        drawn = bool(getattr(getattr(item, "obj", None), "is_hypothesis_test", False))
        self.line(phase, item.nodeid, since, drawn=drawn)

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        yield from self._phase(item, "setup")

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        yield from self._phase(item, "call")

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        yield from self._phase(item, "teardown")

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[None]:
        since = _now()
        yield
        self.line("fixture", f"{request.node.nodeid}::{fixturedef.argname}", since, scope=fixturedef.scope)

    @pytest.hookimpl(hookwrapper=True, trylast=True)
    def pytest_sessionfinish(self) -> Iterator[None]:
        yield
        self.line("process", os.environ.get("PYTEST_XDIST_WORKER", "main"), (0.0, 0.0, 0.0, 0))
        self.file.flush()


def pytest_configure(config: pytest.Config) -> None:
    folder = Path(os.environ["MPISGD_SPENT"])
    folder.mkdir(parents=True, exist_ok=True)
    sys.addaudithook(_audit)
    config.pluginmanager.register(Spent((folder / f"{os.getpid()}-{time.time_ns()}.jsonl").open("w")))


# ------------------------------------------------------------------------------------------------------------ tables


def lines_in(folder: Path) -> list[dict[str, Any]]:
    """Read all lines that processes of pytest wrote into a folder."""
    return [json.loads(line) for path in sorted(folder.rglob("*.jsonl")) for line in path.read_text().splitlines()]


def kinds(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Divide the seconds by their cause; a controller's children are its workers, which have lines of their own."""
    phases = [line for line in lines if line["kind"] in ("setup", "call", "teardown")]
    processes = [line for line in lines if line["kind"] == "process"]
    return {
        "ranks and other programs that tests start": sum(line["children"] for line in phases),
        "fixtures": sum(line["own"] for line in phases if line["kind"] != "call"),
        "tests that draw examples": sum(line["own"] for line in phases if line["kind"] == "call" and line["drawn"]),
        "other tests": sum(line["own"] for line in phases if line["kind"] == "call" and not line["drawn"]),
        "imports, collection, workers": sum(line["own"] for line in processes) - sum(line["own"] for line in phases),
    }


def by(lines: list[dict[str, Any]], key: Callable[[str], str]) -> dict[str, float]:
    """Sum the seconds of phases by a part of the test's name, the most first."""
    found: Counter[str] = Counter()
    for line in lines:
        if line["kind"] in ("setup", "call", "teardown"):
            found[key(line["name"])] += line["own"] + line["children"]
    return dict(found.most_common())


def main(folder: Path, most: int = 20) -> None:
    """Print the seconds by kind, by room of tests and by module."""
    lines = lines_in(folder)
    of_room = by(lines, lambda name: "/".join(name.split("/")[:2]))
    of_module = by(lines, lambda name: name.partition("::")[0])
    for title, found in (("kind", kinds(lines)), ("room", of_room), ("module", dict(list(of_module.items())[:most]))):
        print(f"| {title} | s |\n|---|---:|")
        print("".join(f"| {name} | {value:.1f} |\n" for name, value in found.items()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
