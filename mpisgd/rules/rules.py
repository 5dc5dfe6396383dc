"""What a shard decides, whatever its protocol: one object of integers, events in and decisions out [Chen16 Alg. 4].

    a push has come                    `on_push`       SUM it now, PARK it until its turn, or LEAVE it
    its gradient is to be summed       `judge`         its verdict; whether it is finite matters only where `is_wanted`
    only a part of it has come         `on_torn`       its verdict
    a pull has come                    `on_pull`       GIVE weights, let it WAIT, or STOP
    the time for an update is over     `on_timeout`
    a learner leaves, or hangs         `attendance.on_departure`; once that is obeyed, `end_if_deserted` there
    one that hung is back              `attendance.on_return`
    a signal has come                  `on_interrupt`  whether it came in time
    the evaluator has seen enough      `on_enough`     whether it is news

After each the shard obeys until nothing is due: it sums the parked push of whose `turn` it is; where an update is due
(`update_due`), it makes it (`on_update`), and tells those who are `late`; it answers the pulls that are `ready`.

No tensors, no seconds, no messages: the shard's loop (`shard.py`) obeys and tells the log, `replay` asks the same object what a log
must say, tests ask it alone. Where nobody watches learners, none is ever lost or missed: a fail-fast run is a patient one.
"""

from __future__ import annotations

import enum
from collections.abc import Container, Sequence

from mpisgd.rules.attendance import Attendance
from mpisgd.rules.portions import NO_PORTION, Portions
from mpisgd.rules.protocol import Protocol
from mpisgd.rules.verdict import DROP_DUPLICATE, DROP_MISSED, DROP_NONFINITE, DROP_REPEATED, DROP_TORN, LATE, Kind, Verdict


class Do(enum.Enum):
    """What is to be done with the gradient of a push, or with a pull."""

    SUM = enum.auto()
    PARK = enum.auto()  # until its turn
    LEAVE = enum.auto()  # its sum will not be finished: it is computed again when the run goes on
    GIVE = enum.auto()
    WAIT = enum.auto()
    STOP = enum.auto()  # there are no more weights


# Found without a look into the enumeration, once for each gradient:
SUM, PARK, LEAVE, GIVE, WAIT, STOP = Do
_APPLY, _REJECT = Kind.APPLY, Kind.REJECT


class Rules:
    """The rules of one shard, which decides alone (law 2).

    Args:
        budget_samples: the run is over when so many samples have been applied.
        portions: of the data, where they are dealt; None = learners draw by themselves.

    Attributes:
        finished: enough samples have been applied, or all learners have left.
        interrupted: a signal has come before that; where `finished` is true as well in the end, it came too late to matter.
        enough: evaluations are no better any more: nobody is given weights, and once all have left the run is finished.
        present: learners that have not left, and are not missed.
        absent: learners that were missed, and are not back.
        waiting: learners whose pulls are not answered yet, with the clock that each asks for at least.
        computing: learners that compute, with the clock of their weights, where they may be told that they are late.
        applied_seq, dropped_seq: per learner, the last mini-batch that was applied, or dropped; -1 = none.
        verdicts: per learner, the `Kind` of its last push.
        ordered: whether `turn` ever names a learner.
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
        self.verdicts: dict[int, int] = {}
        self.computing: dict[int, int] = {}
        self.attendance = Attendance(self)
        self._budget_samples = budget_samples
        self._aborts = protocol.aborts
        self.ordered = protocol.ordered
        self._fresh = protocol.fresh and protocol.ordered
        self._closes = portions is not None and not protocol.consistent
        """Whether the last portion makes an update of what there is; where others wait for a clock, copies make it."""
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
        """Before anything else: go on at this clock; learner l does with its mini-batch `next_seq[l]`. `portions`: what was applied
        (`Portions.state`)."""
        self.clock = clock
        self.applied_seq, self.dropped_seq = list(applied_seq), list(dropped_seq)
        self.protocol.on_resume(list(next_seq))
        if self.portions is not None:
            self.portions.restore(portions)
            self._deal_in_turn()

    def _deal_in_turn(self) -> None:
        """Where all learners compute at a time, what each is dealt does not depend on who asks first (law 5)."""
        if self.portions is not None and self.portions.deals and self.protocol.lockstep:
            self.portions.deal_in_turn(self.present)

    # ---------------------------------------------------------------------------------------------------------- pushes

    def must_be_fresh(self, learner_id: int) -> bool:
        """Whether a learner can have no weights but the newest: the others have waited for it."""
        return self._fresh and not self.finished and learner_id not in self.absent

    def on_push(self, learner_id: int, timestamp: int) -> Do:
        """A gradient has come. One that was missed is back with it, unless it is of a clock that went on without it."""
        if learner_id in self.absent and not self.finished and not (self.protocol.lockstep and timestamp < self.clock):
            self.attendance.on_return(learner_id)
        if self._aborts:
            self.computing.pop(learner_id, None)
        if not self.ordered:
            return SUM
        if self.attendance.cut_short and not self.finished and self.protocol.expects() not in self.present:
            return LEAVE  # whose turn it is has left
        return SUM if learner_id in self.absent or self.turn() in (None, learner_id) else PARK

    def turn(self, parked: Container[int] = ()) -> int | None:
        """Whose push must be summed next, or None = anybody's: of one who is present, or has left behind what is `parked`."""
        turn = None if self.finished else self.protocol.expects()
        return turn if turn in self.present or turn in parked else None

    def is_wanted(self, learner_id: int, seq: int, portion: int = NO_PORTION) -> bool:
        """Whether a gradient might be used: else it does not matter whether it is finite."""
        return not (self.finished or self._has(learner_id, seq, portion) or learner_id in self.absent)

    def _has(self, learner_id: int, seq: int, portion: int) -> bool:
        """Whether a mini-batch, or this portion of the data, was applied here before."""
        return seq <= self.applied_seq[learner_id] if self.portions is None else self.portions.has(portion)

    def judge(self, learner_id: int, timestamp: int, seq: int, usable: bool = True, portion: int = NO_PORTION) -> Verdict:
        """The verdict on a gradient that is summed now: staleness is measured here. `usable`: finite, or used all the same."""
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
        if self._has(learner_id, seq, portion):  # computed again: another shard rejected it, or had not had it before the
            # checkpoint that the run was continued from
            if self.protocol.consistent and (self._aborts or self.portions is not None):
                self.protocol.on_push(learner_id, timestamp, self.clock)  # all shards count the same pushes of each clock
            else:
                self.protocol.on_discard(learner_id, timestamp, self.clock)
            return DROP_REPEATED if self.portions is None else DROP_DUPLICATE
        return LATE

    def on_torn(self, learner_id: int, timestamp: int, seq: int, portion: int = NO_PORTION) -> Verdict:
        """Of a gradient only a part has come."""
        self.dropped_seq[learner_id] = seq
        if self.portions is not None:
            self.portions.drop(portion, learner_id)
        self.verdicts[learner_id] = DROP_TORN.kind
        if learner_id in self.present and not self.finished:
            self.protocol.on_discard(learner_id, timestamp, self.clock)
        return DROP_TORN

    # --------------------------------------------------------------------------------------------------------- updates

    def update_due(self) -> bool:
        """Whether what was summed is to become an update now."""
        return not self.finished and (self.protocol.update_due() or (self._closes and self._summed and self._all_dealt_with()))

    def _all_dealt_with(self) -> bool:
        return self.portions is not None and self.portions.complete

    def on_update(self, samples: int) -> None:
        """The update was made; so many samples have been applied."""
        self.clock += 1
        self.protocol.on_update()
        self.finished = samples >= self._budget_samples
        self._summed = False
        if self.portions is not None and not self.finished:
            self._deal_in_turn()

    def late(self) -> list[int]:
        """Those who compute from older weights, and are to be told so: each once for each pull (`Protocol.aborts`)."""
        if not self.computing:
            return []
        late = [learner_id for learner_id, clock in self.computing.items() if clock < self.clock]
        for learner_id in late:
            del self.computing[learner_id]
        return late

    def on_timeout(self) -> None:
        """The update in the making has taken its time: what has come is enough, or what comes next may be."""
        self.protocol.on_timeout()

    # ----------------------------------------------------------------------------------------------------------- pulls

    def on_pull(self, learner_id: int, min_clock: int) -> Do:
        """A learner asks for weights of at least this clock."""
        if self.finished or self.interrupted:
            return STOP
        if self._gives(learner_id, min_clock):
            return GIVE
        self.waiting[learner_id] = min_clock
        return WAIT

    def ready(self) -> list[int]:
        """Whose pulls have waited, and are answered now: all, where there are no more weights."""
        over = self.finished or self.interrupted
        ready = [learner_id for learner_id, min_clock in self.waiting.items() if over or self._gives(learner_id, min_clock)]
        for learner_id in ready:
            del self.waiting[learner_id]
        return ready

    def _gives(self, learner_id: int, min_clock: int) -> bool:
        """Whether a learner is now given weights."""
        if min_clock > self.clock or not self.protocol.may_pull(learner_id, self.clock):
            return False
        if self._aborts:
            self.computing[learner_id] = self.clock
        return True

    # ------------------------------------------------------------------------------------------------------------- the end

    def on_interrupt(self) -> bool:
        """Whether a signal comes in time: from now on nobody is given weights."""
        if self.finished or self.interrupted:
            return False
        self.interrupted = True
        return True

    def on_enough(self) -> bool:
        """Whether training is to end now, and nobody knew: from now on nobody is given weights. A signal may have come before."""
        if self.finished or self.enough:
            return False
        self.enough = self.interrupted = True
        return True
