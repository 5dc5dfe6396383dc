"""Spare ranks, as one shard knows them: shard 0 alone appoints them, each to the place of one learner that is dead.

The spare then tells each shard, shard 0 last, whose place it takes; so until shard 0 has heard of it, others may not have.
"""

from __future__ import annotations

from mpisgd.exchange.tolerant_channel import TolerantShardChannel


class Spares:
    """Who waits, and whose places are vacant.

    Attributes:
        appointed: on shard 0, the learners whose places spares are to take that have not yet said that they do, by rank.
    """

    def __init__(self, channel: TolerantShardChannel) -> None:
        self._channel = channel
        self._idle = list(channel.spare_ranks)
        self._vacant: list[int] = []
        self.appointed: dict[int, int] = {}

    @property
    def expected(self) -> bool:
        """Whether one will come, unless it dies: some may be left, and there is a place."""
        return bool(self.appointed or (self._vacant and self._idle))

    def vacate(self, learner_id: int) -> None:
        """A learner is dead."""
        if learner_id not in self._vacant:
            self._vacant.append(learner_id)

    def lost(self, rank: int) -> bool:
        """A rank is dead; whether it is a spare that has not come to a place yet."""
        if rank in self.appointed:
            self.vacate(self.appointed.pop(rank))
            return True
        if rank in self._idle:
            self._idle.remove(rank)
            return True
        return False

    def appoint(self) -> None:
        """By shard 0: the first spare takes the place that is vacant longest, and so on."""
        while self._idle and self._vacant:
            rank, learner_id = self._idle.pop(0), self._vacant.pop(0)
            self.appointed[rank] = learner_id
            self._channel.appoint(rank, learner_id)

    def taken(self, rank: int, learner_id: int) -> None:
        """A spare says that it has taken a place."""
        self.appointed.pop(rank, None)
        for those, each in ((self._idle, rank), (self._vacant, learner_id)):
            if each in those:
                those.remove(each)

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
