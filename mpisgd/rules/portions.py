"""Portions of a batch or a whole run, dealt on request [Dean12 4.2; ElasticDL]."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush

from mpisgd.base.errors import ProtocolError

NO_PORTION = -1
"""Learners draw by themselves, or another shard deals."""
LEASE = 4
"""Length of a lease, in portions per learner: a holder may be this many times slower than others."""
_COPIES = 2


class Dealing:
    """Portions 0 ... `portions` - 1 of an evaluation or a run, each committed exactly once.

        todo        never dealt, or given back
        dealt       under computation; by a second learner too, once nothing is left to deal
        claimed     the first result, on its way into the sum
        committed   in the sum

    Portions are far smaller than 1/N of the batch: fast learners compute more, the last portions are computed twice, so no
    straggler is waited for.

    Args:
        duplicates: deal a portion a second time, once nothing else is left.
        ahead: most portions dealt ahead of the first uncommitted portion.
    """

    def __init__(self, portions: int, *, duplicates: bool, ahead: float = math.inf) -> None:
        self._portions = portions
        self._next = 0
        self._back: list[int] = []
        self._dealt: dict[int, list[int]] = {}
        """Learners by portion, in the order of dealing."""
        self._claimed: dict[int, int] = {}
        self._end = 0
        self._missing = set[int]()
        """Uncommitted portions before `_end`."""
        self._given = set[tuple[int, int]]()
        self._duplicates = duplicates
        self._ahead = ahead
        self._first = 0

    @property
    def complete(self) -> bool:
        return self._first == self._portions

    @property
    def first(self) -> int:
        return self._first

    @property
    def exhausted(self) -> bool:
        """No new portion can be dealt now: claimed results had better be pushed."""
        todo = self._back[0] if self._back else self._next
        return todo >= min(self._portions, self._first + self._ahead)

    def is_committed(self, portion: int) -> bool:
        return portion < self._end and portion not in self._missing

    def ask(self, learner_id: int) -> int | None:
        """Return the next portion for a learner; None = nothing to do now."""
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
        self._dealt[portion].append(learner_id)
        self._given.add((portion, learner_id))

    def holders(self, portion: int) -> Sequence[int]:
        return self._dealt.get(portion, ())

    def is_copy(self, portion: int, learner_id: int) -> bool:
        return learner_id in self.holders(portion)[1:]

    def done(self, portion: int, learner_id: int) -> bool:
        """Note a computed portion; return whether the result counts: the first does.

        Raises ProtocolError for a portion never dealt to the learner.
        """
        if (portion, learner_id) not in self._given:
            raise ProtocolError(f"learner {learner_id} has computed portion {portion}, not dealt to this learner")
        if learner_id not in self._dealt.get(portion, []):
            return False
        del self._dealt[portion]
        self._claimed[portion] = learner_id
        return True

    def commit(self, portion: int, learner_id: int) -> None:
        """Note a claimed result in the sum. Raises ProtocolError where the learner has no claim."""
        if self._claimed.get(portion) != learner_id:
            raise ProtocolError(f"portion {portion} of learner {learner_id} is to be summed, but does not count")
        del self._claimed[portion]
        self._commit(portion)

    def settle(self, portion: int) -> None:
        """Note a result in the sum, of any learner."""
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
        while self._back and self.is_committed(self._back[0]):
            heappop(self._back)

    def give_back(self, portion: int, learner_id: int) -> bool:
        """Take back a portion; return whether no learner has it any more."""
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
        """Take back all uncommitted portions of a lost learner; return the portions to compute again."""
        again = [portion for portion, who in self._claimed.items() if who == learner_id]
        for portion in again:
            del self._claimed[portion]
            heappush(self._back, portion)
        return again + [portion for portion in list(self._dealt) if self.give_back(portion, learner_id)]

    def state(self) -> list[int]:
        """Return an end, then the uncommitted portions before it."""
        return [self._end, *sorted(self._missing)]

    def restore(self, state: Sequence[int]) -> None:
        self._end, *missing = state
        self._next, self._missing, self._back = self._end, set(missing), list(missing)
        heapify(self._back)
        self._first = min(missing, default=self._end)


class Portions:
    """Portions of all epochs as seen by a shard; shard 0 deals to learners that pull [ElasticDL].

        pull              the learner's unapplied portion, else the next
        dropped, torn     given back, and dealt with the next pull
        rejected          kept, and computed again
        learner gone      given back; a missed learner's result in time still counts
        lease over        dealt again; the first result counts

    The lease is counted in later portions. At the end learners are dealt copies: the run waits for no straggler.

    Every shard drops repeated portions by itself (law 2). A portion dropped by another shard alone is missing from that slice: the
    verdict of shard 0 counts.

    Args:
        deals: this shard deals; the others only see results.
    """

    def __init__(self, total: int, lambda_: int, *, deals: bool) -> None:
        self.total = total
        self.deals = deals
        self._lease = LEASE * lambda_
        self._begin()

    def _begin(self) -> None:
        self._dealing = Dealing(self.total, duplicates=False)
        self._held: dict[int, int] = {}
        """Portion of each learner; obsolete once applied."""
        self._dealt_at: dict[int, int] = {}
        """`_count` at the last dealing of portions under way; oldest first."""
        self._count = 0

    @property
    def complete(self) -> bool:
        return self._dealing.complete

    def has(self, portion: int) -> bool:
        return self._dealing.is_committed(portion)

    def of(self, learner_id: int) -> int:
        held = self._held.get(learner_id)
        if held is None or self.has(held):
            held = self._held[learner_id] = self._next(learner_id)
        return held

    def deal_in_turn(self, learner_ids: Iterable[int]) -> None:
        for learner_id in sorted(learner_ids):
            self.of(learner_id)

    def _next(self, learner_id: int) -> int:
        self._count += 1
        oldest, dealt_at = next(iter(self._dealt_at.items()), (-1, self._count))
        if self._count - dealt_at > self._lease:
            return self._copy(oldest, learner_id)
        portion = self._dealing.ask(learner_id)
        if portion is not None:
            self._dealt_at[portion] = self._count
            return portion
        if not self._dealt_at:  # all are in the sum of the next update
            return self.total - 1
        return self._copy(min(self._dealt_at, key=lambda each: len(self._dealing.holders(each))), learner_id)

    def _copy(self, portion: int, learner_id: int) -> int:
        self._dealing.copy(portion, learner_id)
        del self._dealt_at[portion]
        self._dealt_at[portion] = self._count
        return portion

    def apply(self, portion: int) -> None:
        self._dealing.settle(portion)
        self._dealt_at.pop(portion, None)

    def drop(self, portion: int, learner_id: int) -> None:
        """Give back a portion after a drop of its gradient."""
        if self._held.get(learner_id) == portion:
            self.lost(learner_id)

    def lost(self, learner_id: int) -> None:
        portion = self._held.pop(learner_id, -1)
        if self._dealing.give_back(portion, learner_id):
            del self._dealt_at[portion]

    def state(self) -> list[int]:
        return self._dealing.state()

    def restore(self, state: Sequence[int]) -> None:
        """Go on from a state; portions under way are dealt again."""
        self._begin()
        self._dealing.restore(state)
