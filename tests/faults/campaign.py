"""A campaign: many seeded runs, something is done to each, and one table says what was found."""

from __future__ import annotations

import argparse
import collections
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mpisgd import config_file
from mpisgd.launch import mpirun
from tests.faults.where import machine


@dataclass
class Found:
    """What one run has shown.

    Attributes:
        kinds: what was drawn; the table counts each.
        totals: numbers that are summed over the runs.
        seconds: name -> measured values; the table has their quantiles.
        failures: what was not as promised; none of them in a run that went well.
    """

    kinds: list[str] = field(default_factory=list)
    totals: collections.Counter[str] = field(default_factory=collections.Counter)
    seconds: dict[str, list[float]] = field(default_factory=lambda: collections.defaultdict(list))
    failures: list[str] = field(default_factory=list)

    def expect(self, true: object, what: str) -> bool:
        if not true:
            self.failures.append(what)
        return bool(true)


Execute = Callable[[random.Random, Path, int], Found]
"""(generator, an empty directory, the run's number) -> what was found; all that is random is drawn from the generator."""


def configured(directory: Path, settings: dict[str, Any]) -> str:
    """The path of a configuration file with these settings."""
    path = directory / "job.toml"
    path.write_text(config_file.dumps(config_file.from_mapping(settings)))
    return str(path)


def quantiles(seconds: list[float]) -> dict[str, float]:
    return {
        "median": round(float(np.median(seconds)), 4),
        "99 %": round(float(np.quantile(seconds, 0.99)), 4),
        "worst": round(max(seconds), 4),
        "number": len(seconds),
    }


def _launcher() -> str:
    done = subprocess.run([mpirun(1)[0], "--version"], capture_output=True, text=True, check=True)
    return done.stdout.partition("\n")[0]


def main(name: str, about: str, count: int, execute: Execute, argv: list[str]) -> int:
    """`python -m tests.faults.NAME --count C --seed S --out DIRECTORY` writes NAME.json there, anew after each run."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.faults.{name}", description=about)
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, nargs="*", help="the numbers of single runs of the campaign")
    parser.add_argument("--out", type=Path, help=f"a directory for {name}.json")
    parser.add_argument("--keep", type=Path, help="a directory for what failed runs left")
    options = parser.parse_args(argv)
    begun_s = time.monotonic()
    where = machine(mpi=_launcher())
    kinds: collections.Counter[str] = collections.Counter()
    totals: collections.Counter[str] = collections.Counter()
    seconds: dict[str, list[float]] = collections.defaultdict(list)
    failures: list[str] = []
    numbers: Iterable[int] = range(options.count) if options.only is None else options.only
    text = ""
    for done, number in enumerate(numbers, 1):
        with tempfile.TemporaryDirectory() as directory:
            found = execute(random.Random(f"{options.seed}:{number}"), Path(directory), number)
            if found.failures and options.keep is not None:
                shutil.copytree(directory, options.keep / str(number), dirs_exist_ok=True)
        failures += [f"run {number}, {', '.join(found.kinds)}: {failure}" for failure in found.failures]
        kinds.update(found.kinds)
        totals.update(found.totals)
        for each, values in found.seconds.items():
            seconds[each] += values
        print(f"{number}: {', '.join(found.kinds)}: {found.failures or 'well'}", file=sys.stderr, flush=True)
        table = {
            "count": done,
            "seed": options.seed,
            "kinds": dict(sorted(kinds.items())),
            "totals": dict(totals),
            **{each: quantiles(values) for each, values in seconds.items() if values},
            "failures": failures,
            "seconds": round(time.monotonic() - begun_s),
            **where,
        }
        text = json.dumps(table, indent=1) + "\n"
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / f"{name}.json").write_text(text)
    print(text, end="")
    return 1 if failures else 0
