"""Membership of learners: after each change the shard obeys the rules until nothing is due (`rules.py`)."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpisgd.rules.rules import Rules


class Gone(enum.Enum):
    LEFT = enum.auto()  # by itself; others go on
    STOPPED = enum.auto()  # the run is over
    INTERRUPTED = enum.auto()  # a signal ends this attempt
    LOST = enum.auto()  # dead
    MISSED = enum.auto()  # silent for too long: the others go on until it is back


OTHERS_GO_ON = (Gone.LEFT, Gone.LOST, Gone.MISSED)
_UNTOLD = (Gone.LOST, Gone.MISSED)
"""Nobody has told the learner to go."""


class Membership:
    """Changes of `present`, `absent` and `waiting` in a shard's rules.

    Attributes:
        cut_short: a learner left because of a signal, or the last was lost after a signal.
        parted: a learner left in order.
        ends: a learner left because of a signal or the end of the run, here or on another shard.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self.parted = False
        self.cut_short = False
        self.ends = False
        self._told_to_stop = set[int]()
        """Learners stopped by another shard; the protocol still awaits their pushes."""
        self._disturbed = False
        self._ended_at: int | None = None
        """As `GivenUp.clock`; None = not told."""

    @property
    def stuck(self) -> bool:
        rules = self._rules
        return bool(rules.present) and rules.present <= rules.waiting.keys()

    @property
    def is_over(self) -> bool:
        """The run may end without learners: a learner left, or a shard ended, in order."""
        rules = self._rules
        anywhere = not rules.protocol.consistent or (rules.portions is not None and rules.portions.complete)
        return self.parted or (self._ended_at is not None and (anywhere or self._ended_at == rules.clock))

    def on_end_elsewhere(self, clock: int) -> None:
        self._ended_at = clock

    def passes(self, learner_id: int, min_clock: int, stuck: bool) -> bool:
        """Return whether a learner that owes a push asks for a later clock; count the push as discarded then.

        Another shard has gone on without a learner awaited here. Without a known loss, this is believed only in lockstep, or
        when all present learners wait (`stuck`).
        """
        rules = self._rules
        told = self._disturbed or rules.protocol.lockstep or stuck
        lags = told and rules.protocol.consistent and min_clock > rules.clock
        if not lags or rules.finished or learner_id not in rules.present:
            return False
        rules.protocol.on_discard(learner_id, rules.clock, rules.clock)
        return True

    def on_departure(self, learner_id: int, gone: Gone) -> None:
        """Remove a learner; where others go on, its parked push was summed before."""
        rules = self._rules
        was_present = learner_id in rules.present
        for those in (rules.present, rules.absent):
            those.discard(learner_id)
        for of_each in (rules.waiting, rules.computing):
            of_each.pop(learner_id, None)
        if rules.portions is not None:
            rules.portions.lost(learner_id)
        if gone is Gone.MISSED:
            rules.absent.add(learner_id)
        self._disturbed |= gone in _UNTOLD
        self.parted |= gone not in _UNTOLD
        self.ends |= gone in (Gone.STOPPED, Gone.INTERRUPTED)
        if was_present and gone is Gone.STOPPED:
            self._told_to_stop.add(learner_id)
        last_lost = gone is Gone.LOST and rules.interrupted and not rules.present
        self.cut_short |= gone is Gone.INTERRUPTED or last_lost
        if was_present and gone in OTHERS_GO_ON:
            rules.protocol.on_departure(learner_id)

    def release_stopped(self) -> list[int]:
        """Release and return learners stopped by another shard, once all present learners wait.

        That shard lacks nothing lost here, and stops the waiting learners as well.
        """
        rules = self._rules
        if not self.stuck or rules.finished or rules.interrupted:
            return []
        gone, self._told_to_stop = sorted(self._told_to_stop), set()
        for learner_id in gone:
            rules.protocol.on_departure(learner_id)
        return gone

    def on_return(self, learner_id: int) -> None:
        rules = self._rules
        rules.absent.discard(learner_id)
        rules.present.add(learner_id)
        rules.protocol.on_return(learner_id, rules.clock)
        if rules.torn_at.pop(learner_id, -1) == rules.clock and not rules.finished:  # another will not come
            rules.protocol.on_discard(learner_id, rules.clock, rules.clock)

    def end_if_deserted(self) -> bool:
        """Return whether no learner is present; finish the run then, unless only a signal has cut it short."""
        rules = self._rules
        if not rules.present and (rules.enough or not self.cut_short):
            rules.finished = True
        return not rules.present
