"""Files of checkpoints: plain arrays and numbers, nothing executable (DESIGN 6).

    checkpoint/clock-000120/shard-000.h5     one shard's tensors: one-dimensional float32 data sets
                            shard-000.json   the shard's `Account`, file length and CRC-32
                            coordinator.json of a batch optimisation (`coordinator_records.py`)
                            manifest.json    all of the above in one, written last: without it, no checkpoint

Each file is written aside, synced and renamed. JSON files hold CRC-32s of themselves and of all others: a checkpoint loads whole or
is refused.
"""

from __future__ import annotations

import dataclasses
import io
import json
import mmap
import os
import re
import shlex
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from mpisgd.base import durable, safe_read
from mpisgd.base.errors import CheckpointError
from mpisgd.records.log import schema

MANIFEST = "manifest.json"
COORDINATOR = "coordinator.json"
_DIRECTORY = re.compile(r"clock-(\d{6,})$")
CRC = "crc32"
TOLD = ("schema_version", "attempt", "learners", "model")
"""Entries of a manifest repeated in each part."""
_LAYOUT_NBYTES = 4096
"""More than HDF5 writes about one data set."""
_PIECE = 1 << 20
"""Bytes per CRC-32, still in the cache for the write."""


@dataclass(frozen=True)
class Account:
    """State of a shard just after an update, besides its tensors.

    Attributes:
        received: pushes in the log.
        applied_seq: per learner, the last mini-batch applied here; -1 = none.
        next_seq: per learner, the mini-batch wanted next here.
        rows: the log so far, as attribute `continues` (`schema`).
        snapshots: clock, samples, seconds and CRC-32 of each.
        portions: `portions.Portions.state`, if data are dealt.
    """

    shard: int
    bounds: tuple[int, int]
    clock: int
    samples: int
    now_s: float
    received: int
    applied_seq: list[int]
    next_seq: list[int]
    rows: list[list[int]]
    snapshots: list[tuple[int, int, float, int]]
    diverged: bool = False
    portions: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Part:
    account: Account
    nbytes: int
    crc32: int

    def tensors(self, path: Path) -> dict[str, np.ndarray]:
        """Return the part's tensors by name, (slice,) or () float32. Raises CheckpointError if changed."""
        try:
            nbytes = path.stat().st_size
            content = path.read_bytes() if nbytes == self.nbytes else bytes(0)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if nbytes != self.nbytes or zlib.crc32(content) != self.crc32:
            found = f"{nbytes} bytes" + f" with CRC-32 {zlib.crc32(content):08x}" * (nbytes == self.nbytes)
            raise CheckpointError(f"{path} is torn: {found}, written were {self.nbytes} with {self.crc32:08x}")
        return _arrays(path, content)


@dataclass(frozen=True)
class Checkpoint:
    """A manifest.

    Attributes:
        attempt, learners: of the writing attempt.
        model: `flat.FlatModel.fingerprint`.
        coordinator: of a batch optimisation (`sandblaster/state.py`); else empty.
    """

    path: Path
    clock: int
    attempt: int
    learners: int
    model: str
    parts: tuple[Part, ...]
    coordinator: dict[str, Any] = field(default_factory=dict, kw_only=True)

    @property
    def next_seq(self) -> list[int]:
        """Per learner, the first mini-batch wanted by any shard."""
        return [min(wanted) for wanted in zip(*(part.account.next_seq for part in self.parts), strict=True)]

    @property
    def attempts(self) -> list[int]:
        return [attempt for attempt, *_ in self.parts[0].account.rows]

    @property
    def now_s(self) -> float:
        return max(part.account.now_s for part in self.parts)

    def tensors(self, shard: int) -> dict[str, np.ndarray]:
        """Return one shard's tensors by name, (slice,) or () float32. Raises CheckpointError if changed."""
        return self.tensors_at(self.path / part_file(shard), shard)

    def tensors_at(self, path: Path, shard: int) -> dict[str, np.ndarray]:
        return self.parts[shard].tensors(path)


def name_of(clock: int) -> str:
    return f"clock-{clock:06d}"


def directory_of(run: Path, clock: int) -> Path:
    return run / schema.CHECKPOINTS / name_of(clock)


def part_file(shard: int) -> str:
    return f"shard-{shard:03d}.h5"


def account_file(shard: int) -> str:
    return f"shard-{shard:03d}.json"


def directories(run: Path) -> list[Path]:
    """List the directories of checkpoints, complete or not, newest first."""
    return by_clock((run / schema.CHECKPOINTS).glob("clock-*"))


def by_clock(paths: Iterable[Path]) -> list[Path]:
    """Return directories of clocks, newest first."""
    return sorted((path for path in paths if _DIRECTORY.match(path.name)), key=clock_of, reverse=True)


def clock_of(directory: Path) -> int:
    return int(directory.name.removeprefix("clock-"))


def newest(run: Path, complain: Callable[[str], None] = lambda why: None, whole: Collection[int] = ()) -> Checkpoint:
    """Return the newest whole checkpoint, all bytes read; tell `complain` why newer ones are passed over.

    `whole`: clocks already checked. Raises CheckpointError if there is none.
    """
    why: list[str] = []
    for path in directories(run):
        try:
            checkpoint = read(path)
            for shard in range(len(checkpoint.parts) * (checkpoint.clock not in whole)):
                checkpoint.tensors(shard)
        except CheckpointError as error:
            complain(f"{path.name} is passed over: {error}")
            why.append(f"; {path.name}: {error}")  # of each: the newest may be merely unfinished, an older one damaged
            continue
        return checkpoint
    raise CheckpointError(
        f"{run} has no complete checkpoint, and cannot be continued; begin anew with --overwrite"
        f" (checkpoint.every_updates sets how often checkpoints are written){''.join(why)}"
    )


def read(path: Path) -> Checkpoint:
    """Read a manifest. Raises CheckpointError if missing or changed."""
    table = read_json(path / MANIFEST)
    try:
        if table["schema_version"] != schema.SCHEMA_VERSION:
            raise CheckpointError(f"{path} has schema version {table['schema_version']}, this mpisgd reads {schema.SCHEMA_VERSION}")
        if path.name != name_of(table["clock"]):
            raise CheckpointError(f"{path / MANIFEST} is of clock {table['clock']}: somebody has moved the checkpoint")
        parts = tuple(map(_part_of, table["parts"]))
        told = table.get("coordinator", {})
        return Checkpoint(path, table["clock"], table["attempt"], table["learners"], table["model"], parts, coordinator=told)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path / MANIFEST} is no manifest: {type(error).__name__}: {error}") from error


def read_part(directory: Path, shard: int) -> Part:
    """Read a part's numbers. Raises CheckpointError if missing or changed."""
    return _part_of(read_json(directory / account_file(shard))["part"])


def _part_of(told: Mapping[str, Any]) -> Part:
    """Return a part; an earlier mpisgd also wrote `counts` in accounts."""
    known = {name: value for name, value in told["account"].items() if name != "counts"}
    return Part(Account(**known | {"bounds": tuple(known["bounds"])}), told["nbytes"], told[CRC])


def read_json(path: Path) -> dict[str, Any]:
    """Read a file of `write_json`. Raises CheckpointError if missing or changed."""
    try:
        table: dict[str, Any] = json.loads(path.read_bytes())
        whole = table.pop(CRC) == zlib.crc32(_text(table))  # a flipped exponent may be infinite
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.name} is missing") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is torn: {type(error).__name__}: {error}") from error
    if not whole:
        raise CheckpointError(f"{path} is torn: the CRC-32 does not match")
    return table


def _arrays(path: Path, content: bytes) -> dict[str, np.ndarray]:
    """Return the data sets of a part; links into other files are not followed."""
    try:
        with h5py.File(io.BytesIO(content), "r") as file:
            arrays = {}
            for name in file:
                data = safe_read.data_set(file, name)
                if data.dtype != np.float32 or data.size * 4 > len(content):
                    raise CheckpointError(f"{path}: {name} is no data set of float32, or larger than the file")
                arrays[name] = np.asarray(data[()], np.float32)
            return arrays
    except (OSError, RuntimeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as HDF5: {error}") from error


def seal(directory: Path, clock: int, shards: int, attempt: int, coordinated: bool = False) -> bool:
    """Write the manifest if all shards have parts of this attempt; return whether they have. Raises OSError."""
    tables: list[dict[str, Any]] = []
    for shard in range(shards):
        try:
            tables.append(read_json(directory / account_file(shard)))
        except CheckpointError:
            return False
        if tables[-1]["attempt"] != attempt:
            return False
    told = {name: value for name, value in tables[0].items() if name in TOLD}
    if coordinated:
        told["coordinator"] = read_json(directory / COORDINATOR)["numbers"]
    write_json(directory / MANIFEST, {**told, "clock": clock, "parts": [table["part"] for table in tables]})
    durable.sync_directory(directory)
    durable.sync_directory(directory.parent)
    return True


def way_on(run: Path, clock: int | None = None, command: str = "", *, near: bool = False) -> str:
    """Return how to continue a failed run; "" if done or never begun.

    `clock`: the newest known; `near`: nodes may hold a newer state.
    """
    command = command or f"mpisgd train --resume {shlex.quote(str(run))}"
    try:
        if not (run / schema.CONFIG).is_file() or (run / schema.DONE).exists():
            return ""
        if near:
            return f"to go on from the newest state on the nodes, or {run}: {command}"
        for path in directories(run):
            if (path / MANIFEST).is_file():
                saved = read(path).clock
                lost = "" if clock is None else f" ({max(0, clock - saved):,} later updates are lost, as far as is known here)"
                return f"to go on from the checkpoint of clock {saved:,}{lost}: {command}"
        return f"{run} has no complete checkpoint to go on from: begin anew with --overwrite"
    except (OSError, CheckpointError):  # `--resume` reports and passes over torn ones
        return f"to go on from the newest whole checkpoint: {command}"


def write_part(directory: Path, account: Account, tensors: Mapping[str, np.ndarray], told: Mapping[str, Any]) -> None:
    """Write a shard's tensors and account; `told`: of the run (`TOLD`). Raises OSError."""
    about = {"clock": account.clock, "shard": account.shard, "attempt": told["attempt"]}
    nbytes, crc32 = write_tensors(directory / part_file(account.shard), tensors, about)
    part = {"account": dataclasses.asdict(account), "nbytes": nbytes, CRC: crc32}
    write_json(directory / account_file(account.shard), {**told, "part": part})


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray], attributes: Mapping[str, int]) -> tuple[int, int]:
    """Write a part; return its bytes and CRC-32. Raises OSError, and leaves nothing aside.

    HDF5 writes to memory alone: disks may be full or busy (TRAPS 8).
    """
    layout = _Layout(-1, sum(4 * tensor.size for tensor in tensors.values()) + _LAYOUT_NBYTES * (16 + len(tensors)))
    with h5py.File(layout, "w") as file:
        for name, value in attributes.items():
            file.attrs[name] = value
        offsets = {name: _lay_out(file, name, tensor) for name, tensor in tensors.items()}
    crc32 = 0
    with durable.written_aside(path) as raw:
        for content in _in_order(layout, {offset: tensors[name] for name, offset in offsets.items() if tensors[name].size}):
            for start in range(0, len(content), _PIECE):
                piece = content[start : start + _PIECE]
                crc32 = zlib.crc32(piece, crc32)
                durable.write_all(raw, piece)
    return layout.end, crc32


class _Layout(mmap.mmap):
    """HDF5's file without data, in memory taken only where written."""

    end = 0

    def seek(self, position: int, whence: int = os.SEEK_SET) -> None:
        super().seek(self.end if whence == os.SEEK_END else position)

    def truncate(self, size: int) -> None:
        self.end = size


def _in_order(layout: _Layout, tensors: Mapping[int, np.ndarray]) -> Iterator[memoryview]:
    end = 0
    for offset, tensor in sorted(tensors.items()):
        yield memoryview(layout[end:offset])
        yield np.ascontiguousarray(tensor, "<f4").reshape(-1).data.cast("B")
        end = offset + 4 * tensor.size
    yield memoryview(layout[end : layout.end])


def _lay_out(file: h5py.File, name: str, tensor: np.ndarray) -> int:
    how = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    how.set_layout(h5py.h5d.CONTIGUOUS)
    how.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    how.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    space = h5py.h5s.create_simple(tensor.shape) if tensor.ndim else h5py.h5s.create(h5py.h5s.SCALAR)
    offset: int = h5py.h5d.create(file.id, name.encode(), h5py.h5t.IEEE_F32LE, space, dcpl=how).get_offset()
    return offset


def write_json(path: Path, table: Mapping[str, Any]) -> None:
    """Write a table with its CRC-32. Raises OSError, and leaves nothing aside."""
    text = _text({**table, CRC: zlib.crc32(_text(table))})
    with durable.written_aside(path) as raw:
        durable.write_all(raw, text)


def _text(table: Mapping[str, Any]) -> bytes:
    return json.dumps(table, sort_keys=True, indent=1, allow_nan=False).encode()
