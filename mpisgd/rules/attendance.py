"""Who is there, of the learners that a shard's rules count on: they leave, are lost, missed, and back (`rules.py`).

Nobody waits for ever: after each of these the shard obeys what has become due. Where all who are present wait, it asks whom to let
go; where nobody is present any more, the run comes to its end.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpisgd.rules.rules import Rules


class Gone(enum.Enum):
    """Why a learner pushes and pulls no more."""

    LEFT = enum.auto()  # by itself, while others go on
    STOPPED = enum.auto()  # the run is over
    INTERRUPTED = enum.auto()  # a signal ends this attempt
    LOST = enum.auto()  # it is dead
    MISSED = enum.auto()  # too little was heard of it: the others go on without it until it is back


OTHERS_GO_ON = (Gone.LEFT, Gone.LOST, Gone.MISSED)


class Attendance:
    """Attendance at one shard, which changes who is `present`, `absent` and `waiting` in its rules.

    Attributes:
        parted: whether any learner has said goodbye.
        cut_short: whether a learner has left because of a signal.
        ends: whether a learner has left because the run is over, here or on another shard, or because of a signal.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self.parted = False
        self.cut_short = False
        self.ends = False
        self._told_to_stop = set[int]()
        """Learners that have left because another shard has finished; here they are still counted on."""
        self._disturbed = False
        """Whether any was lost or missed: other shards may have gone on without it."""

    @property
    def stuck(self) -> bool:
        """Whether all who are present wait."""
        rules = self._rules
        return bool(rules.present) and rules.present <= rules.waiting.keys()

    def passes(self, learner_id: int, min_clock: int, stuck: bool) -> bool:
        """Whether a pull of a learner that owes a push says that none of this clock will come: another shard is ahead of this one,
        and has gone on without a learner for which this one has not. It then counts as heard.

        A shard that knows of no loss believes it of shards in lockstep, of which only one that misses a learner gets ahead; or
        where all who are present wait (`stuck`), so that nobody will push.
        """
        rules = self._rules
        told = self._disturbed or rules.protocol.lockstep or stuck
        lags = told and rules.protocol.consistent and min_clock > rules.clock
        if not lags or rules.finished or learner_id not in rules.present:
            return False
        rules.protocol.on_discard(learner_id, rules.clock, rules.clock)
        return True

    @property
    def deserted(self) -> bool:
        """Whether all learners have left, and none can be back."""
        rules = self._rules
        return not rules.present and not rules.absent

    def on_departure(self, learner_id: int, gone: Gone) -> None:
        """A learner pushes and pulls no more; a push of it that is parked was summed before, where others go on."""
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
        self._disturbed |= gone in (Gone.LOST, Gone.MISSED)
        self.parted |= gone not in (Gone.LOST, Gone.MISSED)
        self.ends |= gone in (Gone.STOPPED, Gone.INTERRUPTED)
        if gone is Gone.STOPPED:
            self._told_to_stop.add(learner_id)
        self.cut_short |= gone is Gone.INTERRUPTED or (gone is Gone.LOST and rules.interrupted and self.deserted)
        if was_present and gone in OTHERS_GO_ON:
            rules.protocol.on_departure(learner_id)

    def let_go(self) -> list[int]:
        """Whom nobody counts on any more, now that all who are present wait: learners that another shard, which lacks none of what
        has been lost here, has told to stop. The others are told so, too, as soon as they get on here."""
        rules = self._rules
        if not self.stuck or rules.finished or rules.interrupted:
            return []
        gone, self._told_to_stop = sorted(self._told_to_stop), set()
        for learner_id in gone:
            rules.protocol.on_departure(learner_id)
        return gone

    def on_return(self, learner_id: int) -> None:
        """One that was missed is there again: the next update may wait for it."""
        rules = self._rules
        rules.absent.discard(learner_id)
        rules.present.add(learner_id)
        rules.protocol.on_return(learner_id, rules.clock)

    def end_if_deserted(self) -> bool:
        """Whether nobody is present any more; the run is then finished, unless a signal, and nothing else, has cut it short."""
        rules = self._rules
        if not rules.present and (rules.enough or not self.cut_short):
            rules.finished = True
        return not rules.present
