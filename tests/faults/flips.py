"""Damage to a run's files: each is refused or reported by a message that names the file, or changes nothing.

`python -m tests.faults.flips --count 1000 --seed 1 --out results/faults` writes flips.json there. Runs of one, two and three shards
are made on a virtual cluster, each with a killed run's logs, snapshots, checkpoints and lock beside it. Then one place at a time is
damaged: a bit or a byte is changed, a page is zeroed, or the file is cut short; and all that reads it is tried. The kinds of files
(KINDS, in which each file of a run has its place) take turns. An outcome is

    reported    a ConfigError, DataError or CheckpointError that names the file; or replay finds it
    passed over the newest checkpoint is damaged, it is named, and the one before is taken
    refused by HDF5    log.h5, opened by h5py without mpisgd: HDF5 raises its own error
    harmless    everything that was read is what is read of the whole files
    answers     the log of a killed run has other seconds in `answer_s`, but nothing else: those are set after their rows are
                flushed, and have a checksum only when the file is closed

and anything else (another exception, other data, no end) is a failure, told with the run's number.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple

import h5py
import numpy as np
import torch

from mpisgd import models
from mpisgd.base.errors import ConfigError, DataError, MpisgdError
from mpisgd.config import CheckpointOptions, config_file
from mpisgd.config.config_file import from_mapping
from mpisgd.records import lock
from mpisgd.records.checkpoint import checkpoint as disk
from mpisgd.records.checkpoint.checkpoint import MANIFEST
from mpisgd.records.checkpoint.checkpoints import Checkpoints, Share
from mpisgd.records.checkpoint.snapshots import Snapshots, check_spool
from mpisgd.records.log import schema
from mpisgd.records.log.rank_file import read_table
from mpisgd.records.log.reader import Run
from mpisgd.records.log.writer import TableFile
from mpisgd.replay.checks.difference import load_weights
from mpisgd.simulate import simulate
from mpisgd.update.slice_update import SliceUpdate
from mpisgd.vectors.computing import Updates
from mpisgd.vectors.flat import FlatModel
from mpisgd.vectors.memory import host_view
from tests.faults.campaign import Found, lasting, main

LIMIT_S = 20
"""Longer than this, on files of some hundred kB, is a hang."""


class TooLongError(Exception):
    pass


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    def over(number: int, frame: FrameType | None) -> None:
        raise TooLongError

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# ----------------------------------------------------------------------------------------------------------- what is damaged


TAKEN = "taken.json"


def make(directory: Path, shards: int = 2) -> None:
    """`done`, a run that finished; `killed`, one whose logs were left open, with three checkpoints, locked by this process."""
    config = from_mapping(
        {
            "protocol": {"name": "softsync", "n": 2},
            "model": "softmax",
            "shards": shards,
            "epochs": 10,
            "virtual": {"learners": 3},
            "out": str(directory / "done"),
            "log": {"progress": "off", "flush_rows": 16},
        }
    )
    simulate(config)
    killed = directory / "killed"
    shutil.copytree(directory / "done", killed)
    for name in (schema.DONE, schema.LOG, schema.WEIGHTS):
        (killed / name).unlink()
    spool(killed / SPOOL).close(keep=True)
    for shard in range(shards):
        leave_open(killed / schema.shard_file(shard))
    for clock in (8, 16, 24):
        for shard in range(shards):
            checkpoint(killed, shard, clock, shards)
    lock.Lock(killed)


def spool(path: Path, resumed: Any = ()) -> Snapshots:
    """Three snapshots that wait for evaluation, of 300 elements and their average."""
    snapshots = Snapshots(path, every_epochs=1.0, vectors=2, size=300, resumed=resumed)
    for clock in range(3 if not resumed else 0):
        update = SimpleNamespace(weights=torch.arange(300.0) + clock, averaged=torch.arange(300.0) - clock, samples=8 * clock)
        snapshots.take(typing.cast(Updates, update), clock, 0.5)
    path.parent.with_name(TAKEN).write_text(json.dumps(snapshots.taken))
    return snapshots


def leave_open(path: Path) -> None:
    """The same rows, as a killed writer leaves them: copied by one that never closes its file."""
    aside = path.with_suffix(".copy")
    if os.fork() == 0:
        rewrite_and_die(path, aside)
    os.wait()
    aside.rename(path)


def rewrite_and_die(path: Path, aside: Path) -> None:
    file = TableFile(aside, shard=int(path.name[6:9]), flush_rows=16, flush_s=1e9)
    for table in schema.TABLES:
        for row in read_table(path, table).tolist():
            file.append(table, row)
    file.flush()
    os._exit(0)


def checkpoint(run: Path, shard: int, clock: int, shards: int = 2) -> None:
    options = from_mapping({}).optimizer
    update = SliceUpdate(torch.arange(300.0) + clock, options, learning_rate=0.1, schedule=lambda epochs: 1.0, train_samples=8)
    share = Share(run, shard, bounds=(300 * shard, 300 * (shard + 1)), shards=shards, learners=3, model=f"{300 * shards} (abc)")
    writer = Checkpoints(
        share,
        CheckpointOptions(every_updates=8, keep=3),
        update,
        beside=[path for path in [run / schema.shard_file(shard)] if path.is_file()],
    )
    update.accumulate(update.bodies.take(), 1.0, 4)
    update.step()
    writer.due(clock)
    writer.wait()
    told: dict[str, Any] = {"applied_seq": [4, 4, 4], "next_seq": [5, 5, 5], "snapshots": [(0, 0, 0.1)], "diverged": False}
    writer.take(clock=clock, now_s=1.0, received=15, rows=[15, 8, 0, 2], **told)
    writer.wait()


# ---------------------------------------------------------------------------------------------------------- what reads it


def digest_of_run(path: Path, answers: bool = True) -> str:
    """Of all that mpisgd reads of a run's log, with `answer_s` or without."""
    run = Run(path)
    found = hashlib.sha256(json.dumps([run.config, run.done], sort_keys=True, default=str).encode())
    found.update(run.summaries.tobytes())
    for table in schema.TABLES:
        rows = run.table(table)
        if table == "pushes" and not answers:
            rows["answer_s"] = 0
        found.update(rows.tobytes())
    found.update(json.dumps([dataclasses.astuple(books) for books in run.books()]).encode())
    found.update(repr([run.begins, run.lambda_, run.shards, run.attempt]).encode())
    found.update(config_file.dumps(config_file.read(path / schema.CONFIG)).encode())
    return found.hexdigest()


def digest_of_weights(run: Path) -> str:
    """Of the last weights, as replay loads them."""
    done = Run(run).done or {}
    model = FlatModel(models.make(from_mapping({"model": "softmax"}).model, input_shape=(1, 8, 8), classes=10, seed=1))
    theta = host_view(load_weights(run / schema.WEIGHTS, ["theta"], model, done["weights"])["theta"])
    return hashlib.sha256(theta.tobytes()).hexdigest()


def digest_of_spool(path: Path) -> str:
    """Of snapshots, as whoever goes on with a run, and then the evaluator, gets them: the second, without the first's check."""
    taken = json.loads(path.parent.with_name(TAKEN).read_text())
    found = []
    for checked in (True, False):
        if checked:
            check_spool(path, taken, 2 * 4 * 300)
        snapshots = Snapshots(path, every_epochs=1.0, vectors=2, size=300, resumed=taken)
        found.append([hashlib.sha256(np.concatenate(snapshots.get(number).vectors).tobytes()).hexdigest() for number in range(3)])
        snapshots.close(keep=True)
    return repr(found)


def digest_of_log(path: Path) -> str:
    """Of the whole file, as any program reads it."""
    found = hashlib.sha256()
    with h5py.File(path) as file:
        for table in schema.TABLES:
            found.update(file[table][:].tobytes())
    return found.hexdigest()


def digest_of_lock(path: Path) -> str:
    """Whether another job is kept out; of a lock that is damaged, too, whoever held it."""
    try:
        lock.Lock(path.parent)
    except ConfigError as error:
        return "kept out" if str(path) in str(error) else f"{path.name} is not named: {error}"
    return "let in"


SPOOL = schema.SPOOL + "000"
#: What is read by itself.
ALONE = {
    schema.WEIGHTS: lambda path: digest_of_weights(path.parent),
    schema.LOG: digest_of_log,
    SPOOL: digest_of_spool,
    schema.LOCK: digest_of_lock,
}
READING = (OSError, RuntimeError, KeyError, ValueError, TypeError)
"""What h5py raises."""


def digest_of_checkpoint(path: Path, complaints: list[str]) -> str:
    """Of the checkpoint that a run would go on from."""
    found = disk.newest(path, complaints.append)
    content = hashlib.sha256(repr(dataclasses.replace(found, path=Path(found.path.name))).encode())
    for shard in range(len(found.parts)):
        for name, tensor in sorted(found.tensors(shard).items()):
            content.update(name.encode() + np.ascontiguousarray(tensor).tobytes())
    return content.hexdigest()


def outcome(directory: Path, spoilt: Path, whole: dict[str, str]) -> str:
    """What comes of one damaged file; see the module. Raises AssertionError where it is none of what may be."""
    run = directory / spoilt.relative_to(directory).parts[0]
    complaints: list[str] = []
    try:
        with limited(LIMIT_S):
            if schema.CHECKPOINTS in spoilt.parts:
                found = digest_of_checkpoint(run, complaints)
                if complaints:
                    assert len(complaints) == 1, complaints
                    assert spoilt.parent.name in complaints[0], complaints[0]
                    assert spoilt.name in complaints[0] or MANIFEST in complaints[0], complaints[0]
                    return "passed over" if found == whole["checkpoint before"] else "FAILED: another checkpoint was taken"
                return "harmless" if found == whole["checkpoint"] else "FAILED: other data, without a word"
            if spoilt.name in ALONE:
                return "harmless" if ALONE[spoilt.name](spoilt) == whole[spoilt.name] else "FAILED: other data, without a word"
            found = digest_of_run(run)
    except (ConfigError, DataError) as error:
        return "reported" if spoilt.name in str(error) else f"FAILED: does not name the file: {error}"
    except TooLongError:
        return "FAILED: no end"
    except MpisgdError as error:
        return f"FAILED: {type(error).__name__}: {error}"
    except Exception as error:  # what a user would see as a traceback
        if spoilt.name == schema.LOG and isinstance(error, READING):
            return "refused by HDF5"
        return f"FAILED: {type(error).__name__}: {error}"
    if found == whole[run.name]:
        return "harmless"
    if run.name == "killed" and digest_of_run(run, answers=False) == whole["without answers"]:
        return "answers"
    return "FAILED: other data, without a word"


def damage(content: bytes, generator: random.Random) -> tuple[str, bytes]:
    """What is done, "bit: ..." say, and what the file then holds: never what it was."""
    while True:
        kind, place, spoilt = generator.choice(DAMAGES), generator.randrange(len(content)), bytearray(content)
        if kind == "cut":
            del spoilt[place:]
        elif kind == "page":
            start = place - place % PAGE
            spoilt[start : start + PAGE] = bytes(len(spoilt[start : start + PAGE]))
        else:
            spoilt[place] ^= 1 << generator.randrange(8) if kind == "bit" else generator.randrange(1, 256)
        if spoilt != content:
            return f"{kind}: at {place} of {len(content)} bytes", bytes(spoilt)


DAMAGES = ("bit", "bit", "byte", "page", "cut")
PAGE = 512
KINDS: dict[str, Callable[[Path], bool]] = {
    "log of a finished run": lambda path: "done" in path.parts and "attempt" in path.name,
    "log of a killed run": lambda path: "killed" in path.parts and "attempt" in path.name,
    "config.toml": lambda path: path.name == schema.CONFIG,
    "DONE": lambda path: path.name == schema.DONE,
    "parts of a checkpoint": lambda path: schema.CHECKPOINTS in path.parts and path.suffix == ".h5",
    "accounts of a checkpoint": lambda path: path.match("shard-*.json"),
    "manifest of a checkpoint": lambda path: path.name == disk.MANIFEST,
    "weights.pt": lambda path: path.name == schema.WEIGHTS,
    "snapshots": lambda path: path.name == SPOOL,
    "log.h5, by h5py alone": lambda path: path.name == schema.LOG,
    "lock": lambda path: path.name == schema.LOCK,
}


class Made(NamedTuple):
    """Runs of so many shards, and what is read of them while they are whole."""

    directory: Path
    files: dict[str, list[Path]]
    whole: dict[str, str]


@cache
def made(shards: int) -> Made:
    """They stay for the next damages, as long as this process lives. Raises AssertionError where a file is of no kind."""
    directory = lasting()
    make(directory, shards)
    done, killed = directory / "done", directory / "killed"
    whole = {
        "done": digest_of_run(done),
        "killed": digest_of_run(killed),
        "without answers": digest_of_run(killed, answers=False),
        "checkpoint": digest_of_checkpoint(killed, []),
    }
    whole |= {path.name: ALONE[path.name](path) for run in (done, killed) for path in run.iterdir() if path.name in ALONE}
    newest, aside = disk.directory_of(killed, 24), directory / "aside"
    newest.rename(aside)
    whole["checkpoint before"] = digest_of_checkpoint(killed, [])
    aside.rename(newest)
    files: dict[str, list[Path]] = {kind: [] for kind in KINDS}
    for path in sorted(each for run in (done, killed) for each in run.rglob("*") if each.is_file()):
        if schema.CHECKPOINTS in path.parts and newest not in path.parents:
            continue  # nobody looks at those before
        kinds = [kind for kind, is_of in KINDS.items() if is_of(path.relative_to(directory))]
        assert len(kinds) == 1, f"{path.name} is of kinds {kinds}"
        files[kinds[0]].append(path)
    return Made(directory, files, whole)


def execute(generator: random.Random, directory: Path, number: int) -> Found:
    """One damage, which is undone."""
    kind, shards = list(KINDS)[number % len(KINDS)], generator.randint(1, 3)
    there, files, whole = made(shards)
    path = generator.choice(files[kind])
    content = path.read_bytes()
    what, spoilt = damage(content, generator)
    try:
        path.write_bytes(spoilt)
        came = outcome(there, path, whole)
    finally:
        path.write_bytes(content)
    found = Found([kind, what.partition(":")[0], f"S = {shards}"])
    found.totals[f"{kind}: {came.partition(':')[0]}"] += 1
    found.expect(not came.startswith("FAILED"), f"{path.relative_to(there)}, {what}: {came}")
    return found


if __name__ == "__main__":
    sys.exit(main("flips", "Damage to the files of a run.", 1000, execute, sys.argv[1:]))
