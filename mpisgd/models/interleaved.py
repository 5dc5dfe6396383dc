"""All pieces of a partitioned model in one process, in turn: each runs until a call needs the others' parts.

So one rank evaluates or replays a group's computation, bit for bit, and virtual ranks compute it. Each piece has a thread, since
autograd and its modes are a thread's: a piece may stop amid a backward pass. The calls alone order the threads, and only one runs
at a time. A piece's draws from the global generators go on where they stopped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from mpisgd.base.draws import kept
from mpisgd.base.errors import ConfigError
from mpisgd.models.partition import Partition, Parts

T = TypeVar("T")


class Dealt(NamedTuple):
    """Bytes from a piece to each other in a call; None = not exchanged."""

    back: bool
    nbytes: tuple[int | None, ...]


class _Over(Exception):
    """Another piece has failed."""


class Interleaved:
    """A run of all pieces.

    Attributes:
        dealt: by piece, in the order of calls.
    """

    def __init__(self, partitions: Sequence[Partition]) -> None:
        self._partitions = partitions
        self._turns = [threading.Semaphore(0) for _ in partitions]
        self._given: list[dict[int, tuple[int, bool, Parts]]] = [{} for _ in partitions]
        """By piece, then number of deals before: number of the call, whether backward, the parts."""
        self._ended = [False for _ in partitions]
        self._errors: list[BaseException] = []
        self.dealt: list[list[Dealt]] = [[] for _ in partitions]

    def run(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        results: list[Any] = [None for _ in functions]
        enabled = torch.is_grad_enabled()

        def run(place: int) -> None:
            self._turns[place].acquire()
            try:
                if not self._errors:
                    self._partitions[place].begin(_End(self, place))
                    with torch.set_grad_enabled(enabled):
                        results[place] = functions[place]()
                    self._partitions[place].end()
            except _Over:
                pass
            except BaseException as error:
                self._errors.append(error)
            self._ended[place] = True
            self._pass_turn(place)

        threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(functions))]
        for thread in threads:
            thread.start()
        self._turns[0].release()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]
        return results

    def _pass_turn(self, place: int) -> None:
        after = ((place + step) % len(self._turns) for step in range(1, len(self._turns)))
        if (turn := next((each for each in after if not self._ended[each]), None)) is not None:
            self._turns[turn].release()

    def deal(self, place: int, call: int, parts: Parts, back: bool) -> Parts:
        number = len(self.dealt[place])
        sizes = (None if part is None or other == place else part.nbytes for other, part in enumerate(parts))
        self.dealt[place].append(Dealt(back, tuple(sizes)))
        self._given[place][number] = call, back, [None if part is None else part.clone() for part in parts]
        with kept():
            self._pass_turn(place)
            self._turns[place].acquire()
        if self._errors:
            raise _Over
        taken: list[Any] = []
        for other, (given, part) in enumerate(zip(self._given, parts, strict=True)):
            if (call, back) != given.get(number, (None,))[:2] and (part is not None or other == place):
                raise ConfigError(apart(place, other, call, back))
            taken.append(None if part is None else given[number][2][place])
        self._given[place].pop(number - 1, None)  # every piece has taken its part
        return taken


class _End:
    """A piece's `Links`."""

    def __init__(self, together: Interleaved, place: int) -> None:
        self._together = together
        self._place = place

    def deal(self, call: int, parts: Parts, *, back: bool) -> Parts:
        return self._together.deal(self._place, call, parts, back)


def apart(place: int, other: int, call: int, back: bool) -> str:
    return (
        f"model: piece {place} makes call {call} of the partition{' in the backward pass' if back else ''}, and piece {other}"
        " does not make this call there: expected the same calls in the same order from all pieces"
    )
