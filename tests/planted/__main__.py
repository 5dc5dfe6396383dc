"""Faults are planted in the package, one at a time: which of them does a suite of tests find?

    python -m tests.planted --out results/tests/planted.json                     # what `make test` runs
    python -m tests.planted --out results/tests/before.json --tests REVISION     # tests of a revision, the package of today
    python -m tests.planted --compare results/tests/before.json results/tests/planted.json

Faults are drawn by a seed, the rooms of the package in turn. The suite is run once in a scratch copy of the checkout, with a probe
at each site, ranks and other processes included, to learn which tests reach which site. Then each fault is planted alone, and the
tests that reach it are run, the quickest first, until one fails. A test that fails without a fault, too, is named and left out.
Stopped and started again with the same words the campaign goes on where it was.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import queue
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tests.planted.attempts import attempt
from tests.planted.draws import Fault, draw
from tests.planted.reach import Reach, learn
from tests.planted.suites import PACKAGE, SUITE, Copy, copied, environment, git

#: What must be the same for two files to be of the same faults, and of the same campaign.
SAME_FAULTS = ("seed", "count", "package")
SAME_CAMPAIGN = (*SAME_FAULTS, "tests", "test_files", "suite", "effort")


def digest(folder: Path) -> str:
    """Name what lies in a folder: names and bytes of its files."""
    found = hashlib.sha256()
    for path in sorted(each for each in folder.rglob("*") if each.is_file() and "__pycache__" not in each.parts):
        found.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def header(options: argparse.Namespace, copy: Path) -> dict[str, Any]:
    """Say which faults are tried, and by what."""
    root = options.checkout
    revision = git(root, "rev-parse", options.tests).decode().strip() if options.tests else "working tree"
    return {
        "seed": options.seed,
        "count": options.count,
        "commit": git(root, "rev-parse", "HEAD").decode().strip(),
        "package": digest(copy / PACKAGE),
        "tests": revision,
        "test_files": digest(copy / "tests"),
        "suite": options.suite or "make test",
        "effort": os.environ.get("MPISGD_TESTS", "some"),
    }


def imports_its_own(copy: Path) -> None:
    """End where a process in the scratch copy imports another copy of the package."""
    words = [sys.executable, "-c", f"import {PACKAGE}; print({PACKAGE}.__file__)"]
    told = subprocess.run(words, cwd=copy.parent, env=environment(copy, copy), check=True, capture_output=True, text=True).stdout
    if not Path(told.strip()).resolve().is_relative_to(copy.resolve()):
        sys.exit(f"planted: {PACKAGE} is imported from {told.strip()}, not from the scratch copy {copy}")


def known_reach(copy: Copy, faults: Sequence[Fault], head: dict[str, Any], options: argparse.Namespace) -> Reach:
    """Return which tests reach which site, from the file of a campaign that was stopped, or else from a run of the suite."""
    name = hashlib.sha256(json.dumps([head[key] for key in SAME_CAMPAIGN]).encode()).hexdigest()[:16]
    file = options.checkout / "build" / f"planted-{name}.json"
    if file.is_file():
        told = json.loads(file.read_text())
        return Reach(**told | {"tests": {int(number): tests for number, tests in told["tests"].items()}})
    say(f"the suite is run with probes at {len(faults)} sites")
    reach = learn(copy, faults, [shlex.split(options.suite)] if options.suite else SUITE)
    file.parent.mkdir(exist_ok=True)
    save(file, dataclasses.asdict(reach))
    return reach


def say(text: str) -> None:
    print(f"planted: {text}", file=sys.stderr, flush=True)


def save(file: Path, told: dict[str, Any]) -> None:
    """Write a file whole, or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.with_suffix(".new").write_text(json.dumps(told, indent=1) + "\n")
    file.with_suffix(".new").replace(file)


def campaign(options: argparse.Namespace, base: Path) -> dict[str, Any]:
    """Try all faults, or those that are named, some at a time; results are written after each."""
    stop = threading.Event()
    copies = [Copy(base / str(number), options.limit_s, stop) for number in range(options.jobs)]
    copied(options.checkout, options.tests, copies[0].directory)
    imports_its_own(copies[0].directory)
    faults = draw(copies[0].directory / PACKAGE, options.count, options.seed)
    head = header(options, copies[0].directory)
    done = json.loads(options.out.read_text()) if options.out.is_file() else head | {"left_out": {}, "faults": []}
    if other := [key for key in SAME_CAMPAIGN if done[key] != head[key]]:
        sys.exit(f"planted: {options.out} is of another campaign ({', '.join(other)} differ): name another file")
    reach = known_reach(copies[0], faults, head, options)
    left_out = done["left_out"]
    for test, said in reach.failed.items():
        say(f"{test} FAILS WITHOUT A FAULT, and is left out: {said}")
    results = {each["number"]: each for each in done["faults"]}
    wanted = [each for each in faults if each.number in options.only] if options.only else faults
    wanted = [each for each in wanted if options.only or each.number not in results]
    for copy in copies[1:]:
        shutil.copytree(copies[0].directory, copy.directory, symlinks=True)
    free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
    for copy in copies:
        free.put(copy)

    def one(fault: Fault) -> dict[str, Any]:
        copy = free.get()
        try:
            return attempt(copy, fault, reach, left_out)
        finally:
            free.put(copy)

    with ThreadPoolExecutor(options.jobs) as pool:
        try:
            for future in as_completed([pool.submit(one, fault) for fault in wanted]):
                result = future.result()
                results[result["number"]] = result
                done |= {"left_out": reach.failed | left_out, "faults": [results[number] for number in sorted(results)]}
                save(options.out, done)
                say(f"{len(results)} of {len(faults)}: {row(result)}")
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    return dict(done)


def row(fault: dict[str, Any]) -> str:
    """Return a fault as a row of Markdown."""
    texts = [" ".join(fault[key].split()).replace("|", "\\|") for key in ("before", "after", "found_by")]
    before, after, by = (f"`{text if len(text) <= 90 else text[:90] + '…'}`" if text else "" for text in texts)
    by = by or ("not found" if fault["reached_by"] else "not reached")
    what = f"{fault['kind']}: {before} to {after}"
    return (
        f"| {fault['number']} | {fault['file']}:{fault['line']} | {what} | {fault['reached_by']} | {by} | {fault['seconds']:.0f} |"
    )


def table(faults: Sequence[dict[str, Any]]) -> str:
    lines = ["| | where | fault | tests that reach it | found by | seconds |", "|--:|---|---|--:|---|--:|", *map(row, faults)]
    found = sum(bool(each["found_by"]) for each in faults)
    reached = sum(bool(each["reached_by"]) and not each["found_by"] for each in faults)
    unreached = len(faults) - found - reached
    return "\n".join([*lines, "", f"{len(faults)} faults: {found} found, {reached} reached and not found, {unreached} not reached"])


def compare(before: Path, after: Path) -> int:
    """Print the faults that the first suite found and the second did not, or has not tried; return how the command ends."""
    first, second = (json.loads(path.read_text()) for path in (before, after))
    if other := [key for key in SAME_FAULTS if first[key] != second[key]]:
        print(f"planted: the files are of different faults: {', '.join(other)} differ", file=sys.stderr)
        return 2
    tried = {each["number"]: each for each in second["faults"]}
    found = [each for each in first["faults"] if each["found_by"]]
    lost = [each for each in found if not tried.get(each["number"], each | {"found_by": ""})["found_by"]]
    for each in lost:
        print(row(each) + ("" if each["number"] in tried else " not tried by the second |"))
    print(f"of {len(found)} faults that {before} found, {after} did not find {len(lost)}")
    return int(bool(lost))


def words(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description="Which planted faults does a suite of tests find?")
    parser.add_argument("--out", type=Path, help="the file of results (JSON); an unfinished one is gone on with")
    parser.add_argument(
        "--compare", type=Path, nargs=2, metavar=("A", "B"), help="print what A found and B did not; status 1 if any"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60, help="how many faults are drawn (60)")
    parser.add_argument("--only", type=int, nargs="+", metavar="NUMBER", help="try these faults alone, again if need be")
    parser.add_argument("--tests", default="", metavar="REVISION", help="take tests/ from a revision of git")
    parser.add_argument("--suite", default="", metavar="WORDS", help="what pytest runs, in place of what `make test` runs")
    parser.add_argument("--jobs", type=int, default=1, help="faults tried at a time, each in a scratch copy of its own (1)")
    parser.add_argument(
        "--limit-s", type=float, default=600, help="seconds in which no test ends: a fault that hangs is found (600)"
    )
    parser.add_argument("--checkout", type=Path, default=Path(__file__).parents[2], help="whose package is tried (this one)")
    options = parser.parse_args(argv)
    if not (options.out or options.compare):
        parser.error("--out FILE or --compare A B is needed")
    return options


def main(argv: Sequence[str]) -> int:
    options = words(argv)
    if options.compare:
        return compare(*options.compare)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    base = Path(tempfile.mkdtemp(prefix="pl-"))
    try:
        print(table(campaign(options, base)["faults"]))
    except KeyboardInterrupt:
        say("stopped; the same words go on from here")
        return 130
    finally:
        shutil.rmtree(base, ignore_errors=True)
        signal.signal(signal.SIGTERM, before)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
