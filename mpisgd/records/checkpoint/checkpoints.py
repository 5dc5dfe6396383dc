"""Checkpoints written by a shard: the loop copies the slice, a thread does the rest (law 7).

No shard asks another (law 2): all know the due clocks, and a shard that finds all parts writes the manifest. A failure is logged;
training goes on.
"""

from __future__ import annotations

import contextlib
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
    """A shard's share of the run's checkpoints.

    Attributes:
        pinned: clocks of checkpoints the run was continued from: kept for replay.
        coordinated: a coordinator's part exists before any shard's (`coordinator_records.py`).
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
    """Checkpoints of one shard.

    Args:
        beside: files to sync first: the log, the snapshots.
        complain: told in the thread of the first failure, and of the next success.
        near: keeps a state on nodes (`near.py`); may raise OSError or PeerError.
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
        """Return whether all shards write a checkpoint now; ask after every update."""
        if not (self._every or self._near_every):
            return False
        if self._thread is None:  # the first update has been made: the optimiser has all its tensors
            self._begin(self._make_room)
        return self.lasts(clock) or self._is_near(clock)

    def lasts(self, clock: int) -> bool:
        """Return whether a scheduled checkpoint goes into the run's directory."""
        return self._every > 0 and clock % self._every == 0

    def _is_near(self, clock: int) -> bool:
        return self._near_every > 0 and clock % self._near_every == 0

    def busy(self) -> bool:
        """Return whether a checkpoint is being written. Raises as `wait`."""
        if not self._idle.is_set():
            return True
        self.wait()
        return False

    def lost(self) -> list[int]:
        """Return clocks of failed checkpoints, each once; not while `busy`."""
        lost, self._lost = self._lost, []
        return lost

    def take(self, rows: list[int], *, last: bool = False, **told: Any) -> None:
        """Copy the slice and begin to write; not while `busy`.

        `told`: fields of `Account`. `last`: the slice is final, not copied, and written at any clock.
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
        """Wait for the last checkpoint. Raises CheckpointError for a bug in the thread."""
        self._idle.wait()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise CheckpointError(f"a checkpoint of shard {self._share.shard} could not be made: {failure}") from failure

    def _begin(self, action: Callable[[], None]) -> None:
        """Queue an action: starting a thread each time would delay the shard."""
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
        """Allocate the copies and touch every page: ten times the work of a copy."""
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
            for path in self._beside:  # rows of the state must survive the node
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
                remove(directory)  # never complete without this part: its room is wanted
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
        directory.parent.mkdir(exist_ok=True)  # never the run's own directory: once removed, it stays so
        directory.mkdir(exist_ok=True)
        durable.sync_directory(self._share.run)  # holds these names
        disk.write_part(directory, account, self._copies, self._told)
        durable.sync_directory(directory)
        # Parts missing: the last shard will find all.
        if disk.seal(directory, account.clock, self._share.shards, self._share.attempt, self._share.coordinated):
            self._prune(account.clock)

    def _prune(self, newest: int) -> None:
        """Remove checkpoints older than the newest `keep`: no shard writes there."""
        complete = 0
        for path in disk.directories(self._share.run):
            clock = disk.clock_of(path)
            if clock > newest or clock in self._share.pinned:
                continue
            if complete >= self._keep:
                remove(path)
            complete += (path / disk.MANIFEST).is_file()


def remove(path: Path) -> None:
    """Remove a checkpoint, manifest first: half removed, it is invalid. Other ranks may do the same."""
    with contextlib.suppress(NotADirectoryError):  # something else is in the way
        (path / disk.MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)
