"""A fault is planted, and the tests that reach it are run, the quickest first, until one fails."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from tests.planted.draws import Fault, planted
from tests.planted.reach import Reach
from tests.planted.suites import PACKAGE, Copy, Ran, module_of, place, run, write

#: Of the tests that reach a fault: the quickest first, so many at a time.
PORTIONS = (40, 400)
HANG_OF_A_UNIT_S = 120


def portions(tests: Collection[str], seconds: Mapping[str, float]) -> Iterator[list[str]]:
    """Yield what is run at a time: tests without ranks first, the quickest, then modules of real ranks, the quickest."""
    of_module: dict[str, float] = defaultdict(float)
    for test in tests:
        of_module[module_of(test)] += seconds[test]

    def cost(test: str) -> tuple[Any, ...]:
        module = module_of(test)
        return (of_module[module], module, seconds[test], test) if place(test) else (seconds[test], test)

    for where in range(3):
        those = sorted((test for test in tests if place(test) == where), key=cost)
        for start, stop in itertools.pairwise([0, *itertools.accumulate(PORTIONS), len(tests)]):
            modules: dict[str, list[str]] = defaultdict(list)
            for test in those[start:stop]:
                modules[module_of(test)].append(test)
            if modules:
                yield list(itertools.chain.from_iterable(modules.values()))


_one_cluster = threading.Lock()


def suite_of(copy: Copy, tests: Sequence[str]) -> Ran:
    """Run some tests, all of one place, until one fails."""
    where = place(tests[0])
    with _one_cluster if where == 2 else contextlib.nullcontext():
        return run(copy, ["-x", *([] if where else [f"--timeout={HANG_OF_A_UNIT_S}"])], tests)


def attempt(copy: Copy, fault: Fault, reach: Reach, flawed: dict[str, str]) -> dict[str, Any]:
    """Plant a fault and run the tests that reach it; a test that finds it must pass without it, or it is left out."""
    path, since, by, said = copy.directory / PACKAGE / fault.file, time.monotonic(), "", ""
    clean = path.read_bytes()
    for tests in portions({*reach.tests[fault.number], *reach.readers}, reach.seconds):
        wanted = [test for test in tests if test not in flawed]
        while wanted:
            write(path, planted(clean, fault.site))
            try:
                by, said = suite_of(copy, wanted).found_by()
            finally:
                write(path, clean)
            if "::" not in by or suite_of(copy, [by]).status == 0:
                break
            flawed[by] = said
            print(f"planted: {by} fails without a fault, too, and is left out: {said}", file=sys.stderr, flush=True)
            wanted = [test for test in wanted if test != by]
            by = said = ""
        if by:
            break
    told = {"number": fault.number, "room": fault.room, "file": fault.file, "line": fault.site.line, "kind": fault.site.kind}
    told |= {"before": fault.before, "after": fault.after, "reached_by": len(reach.tests[fault.number])}
    return told | {"found_by": by, "said": said, "seconds": round(time.monotonic() - since, 1)}
