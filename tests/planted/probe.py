"""Plugin of the suites that `tests.planted` runs; a scratch copy of a checkout has it at its root, as `planted_probe`.

In the folder that PLANTED names, each process appends to `reached.PID` which site was reached, and for whom: PLANTED_FOR, which
ranks and commands inherit, is `test ID`, or, where a fixture of more than one test is made, `module FILE` or `under FOLDER`, or
`cache NAME`, where it is kept for whoever asks: then who has asked is noted, too. The process that reports appends the outcome of
each phase to `reports`; `wanted` has the tests to be run, in their order, where not all of them are.
"""

from __future__ import annotations

import functools
import json
import os
import resource
from collections.abc import Callable
from os import getpid, write
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

FOLDER = os.environ.get("PLANTED", "")
#: Bytes of a process, so that a loop without end does not take the machine's memory.
MOST_BYTES = 8 << 30

_seen: set[int | str] = set()
_for = [os.environ.get("PLANTED_FOR", "")]


def reached(what: int | str) -> None:
    """Note once per process and phase of a test that the site of a fault is reached; None, so that `reached(3) or E` is E."""
    if what not in _seen and FOLDER:
        _seen.add(what)
        _append(f"reached.{getpid()}", f"{what}\t{_for[0]}\n")


def _append(name: str, line: str) -> None:
    file = os.open(f"{FOLDER}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        write(file, line.encode("utf-8", "surrogateescape"))
    finally:
        os.close(file)


def _phase(whom: str) -> None:
    _seen.clear()
    _for[0] = os.environ["PLANTED_FOR"] = whom


def _kept(cache: Any) -> Any:
    """Return functools' cache, with notes of who asks for what tests and the package keep."""

    def noting(function: Callable[..., Any]) -> Any:
        name = f"cache {function.__module__}.{getattr(function, '__qualname__', '')}"
        if not name.startswith(("cache tests.", "cache mpisgd.")):
            return cache(function)

        @functools.wraps(function)
        def made(*args: Any, **more: Any) -> Any:
            before = _for[0]
            _phase(name)
            try:
                return function(*args, **more)
            finally:
                _phase(before)

        kept = cache(made)

        @functools.wraps(function)
        def asked(*args: Any, **more: Any) -> Any:
            reached(name)
            return kept(*args, **more)

        vars(asked).update(cache_clear=kept.cache_clear, cache_info=kept.cache_info)
        return asked

    return noting


def pytest_load_initial_conftests() -> None:
    if not Path(FOLDER, "wanted").is_file():
        functools.cache = _kept(functools.cache)


def pytest_configure(config: pytest.Config) -> None:
    """Have the same examples drawn in each run, without the time that a shorter failing one takes to be found."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, hard))
    if config.pluginmanager.hasplugin("hypothesispytest"):
        from hypothesis import Phase, settings

        settings.register_profile("planted", database=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
        settings.load_profile("planted")


def pytest_runtest_setup(item: pytest.Item) -> None:
    _phase(f"test {item.nodeid}")


def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest) -> None:
    """Note for whom a fixture is made; those that it rests on have been made before."""
    if fixturedef.scope == "function":
        _phase(f"test {request.node.nodeid}")
    elif fixturedef.scope in ("class", "module"):
        _phase(f"module {request.node.nodeid.partition('::')[0]}")
    else:
        _phase(f"under {fixturedef.baseid}")


def pytest_runtest_call(item: pytest.Item) -> None:
    _phase(f"test {item.nodeid}")


def pytest_runtest_teardown(item: pytest.Item) -> None:
    _phase(f"module {item.nodeid.partition('::')[0]}")


def pytest_runtest_logfinish() -> None:
    _phase("")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the wanted tests alone, in the order in which they are wanted."""
    file = Path(FOLDER, "wanted")
    if file.is_file():
        place = {name: number for number, name in enumerate(json.loads(file.read_text()))}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in place])
        items[:] = sorted((item for item in items if item.nodeid in place), key=lambda item: place[item.nodeid])


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _report(report, "collect", 0.0)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _report(report, report.when or "", report.duration)


def _report(report: pytest.CollectReport | pytest.TestReport, when: str, seconds: float) -> None:
    """Append a line, in the process that gathers the reports of all workers."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        crash = getattr(report.longrepr, "reprcrash", None)
        said = (crash.message if crash else str(report.longrepr or "").strip()) if report.failed else ""
        told = {"test": report.nodeid, "when": when, "outcome": report.outcome, "seconds": seconds, "said": said[:400]}
        _append("reports", json.dumps(told) + "\n")
