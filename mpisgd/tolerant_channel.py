"""A shard's channel in a fault-tolerant run: who evaluates may change, and shard 0 says who does (`succession.py`).

A learner's goodbye to shard 0 is answered: DUTY says whether it is to evaluate (`LearnerChannel.duty`). The evaluator says its own
goodbye to shard 0 alone, which passes it on: so no shard leaves before somebody has come to the end of the evaluation.
"""

from __future__ import annotations

from mpisgd.channel import ShardChannel
from mpisgd.communicator import Communicator
from mpisgd.messages import NOTHING_MORE, Tag
from mpisgd.roles import Roles


class TolerantShardChannel(ShardChannel):
    """A shard's end."""

    def __init__(self, wire: Communicator, roles: Roles, shard: int) -> None:
        super().__init__(wire, roles, shard)
        self._shard_ranks = list(roles.shard_ranks)

    @property
    def evaluator_rank(self) -> int:
        """Whose snapshot pulls are answered."""
        return self._evaluator_rank

    def _succeeds(self, rank: int) -> None:
        """Whoever shard 0 has appointed; or shard 0 itself, which passes on that nothing more will be asked for."""
        if rank != self._shard_ranks[0]:
            self._evaluator_rank = rank

    def answer_goodbye(self, learner_id: int, *, evaluate: bool) -> None:
        """Tell a learner that has said goodbye whether it is to evaluate."""
        self._wire.finish(self._wire.start(self._learner_ranks[learner_id], Tag.DUTY, (evaluate,)))

    def pass_on_nothing_more(self) -> None:
        """Tell all other shards that evaluation is over; they take whatever comes."""
        for rank in self._shard_ranks[1:]:
            self._wire.finish(self._wire.start(rank, Tag.SNAPSHOT_PULL, (NOTHING_MORE,)))

    def give_up(self, rank: int) -> None:
        """Nobody waits for this rank any more."""
        self._wire.give_up(rank)
