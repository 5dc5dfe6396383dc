"""A shard in a fault-tolerant run: learners may die, or hang, and the others go on (DESIGN 4, laws 2, 4).

A learner that MPI says is dead is *lost*: to the protocol it has departed. One that owes a push or a pull, and of which nothing was
heard for longer than is patient, is *missed*: to the protocol it has departed too, but when something comes from it, it is back.
The last learner that is present is never missed: somebody must be waited for.

Each shard finds out by itself. A gradient under way when its learner died may so have come to one shard, whole, and not to another,
or in part (*torn*): each shard does with it what its protocol does with a gradient that came, or did not. Where one shard has gone
on without a learner and another has not, the learner asks the one that lags for the clock of the other, as ever; so that one knows
that no gradient of its own clock will come (*passed*).
"""

from __future__ import annotations

import sys

from mpisgd.attendance import Attendance
from mpisgd.errors import PeerError
from mpisgd.messages import Goodbye, Lost, Message, Pull, Push, Refused, Stuck, Torn
from mpisgd.protocols.verdict import DROP_MISSED, DROP_TORN, Verdict
from mpisgd.records.schema import Event
from mpisgd.shard import Shard
from mpisgd.succession import DEDICATED, Succession
from mpisgd.tolerant_channel import TolerantShardChannel


class TolerantShard(Shard):
    """One shard; the arguments are those of `Shard`, and what `watch` adds."""

    def watch(self, others: TolerantShardChannel, patience_s: float, succession: Succession | None, name: str) -> None:
        """Before `begin`: the channel once more, as what it is here; how long a learner may owe something; on shard 0, who
        evaluates; what this shard is called."""
        self._others = others
        self.absent: set[int] = set()
        """Learners that were missed, and are not back yet."""
        self._disturbed = False
        self._parted = False
        """Whether any learner has said goodbye."""
        self._unheeded = set[int]()
        """Learners whose goodbye was refused: if nothing else comes of them, they count as lost."""
        self._attendance = Attendance(len(self.received), patience_s)
        self._succession = succession
        self._name = name

    def begin(self) -> None:
        super().begin()
        self._attendance.begin(self.channel.now_s())

    def serve_on(self) -> None:
        while self.present or self.evaluating or (self.absent and not (self.finished or self.interrupted)):
            self.serve_one()
        for learner_id in sorted(self.absent):
            self._note_lost(learner_id, "is lost: it has not come back before the end of the run")
            self._others.give_up(self._others.rank_of(learner_id))
        super().serve_on()

    def serve_one(self) -> None:
        whose = self._expected() if self._ordered else None
        message = self._next(whose, min(self._over_s, self._attendance.look_s))
        if message is not None:
            self.handle(message)
        elif self.channel.now_s() >= self._over_s:
            self._time_out()
        else:
            self._look_who_is_overdue(whose)

    def handle(self, message: Message) -> None:
        if isinstance(message, (Push, Pull)):
            self._unheeded.discard(message.learner_id)
        if isinstance(message, Push):
            self._attendance.pushed(message.learner_id, message.arrival_ns * 1e-9)
        elif isinstance(message, Pull):
            self._attendance.waits(message.learner_id)
        elif isinstance(message, Refused):
            if message.push and (learner_id := self.channel.learner_of(message.rank)) >= 0:
                self._attendance.pushed(learner_id, self.channel.now_s())
        elif isinstance(message, Lost):
            self._lose(message.rank, message.learner_id)
            return
        elif isinstance(message, Torn):
            self._tear(message.push)
            return
        elif isinstance(message, Stuck):
            self._unstick(message.rank, message.learner_id)
            return
        super().handle(message)

    # ------------------------------------------------------------------------------------------------- dead, or missed

    def _lose(self, rank: int, learner_id: int) -> None:
        """A rank is dead."""
        self._pulls.pop(learner_id, None)
        if learner_id in self.present or learner_id in self.absent:
            self._note_lost(learner_id, "is lost")
            self._disturbed = True
            self.absent.discard(learner_id)
            if learner_id in self.present:
                self._go_on_without(learner_id)
            if not (self.present or self.absent):
                self._end_without(learner_id)
        if rank == self._others.evaluator_rank:
            self._snapshot_pull = None
        if self._succession is not None:
            self._succession.lost(DEDICATED if learner_id < 0 else learner_id)
            self._appoint()

    def _end_without(self, learner_id: int) -> None:
        """The last one that had not said goodbye is dead. Raises PeerError where that leaves a run without an end."""
        if not (self._parted or self.finished or self.interrupted):
            raise PeerError(f"no learner is left at clock {self.clock}")
        self._cut_short = self._cut_short or self.interrupted
        self._end_if_all_have_left()

    def _look_who_is_overdue(self, whose: int | None) -> None:
        """Miss those of whom too little was heard. Where one is waited for in its turn, the others may be blocked behind it."""
        now_s = self.channel.now_s()
        self._attendance.looked(now_s)
        for learner_id in self._attendance.overdue(self.present if whose is None else {whose} & self.present, now_s):
            if len(self.present) > 1:
                self._miss(learner_id)
            elif learner_id in self._unheeded:
                rank = self._others.rank_of(learner_id)
                self._others.give_up(rank)
                self._lose(rank, learner_id)

    def _miss(self, learner_id: int) -> None:
        """Go on without a learner, until it asks for weights."""
        silent_s = self._attendance.silent_s(learner_id, self.channel.now_s())
        self._note(Event.MISSED, learner_id, f"was not heard of for {silent_s:.2f} s: the others go on without it", silent_s)
        self._disturbed = True
        self._pulls.pop(learner_id, None)
        self.absent.add(learner_id)
        self._go_on_without(learner_id)

    def _take_back(self, learner_id: int) -> None:
        """A learner that was missed is there again: the next update may wait for it."""
        self.absent.discard(learner_id)
        self.present.add(learner_id)
        self.protocol.on_return(learner_id, self.clock)
        self._note(Event.RETURNED, learner_id, "is back")

    def _tear(self, push: Push) -> None:
        """A gradient has come in part: it counts as pushed, and is dropped; into its buffer MPI may yet write."""
        learner_id = push.learner_id
        self._attendance.pushed(learner_id, push.arrival_ns * 1e-9)
        self.update.renew_scratch()
        if self._cannot_be(push):
            return
        self.received[learner_id] += 1
        self.log.push(push, self.clock, DROP_TORN, self.update.learning_rate)
        self._dropped_seq[learner_id] = push.seq
        if learner_id in self.present and not self.finished:
            self.protocol.on_discard(learner_id, push.timestamp, self.clock)
            self._sum_parked()
            self._update_if_due()

    def _unstick(self, rank: int, learner_id: int) -> None:
        """A transfer to or from a rank was given up."""
        if learner_id in self.present:
            self.log.event(Event.STUCK, self.clock, self.channel.now_s(), learner_id)
            if len(self.present) > 1:
                self._miss(learner_id)
        elif learner_id not in self.absent:  # it has said goodbye, or is no learner: it was to be told, or to evaluate
            self._others.give_up(rank)
            self._lose(rank, learner_id)

    # ----------------------------------------------------------------------------------------------------- what they send

    def _take(self, push: Push) -> None:
        """One that was missed is back, unless its gradient is of a clock that went on without it."""
        if push.learner_id in self.absent and not self.finished and not self._is_past(push):
            self._take_back(push.learner_id)
        super()._take(push)

    def _must_be_fresh(self, learner_id: int) -> bool:
        """One that the others did not wait for may have older weights."""
        return learner_id not in self.absent and super()._must_be_fresh(learner_id)

    def _is_past(self, push: Push) -> bool:
        return self.protocol.lockstep and push.timestamp < self.clock

    def _is_turn_of(self, learner_id: int) -> bool:
        """What will be dropped is not kept until its turn."""
        return learner_id in self.absent or super()._is_turn_of(learner_id)

    def _judge(self, push: Push) -> Verdict:
        return DROP_MISSED if push.learner_id in self.absent and not self.finished else super()._judge(push)

    def _pull(self, learner_id: int, min_clock: int) -> None:
        passes = self.protocol.consistent and min_clock > self.clock and self._attendance.owes_push(learner_id)
        super()._pull(learner_id, min_clock)
        if passes and self._disturbed and learner_id in self.present and not self.finished:
            self.log.event(Event.PASSED, self.clock, self.channel.now_s(), learner_id)
            self.protocol.on_discard(learner_id, self.clock, self.clock)
            self._sum_parked()
            self._update_if_due()

    def _wait(self, learner_id: int, min_clock: int) -> None:
        self._attendance.waits(learner_id)
        super()._wait(learner_id, min_clock)

    def _finish_answers(self, learner_ids: list[int], now_s: float) -> None:
        super()._finish_answers(learner_ids, now_s)
        now_s = self.channel.now_s()
        for learner_id in learner_ids:
            self._attendance.given(learner_id, now_s)
            if learner_id in self.absent:
                self._take_back(learner_id)

    def _part(self, goodbye: Goodbye) -> None:
        learner_id = goodbye.learner_id
        if why := self._cannot_part(goodbye):
            self._unheeded.add(learner_id)
            self._refuse_message(Refused(self._others.rank_of(learner_id), why, push=False))
            return
        self._others.has_parted(learner_id)
        if learner_id in self.absent:
            self.absent.discard(learner_id)
            self._note(Event.DEPARTED, learner_id, "is back, and leaves")
        self._parted = True
        super()._part(goodbye)
        if self._succession is not None:
            if self.evaluating:
                self._succession.free.append(learner_id)
                self._appoint()
            else:
                self._others.answer_goodbye(learner_id, evaluate=False)

    def _cannot_part(self, goodbye: Goodbye) -> str:
        """Why a goodbye is refused; "" = it is not."""
        learner_id, received = goodbye.learner_id, self.received[goodbye.learner_id]
        if learner_id not in self.present and learner_id not in self.absent:
            return f"learner {learner_id} says goodbye, and has left already"
        most = received + self.refusals.pushes[learner_id]
        if not received <= goodbye.pushed <= most:
            return f"learner {learner_id} says goodbye after {goodbye.pushed} pushes: expected {received} ... {most}"
        return ""

    # -------------------------------------------------------------------------------------------------------- evaluation

    def _appoint(self) -> None:
        """See to it that somebody evaluates."""
        if self._succession is None or not self.evaluating:
            return
        learner_id = self._succession.appoint()
        if learner_id is not None:
            self._others.answer_goodbye(learner_id, evaluate=True)
        elif self._succession.evaluator is None and not self.present and not self.absent:
            raise PeerError("no rank is left to evaluate and to save the weights")

    def _answer_snapshot(self) -> None:
        evaluated = self.evaluating
        super()._answer_snapshot()
        if evaluated and not self.evaluating and self._succession is not None:
            self._others.pass_on_nothing_more()
            for learner_id in self._succession.free:
                self._others.answer_goodbye(learner_id, evaluate=False)
            self._succession.free.clear()

    def _note_lost(self, learner_id: int, text: str) -> None:
        """With the clock of the weights that it was given last: another shard may have a gradient that came from them."""
        self.pushed[learner_id] = self.received[learner_id]
        clock, _ = self.given[learner_id]
        self._note(Event.LOST, learner_id, text, clock)

    def _note(self, event: Event, learner_id: int, text: str, value: float = 0.0) -> None:
        """Into the log, and for everybody to see at once."""
        self.log.event(event, self.clock, self.channel.now_s(), learner_id, value)
        print(f"mpisgd: {self._name}, clock {self.clock}: learner {learner_id} {text}", file=sys.stderr, flush=True)
