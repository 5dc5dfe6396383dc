"""The portions of a batch, dealt to whoever asks; each is committed exactly once [Dean12 4.2].

    todo        nobody has it, or whoever had it is lost
    dealt       one learner computes it; in the tail, where nothing is left to do, a second one may, too
    claimed     the first result has come, and is on its way into the sum; a second one does not count
    committed   it is in the sum

Portions are far smaller than 1/N of the batch, so a fast learner does more of them, and the slowest one at the end is done twice:
an evaluation waits for nobody. A learner that is lost gives back what it had and what it had claimed: nothing else is done again.
"""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush

from mpisgd.base.errors import ProtocolError

_COPIES = 2
"""Learners that may compute the same portion at a time."""


class Dealing:
    """The portions 0 ... `portions` - 1 of one evaluation.

    Args:
        duplicates: whether a portion is dealt a second time when there is nothing else to do.
        ahead: portions are dealt at most so far ahead of the first that is not committed.
    """

    def __init__(self, portions: int, *, duplicates: bool, ahead: float = math.inf) -> None:
        self._todo = list(range(portions))
        heapify(self._todo)
        self._dealt: dict[int, list[int]] = {}
        """Who computes it; in the order of first dealing."""
        self._claimed: dict[int, int] = {}
        self._committed = [False] * portions
        self._given = set[tuple[int, int]]()
        self._duplicates = duplicates
        self._ahead = ahead
        self._first = 0
        """The first portion that is not committed."""

    @property
    def complete(self) -> bool:
        return self._first == len(self._committed)

    @property
    def first(self) -> int:
        """The first portion that is not committed."""
        return self._first

    @property
    def exhausted(self) -> bool:
        """Whether no portion can be dealt for the first time, now: what is claimed had better be pushed."""
        return not self._todo or self._todo[0] >= self._first + self._ahead

    def ask(self, learner_id: int) -> int | None:
        """The portion that a learner is to compute; None: there is nothing for it to do, now."""
        if not self.exhausted:
            portion = heappop(self._todo)
            self._dealt[portion] = [learner_id]
        elif self._duplicates:
            single = (each for each, who in self._dealt.items() if len(who) < _COPIES and learner_id not in who)
            found = next(single, None)
            if found is None:
                return None
            portion = found
            self._dealt[portion].append(learner_id)
        else:
            return None
        self._given.add((portion, learner_id))
        return portion

    def is_copy(self, portion: int, learner_id: int) -> bool:
        """Whether a learner was dealt a portion that another computes as well."""
        who = self._dealt.get(portion, [])
        return learner_id in who[1:]

    def done(self, portion: int, learner_id: int) -> bool:
        """A learner has computed a portion; whether that counts: the first result does. Raises ProtocolError for what it was never
        dealt."""
        if (portion, learner_id) not in self._given:
            raise ProtocolError(f"learner {learner_id} has computed portion {portion}, which it was not dealt")
        if learner_id not in self._dealt.get(portion, []):
            return False
        del self._dealt[portion]
        self._claimed[portion] = learner_id
        return True

    def commit(self, portion: int, learner_id: int) -> None:
        """The result of a learner that counts is in the sum. Raises ProtocolError where it does not count."""
        if self._claimed.get(portion) != learner_id:
            raise ProtocolError(f"portion {portion} of learner {learner_id} is to be summed, but does not count")
        del self._claimed[portion]
        self._committed[portion] = True
        while not self.complete and self._committed[self._first]:
            self._first += 1

    def lost(self, learner_id: int) -> list[int]:
        """A learner is gone, with all that it had not committed; returns the portions that are to be done again."""
        again = [portion for portion, who in self._claimed.items() if who == learner_id]
        for portion in again:
            del self._claimed[portion]
        for portion, holders in list(self._dealt.items()):
            if learner_id in holders:
                holders.remove(learner_id)
                if not holders:
                    del self._dealt[portion]
                    again.append(portion)
        for portion in again:
            heappush(self._todo, portion)
        return again
