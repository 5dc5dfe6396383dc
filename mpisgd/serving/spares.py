"""Spare ranks, as one shard knows them: shard 0 alone appoints them, each to the place of one learner that is dead, or hangs.

The spare then tells each shard, shard 0 last, whose place it takes; so until shard 0 has heard of it, others may not have; and a
learner that hangs may be back until then. Of a rank whose place is taken no shard takes anything any more, nor answers it.

A spare may die when it has told some shards: for the others, the one whose place it took is still there, and may live. Where no
spare follows, they are told to do without that learner (`forsaken`).

Where a spare that was appointed is not heard of, the next one, if there is one, is appointed to the same place. Their ranks ascend:
so one that wakes late is known by its rank, and takes no place from one that came after it.
"""

from __future__ import annotations

from mpisgd.base.speech import warn
from mpisgd.exchange.tolerant_channel import TolerantShardChannel


class Spares:
    """Who waits, and whose places are vacant.

    Args:
        patience_s: how long one that was appointed may take to come to its place.

    Attributes:
        appointed: on shard 0, the learners whose places spares are to take that have not yet said that they do, by rank.
    """

    def __init__(self, channel: TolerantShardChannel, patience_s: float) -> None:
        self._channel = channel
        self._patience_s = patience_s
        self._idle = list(channel.spare_ranks)
        self._vacant: list[int] = []
        self._forsaken = set[int]()
        """Learners whose place a spare had that is dead."""
        self.appointed: dict[int, int] = {}
        self._since_s: dict[int, float] = {}

    @property
    def expected(self) -> bool:
        """Whether one will come, unless it dies: some may be left, and there is a place."""
        return bool(self.hopes)

    @property
    def hopes(self) -> list[int]:
        """The ranks of which any may come."""
        return [*self.appointed, *(self._idle if self._vacant else ())]

    def vacate(self, learner_id: int) -> None:
        """A learner is dead, or hangs."""
        if learner_id not in (*self._vacant, *self.appointed.values()):
            self._vacant.append(learner_id)

    def die(self, rank: int, learner_id: int) -> None:
        """A learner is dead, which may be a spare that had come to its place."""
        self.vacate(learner_id)
        if rank in self._channel.spare_ranks:
            self._forsaken.add(learner_id)

    def forsaken(self) -> list[int]:
        """Learners whose spare is dead, once it is known that no other will come to their place; each is named once.

        Other shards may not have heard of that spare. As long as a spare is idle here, it may have come to the place elsewhere.
        """
        if self._idle:
            return []
        forsaken, self._forsaken = sorted(self._forsaken), set()
        return forsaken

    def lost(self, rank: int) -> bool:
        """A rank is dead; whether it is a spare that has not come to a place yet."""
        if rank in self.appointed:
            self.vacate(self.appointed.pop(rank))
            return True
        if rank in self._idle:
            self._idle.remove(rank)
            return True
        return False

    def appoint(self, now_s: float, hangs: int = -1) -> None:
        """By shard 0: the first spare takes the place that is vacant longest, and so on; also that of a learner that hangs."""
        self._miss(now_s - self._patience_s)
        if hangs >= 0 and self._idle:
            self.vacate(hangs)
        while self._idle and self._vacant:
            rank, learner_id = self._idle.pop(0), self._vacant.pop(0)
            self.appointed[rank], self._since_s[rank] = learner_id, now_s
            self._channel.appoint(rank, learner_id)

    def taken(self, rank: int, learner_id: int) -> None:
        """A spare says that it has taken a place."""
        self.appointed.pop(rank, None)
        self._forsaken.discard(learner_id)
        for those, each in ((self._idle, rank), (self._vacant, learner_id)):
            if each in those:
                those.remove(each)

    def _miss(self, before_s: float) -> None:
        """Those that were appointed before this second, and not heard of, are spares no more, where others may follow them.

        Where none may, one that wakes is still welcome: other shards may have taken it for the learner already.
        """
        for rank in [rank for rank in self.appointed if self._since_s[rank] < before_s]:
            if len(self._idle) <= len(self._vacant):
                return
            warn(f"mpisgd: a spare, rank {rank}, was not heard of since it was to take the place of learner {self.appointed[rank]}")
            self.vacate(self.appointed.pop(rank))
            self._leave_out(rank)

    def displaces(self, rank: int, before: int) -> bool:
        """Whether a spare that says so takes the place of this rank, which counts no more; else the spare does not."""
        late = before in self._channel.spare_ranks and rank < before
        self._leave_out(rank if late else before)
        return not late

    def _leave_out(self, rank: int) -> None:
        self._channel.lose(rank)
        self._channel.give_up(rank)

    def dismiss(self) -> None:
        """By shard 0: the run is over for those who wait."""
        for rank in self._idle:
            self._channel.appoint(rank, -1)
        self._idle.clear()

    def give_up(self) -> None:
        """Nobody waits any more for those who were appointed: they hang."""
        for rank in self.appointed:
            self._channel.give_up(rank)
        self.appointed.clear()

    def give_up_all(self) -> None:
        """Nor for any other."""
        self.give_up()
        for rank in self._idle:
            self._channel.give_up(rank)
        self._idle.clear()
