"""A shard writes its checkpoints: the slice is copied in the loop, all else happens in a thread beside it (law 7).

No shard asks another (law 2): a checkpoint is due at clocks that all know. Whichever finds all parts there, after its own, writes
the manifest; where two do, they write the same.

One that cannot be written (a full disk, a quota) does not end the training: the older ones are still there, and the next may
succeed. It is told, and in the log.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import shutil
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from mpisgd.base import durable, storage
from mpisgd.base.errors import CheckpointError, PeerError
from mpisgd.config import CheckpointOptions
from mpisgd.records.checkpoint import checkpoint as disk
from mpisgd.records.checkpoint.checkpoint import Account
from mpisgd.records.log import schema
from mpisgd.update.slice_update import SliceUpdate
from mpisgd.vectors.memory import on_host


@dataclass(frozen=True)
class Share:
    """Share of a run's checkpoints that one shard writes.

    Attributes:
        bounds: of its slice.
        shards, learners, model: as in `checkpoint.Checkpoint`.
        attempt, continues: as in the shard's log file (`schema`).
        pinned: clocks of the checkpoints that the run was continued from: they are kept, for replay.
        coordinated: whether a coordinator has a part as well (`coordinator_records.py`), which is there before any shard's.
    """

    run: Path
    shard: int
    bounds: tuple[int, int]
    shards: int
    learners: int
    model: str
    attempt: int = 0
    continues: Sequence[Sequence[int]] = ()
    pinned: Collection[int] = ()
    coordinated: bool = False


class Checkpoints:
    """The checkpoints of one shard.

    Args:
        update: the slice and its optimiser.
        beside: files that the checkpoint refers to, and that must be on disk before it: the log, the snapshots.
        complain: is told, in the thread, when checkpoints begin to fail and when one is written again.
        near: keeps a state on nodes (`near.py`), where options ask for that; may raise OSError or PeerError.
    """

    def __init__(
        self,
        share: Share,
        options: CheckpointOptions,
        update: SliceUpdate,
        *,
        beside: Sequence[Path] = (),
        complain: Callable[[str], None] = lambda why: None,
        near: Callable[[Account, Mapping[str, Any], Mapping[str, np.ndarray]], None] | None = None,
    ) -> None:
        self._share = share
        self._every = options.every_updates
        self._near_every = options.partner_updates if near is not None else 0
        self._near = near
        self._far_away = False
        """Whether the last state could not be kept near."""
        self._keep = options.keep
        self._update = update
        self._beside = list(beside)
        self._complain = complain
        told = {"attempt": share.attempt, "learners": share.learners, "model": share.model}
        self._told = {"schema_version": schema.SCHEMA_VERSION, **told}
        self._copies: dict[str, np.ndarray] = {}
        self._idle = threading.Event()
        self._idle.set()
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._failing = False
        self._lost: list[int] = []

    def due(self, clock: int) -> bool:
        """Whether all shards write a checkpoint at this clock. To be asked after every update."""
        if not (self._every or self._near_every):
            return False
        if self._thread is None:  # the first update has been made: the optimiser has all its tensors
            self._begin(self._make_room)
        return self.lasts(clock) or self._is_near(clock)

    def lasts(self, clock: int) -> bool:
        """Whether a checkpoint of this clock goes into the run's directory, unless it is asked for besides."""
        return self._every > 0 and clock % self._every == 0

    def _is_near(self, clock: int) -> bool:
        return self._near_every > 0 and clock % self._near_every == 0

    def busy(self) -> bool:
        """Whether the last one is still being written."""
        if not self._idle.is_set():
            return True
        self.wait()
        return False

    def lost(self) -> list[int]:
        """Clocks of those that could not be written, each told once. Not while it is `busy`."""
        lost, self._lost = self._lost, []
        return lost

    def take(self, rows: list[int], *, last: bool = False, **told: Any) -> None:
        """Copy the slice as it is, and begin to write it; `told` are fields of `Account`, `rows` those of this log file.

        Not while it is `busy`. `last`: the slice does not change any more, so it is not copied, and written at any clock.
        """
        for name, tensor in self._update.state().items():
            if tensor.dim() == 0:
                self._copies[name] = np.array(tensor.item(), np.float32)
                continue
            if last:
                self._copies[name] = on_host(tensor)
                continue
            if name not in self._copies:
                self._copies[name] = np.empty(tensor.numel(), np.float32)
            torch.from_numpy(self._copies[name]).copy_(tensor)
        account = Account(
            shard=self._share.shard,
            bounds=self._share.bounds,
            samples=self._update.samples,
            rows=[*map(list, self._share.continues), [self._share.attempt, *rows]],
            **told,
        )
        self._begin(
            functools.partial(self._write, account, lasts=last or self.lasts(account.clock) or not self._is_near(account.clock))
        )

    def wait(self) -> None:
        """Wait until the last one is written, or given up. What else went wrong in the thread is raised here."""
        self._idle.wait()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise CheckpointError(f"a checkpoint of shard {self._share.shard} could not be made: {failure}") from failure

    def _begin(self, action: Callable[[], None]) -> None:
        """Have it done by the thread; to start one for each would make the shard wait for it."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="checkpoints", daemon=True)
            self._thread.start()
        self._idle.clear()
        self._work.put(action)

    def _serve(self) -> None:
        while True:
            try:
                self._work.get()()
            except Exception as error:  # a bug: raised in the shard's own thread, by `busy` or `wait`
                self._failure = error
            self._idle.set()

    def _make_room(self) -> None:
        """Memory for the copies, every page of it touched: for the kernel that is ten times the work of a copy."""
        for name, tensor in self._update.state().items():
            if tensor.dim():
                self._copies[name] = np.ones(tensor.numel(), np.float32)

    def _write(self, account: Account, *, lasts: bool) -> None:
        if self._is_near(account.clock):
            self._keep_near(account)
        if lasts:
            self._write_here(account)

    def _keep_near(self, account: Account) -> None:
        assert self._near is not None
        try:
            for path in self._beside:  # of what is lost with a node, these have the rows
                durable.sync(path)
            self._near(account, self._told, self._copies)
        except (OSError, PeerError) as error:
            if not self._far_away:
                self._complain(f"the state of clock {account.clock} could not be kept on nodes: {error}; training goes on")
            self._far_away = True
            return
        self._far_away = False

    def _write_here(self, account: Account) -> None:
        directory = disk.directory_of(self._share.run, account.clock)
        try:
            self._write_part(directory, account)
        except OSError as error:
            self._lost.append(account.clock)
            if not (directory / disk.MANIFEST).is_file():
                remove(directory)  # without this part it is never complete: its room is wanted
            if not self._failing:
                self._complain(
                    f"the checkpoint of clock {account.clock} could not be written: {error.filename or directory}:"
                    f" {storage.cause(error)}; training goes on, and tries again at the next"
                )
            self._failing = True
            return
        if self._failing:
            self._complain(f"the checkpoint of clock {account.clock} could be written again")
        self._failing = False

    def _write_part(self, directory: Path, account: Account) -> None:
        for path in self._beside:
            durable.sync(path)
        directory.parent.mkdir(exist_ok=True)  # not the run's own directory: where that is gone, it stays so
        directory.mkdir(exist_ok=True)
        durable.sync_directory(self._share.run)  # has the names of all these
        told = {"clock": account.clock, "shard": self._share.shard, "attempt": self._share.attempt}
        nbytes, crc32 = disk.write_tensors(directory / disk.part_file(self._share.shard), self._copies, told)
        part = {"account": dataclasses.asdict(account), "nbytes": nbytes, disk.CRC: crc32}
        disk.write_json(directory / disk.account_file(self._share.shard), {**self._told, "part": part})
        durable.sync_directory(directory)
        # Where not all parts are there, the shard that is last will see them.
        if disk.seal(directory, account.clock, self._share.shards, self._share.attempt, self._share.coordinated):
            self._prune(account.clock)

    def _prune(self, newest: int) -> None:
        """Remove what is older than the newest `keep` complete ones: all shards have come further, nobody writes there."""
        complete = 0
        for path in disk.directories(self._share.run):
            clock = int(path.name.removeprefix("clock-"))
            if clock > newest or clock in self._share.pinned:
                continue
            if complete >= self._keep:
                remove(path)
            complete += (path / disk.MANIFEST).is_file()


def remove(path: Path) -> None:
    """Remove a checkpoint's directory, the manifest first: half removed, it is none. Another rank may be doing the same."""
    with contextlib.suppress(NotADirectoryError):  # something else is in the way
        (path / disk.MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)
