"""Shard's loop: receive, ask the rules, sum, update, answer (DESIGN 3; [Zhang16 2.2], [Chen16 Alg. 2, 4]).

The rules decide (`rules/rules.py`); this loop obeys and logs. A shard never waits for another (law 2), and sends only to posted
receives (law 1).

After a signal a shard answers each pull with an ending, and takes pushes until all learners have left. All shards then have the
same pushes. (Under time-outs, or bounded staleness above 0, clocks may differ: then the newest complete checkpoint counts.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

from mpisgd.base.errors import ProtocolError
from mpisgd.comm.messages import NOTHING_MORE, Ending, GaveUp, Goodbye, Interrupt, Message, Pull, Push, Refused, SnapshotPull
from mpisgd.exchange.deltas import Deltas
from mpisgd.exchange.shard_channel import ShardChannel
from mpisgd.records.checkpoint.buffers import PULLS_UNTIL_KEPT
from mpisgd.records.checkpoint.checkpoint import Account
from mpisgd.records.checkpoint.snapshots import Taken
from mpisgd.records.log.schema import Event
from mpisgd.records.shard_records import ShardRecords
from mpisgd.rules.membership import OTHERS_GO_ON, Gone
from mpisgd.rules.rules import PARK, SUM, WAIT, Rules
from mpisgd.rules.verdict import Kind, Verdict
from mpisgd.serving.answering import Answering
from mpisgd.serving.fail_fast import FAIL_FAST, FailFast
from mpisgd.serving.finiteness import Finiteness
from mpisgd.serving.refusals import Refusals
from mpisgd.serving.snapshot_server import SnapshotServer
from mpisgd.vectors.computing import Updates

_APPLY = Kind.APPLY  # spares a look into the enumeration for each gradient
_GONE = {
    Ending.NONE: Gone.LEFT, Ending.FINISHED: Gone.STOPPED, Ending.ENOUGH: Gone.INTERRUPTED, Ending.INTERRUPTED: Gone.INTERRUPTED,
}  # fmt: skip


class Shard:
    """Shard of the parameter server.

    Args:
        timeout_s: seconds from an update to `on_timeout`.
        deltas: vectors held by learners, where they pull rounded weights.
        hands_state_on: snapshots wait for learner 0's buffers (`records/checkpoint/buffers.py`).
        presence: hears of learners that die, hang and come back.

    Attributes:
        received, pushed: per learner, pushes that came, and, once it has left, pushes made.
    """

    def __init__(  # noqa: PLR0913 - each by name
        self,
        channel: ShardChannel,
        rules: Rules,
        update: Updates,
        records: ShardRecords,
        *,
        nonfinite: Literal["stop", "drop", "continue"],
        timeout_s: float = math.inf,
        deltas: Deltas | None = None,
        hands_state_on: bool = False,
        presence: FailFast = FAIL_FAST,
    ) -> None:
        lambda_ = len(rules.present)
        self.channel = channel
        self.rules = rules
        self.update = update
        self.records = records
        self.log, self.progress = records.log, records.progress
        self.refusals = Refusals(lambda_)
        if rules.portions is not None:
            self.refusals.portions = rules.portions.total
        self.finiteness = Finiteness(rules, update, nonfinite)
        self.snapshot_server = SnapshotServer(channel, rules, update, records.snapshots, PULLS_UNTIL_KEPT if hands_state_on else 0)
        self.answering = Answering(channel, rules, update, self.log, self.finiteness, deltas, presence)
        self.received = [0] * lambda_
        self.pushed = [0] * lambda_
        self.updated_s = 0.0
        self._resumed = False
        self._parked: dict[int, Push] = {}
        self._coming: list[tuple[Push, int, Verdict, float]] = []
        """Rows of pushes that come in chunks, and of pushes behind them."""
        self._left: list[Push] = []
        """Pushes that arrived after their sum was abandoned; headers only."""
        self._losses = 0.0
        self._timeout_s = timeout_s
        self._over_s = math.inf
        self._presence, self._tolerant = presence, presence.tolerant  # spares calls for each message
        self._handlers: dict[Any, Callable[[Any], None]] = {
            Push: self._take,
            Pull: self._pull,
            Goodbye: self._part,
            GaveUp: self._note_given_up,
            Refused: self.refuse,
            Interrupt: lambda told: self.interrupt(told.signal),
            SnapshotPull: self._snapshot_pull,
        }
        presence.attend(self)

    def restore(self, account: Account, next_seq: list[int]) -> None:
        """Go on from a checkpoint, before `begin`; `update` has its tensors.

        Learner l goes on with mini-batch `next_seq[l]`, the first that any shard wants: others may have applied it.
        """
        last_seq = [seq - 1 for seq in account.next_seq]
        self.rules.resume(account.clock, account.applied_seq, last_seq, next_seq, account.portions)
        self.refusals.last_seq = last_seq
        self.finiteness.diverged = account.diverged
        self.records.carried, self.records.saved_clock = account.received, account.clock
        self.records.progress.resume(account.clock, account.now_s)
        self._resumed = True

    # -------------------------------------------------------------------------------------------------------- the loop

    def serve(self, evaluate: Callable[[], None] | None = None) -> None:
        """Serve until all learners and the evaluator have left; `evaluate`: for this rank to do then."""
        self.begin()
        self.serve_on(evaluate)

    def begin(self) -> None:
        self.channel.numbers.note_snapshots(max(1, self.records.snapshots.count))
        self.answering.begin()
        now_s = self.channel.now_s()
        self.log.event(Event.RESUMED if self._resumed else Event.STARTED, self.rules.clock, now_s)
        if self._resumed:
            self.updated_s = now_s
        else:
            self.records.take_snapshot(self.update, 0, self.channel.now_s())
        self._over_s = self.updated_s + self._timeout_s
        if self.records.checkpoints is not None:
            self._mark()
        self._presence.begin()

    def serve_on(self, evaluate: Callable[[], None] | None = None) -> None:
        """Serve to the end; save an interrupted run."""
        rules, records = self.rules, self.records
        while (
            learning := rules.present or (rules.absent and not (rules.finished or rules.interrupted))
        ) or self.snapshot_server.is_open:
            if not learning and evaluate is not None and self._presence.evaluates:
                self._presence.end()
                evaluate()
            else:
                self.serve_one()
        self._tell_of_pushes()
        self.answering.end()
        self._presence.end()
        cut_short = rules.interrupted and not rules.finished
        if cut_short and records.checkpoints is not None and records.saved_clock != rules.clock:
            records.checkpoints.wait()
            self._save(last=True)
        records.end(self.channel.now_s)
        if cut_short:
            self.log.flush()
        else:
            carried, diverged = records.carried, self.finiteness.diverged
            self.log.summary(rules.clock, self.update.samples, carried + sum(self.received), carried + sum(self.pushed), diverged)

    def serve_one(self) -> None:
        rules, update, presence, whose = self.rules, self.update, self._presence, None
        if rules.ordered and not update.bodies.has_room:  # no memory to park pushes
            whose = rules.turn()
        until_s = min(self._over_s, presence.look_s) if self._tolerant else self._over_s
        put_off = self.answering.put_off
        message = put_off.popleft() if put_off else self.channel.receive(update.bodies, whose, until_s)
        if message is not None:
            self.handle(message)
        elif until_s == self._over_s:
            self._over_s = math.inf
            self._tell(Event.TIMEOUT)
            rules.on_timeout()
            self.settle()
        else:
            presence.look(whose)

    def handle(self, message: Message) -> None:
        if self._tolerant and self._presence.hear(message):
            return
        try:
            handler = self._handlers[message.__class__]
        except KeyError:
            raise ProtocolError(f"{message}: only a fault-tolerant shard is told") from None
        handler(message)

    def _note_given_up(self, told: GaveUp) -> None:
        self._tell(Event.GAVE_UP, told.learner_id, told.seq)
        if told.learner_id == 0:
            self.snapshot_server.has_computed()

    def _snapshot_pull(self, asked: SnapshotPull) -> None:
        self.see_enough(asked)
        self.snapshot_server.ask(asked.number)

    def _tell(self, event: Event, learner_id: int = -1, value: float = math.nan) -> None:
        self.log.event(event, self.rules.clock, self.channel.now_s(), learner_id, value)

    def settle(self) -> None:
        """Make due updates, and sum parked pushes in turn."""
        while True:
            if self.rules.update_due():
                self._update()
            elif self._parked and (turn := self.rules.turn(self._parked)) in self._parked:
                assert turn is not None
                self._sum(self._parked.pop(turn))
            else:
                return

    # ---------------------------------------------------------------------------------------------------------- pushes

    def _take(self, push: Push) -> None:
        rules, learner_id = self.rules, push.learner_id
        if learner_id == 0:
            self.snapshot_server.has_computed()
        was_absent = learner_id in rules.absent
        place = rules.on_push(learner_id, push.timestamp)
        if was_absent:
            self._presence.note_if_back(learner_id)
        if self._cannot_be(push):
            return
        if why := push.body.arrive(push.runs):
            push.body.release()
            self.refuse(Refused(self.channel.rank_of(learner_id), f"learner {learner_id} pushed {why}", push=True))
            return
        self.received[learner_id] += 1
        if place is SUM:
            self._sum(push)
            self.settle()
        elif place is PARK:
            self._parked[learner_id] = push
        else:
            push.body.release()
            self._left.append(push)

    def tear(self, push: Push) -> None:
        """Count and drop a push that came in part; MPI may yet write into its body."""
        push.body.lose()
        if self._cannot_be(push):
            return
        self.received[push.learner_id] += 1
        verdict = self.rules.on_torn(push.learner_id, push.timestamp, push.seq, push.portion)
        self.log.push(push, self.rules.clock, verdict, self.update.learning_rate)
        self.settle()

    def _cannot_be(self, push: Push) -> bool:
        """Refuse an impossible push; return whether refused."""
        clock = self.rules.clock
        why = self.refusals.why_not(push, clock, push.timestamp != clock and self.rules.must_be_fresh(push.learner_id))
        if why:
            push.body.release()
            self.refuse(Refused(self.channel.rank_of(push.learner_id), why, push=True))
        return bool(why)

    def refuse(self, refused: Refused) -> None:
        """Refuse a message; a bad rank must not end the work of all, and is reported at the end (`refusals`)."""
        learner_id = self.channel.learner_of(refused.rank)
        self._tell(Event.REFUSED, learner_id, refused.rank)
        self.refusals.refuse(refused, learner_id, waits=learner_id in self.rules.waiting)

    def _sum(self, push: Push) -> None:
        rules, update, finiteness = self.rules, self.update, self.finiteness
        learner_id, timestamp, seq = push.learner_id, push.timestamp, push.seq
        usable = finiteness.of(push) or not rules.is_wanted(learner_id, seq, push.portion) or finiteness.uses(push, self._tell)
        verdict = rules.judge(learner_id, timestamp, seq, usable, push.portion)
        applies, row = verdict.kind is _APPLY, (push, rules.clock, verdict, update.learning_rate)
        if self._coming or (applies and not push.body.owned):
            self._coming.append(row)
        else:
            self.log.push(*row)
        if applies:
            if finiteness.later:
                finiteness.before_sum(learner_id)
            last = self.answering.chunked and rules.update_due()
            update.accumulate(push.body, verdict.weight, push.samples, timestamp, push.gradients, last=last, skipped=push.runs)
            self._losses += push.loss * push.gradients
            if self.progress.on:
                self.progress.staleness(rules.clock - timestamp)
        else:
            push.body.release()

    # --------------------------------------------------------------------------------------------------------- updates

    def _update(self) -> None:
        rules, update, records = self.rules, self.update, self.records
        if self.channel.duplex:
            self.answering.leave()
        start_s, epochs_before = self.channel.now_s(), update.epochs
        begin = update.begin_step if self.answering.chunked else update.step
        begin()
        due = records.snapshots.due(epochs_before, update.epochs)
        if due:
            self.channel.numbers.note_snapshots(records.snapshots.count + 1)
        if self.finiteness.later:
            self.finiteness.after_update()
        self.answering.follow()
        rules.on_update(update.samples)
        now_s = self.channel.now_s()
        update_s = now_s - start_s
        if self.answering.chunked:
            now_s, making_s = self.answering.make(self._tell_of_pushes)
            update_s += making_s
        else:
            self._tell_of_pushes()
        step, epochs = update.made, update.epochs
        mean_loss = self._losses / step.gradients if step.gradients else math.nan
        self._losses = 0.0
        self.updated_s, self._over_s = now_s, math.inf if rules.finished else now_s + self._timeout_s
        self.log.update(rules.clock, step, update.samples, now_s=now_s, update_s=update_s, mean_loss=mean_loss)
        self.progress.update(rules.clock, epochs, mean_loss, now_s)
        if rules.finished:
            self.finiteness.check()
            self.log.event(Event.STOPPED, rules.clock, now_s)
        elif due:
            records.take_snapshot(update, rules.clock, self.channel.now_s())
        if late := rules.late():
            self.channel.notify(late, rules.clock)
        self.answering.answer_waiting()
        self.snapshot_server.answer()
        if records.checkpoints is not None:
            self._mark()
            if records.due(rules):
                self._save()

    def _tell_of_pushes(self) -> None:
        """Log pushes that have come in chunks, to the last."""
        for row in self._coming:
            self.log.push(*row)
        self._coming.clear()

    def _mark(self) -> None:
        self.records.mark(self.rules, self.channel.now_s(), sum(self.received) - len(self._parked), self.finiteness.diverged)

    def _save(self, last: bool = False) -> None:
        self.finiteness.check()
        self.records.save(self.channel.now_s, last)

    # ------------------------------------------------------------------------------------------------ pulls, departures

    def _pull(self, pull: Pull) -> None:
        learner_id = pull.learner_id
        if learner_id == 0:
            self.snapshot_server.has_pulled()
        if self.answering.answer(pull) is WAIT:
            self.refusals.check_waiting(learner_id)
            if self._tolerant:
                self._presence.note_if_alone(learner_id)
            self._let_go()
        if self._tolerant:
            self._presence.note_if_passed(learner_id, pull.min_clock)

    def _part(self, goodbye: Goodbye) -> None:
        learner_id, received = goodbye.learner_id, self.received[goodbye.learner_id]
        if not 0 <= goodbye.pushed - received <= self.refusals.pushes[learner_id]:
            raise ProtocolError(
                f"the books do not balance: learner {learner_id} says {goodbye.pushed} gradients pushed to this shard,"
                f" the shard received {received}"
            )
        self.pushed[learner_id] = received
        self._tell(Event.GOODBYE, learner_id, goodbye.pushed)
        if goodbye.ending == Ending.INTERRUPTED:
            self.interrupt(0)
        elif goodbye.ending == Ending.ENOUGH:
            self._end_training(math.nan)
        if goodbye.ending == Ending.NONE and learner_id in self.rules.present:
            self._tell(Event.DEPARTED, learner_id)
        self.go_on_without(learner_id, _GONE[Ending(goodbye.ending)])
        self.end_if_deserted()

    def go_on_without(self, learner_id: int, gone: Gone) -> None:
        """Remove a learner; where others go on, its whole pushes count."""
        if learner_id in self._parked and gone in OTHERS_GO_ON:
            self._sum(self._parked.pop(learner_id))
        self.rules.membership.on_departure(learner_id, gone)
        if self.update.compensation is not None:
            self.update.compensation.gone(learner_id)
        if gone is not Gone.MISSED:  # once back, it has what was sent
            self.answering.gone(learner_id)
        self.settle()
        if learner_id == 0 and self.rules.present:  # else `end_if_deserted` does
            self.snapshot_server.answer()
        self._presence.note_who_passes()
        self.answering.answer_waiting()
        self._let_go()

    def _let_go(self) -> None:
        """Go on without learners stopped elsewhere, where all others wait."""
        if gone := self.rules.membership.release_stopped():
            for learner_id in gone:
                self._tell(Event.DEPARTED, learner_id)
            self.settle()
            self.answering.answer_waiting()

    def end_if_deserted(self) -> None:
        """End the run, or this attempt, once no learner is present."""
        if self.rules.membership.end_if_deserted():
            self._over_s = math.inf
            if self.rules.enough:
                self._drop_what_is_left()
            self.snapshot_server.answer()

    def interrupt(self, signal: int) -> None:
        """Give no more weights, after a signal to this rank, or (0) to another."""
        if self.rules.on_interrupt():
            self._tell(Event.INTERRUPTED, value=signal)
            self.answering.answer_waiting()

    def snapshot(self, number: int) -> Taken:
        while (taken := self.snapshot_server.find(number)) is None:
            self.serve_one()
        return taken

    def end_evaluation(self) -> None:
        self.snapshot_server.ask(NOTHING_MORE)

    def see_enough(self, asked: SnapshotPull) -> None:
        if asked.enough:
            self._end_training(asked.enough - 1)

    def _end_training(self, snapshot: float) -> None:
        if self.rules.on_enough():
            self._tell(Event.ENOUGH, value=snapshot)
            self.answering.answer_waiting()
            if not self.rules.present:
                self.end_if_deserted()

    def _drop_what_is_left(self) -> None:
        """Drop remaining pushes as late: their sum will not be finished."""
        self.finiteness.check()
        self._tell_of_pushes()
        left, self._left = [*self._left, *self._parked.values()], []
        self._parked.clear()
        for push in sorted(left, key=lambda each: each.arrival_ns):
            verdict = self.rules.judge(push.learner_id, push.timestamp, push.seq, portion=push.portion)
            self.log.push(push, self.rules.clock, verdict, self.update.learning_rate)
