"""The newest state of shards on the nodes themselves, in memory: each on its own node and on a partner's, as SCR and VeloC have it.

    /dev/shm/mpisgd-USER-RUN-BEGUN-NODE/clock-000120/shard-000.h5, shard-000.json     as in a checkpoint (`checkpoint.py`)

A node that is lost takes its copies along; those on partners' nodes are left. Where there is no /dev/shm, files lie in TMPDIR.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
"""Clocks that are kept: at the newest, some shards may not have come to write."""
_CLOCK, _SHARD = re.compile(r"clock-(\d{6,})$"), re.compile(r"shard-(\d{3})\.json$")


@dataclass(frozen=True)
class Held:
    """A shard's state that a node has, whole; `shards`: how many had one at this clock."""

    clock: int
    shard: int
    shards: int
    attempt: int


class Near:
    """What one node holds of a run.

    Args:
        run: the run's directory.
        begun: when the run was begun, which tells it from another one that had the same directory.
        node: the name of this node.
        root: where its directory lies.
    """

    def __init__(self, run: Path, begun: str, node: str, root: Path | None = None) -> None:
        name, time = (hashlib.sha256(each.encode()).hexdigest()[:16] for each in (str(run.resolve()), begun))
        shared_memory = Path("/dev/shm")
        usual = shared_memory if os.access(shared_memory, os.W_OK) else Path(tempfile.gettempdir())
        self._of_run, self._node = f"mpisgd-{os.getuid()}-{name}-", re.sub("[^a-zA-Z0-9.-]", "_", node)
        self.path = (root or usual) / f"{self._of_run}{time}-{self._node}"

    def write(self, account: Account, shards: int, told: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> tuple[Path, Path]:
        """Write a shard's state; its two files. Raises OSError."""
        directory = self._directory(account.clock)
        part = directory / disk.part_file(account.shard)
        about = {"clock": account.clock, "shard": account.shard, "attempt": told["attempt"]}
        nbytes, crc32 = disk.write_tensors(part, tensors, about)
        entry = {"account": dataclasses.asdict(account), "nbytes": nbytes, disk.CRC: crc32}
        disk.write_json(directory / disk.account_file(account.shard), {**told, "shards": shards, "part": entry})
        self._prune(account.shard)
        return part, directory / disk.account_file(account.shard)

    def take(self, clock: int, shard: int, part: Iterable[np.ndarray], account: Iterable[np.ndarray]) -> None:
        """Keep the files of another node's shard as they are; of each, the pieces in order, uint8. Raises OSError."""
        directory = self._directory(clock)
        for name, pieces in ((disk.part_file(shard), part), (disk.account_file(shard), account)):
            with durable.written_aside(directory / name) as raw:
                for piece in pieces:
                    durable.write_all(raw, piece.data)
        self._prune(shard)

    def held(self, attempt: int) -> list[Held]:
        """List what there is, every byte of it whole, of an attempt of the run."""
        found = []
        for directory in self._clocks():
            for path in _listed(directory):
                if _SHARD.match(path.name):
                    with contextlib.suppress(CheckpointError, OSError, KeyError, TypeError, ValueError):
                        table, part = self._table(directory, path.name)
                        whole = zlib.crc32(part.read_bytes()) == table["part"][disk.CRC]
                        account = table["part"]["account"]
                        here = Held(account["clock"], account["shard"], table["shards"], table["attempt"])
                        if whole and here.attempt == attempt and directory.name == f"clock-{here.clock:06d}":
                            found.append(here)
        return found

    def files(self, clock: int, shard: int) -> tuple[Path, Path]:
        """The two files of a shard's state, there or not."""
        directory = self.path / f"clock-{clock:06d}"
        return directory / disk.part_file(shard), directory / disk.account_file(shard)

    def copy_to(self, run: Path, clock: int, shard: int) -> None:
        """Copy a shard's state into the run's directory, as a part of a checkpoint. Raises OSError."""
        directory = disk.directory_of(run, clock)
        directory.parent.mkdir(exist_ok=True)
        directory.mkdir(exist_ok=True)
        for path in self.files(clock, shard):
            with durable.written_aside(directory / path.name) as raw, path.open("rb") as source:
                while piece := source.read(1 << 24):
                    durable.write_all(raw, piece)
        durable.sync_directory(directory)

    def forget(self) -> None:
        """Remove all that this node holds of the run."""
        shutil.rmtree(self.path, ignore_errors=True)

    def forget_replaced(self) -> None:
        """Remove what this node holds of runs that had the same directory before."""
        for path in self.path.parent.glob(f"{self._of_run}{'?' * 16}-{self._node}"):
            if path != self.path:
                shutil.rmtree(path, ignore_errors=True)

    def _table(self, directory: Path, name: str) -> tuple[dict[str, Any], Path]:
        table = disk.read_json(directory / name)
        return table, directory / disk.part_file(int(table["part"]["account"]["shard"]))

    def _directory(self, clock: int) -> Path:
        """The directory of a clock; the run's belongs to this user alone. Raises OSError."""
        with contextlib.suppress(FileExistsError):
            self.path.mkdir(mode=0o700)
        if not self._is_own():
            raise PermissionError(f"{self.path} belongs to another user, or is open to others")
        directory = self.path / f"clock-{clock:06d}"
        directory.mkdir(exist_ok=True)
        return directory

    def _is_own(self) -> bool:
        """Whether the directory was made by this user: /dev/shm is everybody's."""
        try:
            found = self.path.lstat()
        except OSError:
            return False
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077

    def _clocks(self) -> list[Path]:
        """Directories of clocks, the newest first."""
        if not self._is_own():
            return []
        found = [path for path in _listed(self.path) if _CLOCK.match(path.name) and path.is_dir() and not path.is_symlink()]
        return sorted(found, key=lambda path: int(path.name.removeprefix("clock-")), reverse=True)

    def _prune(self, shard: int) -> None:
        """Remove what is older than the newest states of this shard; a directory goes with its last file."""
        mine = [path for path in self._clocks() if (path / disk.account_file(shard)).is_file()]
        for path in mine[KEEP:]:
            for name in (disk.account_file(shard), disk.part_file(shard)):
                (path / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                path.rmdir()


def _listed(directory: Path) -> list[Path]:
    """List a directory; none of a directory that a rank of an attempt before has just removed."""
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []


def newest(everywhere: list[list[Held]], than: int) -> list[tuple[int, list[int]]]:
    """Of what each rank's node holds, clocks later than `than` at which every shard's state is there, the newest first.

    With each clock, the first rank that holds each shard's.
    """
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
