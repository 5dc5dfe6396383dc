"""Decisions of a shard under any protocol: one object of integers; events in, decisions out [Chen16 Alg. 4].

    push                       `on_push`       SUM now, PARK until its turn, or LEAVE
    gradient to be summed      `judge`         verdict; finiteness matters only where `is_wanted`
    torn push                  `on_torn`       verdict
    pull                       `on_pull`       GIVE weights, WAIT, or STOP
    update overdue             `on_timeout`
    learner leaves, or hangs   `membership.on_departure`; once obeyed, `membership.end_if_deserted`
    missed learner back        `membership.on_return`
    signal                     `on_interrupt`  whether in time
    evaluator has seen enough  `on_enough`     whether news

After each event the shard obeys until nothing is due: the parked push in `turn`, then `update_due`, `on_update` and `late`, and the
pulls that are `ready`. No tensors, no seconds, no messages: `shard.py` obeys and logs. A fail-fast run is a patient one: no learner
is ever lost or missed.
"""

from __future__ import annotations

import enum
from collections.abc import Container, Sequence

from mpisgd.rules.membership import Membership
from mpisgd.rules.portions import NO_PORTION, Portions
from mpisgd.rules.protocol import Protocol
from mpisgd.rules.verdict import DROP_DUPLICATE, DROP_MISSED, DROP_NONFINITE, DROP_REPEATED, DROP_TORN, LATE, Kind, Verdict


class Do(enum.Enum):
    SUM = enum.auto()
    PARK = enum.auto()  # until its turn
    LEAVE = enum.auto()  # its sum will not be finished; computed again when the run goes on
    GIVE = enum.auto()
    WAIT = enum.auto()
    STOP = enum.auto()  # no more weights


# Spares a look into the enumeration for each gradient:
SUM, PARK, LEAVE, GIVE, WAIT, STOP = Do
_APPLY, _REJECT = Kind.APPLY, Kind.REJECT


class Rules:
    """Rules of one shard, which decides alone (law 2).

    Args:
        budget_samples: applied samples at which the run is over.
        portions: None = learners draw by themselves.

    Attributes:
        finished: enough samples were applied, or all learners have left.
        interrupted: no more weights: a signal, or `enough`; with `finished` at the end, a signal came too late to matter.
        enough: evaluations no longer improve; `finished` once all learners have left.
        absent: missed learners.
        waiting: least clock wanted, by unanswered learner.
        computing: clock of the weights, by learner to be told when late.
        applied_seq, dropped_seq: last mini-batch by learner; -1 = none.
        verdicts: `Kind` of the last push, by learner.
    """

    def __init__(self, protocol: Protocol, lambda_: int, budget_samples: float, portions: Portions | None = None) -> None:
        self.protocol = protocol
        self.portions = portions
        self.clock = 0
        self.finished = False
        self.interrupted = False
        self.enough = False
        self.present = set(range(lambda_))
        self.absent = set[int]()
        self.waiting: dict[int, int] = {}
        self.applied_seq = [-1] * lambda_
        self.dropped_seq = [-1] * lambda_
        self.torn_at: dict[int, int] = {}
        """Timestamps of torn pushes of missed learners."""
        self.verdicts: dict[int, int] = {}
        self.computing: dict[int, int] = {}
        self.membership = Membership(self)
        self._budget_samples = budget_samples
        self._aborts = protocol.aborts
        self.ordered = protocol.ordered
        self._fresh = protocol.fresh and protocol.ordered
        self._closes = portions is not None and not protocol.consistent
        """The last portion makes an update of the sum so far; where others wait for a clock, copies complete it."""
        self._summed = False
        self._deal_in_turn()

    def resume(
        self,
        clock: int,
        applied_seq: Sequence[int],
        dropped_seq: Sequence[int],
        next_seq: Sequence[int],
        portions: Sequence[int] = (),
    ) -> None:
        """Go on, before any event: learner l with mini-batch `next_seq[l]`; `portions` as of `Portions.state`."""
        self.clock = clock
        self.applied_seq, self.dropped_seq = list(applied_seq), list(dropped_seq)
        self.protocol.on_resume(list(next_seq))
        if self.portions is not None:
            self.portions.restore(portions)
            self._deal_in_turn()

    def _deal_in_turn(self) -> None:
        """Deal in lockstep, whichever learner asks first (law 5)."""
        if self.portions is not None and self.portions.deals and self.protocol.lockstep:
            self.portions.deal_in_turn(self.present)

    # ---------------------------------------------------------------------------------------------------------- pushes

    def must_be_fresh(self, learner_id: int) -> bool:
        """Return whether only the newest weights are possible: the others have waited for this learner."""
        return self._fresh and not self.finished and learner_id not in self.absent

    def on_push(self, learner_id: int, timestamp: int) -> Do:
        """Return the action on a push; a missed learner is back with it, unless lockstep has passed its clock."""
        if learner_id in self.absent and not self.finished and not (self.protocol.lockstep and timestamp < self.clock):
            self.membership.on_return(learner_id)
        if self._aborts:
            self.computing.pop(learner_id, None)
        if not self.ordered:
            return SUM
        if self.membership.cut_short and not self.finished and self.protocol.expects() not in self.present:
            return LEAVE  # the learner in turn has left
        return SUM if learner_id in self.absent or self.turn() in (None, learner_id) else PARK

    def turn(self, parked: Container[int] = ()) -> int | None:
        """Return the learner to sum next, present or `parked`; None = any."""
        turn = None if self.finished else self.protocol.expects()
        return turn if turn in self.present or turn in parked else None

    def is_wanted(self, learner_id: int, seq: int, portion: int = NO_PORTION) -> bool:
        return not (self.finished or self._has(learner_id, seq, portion) or learner_id in self.absent)

    def _has(self, learner_id: int, seq: int, portion: int) -> bool:
        return seq <= self.applied_seq[learner_id] if self.portions is None else self.portions.has(portion)

    def judge(self, learner_id: int, timestamp: int, seq: int, usable: bool = True, portion: int = NO_PORTION) -> Verdict:
        """Judge a gradient summed now, at its present staleness; `usable`: finite, or used regardless."""
        has = seq <= self.applied_seq[learner_id] if self.portions is None else self.portions.has(portion)
        if has or self.finished or learner_id in self.absent:
            verdict = self._unwanted(learner_id, timestamp, seq, portion)
        elif usable:
            verdict = self.protocol.on_push(learner_id, timestamp, self.clock)
        else:
            self.protocol.on_discard(learner_id, timestamp, self.clock)
            verdict = DROP_NONFINITE
        self.verdicts[learner_id] = kind = verdict.kind
        if kind is _APPLY:
            self.applied_seq[learner_id] = seq
        elif kind is not _REJECT:
            self.dropped_seq[learner_id] = seq
        if self.portions is not None:
            if kind is _APPLY:
                self.portions.apply(portion)
                self._summed = True
            elif kind is not _REJECT:
                self.portions.drop(portion, learner_id)
        return verdict

    def _unwanted(self, learner_id: int, timestamp: int, seq: int, portion: int) -> Verdict:
        if learner_id in self.absent and not self.finished:
            return DROP_MISSED
        if not self._has(learner_id, seq, portion):
            return LATE
        if not self.finished:  # computed again: another shard rejected it, or its checkpoint lacks it
            counts = self.protocol.consistent and (self._aborts or self.portions is not None)  # on all shards, of each clock
            (self.protocol.on_push if counts else self.protocol.on_discard)(learner_id, timestamp, self.clock)
        return DROP_REPEATED if self.portions is None else DROP_DUPLICATE

    def on_torn(self, learner_id: int, timestamp: int, seq: int, portion: int = NO_PORTION) -> Verdict:
        self.dropped_seq[learner_id] = seq
        if self.portions is not None:
            self.portions.drop(portion, learner_id)
        self.verdicts[learner_id] = DROP_TORN.kind
        if learner_id in self.absent:
            self.torn_at[learner_id] = timestamp
        elif learner_id in self.present and not self.finished:
            self.protocol.on_discard(learner_id, timestamp, self.clock)
        return DROP_TORN

    # --------------------------------------------------------------------------------------------------------- updates

    def update_due(self) -> bool:
        return not self.finished and (self.protocol.update_due() or (self._closes and self._summed and self._all_dealt_with()))

    def _all_dealt_with(self) -> bool:
        return self.portions is not None and self.portions.complete

    def on_update(self, samples: int) -> None:
        self.clock += 1
        self.protocol.on_update()
        self.finished = samples >= self._budget_samples
        self._summed = False
        if self.portions is not None and not self.finished:
            self._deal_in_turn()

    def late(self) -> list[int]:
        """Return learners that compute from older weights, once per pull."""
        if not self.computing:
            return []
        late = [learner_id for learner_id, clock in self.computing.items() if clock < self.clock]
        for learner_id in late:
            del self.computing[learner_id]
        return late

    def on_timeout(self) -> None:
        self.protocol.on_timeout()

    # ----------------------------------------------------------------------------------------------------------- pulls

    def on_pull(self, learner_id: int, min_clock: int) -> Do:
        if self.finished or self.interrupted:
            return STOP
        if self._gives(learner_id, min_clock):
            return GIVE
        self.waiting[learner_id] = min_clock
        return WAIT

    def ready(self) -> list[int]:
        """Return waiting learners to answer now; all, after the last weights."""
        over = self.finished or self.interrupted
        ready = [learner_id for learner_id, min_clock in self.waiting.items() if over or self._gives(learner_id, min_clock)]
        for learner_id in ready:
            del self.waiting[learner_id]
        return ready

    def _gives(self, learner_id: int, min_clock: int) -> bool:
        if min_clock > self.clock or not self.protocol.may_pull(learner_id, self.clock):
            return False
        if self._aborts:
            self.computing[learner_id] = self.clock
        return True

    # ------------------------------------------------------------------------------------------------------------- the end

    def on_interrupt(self) -> bool:
        if self.finished or self.interrupted:
            return False
        self.interrupted = True
        return True

    def on_enough(self) -> bool:
        """Give no more weights; return whether this is news. A signal may have come before."""
        if self.finished or self.enough:
            return False
        self.enough = self.interrupted = True
        return True
