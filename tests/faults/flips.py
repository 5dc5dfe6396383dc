"""Bit flips and truncations of a run's files: each is refused or reported by a message that names the file, or changes nothing.

`python -m tests.faults.flips --count 1000 --seed 1 --out results/faults` writes flips.json there. A run is made on a virtual
cluster, with a killed run's logs and checkpoints beside it; then files are damaged, one place at a time, and all that reads them is
tried. An outcome is

    reported    a ConfigError, DataError or CheckpointError that names the file; or replay finds it
    passed over the newest checkpoint is damaged, it is named, and the one before is taken
    refused by HDF5    log.h5, opened by h5py without mpisgd: HDF5 raises its own error
    harmless    everything that was read is what is read of the whole files
    answers     the log of a killed run has other seconds in `answer_s`, but nothing else: those are set after their rows are
                flushed, and have a checksum only when the file is closed

and anything else (another exception, other data, no end) is a failure, told with the seed's number.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import h5py
import numpy as np
import torch

from mpisgd import config_file, models
from mpisgd.computing import Updates
from mpisgd.config import CheckpointOptions
from mpisgd.config_file import from_mapping
from mpisgd.errors import ConfigError, DataError, MpisgdError
from mpisgd.flat import FlatModel, host_view
from mpisgd.records import checkpoint as disk
from mpisgd.records import schema
from mpisgd.records.checkpoints import Checkpoints
from mpisgd.records.reader import Run, read_table
from mpisgd.records.snapshots import Snapshots, check_spool
from mpisgd.records.writer import TableFile
from mpisgd.replay.difference import load_weights
from mpisgd.simulate import simulate
from mpisgd.update import SliceUpdate
from tests.faults.where import machine

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


def make(directory: Path) -> None:
    """`done`, a run that finished; `killed`, one whose logs were left open, with three checkpoints of two shards."""
    config = from_mapping(
        {
            "protocol": {"name": "softsync", "n": 2},
            "model": "softmax",
            "shards": 2,
            "epochs": 10,
            "virtual": {"learners": 3},
            "out": str(directory / "done"),
            "log": {"progress": "off", "flush_rows": 16},
        }
    )
    simulate(config)
    shutil.copytree(directory / "done", directory / "killed")
    (directory / "killed" / schema.DONE).unlink()
    spool(directory / "killed" / SPOOL).close(keep=True)
    for shard in range(2):
        leave_open(directory / "killed" / schema.shard_file(shard))
    for clock in (8, 16, 24):
        for shard in range(2):
            checkpoint(directory / "killed", shard, clock)


def spool(path: Path, resumed: Any = ()) -> Snapshots:
    """Three snapshots that wait for evaluation, of 300 elements and their average."""
    snapshots = Snapshots(path, every_epochs=1.0, vectors=2, size=300, resumed=resumed)
    for clock in range(3 if not resumed else 0):
        update = SimpleNamespace(weights=torch.arange(300.0) + clock, averaged=torch.arange(300.0) - clock, samples=8 * clock)
        snapshots.take(typing.cast(Updates, update), clock, 0.5)
    path.with_name("taken.json").write_text(json.dumps(snapshots.taken))
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


def checkpoint(run: Path, shard: int, clock: int) -> None:
    options = from_mapping({}).optimizer
    update = SliceUpdate(torch.arange(300.0) + clock, options, learning_rate=0.1, schedule=lambda epochs: 1.0, train_samples=8)
    writer = Checkpoints(
        run,
        CheckpointOptions(every_updates=8, keep=3),
        update,
        shard,
        bounds=(300 * shard, 300 * (shard + 1)),
        shards=2,
        learners=3,
        model="600 (abc)",
        beside=[path for path in [run / schema.shard_file(shard)] if path.is_file()],
    )
    update.accumulate(1.0, 4)
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
    return hashlib.sha256(host_view(load_weights(run / schema.WEIGHTS, ["theta"], model, done["weights"])["theta"])).hexdigest()


def digest_of_spool(path: Path) -> str:
    """Of snapshots, as whoever goes on with a run, and then the evaluator, gets them: the second, without the first's check."""
    taken = json.loads(path.with_name("taken.json").read_text())
    found = []
    for check in (lambda: check_spool(path, taken, 2 * 4 * 300), lambda: None):
        check()
        snapshots = Snapshots(path, every_epochs=1.0, vectors=2, size=300, resumed=taken)
        found.append([hashlib.sha256(np.concatenate(snapshots.get(number).vectors)).hexdigest() for number in range(3)])
        snapshots.close(keep=True)
    return repr(found)


def digest_of_log(path: Path) -> str:
    """Of the whole file, as any program reads it."""
    found = hashlib.sha256()
    with h5py.File(path) as file:
        for table in schema.TABLES:
            found.update(file[table][:].tobytes())
    return found.hexdigest()


SPOOL = schema.SPOOL + "000"
#: What is read by itself.
ALONE = {schema.WEIGHTS: lambda path: digest_of_weights(path.parent), schema.LOG: digest_of_log, SPOOL: digest_of_spool}
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
                    assert spoilt.name in complaints[0] or schema.MANIFEST in complaints[0], complaints[0]
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
    if generator.random() < 0.2:
        length = generator.randrange(len(content))
        return f"cut to {length} of {len(content)} bytes", content[:length]
    place, bit = generator.randrange(len(content)), generator.randrange(8)
    spoilt = bytearray(content)
    spoilt[place] ^= 1 << bit
    return f"bit {bit} of byte {place} of {len(content)}", bytes(spoilt)


def campaign(count: int, seed: int, directory: Path) -> dict[str, Any]:
    make(directory)
    newest = disk.directory_of(directory / "killed", 24)
    whole = {
        "done": digest_of_run(directory / "done"),
        "killed": digest_of_run(directory / "killed"),
        "without answers": digest_of_run(directory / "killed", answers=False),
        "checkpoint": digest_of_checkpoint(directory / "killed", []),
    }
    whole |= {path.name: ALONE[path.name](path) for path in (directory / "done").iterdir() if path.name in ALONE}
    whole[SPOOL] = digest_of_spool(directory / "killed" / SPOOL)
    aside = directory / "aside"
    newest.rename(aside)
    whole["checkpoint before"] = digest_of_checkpoint(directory / "killed", [])
    aside.rename(newest)
    log = [schema.shard_file(0), schema.shard_file(1)]
    targets = {
        "log of a finished run": [directory / "done" / name for name in (*log, schema.evaluator_file())],
        "log of a killed run": [directory / "killed" / name for name in log],
        "config.toml, DONE": [directory / "done" / schema.CONFIG, directory / "done" / schema.DONE],
        "parts of a checkpoint": [newest / disk.part_file(0), newest / disk.part_file(1)],
        "weights.pt": [directory / "done" / schema.WEIGHTS],
        "snapshots": [directory / "killed" / SPOOL],
        "log.h5, by h5py alone": [directory / "done" / schema.LOG],
        "accounts, manifest": [newest / disk.account_file(0), newest / disk.MANIFEST, newest / disk.MANIFEST],
    }
    generator = random.Random(seed)
    table: dict[str, collections.Counter[str]] = {kind: collections.Counter() for kind in targets}
    failures: list[str] = []
    for number in range(count):
        kind = list(targets)[number % len(targets)]
        path = generator.choice(targets[kind])
        content = path.read_bytes()
        what, spoilt = damage(content, generator)
        path.write_bytes(spoilt)
        found = outcome(directory, path, whole)
        path.write_bytes(content)
        table[kind][found.partition(":")[0]] += 1
        if found.startswith("FAILED"):
            failures.append(f"{number}: {path.relative_to(directory)}, {what}: {found}")
    return {"count": count, "seed": seed, "outcomes": {kind: dict(found) for kind, found in table.items()}, "failures": failures}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.flips", description="Bit flips and truncations of a run's files.")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a directory for flips.json")
    options = parser.parse_args(argv)
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        found = campaign(options.count, options.seed, Path(directory))
    found |= {
        "seconds": round(time.monotonic() - begun_s, 1),
        "h5py": h5py.__version__,
        "hdf5": h5py.version.hdf5_version,
        **machine(),
    }
    text = json.dumps(found, indent=1) + "\n"
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "flips.json").write_text(text)
    print(text, end="")
    return 1 if found["failures"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
