"""A campaign: many seeded runs, something is done to each, and one table says what was found."""

from __future__ import annotations

import argparse
import atexit
import collections
import json
import math
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mpisgd import replay
from mpisgd.bench.parts.measured import describe, write
from mpisgd.comm.mpi.launch import mpirun, version
from mpisgd.config import config_file
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from tests.faults.job import Job, end_all, stop_orderly

if TYPE_CHECKING:
    from tests.jobs import slurm

TABLE_S = 10.0
"""Seconds from one table to the next where there are many runs: it takes a while to be made."""
_MANY = 500


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

    def well(self, job: Job, status: int | None, out: Path, drawn: object = "") -> bool:
        """The job has ended with status 0 and DONE, and nobody is left."""
        done = (out / schema.DONE).is_file()
        told = f"status {status}, gone {job.left_s}, DONE {done}, {drawn}\n{job.text}"
        return self.expect(status == 0 and job.left_s is not None and done, told)

    def balanced(self, run: Run) -> None:
        """The books of each shard balance."""
        for books in run.books():
            self.expect(books.balanced, f"{books}")

    def no_update_lost(self, run: Run, shard: int, final_clock: int) -> int:
        """A shard's updates are there, each once; how many."""
        clocks = run.updates["clock"][run.updates["shard"] == shard].tolist()
        self.expect(clocks == list(range(1, final_clock + 1)), f"shard {shard}: updates are lost or doubled")
        return len(clocks)

    def proved(self, out: Path) -> None:
        """Replay proves the run."""
        proof = replay.replay(out)
        well = not proof.reason and proof.lines()[-1].startswith("identical")
        self.expect(well, f"replay: {proof.reason} {proof.lines()[-2:]}")

    def same_bits(self, out: Path, alone: Path) -> None:
        """The run ends with the weights of the same job left alone."""
        ours, theirs = (torch.load(path / schema.WEIGHTS, weights_only=True) for path in (out, alone))
        same = all(torch.equal(ours[kind][key], theirs[kind][key]) for kind in theirs for key in theirs[kind])
        self.expect(same and ours.keys() == theirs.keys(), "it ends with other bits than the job left alone")
        self.totals["compared bit for bit"] += 1


Execute = Callable[[random.Random, Path, int], Found]
"""(generator, an empty directory, the run's number) -> what was found; all that is random is drawn from the generator."""


def configured(directory: Path, settings: dict[str, Any]) -> str:
    """The path of a configuration file with these settings."""
    path = directory / "job.toml"
    path.write_text(config_file.dumps(config_file.from_mapping(settings)))
    return str(path)


def lasting() -> Path:
    """A directory that lives as long as this process: runs that others are compared with lie there."""
    directory = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def left_alone(ranks: int, settings: Callable[[Path], dict[str, Any]], limit_s: float) -> Path:
    """The run of a job to which nothing is done; it must end well."""
    directory = lasting()
    job = Job(ranks, [configured(directory, settings(directory / "run"))])
    assert job.end(limit_s) == 0, job.text
    return directory / "run"


def quantiles(seconds: list[float]) -> dict[str, float]:
    return {
        "median": round(float(np.median(seconds)), 4),
        "99 %": round(float(np.quantile(seconds, 0.99)), 4),
        "worst": round(max(seconds), 4),
        "number": len(seconds),
    }


def launcher() -> str:
    done = subprocess.run([mpirun(1)[0], "--version"], capture_output=True, text=True, check=True)
    return done.stdout.partition("\n")[0]


def machine(mpi: str = "") -> dict[str, Any]:
    """Where a campaign runs, for its table."""
    described = describe(1, mpi)
    del described["ranks"]  # each run has its own
    edited = " and edits" if _git("status", "--porcelain", "--", "mpisgd", "tests") else ""
    return {"commit": _git("rev-parse", "--short", "HEAD") + edited, **described}


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=False).stdout.strip()


def _run(execute: Execute, seed: int, number: int, keep: Path | None) -> tuple[Found, float]:
    """One run, which is a function of (seed, number) alone, and the seconds it took. Whatever it raises is a failure of it."""
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        try:
            found = execute(random.Random(f"{seed}:{number}"), Path(directory), number)
        except Exception as error:
            found = Found(failures=[f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-3)}"])
        finally:
            end_all()
        if found.failures and keep is not None:
            shutil.copytree(directory, keep / str(number), dirs_exist_ok=True)
    return found, time.monotonic() - begun_s


def table_of(runs: list[tuple[int, Found, float]]) -> dict[str, Any]:
    """The runs of a campaign, each with its number and seconds, in one table."""
    kinds: collections.Counter[str] = collections.Counter()
    totals: collections.Counter[str] = collections.Counter()
    seconds: dict[str, list[float]] = collections.defaultdict(list)
    failures = []
    for number, found, _ in runs:
        kinds.update(found.kinds)
        totals.update(found.totals)
        for name, values in found.seconds.items():
            seconds[name] += values
        failures += [f"run {number}, {', '.join(found.kinds)}: {failure}" for failure in found.failures]
    return {
        "kinds": dict(sorted(kinds.items())),
        "totals": dict(totals),
        **{name: quantiles(values) for name, values in seconds.items() if values},
        "failures": failures,
        "seconds": round(sum(took_s for *_, took_s in runs)),
    }


class Journal:
    """The runs that are done, one a line, beside the table until that is whole: a campaign that is stopped goes on after them.

    Those of another commit or seed count for nothing. `path` None = nothing is kept.
    """

    def __init__(self, path: Path | None, head: dict[str, Any]) -> None:
        self._path = path
        self.runs: list[tuple[int, Found, float]] = []
        if path is None:
            return
        lines = path.read_text().splitlines() if path.is_file() else []
        if lines[:1] == [json.dumps(head)]:
            for line in lines[1:]:
                try:
                    number, found, took_s = json.loads(line)
                except ValueError:  # the last line, of one that was killed while it wrote
                    break
                self.runs.append((number, Found(**found), took_s))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(head) + "\n" + "".join(map(_line, self.runs)))

    def add(self, run: tuple[int, Found, float]) -> None:
        self.runs.append(run)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(_line(run))

    def close(self) -> None:
        """The table is whole, and says all."""
        if self._path is not None:
            self._path.unlink()


def _line(run: tuple[int, Found, float]) -> str:
    number, found, took_s = run
    return json.dumps([number, vars(found), took_s]) + "\n"


def kept(path: Path, head: dict[str, Any]) -> dict[str, Any]:
    """The table of an earlier campaign of this commit and seed; empty where there is none."""
    try:
        table = dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}
    return table if all(table.get(name) == value for name, value in head.items()) else {}


ExecuteOnSlurm = Callable[["slurm.Slurm", str, random.Random, Path, int], Found]
"""(cluster, MPI as the scripts call it, and what `Execute` takes) -> what was found."""


def main_on_slurm(name: str, about: str, count: int, execute: ExecuteOnSlurm, argv: list[str]) -> int:
    """`main` on a real SLURM of virtual nodes, which lives as long (as root); status 2, and why, where there can be none."""
    from tests.jobs import slurm
    from tests.jobs.submitting import NODES

    if reason := slurm.missing():
        print(reason, file=sys.stderr)
        return 2
    mpi = "openmpi" if "Open MPI" in version() else "mpich"
    with tempfile.TemporaryDirectory() as directory, slurm.cluster(Path(directory), NODES) as cluster:
        return main(name, about, count, lambda generator, path, number: execute(cluster, mpi, generator, path, number), argv)


def main(name: str, about: str, count: int, execute: Execute, argv: list[str]) -> int:
    """`python -m tests.faults.NAME --count C --seed S --out DIRECTORY` writes NAME.json there, anew after each run.

    Stopped and started again with the same seed and commit, it goes on where it was; a whole one is only told.
    """
    parser = argparse.ArgumentParser(prog=f"python -m tests.faults.{name}", description=about)
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, nargs="*", help="the numbers of single runs of the campaign; nothing is written")
    parser.add_argument("--out", type=Path, help=f"a directory for {name}.json")
    parser.add_argument("--keep", type=Path, help="a directory for what failed runs left")
    options = parser.parse_args(argv)
    stop_orderly()
    where = machine(mpi=launcher())
    head = {"seed": options.seed, "commit": where["commit"]}
    out = options.out / f"{name}.json" if options.out is not None and options.only is None else None
    table = kept(out, head) if out is not None else {}
    if table.get("count", 0) < options.count:
        journal = Journal(out.with_suffix(".runs") if out is not None else None, head)
        done, written_s = {number for number, *_ in journal.runs}, -math.inf
        wanted = [each for each in (range(options.count) if options.only is None else options.only) if each not in done]
        for number in wanted:
            found, took_s = _run(execute, options.seed, number, options.keep)
            journal.add((number, found, took_s))
            print(f"{number}: {took_s:.1f} s, {', '.join(found.kinds)}: {found.failures or 'well'}", file=sys.stderr, flush=True)
            if number != wanted[-1] and len(journal.runs) > _MANY and time.monotonic() - written_s < TABLE_S:
                continue
            written_s = time.monotonic()
            table = {"count": len(journal.runs), "of": options.count, "seed": options.seed, **table_of(journal.runs), **where}
            if out is not None:
                write(out, table)
        journal.close()
    print(json.dumps(table, indent=1))
    return 1 if table.get("failures") else 0
