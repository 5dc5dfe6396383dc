"""The commands of a batch optimisation, given again, beside those of the log (`sandblaster/noted.py`)."""

from __future__ import annotations

import numpy as np

from mpisgd.comm.messages import Op
from mpisgd.replay.checks.finding import refuse, same
from mpisgd.replay.checks.record import Record
from mpisgd.sandblaster.noted import NONE

_SLOTS = ("out", "a", "b")


class Commands:
    """The rows of `commands`, one after the other; `compare` raises Untrue at the first that is another.

    A run that goes on numbers its slots anew: so numbers are not compared, but which slot is which.
    """

    def __init__(self, record: Record) -> None:
        parts = [part.rows("commands") for part in record.run.parts_of_coordinator]
        self._rows = np.concatenate(parts)
        self._begins = set(np.cumsum([len(part) for part in parts])[:-1].tolist())
        """Rows with which another attempt begins."""
        self._finished = record.done is not None
        self._at = 0
        self._mine: dict[int, int] = {}
        """Slots of the log, and what they are here; and the other way round."""
        self._theirs: dict[int, int] = {}

    def compare(self, **fields: float) -> None:
        """`fields`: those of the command that comes now."""
        at, op = self._at, Op(int(fields["op"]))
        if at == len(self._rows):
            if self._finished:
                refuse(f"it has {at} rows, and {op.name} follows", -1, "commands", row=at, clock=int(fields["clock"]))
            return
        if at in self._begins:
            self._mine, self._theirs = {}, {}
        row, self._at = self._rows[at], at + 1
        for name in ("clock", "op", "alpha", "value"):
            if not same(row[name].item(), fields[name]):
                why = f"{name} {row[name].item()!r}, recomputed {fields[name]!r}"
                refuse(why, -1, "commands", row=at, clock=int(fields["clock"]))
        for name in _SLOTS:
            said, mine = int(row[name]), int(fields[name])
            known = (self._mine.get(said, mine), self._theirs.get(mine, said))
            if known != (mine, said) or (said == NONE) != (mine == NONE):
                why = f"{op.name} has slot {said} as {name}, recomputed it is another"
                refuse(why, -1, "commands", row=at, clock=int(fields["clock"]))
            self._mine[said], self._theirs[mine] = mine, said

    def end(self) -> None:
        """There are no more, where the run has finished."""
        if self._finished and self._at != len(self._rows):
            refuse(f"it has {len(self._rows)} rows, expected {self._at}", -1, "commands", row=self._at)
