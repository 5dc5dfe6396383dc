"""Newest states of shards in node memory, each on its own node and a partner's, as in SCR and VeloC.

    /dev/shm/mpisgd-USER-RUN-BEGUN-NODE/clock-000120/shard-000.h5, shard-000.json     as in a checkpoint (`checkpoint.py`)

Without /dev/shm, files lie in TMPDIR.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
import tempfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpisgd.base import durable
from mpisgd.base.errors import CheckpointError
from mpisgd.records.checkpoint import checkpoint as disk
from mpisgd.records.checkpoint.checkpoint import Account

KEEP = 2
"""Clocks kept: some shards may not have written at the newest."""
_SHARD = re.compile(r"shard-(\d{3})\.json$")


@dataclass(frozen=True)
class Held:
    """A whole state of a shard; `shards`: number of shards at this clock."""

    clock: int
    shard: int
    shards: int
    attempt: int


class Near:
    """States of a run on one node; `begun` tells apart runs that had the same directory."""

    def __init__(self, run: Path, begun: str, node: str, root: Path | None = None) -> None:
        name, time = (hashlib.sha256(each.encode()).hexdigest()[:16] for each in (str(run.resolve()), begun))
        shared_memory = Path("/dev/shm")
        usual = shared_memory if os.access(shared_memory, os.W_OK) else Path(tempfile.gettempdir())
        self._of_run, self._node = f"mpisgd-{os.getuid()}-{name}-", re.sub("[^a-zA-Z0-9.-]", "_", node)
        self.path = (root or usual) / f"{self._of_run}{time}-{self._node}"

    def write(self, account: Account, shards: int, told: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> tuple[Path, Path]:
        disk.write_part(self._directory(account.clock), account, tensors, {**told, "shards": shards})
        self._prune(account.shard)
        return self.files(account.clock, account.shard)

    def take(self, clock: int, shard: int, part: Iterable[np.ndarray], account: Iterable[np.ndarray]) -> None:
        """Keep another node's files, given as uint8 pieces in order. Raises OSError."""
        directory = self._directory(clock)
        for name, pieces in ((disk.part_file(shard), part), (disk.account_file(shard), account)):
            with durable.written_aside(directory / name) as raw:
                for piece in pieces:
                    durable.write_all(raw, piece.data)
        self._prune(shard)

    def held(self, attempt: int) -> list[Held]:
        """List an attempt's states, every byte checked."""
        found = []
        for directory in self._clocks():
            for path in _listed(directory):
                if _SHARD.match(path.name):
                    with contextlib.suppress(CheckpointError, OSError, KeyError, TypeError, ValueError):
                        table, part = self._table(directory, path.name)
                        whole = zlib.crc32(part.read_bytes()) == table["part"][disk.CRC]
                        account = table["part"]["account"]
                        here = Held(account["clock"], account["shard"], table["shards"], table["attempt"])
                        if whole and here.attempt == attempt and directory.name == disk.name_of(here.clock):
                            found.append(here)
        return found

    def files(self, clock: int, shard: int) -> tuple[Path, Path]:
        directory = self.path / disk.name_of(clock)
        return directory / disk.part_file(shard), directory / disk.account_file(shard)

    def copy_to(self, run: Path, clock: int, shard: int) -> None:
        """Copy a state into the run's directory. Raises OSError."""
        directory = disk.directory_of(run, clock)
        directory.parent.mkdir(exist_ok=True)
        directory.mkdir(exist_ok=True)
        for path in self.files(clock, shard):
            with durable.written_aside(directory / path.name) as raw, path.open("rb") as source:
                while piece := source.read(1 << 24):
                    durable.write_all(raw, piece)
        durable.sync_directory(directory)

    def forget(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def forget_replaced(self) -> None:
        for path in self.path.parent.glob(f"{self._of_run}{'?' * 16}-{self._node}"):
            if path != self.path:
                shutil.rmtree(path, ignore_errors=True)

    def _table(self, directory: Path, name: str) -> tuple[dict[str, Any], Path]:
        table = disk.read_json(directory / name)
        return table, directory / disk.part_file(int(table["part"]["account"]["shard"]))

    def _directory(self, clock: int) -> Path:
        """Make a clock's directory; the run's belongs to this user alone. Raises OSError."""
        with contextlib.suppress(FileExistsError):
            self.path.mkdir(mode=0o700)
        if not self._is_own():
            raise PermissionError(f"{self.path} belongs to another user, or is open to others")
        directory = self.path / disk.name_of(clock)
        directory.mkdir(exist_ok=True)
        return directory

    def _is_own(self) -> bool:
        """Return whether this user made the directory: /dev/shm is open to all."""
        try:
            found = self.path.lstat()
        except OSError:
            return False
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077

    def _clocks(self) -> list[Path]:
        if not self._is_own():
            return []
        return [path for path in disk.by_clock(_listed(self.path)) if path.is_dir() and not path.is_symlink()]

    def _prune(self, shard: int) -> None:
        mine = [path for path in self._clocks() if (path / disk.account_file(shard)).is_file()]
        for path in mine[KEEP:]:
            for name in (disk.account_file(shard), disk.part_file(shard)):
                (path / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                path.rmdir()


def _listed(directory: Path) -> list[Path]:
    """List a directory; empty if another rank has just removed it."""
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []


def newest(everywhere: list[list[Held]], than: int) -> list[tuple[int, list[int]]]:
    """Return clocks later than `than` with every shard's state on some node, newest first, and each shard's first holder."""
    holders: dict[tuple[int, int], dict[int, int]] = {}
    for rank, held in enumerate(everywhere):
        for each in held:
            holders.setdefault((each.clock, each.shards), {}).setdefault(each.shard, rank)
    whole = [
        (clock, [ranks[shard] for shard in range(shards)])
        for (clock, shards), ranks in holders.items()
        if clock > than and set(ranks) >= set(range(shards))
    ]
    return sorted(whole, reverse=True)
