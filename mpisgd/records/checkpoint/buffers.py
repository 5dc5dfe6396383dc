"""State of learners beside parameters (running means, codebooks, queues), never exchanged.

For evaluation, learner 0 writes a file for each snapshot and the last weights: its state at the first pull of weights that new,
before computing; with one learner, a plain loop's. To go on, each learner writes its state at the first pull of weights as new as a
checkpoint, and at the end; an attempt keeps its first state, for replay.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mpisgd.base import durable
from mpisgd.base.errors import CheckpointError
from mpisgd.base.storage import writing
from mpisgd.records.log import schema
from mpisgd.vectors.computing import Keeps
from mpisgd.vectors.kept_state import KeptState, digests, put, taken

LAST = "last"
PULLS_UNTIL_KEPT = 3
"""Pulls of learner 0 until a snapshot's file is written, in any exchange: a waiting or prefetched pull; a pull that shows the
snapshot; a pull after the file."""
_STATES = 2
"""Files kept per learner: the newest checkpoint may never become whole."""


def _of_snapshot(run: Path, number: int | str) -> Path:
    return run / f"{schema.SPOOL}buffers.{number}"


def _of_learner(run: Path, learner_id: int, clock: int | str) -> Path:
    return run / f"{schema.SPOOL}learner-{learner_id}.{clock}"


def _write(path: Path, state: Any) -> None:
    with writing(path), durable.made_aside(path) as aside:
        torch.save(state, aside)


def _read(path: Path, module: nn.Module) -> None:
    try:
        put(module, torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # whatever torch's readers or the module raise
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def forget(run: Path, begin: int) -> None:
    """Remove files of snapshots this attempt takes again; snapshot `begin` - 1, if without a file, gets the last state."""
    last = _of_snapshot(run, LAST)
    if begin and last.exists() and not (newest := _of_snapshot(run, begin - 1)).exists():
        last.rename(newest)
    for path in run.glob(f"{schema.SPOOL}buffers.*"):
        number = path.suffix[1:]
        if not number.isdecimal() or int(number) >= begin:
            path.unlink(missing_ok=True)


def begin(run: Path, attempt: int, learner_id: int, clock: int, module: nn.Module) -> None:
    """Put a learner's state at a checkpoint into the model; without a file the model stays as made."""
    begun = run / schema.learner_file(learner_id, attempt)
    for each in (clock, LAST):
        if (path := _of_learner(run, learner_id, each)).exists():
            path.replace(begun)
            break
    for path in run.glob(f"{schema.SPOOL}learner-{learner_id}.*"):
        path.unlink(missing_ok=True)
    begin_again(run, attempt, learner_id, module)


def at_checkpoint(run: Path, clock: int, module: nn.Module, *, newest: bool) -> bool:
    """Put learner 0's state at a checkpoint into the model; return whether a file exists.

    `newest`: without a later checkpoint, the state at an interruption counts, too.
    """
    for each in (clock, LAST) if newest else (clock,):
        if (path := _of_learner(run, 0, each)).exists():
            _read(path, module)
            return True
    return False


def begin_again(run: Path, attempt: int, learner_id: int, module: nn.Module) -> None:
    if (begun := run / schema.learner_file(learner_id, attempt)).exists():
        _read(begun, module)


class Keeper(Keeps):
    """A learner's part.

    Args:
        own: called before the module is read: a shared module then has this learner's state.
        every: updates between states to go on from, and between lasting states; 0 = only at the end.
        begun: clock to go on from; -1 = a new run.
        late: snapshots become known within a mini-batch (`exchange/rounds.py`): each begins with a copy.
    """

    def __init__(
        self,
        module: nn.Module,
        run: Path,
        own: Callable[[], None],
        *,
        learner_id: int = 0,
        every: tuple[int, int] = (0, 0),
        begun: int = -1,
        late: bool = False,
        given_up: bool = False,
    ) -> None:
        self._given_up = given_up or late
        self._begun: KeptState | None = None
        self._module = module
        self._made = digests(module)
        self._run = run
        self._own = own
        self._learner_id = learner_id
        self._every, self._lasting = every[0], every[1] or 1
        self._late = late
        self._known = 0 if begun < 0 else None
        self._marked = [max(0, begun)]
        self._before: Any = None

    def begins(self, snapshots: int, clock: int) -> None:
        self._keep(snapshots, clock)
        if self._late:
            self._before = self._state()
        if self._given_up:
            self._own()
            self._begun = KeptState(self._module)

    def give_up(self) -> None:
        if self._begun is not None:
            self._own()
            self._begun.put_back()

    def end(self, snapshots: int, clock: int, *, interrupted: bool) -> None:
        self._keep(snapshots, clock)
        state = self._state()
        if self._learner_id == 0:
            _write(_of_snapshot(self._run, LAST), state)
        if interrupted:
            _write(_of_learner(self._run, self._learner_id, LAST), state)

    def _state(self) -> Any:
        self._own()
        return taken(self._module, self._made)

    def _keep(self, snapshots: int, clock: int) -> None:
        if self._known is None:
            self._known = snapshots
        numbers = range(self._known, snapshots) if self._learner_id == 0 else range(0)
        mark = clock // self._every * self._every if self._every else 0
        if not numbers and mark <= self._marked[-1]:
            return
        state = self._state() if self._before is None else self._before
        for number in numbers:
            _write(_of_snapshot(self._run, number), state)
        self._known = max(snapshots, self._known)
        if mark > self._marked[-1]:
            _write(_of_learner(self._run, self._learner_id, mark), state)
            self._marked.append(mark)
            kept = {*self._marked[-_STATES:], *[each for each in self._marked if each % self._lasting == 0][-_STATES:]}
            for old in set(self._marked) - kept:
                _of_learner(self._run, self._learner_id, old).unlink(missing_ok=True)
            self._marked = sorted(kept)


class Given:
    """The evaluator's part; `own` as for `Keeper`."""

    def __init__(self, module: nn.Module, run: Path, own: Callable[[], None]) -> None:
        self._module = module
        self._run = run
        self._own = own

    def has(self, number: int) -> bool:
        """Return whether learner 0 has pulled since this snapshot."""
        return _of_snapshot(self._run, number).exists()

    def put(self, number: int, *, last: bool) -> None:
        """Put a snapshot's state into the model; the last state, if learner 0 is gone."""
        self._own()
        wanted: list[int | str] = [LAST] if last else [number, LAST]
        for path in (_of_snapshot(self._run, each) for each in (*wanted, *reversed(range(number)))):
            if path.exists():
                _read(path, self._module)
                return
