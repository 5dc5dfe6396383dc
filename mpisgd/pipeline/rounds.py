"""Calls of a partition before there is a wire: ranks check at the start whether their pieces fit.

A call is a round: all ranks name it and give their parts. A rank at its end, or after a failure, says so: no rank waits in vain.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor

from mpisgd.base.errors import ConfigError
from mpisgd.models.interleaved import apart
from mpisgd.models.partition import Parts
from mpisgd.vectors.computing import Waited

T = TypeVar("T")


class AllToAll(Protocol):
    """The group's ranks in the order of pieces, such as MPI's intracommunicator."""

    rank: int
    size: int

    def alltoall(self, sendobj: Sequence[Any]) -> list[Any]:
        """Give the j-th object to rank j; return the objects given to this rank."""


class _Said(enum.Enum):
    ENDED = enum.auto()
    FAILED = enum.auto()


class OthersFailed(Exception):
    """Failure of another piece, reported there."""


class Rounds:
    """A rank's `Links`, within `run`."""

    seq = micro = 0

    def __init__(self, comm: AllToAll) -> None:
        self.waited = Waited()
        self._comm = comm
        self._over = False

    def run(self, function: Callable[[], T]) -> T | None:
        """Return the function's result once all ranks have ended; None after another's failure."""
        try:
            result = function()
        except OthersFailed:
            return None
        except BaseException:
            self._say(_Said.FAILED)
            raise
        while not self._over:
            self._over = all(said is _Said.ENDED for said in self._say(_Said.ENDED))
        return result

    def deal(self, call: int, parts: Parts, *, back: bool) -> Parts:
        """Exchange parts. Raises ConfigError: a rank is at another call."""
        own = self._comm.rank
        given = [None if part is None else part.detach().clone() for part in parts]
        found = self._round([(call, back, part) for part in given])
        if any(said is _Said.FAILED for said in found):
            raise OthersFailed
        taken: list[Tensor | None] = []
        for place, (said, part) in enumerate(zip(found, parts, strict=True)):
            if part is not None and place != own and (said is _Said.ENDED or said[:2] != (call, back)):
                raise ConfigError(apart(own, place, call, back))
            taken.append(None if part is None else said[2])
        return taken

    def _say(self, said: _Said) -> list[Any]:
        return self._round([said] * self._comm.size)

    def _round(self, said: list[Any]) -> list[Any]:
        found = [] if self._over else self._comm.alltoall(said)
        self._over = self._over or any(each is _Said.FAILED for each in found)
        return found
