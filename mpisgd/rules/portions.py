"""Portions of all epochs, dealt by shard 0 to learners that pull; each is applied exactly once [ElasticDL].

    pull              the learner's unapplied portion, else the next
    dropped, torn     given back, and dealt with the next pull
    rejected          kept, and computed again
    learner gone      given back; a missed learner's result in time still counts
    lease over        dealt again; the first result counts

The lease is counted in later portions, not in seconds. At the end learners are dealt copies: the run waits for no straggler.

Every shard drops repeated portions by itself (law 2). A portion dropped by another shard alone (torn, or too stale there) is
missing from that slice: the verdict of shard 0 counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mpisgd.rules.dealing import Dealing

NO_PORTION = -1
"""Learners draw by themselves, or another shard deals."""
LEASE = 4
"""Length of a lease, in portions per learner: a holder may be this many times slower than others."""


class Portions:
    """Portions as seen by a shard.

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
