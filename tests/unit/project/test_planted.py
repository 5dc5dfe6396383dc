"""Faults are drawn alike each time, change what is run and nothing else, and a suite finds what it checks (`tests/planted`)."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.planted import __main__ as planted
from tests.planted import draws, suites
from tests.planted.attempts import portions
from tests.planted.reach import reaching
from tests.planted.suites import Ran

ROOT = Path(__file__).parents[3]

SOURCE = '''
from typing import TYPE_CHECKING, Literal
LIMIT = 7
@decorated(1)
def chosen(a: Literal[3], b: int = 4) -> "int[5]":
    """Says 6."""
    if TYPE_CHECKING:
        return 8
    assert a < 9, "ünder"
    if a in (b, "ü"):
        raise ValueError(a == 10)
    elif isinstance(b, int):
        return f"{a + 11:12}"
    match a:
        case 13:
            b = max(a, b)
    wide: tuple[int] = other("ü", b, *a) if (a is
        not b) else True
    return wide
'''
#: Of that, all that may be planted.
PLANTED = {
    ("comparison", 'a in (b, "ü")', 'a not in (b, "ü")'),
    ("branch", 'a in (b, "ü")', "False"),
    ("branch", 'a in (b, "ü")', "True"),
    ("branch", "isinstance(b, int)", "False"),
    ("argument", 'other("ü", b, *a)', 'other(b, "ü", *a)'),
    ("comparison", "a is not b", "a is b"),
}


def test_only_what_is_run_is_planted() -> None:
    source = SOURCE.encode()
    found = set()
    for site in draws.sites(source):
        changed = draws.planted(source, site)
        assert draws.sound(source, site)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source))
        more = len(changed) - len(source)
        found.add((site.kind, draws.in_a_line(source, site, 0), draws.in_a_line(changed, site, more)))
    assert found == PLANTED


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a < b", {"a >= b", "a <= b"}),
        ("a not   in b", {"a in b"}),
        ("(a) == (b)", {"(a) != (b)"}),
        ("a[0x0f]", {"a[16]"}),
        ("-1.5", {"-2.5"}),
        ("a < b != c", {"a >= b != c", "a <= b != c", "a < b == c"}),
        ("f(a, (b), a)", {"f(b, (a), a)", "f(a, (a), b)"}),
    ],
)
def test_each_fault_is_an_exact_replacement(before: str, after: set[str]) -> None:
    source = f"def f(a, b, c):\n    return {before}  # ü < 1\n".encode()
    texts = {draws.planted(source, site).decode() for site in draws.sites(source)}
    expected = {source.decode().replace(before, text) for text in after}
    assert texts == expected


def test_probes_tell_what_is_reached_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    source = b"def f(a, b):\n    if 1 <= a < b and min(a, 0) is not None:\n        return [a, b][1]\n    return g(a, b)\n"
    sites = draws.sites(source)
    reached: list[int] = []
    names: dict[str, Any] = {}
    monkeypatch.setitem(__import__("sys").modules, "planted_probe", SimpleNamespace(reached=reached.append))
    exec(draws.probed(source, {number: site.whole for number, site in enumerate(sites)}), names)
    assert names["f"](2, 5) == 5
    assert {sites[number].kind for number in reached} == {"branch", "comparison", "constant"}
    assert len(sites) - len(set(reached)) == 1, "the call of g"


def test_draws_are_the_same_for_a_seed_and_go_round_the_rooms(tmp_path: Path) -> None:
    for room in ("rules", "protocols"):
        shutil.copytree(ROOT / "mpisgd" / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "mpisgd" / "api.py", tmp_path)
    few, more, other = (draws.draw(tmp_path, count, seed) for count, seed in ((4, 1), (9, 1), (9, 2)))
    assert more[:4] == few
    assert other != more
    assert Counter(fault.room for fault in more) == {"rules": 3, "protocols": 3, "api": 3}
    assert [fault.number for fault in more] == list(range(1, 10))


def test_tests_that_share_a_fixture_reach_what_it_reaches(tmp_path: Path) -> None:
    for name, text in {"a": "", "b": "SHARED = 1\n", "c": "SHARED = 2\n", "d/e": "", "d/f": ""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text(text)
    tests = ["a.py::1", "a.py::2", "b.py::1", "c.py::1", "d/e.py::1", "d/f.py::1"]
    faults = [draws.Fault(number, "", "", None, "", "") for number in range(1, 8)]  # type: ignore[arg-type]
    whom = {"1": "test a.py::1", "2": "module a.py", "3": "module b.py", "4": "under d", "5": "", "6": "cache tests.x"}
    whom |= {"cache tests.x": "cache tests.y", "cache tests.y": "test d/e.py::1"}
    found = reaching(
        tmp_path, faults, tests, {*whom.items(), ("cache tests.x", "test a.py::1"), ("cache tests.y", "cache tests.x")}
    )
    assert found == {1: tests[:1], 2: tests[:2], 3: tests[2:4], 4: tests[4:], 5: tests, 6: [tests[0], tests[4]], 7: []}


def test_the_quickest_tests_come_first_and_those_of_ranks_last() -> None:
    seconds = {f"tests/unit/{name}.py::{n}": n / 10 for n in range(30) for name in "ab"} | {
        "tests/mpi/c.py::1": 0.0,
        "tests/nodes/d.py::1": 0.0,
    }
    those = list(portions(set(seconds), seconds))
    assert [len(each) for each in those] == [40, 20, 1, 1]
    assert max(map(seconds.__getitem__, those[0])) < min(map(seconds.__getitem__, those[1]))
    assert [suites.module_of(test) for test in those[0]] == ["tests/unit/a.py"] * 20 + ["tests/unit/b.py"] * 20


@pytest.mark.parametrize(
    ("status", "when", "found"),
    [
        (0, "", ""),
        (5, "", ""),
        (1, "call", "t"),
        (2, "collect", "import"),
        (4, "", "import"),
        (-11, "", "crash"),
        (None, "", "time-out"),
    ],
)
def test_how_a_fault_is_found(status: int | None, when: str, found: str) -> None:
    reports = [{"test": "t", "when": when, "outcome": "failed", "said": "no"}] if when else []
    assert Ran(status, reports, set(), "text").found_by()[0] == found


def test_nothing_is_left_of_a_suite_that_hangs(tmp_path: Path) -> None:
    """Neither its process nor what it has started in a session of its own."""
    one, other = (
        subprocess.Popen(["sleep", "60"], env=os.environ | {"PLANTED": str(tmp_path)}, start_new_session=True) for _ in range(2)
    )
    suites.end(tmp_path, one)
    assert (one.wait(5), other.wait(5)) == (-9, -9)


TOY = {
    "mpisgd/__init__.py": "",
    "mpisgd/base/__init__.py": "",
    "mpisgd/base/toy.py": "def bigger(a, b):\n    return a > b\n\n\ndef unused(a):\n    return a + 1\n",
    "tests/__init__.py": "",
    "tests/test_toy.py": "from mpisgd.base.toy import bigger\n\ndef test_bigger():\n    assert bigger(2, 1) and not bigger(1, 2)\n",
}


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "pytest_timeout")
    checkout = tmp_path / "toy"
    for name, text in TOY.items():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text(text)
    for words in (["init"], ["add", "."], ["-c", "user.name=n", "-c", "user.email=e", "commit", "-m", "toy"]):
        subprocess.run(["git", "-C", str(checkout), *words], check=True, capture_output=True)
    return checkout


def test_a_toy_suite_finds_what_it_checks(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And the command goes on where it was: there is nothing left to do the second time."""
    out = toy / "out.json"
    words = ["--checkout", str(toy), "--out", str(out), "--count", "3", "--suite", "tests"]
    assert planted.main(words) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "3 faults: 1 found, 1 reached and not found, 1 not reached"
    told = out.read_text()
    found = {each["after"]: (each["reached_by"], each["found_by"]) for each in json.loads(told)["faults"]}
    assert found == {"a <= b": (1, "tests/test_toy.py::test_bigger"), "a >= b": (1, ""), "return a + 2": (0, "")}
    assert planted.main(words) == 0
    assert out.read_text() == told


def test_faults_that_only_the_first_suite_found_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fault = {"file": "f.py", "line": 1, "kind": "constant", "before": "1", "after": "2", "reached_by": 1, "seconds": 1.0}
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, by in zip(files, (("t", "t", ""), ("t", "", "t")), strict=True):
        faults = [{**fault, "number": number, "found_by": each} for number, each in enumerate(by)]
        file.write_text(json.dumps({"seed": 1, "count": 3, "package": "x", "faults": faults}))
    assert planted.main(["--compare", *map(str, files)]) == 1
    assert capsys.readouterr().out.startswith("| 1 | f.py:1 | constant: `1` to `2` | 1 | `t` | 1 |\nof 2 faults")
    assert planted.main(["--compare", str(files[0]), str(files[0])]) == 0
    files[1].write_text(json.dumps({"seed": 2, "count": 3, "package": "x", "faults": []}))
    assert planted.main(["--compare", *map(str, files)]) == 2
