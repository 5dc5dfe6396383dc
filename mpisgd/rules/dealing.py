"""The portions of a batch, or of a whole run, dealt to whoever asks; each is committed exactly once [Dean12 4.2; ElasticDL].

    todo        nobody has it, or whoever had it is lost
    dealt       one learner computes it; in the tail, where nothing is left to do, a second one may, too
    claimed     the first result has come, and is on its way into the sum; a second one does not count
    committed   it is in the sum

Portions are far smaller than 1/N of the batch, so a fast learner does more of them, and the slowest one at the end is done twice:
an evaluation waits for nobody. A learner that is lost gives back what it had and what it had claimed: nothing else is done again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from mpisgd.base.errors import ProtocolError

_COPIES = 2
"""Learners that may compute the same portion at a time."""


class Dealing:
    """The portions 0 ... `portions` - 1 of one evaluation, or of one run. It keeps those that are under way, and no others.

    Args:
        duplicates: whether a portion is dealt a second time when there is nothing else to do.
        ahead: portions are dealt at most so far ahead of the first that is not committed.
    """

    def __init__(self, portions: int, *, duplicates: bool, ahead: float = math.inf) -> None:
        self._portions = portions
        self._next = 0
        """The first portion that nobody was ever dealt."""
        self._back: list[int] = []
        """Those that were given back."""
        self._dealt: dict[int, list[int]] = {}
        """Who computes it; in the order of first dealing."""
        self._claimed: dict[int, int] = {}
        self._end = 0
        self._missing = set[int]()
        """All portions before `_end` are committed, but these."""
        self._given = set[tuple[int, int]]()
        self._duplicates = duplicates
        self._ahead = ahead
        self._first = 0
        """The first portion that is not committed."""

    @property
    def complete(self) -> bool:
        return self._first == self._portions

    @property
    def first(self) -> int:
        """The first portion that is not committed."""
        return self._first

    @property
    def exhausted(self) -> bool:
        """Whether no portion can be dealt for the first time, now: what is claimed had better be pushed."""
        todo = self._back[0] if self._back else self._next
        return todo >= min(self._portions, self._first + self._ahead)

    def is_committed(self, portion: int) -> bool:
        return portion < self._end and portion not in self._missing

    def ask(self, learner_id: int) -> int | None:
        """The portion that a learner is to compute; None: there is nothing for it to do, now."""
        if not self.exhausted:
            if self._back:
                portion = heappop(self._back)
                self._pass_over()
            else:
                portion, self._next = self._next, self._next + 1
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

    def copy(self, portion: int, learner_id: int) -> None:
        """Deal a portion, which another computes, to one more learner."""
        self._dealt[portion].append(learner_id)
        self._given.add((portion, learner_id))

    def holders(self, portion: int) -> Sequence[int]:
        """Who computes a portion."""
        return self._dealt.get(portion, ())

    def is_copy(self, portion: int, learner_id: int) -> bool:
        """Whether a learner was dealt a portion that another computes as well."""
        return learner_id in self.holders(portion)[1:]

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
        self._commit(portion)

    def settle(self, portion: int) -> None:
        """The result of a portion is in the sum, whoever has computed it."""
        for learner_id in self._dealt.pop(portion, ()):
            self._given.discard((portion, learner_id))
        self._commit(portion)
        self._pass_over()

    def _commit(self, portion: int) -> None:
        if portion >= self._end:
            self._missing.update(range(self._end, portion))
            self._end = portion + 1
        self._missing.discard(portion)
        while self._first < self._end and self._first not in self._missing:
            self._first += 1

    def _pass_over(self) -> None:
        """What was given back may have come after all."""
        while self._back and self.is_committed(self._back[0]):
            heappop(self._back)

    def give_back(self, portion: int, learner_id: int) -> bool:
        """A learner does not compute a portion any more; whether nobody does."""
        holders = self._dealt.get(portion, [])
        if learner_id not in holders:
            return False
        holders.remove(learner_id)
        self._given.discard((portion, learner_id))
        if holders:
            return False
        del self._dealt[portion]
        heappush(self._back, portion)
        return True

    def lost(self, learner_id: int) -> list[int]:
        """A learner is gone, with all that it had not committed; returns the portions that are to be done again."""
        again = [portion for portion, who in self._claimed.items() if who == learner_id]
        for portion in again:
            del self._claimed[portion]
            heappush(self._back, portion)
        return again + [portion for portion in list(self._dealt) if self.give_back(portion, learner_id)]

    def state(self) -> list[int]:
        """What is committed: all portions before the first number, but the others."""
        return [self._end, *sorted(self._missing)]

    def restore(self, state: Sequence[int]) -> None:
        """Before anything is dealt: so much is committed, and all else is to be done."""
        self._end, *missing = state
        self._next, self._missing, self._back = self._end, set(missing), list(missing)
        heapify(self._back)
        self._first = min(missing, default=self._end)
