"""Whom a fault-tolerant shard waits for when nobody else goes on: as long as they give signs of life (`liveness/pulse.py`).

An overdue learner is missed, and the others go on without it; of the last one, and of whoever evaluates when all have left, that
cannot be said. They may compute, or write, for as long as they like, or be stopped for ever, and then the job would wait for ever.
"""

from __future__ import annotations

from mpisgd.exchange.tolerant_channel import TolerantShardChannel
from mpisgd.rules.rules import Rules
from mpisgd.serving.snapshot_desk import SnapshotDesk


class Hopes:
    """Those of whom any may still come, each by its ranks: a learner may have one in each stage."""

    def __init__(self, rules: Rules, channel: TolerantShardChannel, desk: SnapshotDesk) -> None:
        self._rules = rules
        self._channel = channel
        self._desk = desk

    def now(self, last: int) -> list[tuple[int, ...]]:
        """Empty where others go on; `last`: the last learner, if it is overdue, else -1."""
        rules, channel = self._rules, self._channel
        if rules.present and last < 0:
            return []
        if not rules.present and (rules.finished or rules.interrupted):
            if not (channel.is_first and self._desk.is_open):
                return []
            if not channel.evaluates:
                return [(channel.evaluator_rank,)]
        return list(map(channel.ranks_of, sorted(rules.present | rules.absent)))

    def silent(self, last: int) -> tuple[list[tuple[int, ...]], bool]:
        """Ask all of them for a sign of life. Returns those that give none, any of whose ranks does not, and whether none does."""
        hopes = self.now(last)
        silent = self._channel.silent(rank for ranks in hopes for rank in ranks)
        hang = [ranks for ranks in hopes if silent.intersection(ranks)]
        return hang, bool(hopes) and len(hang) == len(hopes)
