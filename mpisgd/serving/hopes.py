"""Ranks to wait for when no other goes on, as long as they give signs of life (`liveness/heartbeat.py`).

Overdue learners are missed, except for the last. The last learner may take any time, and so may the evaluator after all learners
left; but stopped for ever, they would hold up the job for ever. Other shards hear of the evaluation's end from shard 0.
"""

from __future__ import annotations

from mpisgd.exchange.tolerant_channel import TolerantShardChannel
from mpisgd.rules.rules import Rules
from mpisgd.serving.snapshot_server import SnapshotServer


class Hopes:
    """Candidates still to come, each by its ranks of all stages."""

    def __init__(self, rules: Rules, channel: TolerantShardChannel, snapshot_server: SnapshotServer) -> None:
        self._rules = rules
        self._channel = channel
        self._snapshot_server = snapshot_server

    def now(self, last: int) -> list[tuple[int, ...]]:
        """Return the candidates, none where others go on; `last`: the last learner if overdue, else -1."""
        rules, channel = self._rules, self._channel
        if rules.present and last < 0:
            return []
        if not rules.present and (rules.finished or rules.interrupted):
            if not self._snapshot_server.is_open or channel.evaluates:
                return []
            return [(channel.evaluator_rank if channel.is_first else channel.first_rank,)]
        return list(map(channel.ranks_of, sorted(rules.present | rules.absent)))

    def silent(self, last: int) -> tuple[list[tuple[int, ...]], bool]:
        """Ask all candidates for a sign of life; return candidates with a silent rank, and whether all are so."""
        hopes = self.now(last)
        silent = self._channel.silent(rank for ranks in hopes for rank in ranks)
        hang = [ranks for ranks in hopes if silent.intersection(ranks)]
        return hang, bool(hopes) and len(hang) == len(hopes)
