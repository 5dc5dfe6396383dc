"""Portions of all epochs of a run, dealt by shard 0 to whoever asks for weights; each is applied exactly once [ElasticDL].

    a learner asks for weights     it is told its portion: what it has, given back and not applied; else the next
    its gradient is applied        the portion is done, whoever else may compute it
    it is dropped, or torn         the portion is given back, and dealt to whoever asks next
    it is rejected                 its learner has the portion still, and computes it again
    its learner leaves, is lost    what it had is given back; where it was missed and comes back in time, its result
    or missed                      counts all the same
    its lease is over              it is dealt once more: the first result counts, and the other is dropped

The lease is counted in what others do, and not in seconds: a portion is overdue when `LEASE` portions for each learner were dealt
after it. At the end, when all have been dealt, whoever asks is given what others compute: the run waits for its slowest learner no
longer than for its fastest.

Every shard drops what it has applied before, by itself (law 2): so a portion that shard 0 had dealt twice is in no slice twice. In
the slice of shard 0 it is exactly once. Where another shard has dropped a gradient that shard 0 applied (it was torn, or too stale
there), the portion is not done again, and that slice lacks it: the verdict of shard 0 counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mpisgd.rules.dealing import Dealing

NO_PORTION = -1
"""In the place of a portion: learners draw by themselves, or another shard deals."""
LEASE = 4
"""Portions for each learner that are dealt after one before that is overdue: it takes so many times as long as others do."""


class Portions:
    """Those of one shard.

    Args:
        total: how many the run has, in all its epochs.
        deals: whether this shard does; the others only see what comes.
    """

    def __init__(self, total: int, lambda_: int, *, deals: bool) -> None:
        self.total = total
        self.deals = deals
        self._lease = LEASE * lambda_
        self._begin()

    def _begin(self) -> None:
        self._dealing = Dealing(self.total, duplicates=False)
        self._held: dict[int, int] = {}
        """What each learner was dealt, and has not pushed, or in vain."""
        self._dealt_at: dict[int, int] = {}
        """Of those under way, how many had been dealt when each was, the last time; in that order."""
        self._count = 0

    @property
    def complete(self) -> bool:
        """Whether all were applied here."""
        return self._dealing.complete

    def has(self, portion: int) -> bool:
        """Whether a portion was applied here."""
        return self._dealing.is_committed(portion)

    def of(self, learner_id: int) -> int:
        """The portion that a learner computes next."""
        held = self._held.get(learner_id)
        if held is None or self.has(held):
            held = self._held[learner_id] = self._next(learner_id)
        return held

    def deal_in_turn(self, learner_ids: Iterable[int]) -> None:
        """Deal to all of these, in the order of learner_id, whoever asks first."""
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
        if not self._dealt_at:  # all are in a sum that is still in the making
            return self.total - 1
        return self._copy(min(self._dealt_at, key=lambda each: len(self._dealing.holders(each))), learner_id)

    def _copy(self, portion: int, learner_id: int) -> int:
        self._dealing.copy(portion, learner_id)
        del self._dealt_at[portion]
        self._dealt_at[portion] = self._count
        return portion

    def apply(self, portion: int) -> None:
        """A gradient of this portion is in the sum."""
        self._dealing.settle(portion)
        self._dealt_at.pop(portion, None)

    def apply_all(self, portions: Iterable[int]) -> None:
        """So many were applied before."""
        for portion in portions:
            self.apply(portion)

    def drop(self, portion: int, learner_id: int) -> None:
        """A learner's gradient of this portion will not be used."""
        if self._held.get(learner_id) == portion:
            self.lost(learner_id)

    def lost(self, learner_id: int) -> None:
        """A learner does not compute any more what it was dealt."""
        portion = self._held.pop(learner_id, -1)
        if self._dealing.give_back(portion, learner_id):
            del self._dealt_at[portion]

    def state(self) -> list[int]:
        """What was applied, as `Dealing.state`."""
        return self._dealing.state()

    def restore(self, state: Sequence[int]) -> None:
        """Go on from there: all that was under way is dealt again."""
        self._begin()
        self._dealing.restore(state)
