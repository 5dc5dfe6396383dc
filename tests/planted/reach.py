"""The suite is run once with a probe at each site: which tests reach which?"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.planted.draws import Fault, probed
from tests.planted.suites import PACKAGE, Copy, module_of, place, run, write


@dataclass
class Reach:
    """Seconds of each test that passes, the tests that reach each site, and what each test said that fails without a fault.

    `readers`: tests that pass without probes only, since they read the source or count: tried for each fault.
    """

    seconds: dict[str, float]
    tests: dict[int, list[str]]
    readers: list[str]
    failed: dict[str, str]


def learn(copy: Copy, faults: Sequence[Fault], suites: Sequence[Sequence[str]]) -> Reach:
    """Run the suites with a probe at each site; what fails then is run again without them."""
    by_file: dict[str, list[Fault]] = defaultdict(list)
    for fault in faults:
        by_file[fault.file].append(fault)
    clean = {copy.directory / PACKAGE / file: (copy.directory / PACKAGE / file).read_bytes() for file in by_file}
    for path, (_, some) in zip(clean, by_file.items(), strict=True):
        write(path, probed(clean[path], {fault.number: fault.site.whole for fault in some}))
    ran = [run(copy, [word for word in words if there(copy.directory, word)]) for words in suites]
    for path, source in clean.items():
        write(path, source)
    for each in ran:
        if each.status not in (0, 1) or any(report["when"] == "collect" for report in each.reports):
            sys.exit(f"planted: the suite does not run without a fault:\n{each.output[-4000:]}")
    seconds, failed = outcomes([report for each in ran for report in each.reports])
    alike, told = outcomes(run(copy, (), sorted(failed)).reports) if failed else ({}, {})
    seconds.update(alike)
    tests = reaching(copy.directory, faults, seconds, set().union(*(each.reached for each in ran)))
    return Reach(seconds, tests, [test for test in alike if not place(test)], told)


def there(directory: Path, word: str) -> bool:
    """Tell whether a word of pytest's is no path, or one that the suite has."""
    return not word.startswith("tests/") or (directory / module_of(word)).exists()


def outcomes(reports: Sequence[dict[str, Any]]) -> tuple[dict[str, float], dict[str, str]]:
    """Return the seconds of each test that passed, and what each test said that failed; skipped ones are in neither."""
    seconds: dict[str, float] = defaultdict(float)
    for each in reports:
        seconds[each["test"]] += each["seconds"]
    failed = {each["test"]: each["said"] for each in reports if each["outcome"] == "failed"}
    passed = {each["test"] for each in reports if each["when"] == "call" and each["outcome"] == "passed"}
    return {test: round(took, 4) for test, took in seconds.items() if test in passed - set(failed)}, failed


def reaching(
    directory: Path, faults: Sequence[Fault], seconds: Collection[str], reached: set[tuple[str, str]]
) -> dict[int, list[str]]:
    """Return the tests that reach each site (see `probe.py`): all, where a site was reached in no test."""
    modules = sorted(set(map(module_of, seconds)))
    shared = {module for module in modules if re.search(r"^SHARED = ", (directory / module).read_text(), re.MULTILINE)}
    by: dict[str, set[str]] = defaultdict(set)
    for what, whom in reached:
        by[what].add(whom)

    @cache
    def those(whom: str) -> frozenset[str]:
        kind, _, name = whom.partition(" ")
        if kind == "test":
            return frozenset({name} & set(seconds))
        if kind == "module":  # those that say SHARED share a launch
            return frozenset(test for test in seconds if module_of(test) in (shared if name in shared else {name}))
        return frozenset(test for test in seconds if test.startswith(name))

    def tests(what: str, around: tuple[str, ...] = ()) -> set[str]:
        found: set[str] = set()
        for whom in by[what] - set(around):
            found |= tests(whom, (*around, what, whom)) if whom.startswith("cache ") else those(whom)
        return found

    return {fault.number: sorted(tests(str(fault.number))) for fault in faults}
