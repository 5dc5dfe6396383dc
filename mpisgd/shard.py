"""A shard's loop: receive, ask the protocol, sum, update, answer (DESIGN 3, "How a gradient flows").

It reads beside [Zhang16 2.2] and [Chen16 Alg. 2, 4]; what differs between them is in `protocols/` alone. The shard never
waits for another shard (law 2) and sends only to receives that are posted (law 1).

Where a signal interrupts the run, a shard answers every pull with that, and goes on taking what is pushed, by the rules of the
protocol, until all learners have left: so all shards have had the same pushes, and no shard need ask another at which clock to
write the last checkpoint. (They come to different clocks where the rules let them, by time-outs or where staleness is bounded but
not zero: then no complete checkpoint arises there, and the newest one before counts.)
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import Final, Literal, NoReturn

from mpisgd.channel import ShardChannel
from mpisgd.communicator import Buffer
from mpisgd.computing import Updates
from mpisgd.errors import DivergenceError, ProtocolError
from mpisgd.flat import on_host
from mpisgd.messages import FINAL, NOTHING_MORE, Ending, GaveUp, Goodbye, Interrupt, Message, Pull, Push, Refused, SnapshotPull
from mpisgd.protocols.base import Protocol
from mpisgd.protocols.verdict import DROP_NONFINITE, DROP_REPEATED, LATE, Kind, Verdict
from mpisgd.records.checkpoint import Account
from mpisgd.records.checkpoints import Checkpoints
from mpisgd.records.mark import Mark
from mpisgd.records.progress import Progress
from mpisgd.records.schema import Event
from mpisgd.records.snapshots import Snapshots
from mpisgd.records.writer import ShardLog
from mpisgd.refusals import Refusals

_isfinite: Final = math.isfinite  # once for each gradient: found without a look into a module

DROPS_IN_A_ROW = 20
"""Where gradients that are not finite are dropped, and so many per learner were dropped without one that was not, the run has
diverged: it would never end."""


class Shard:
    """One shard of the parameter server.

    Args:
        budget_samples: the run is over when so many samples have been applied.
        nonfinite: what to do with a gradient that is not finite.
        snapshots: where copies of the weights for evaluation go.
        log, progress: are told; never asked.
        timeout_s: the protocol is told when an update has been in the making for so long.
        checkpoints: where copies of the slice go, from which the run can be continued; None = nowhere.

    Attributes:
        finished: enough samples have been applied, or all learners have left.
        interrupted: a signal has come before that; where `finished` is true as well in the end, it came too late to matter.
    """

    def __init__(
        self,
        channel: ShardChannel,
        protocol: Protocol,
        update: Updates,
        *,
        lambda_: int,
        budget_samples: float,
        nonfinite: Literal["stop", "drop", "continue"],
        snapshots: Snapshots,
        log: ShardLog,
        progress: Progress,
        timeout_s: float = math.inf,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        self.channel = channel
        self.protocol = protocol
        self.update = update
        self.budget_samples = budget_samples
        self.timeout_s = timeout_s
        self.nonfinite = nonfinite
        self.snapshots = snapshots
        self.log = log
        self.progress = progress
        self.checkpoints = checkpoints
        self.clock = 0
        self.resumed = False
        self.finished = False
        self.interrupted = False
        self.diverged = False
        self.present = set(range(lambda_))
        self.evaluating = True
        self.received = [0] * lambda_
        self.pushed = [0] * lambda_
        self.applied_seq = [-1] * lambda_
        self._dropped_seq = [-1] * lambda_
        self.refusals = Refusals(lambda_)
        self._carried = 0
        """Pushes that were received before the checkpoint that this run continues from."""
        self._mark: Mark | None = None
        self._saved_clock = -1
        """Of the last checkpoint that was taken, or that this run continues from."""
        self._cut_short = False
        """Whether a learner has left because of a signal."""
        self._parked: dict[int, Push] = {}
        self._computing: dict[int, int] = {}
        self._pulls: dict[int, int] = {}
        self.given: list[tuple[int, float]] = [(-1, 0.0)] * lambda_
        """Per learner, the clock of the weights that it was given last, and the second."""
        self._verdicts: dict[int, int] = {}
        self._snapshot_pull: int | None = None
        self._ordered = protocol.ordered
        self._fresh = protocol.fresh
        self._aborts = protocol.aborts
        self._compensation = update.compensation
        self._followed: bool = progress.on  # whether anybody looks at the staleness
        channel.chunks_count = update.chunks_count
        self._put_off: deque[Message] = deque()
        """What has come while an update was being made."""
        self._check_later = update.checks_sums = nonfinite == "stop" and not update.cached
        self._summed_learners, self._unchecked = set[int](), set[int]()
        self._dropped_in_a_row = 0
        self._losses = 0.0
        self.updated_s = 0.0
        self._over_s = math.inf

    @property
    def waiting(self) -> dict[int, int]:
        """Learners whose pulls are not answered yet, with the clock that each asks for at least."""
        return dict(self._pulls)

    def serve(self) -> None:
        """Serve until every learner and the evaluator have said goodbye."""
        self.begin()
        self.serve_on()

    def begin(self) -> None:
        """The first words of the log, and the first snapshot, unless the run is continued."""
        now_s = self.channel.now_s()
        if self.resumed:
            self.updated_s = now_s
            self.log.event(Event.RESUMED, self.clock, now_s)
        else:
            self.log.event(Event.STARTED, self.clock, now_s)
            self._take_snapshot()
        self._over_s = self.updated_s + self.timeout_s
        self._make_mark()

    def restore(self, account: Account, next_seq: list[int]) -> None:
        """Before `begin`: go on from a checkpoint, to whose tensors `update` has been restored.

        Learner l goes on with mini-batch `next_seq[l]`: the first that any shard wants, so that another may have applied it.
        """
        self.resumed = True
        self.clock = self._saved_clock = account.clock
        self._carried = account.received
        self.applied_seq = list(account.applied_seq)
        self._dropped_seq = [seq - 1 for seq in account.next_seq]
        self.refusals.last_seq = list(self._dropped_seq)
        self.diverged = account.diverged
        self.protocol.on_resume(list(next_seq))
        self.progress.resume(account.clock, account.now_s)

    def serve_on(self) -> None:
        """Serve what is left to be served, then say the last words; of a run that is interrupted, save what there is instead."""
        while self.present or self.evaluating:
            self.serve_one()
        if self.interrupted and not self.finished:
            self._save()
        if self.checkpoints is not None:
            self.checkpoints.wait()
            self._note_unsaved(self.checkpoints)
        if self.interrupted and not self.finished:
            self.log.flush()
            return
        received, pushed = self._carried + sum(self.received), self._carried + sum(self.pushed)
        self.log.summary(self.clock, self.update.samples, received, pushed, self.diverged)

    def serve_one(self) -> None:
        """Wait for the next message, or for the time to be over, and do what it asks for."""
        whose = self._expected() if self._ordered else None
        message = self._next(whose, self._over_s)
        if message is None:
            self._time_out()
        else:
            self.handle(message)

    def _next(self, learner_id: int | None, until_s: float) -> Message | None:
        """What is to be done next; the arguments are those of `ShardChannel.receive`."""
        return self._put_off.popleft() if self._put_off else self.channel.receive(self.update.inbox, learner_id, until_s)

    def handle(self, message: Message) -> None:
        """Do what a message asks for; the gradient of a push lies in `update.inbox`."""
        if isinstance(message, Push):
            self._take(message)
        elif isinstance(message, Pull):
            self._pull(message.learner_id, message.min_clock)
        elif isinstance(message, Goodbye):
            self._part(message)
        elif isinstance(message, GaveUp):
            self.log.event(Event.GAVE_UP, self.clock, self.channel.now_s(), message.learner_id, message.seq)
        elif isinstance(message, Refused):
            self._refuse_message(message)
        elif isinstance(message, Interrupt):
            self._interrupt(message.signal)
        elif isinstance(message, SnapshotPull):
            self._snapshot_pull = message.number
            self._answer_snapshot()
        else:
            raise ProtocolError(f"{message}: only a fault-tolerant shard is told")

    def _refuse_message(self, refused: Refused) -> None:
        """The shard lives on: what one rank sends is not to end the work of all; the run says so at its end (`refusals`)."""
        learner_id = self.channel.learner_of(refused.rank)
        self.refusals.refuse(refused, learner_id)
        self.log.event(Event.REFUSED, self.clock, self.channel.now_s(), learner_id, refused.rank)

    def _expected(self) -> int | None:
        """Whose message must be next: where an order is wanted, and there is no memory to keep what comes before its turn."""
        turn = self._turn()
        return None if turn is None or self.update.room_to_park else turn

    def _turn(self) -> int | None:
        """Whose push must be summed next, or None = anybody's."""
        turn = None if self.finished else self.protocol.expects()
        return turn if turn in self.present else None

    # ---------------------------------------------------------------------------------------------------------- pushes

    def _take(self, push: Push) -> None:
        if self._cannot_be(push):
            return
        self.received[push.learner_id] += 1
        self.update.take_in()
        if self._aborts:
            self._computing.pop(push.learner_id, None)
        if not self._ordered:
            self._sum(push)
        elif self._cut_short and not self.finished and self.protocol.expects() not in self.present:
            return  # whose turn it is has left: no update will be made with this push, which is computed again
        elif self._is_turn_of(push.learner_id):
            self._sum(push)
            self._sum_parked()
        else:
            self.update.park(push.learner_id)
            self._parked[push.learner_id] = push

    def _cannot_be(self, push: Push) -> bool:
        """Whether a push is refused, whatever the protocol says of it."""
        why = self.refusals.why_not(push, self.clock, self._must_be_fresh(push.learner_id))
        if why:
            self._refuse_message(Refused(self.channel.rank_of(push.learner_id), why, push=True))
        return bool(why)

    def _must_be_fresh(self, learner_id: int) -> bool:
        """Whether a learner can have no weights but the newest."""
        return self._fresh and self._ordered and not self.finished

    def _is_turn_of(self, learner_id: int) -> bool:
        return self._turn() in (None, learner_id)

    def _sum_parked(self) -> None:
        """Sum the pushes that were kept and whose turn has come."""
        while (turn := self._turn()) in self._parked:
            assert turn is not None
            self.update.unpark(turn)
            self._sum(self._parked.pop(turn))

    def _sum(self, push: Push) -> None:
        verdict = self._judge(push)
        self._verdicts[push.learner_id] = verdict.kind
        self.log.push(push, self.clock, verdict, self.update.learning_rate)
        if verdict.kind is Kind.APPLY:
            self.applied_seq[push.learner_id] = push.seq
            if self._unchecked:
                self._check_sum()
            if self._check_later:
                self._summed_learners.add(push.learner_id)
            last = self._chunked() and self.protocol.update_due()
            self.update.accumulate(verdict.weight, push.samples, push.timestamp, push.gradients, last=last)
            self._losses += push.loss * push.gradients
            if self._followed:
                self.progress.staleness(self.clock - push.timestamp)
        elif verdict.kind is not Kind.REJECT:
            self._dropped_seq[push.learner_id] = push.seq
        self._update_if_due()

    def _judge(self, push: Push) -> Verdict:
        if push.seq <= self.applied_seq[push.learner_id]:  # computed again: another shard rejected it, or had not had it before the
            # checkpoint that the run was continued from
            self.protocol.on_discard(push.learner_id, push.timestamp, self.clock)
            return DROP_REPEATED
        if self.finished:
            return LATE
        finite = self._check_later or self.update.scratch_is_finite()  # whatever the loss: the update keeps what it finds
        if not (finite and _isfinite(push.loss)):
            if self.nonfinite == "stop":
                self._refuse(f"gradient of learner {push.learner_id}, mini-batch {push.seq}, clock {self.clock}, loss {push.loss}")
            self.log.event(Event.NONFINITE, self.clock, self.channel.now_s(), push.learner_id, push.loss)
            if self.nonfinite == "drop":
                self._dropped_in_a_row += 1
                if self._dropped_in_a_row > DROPS_IN_A_ROW * len(self.received):
                    self._refuse(f"the last {self._dropped_in_a_row} gradients, all dropped, up to mini-batch {push.seq}")
                self.protocol.on_discard(push.learner_id, push.timestamp, self.clock)
                return DROP_NONFINITE
            self.diverged = True
        else:
            self._dropped_in_a_row = 0
        return self.protocol.on_push(push.learner_id, push.timestamp, self.clock)

    def _refuse(self, what: str) -> NoReturn:
        raise DivergenceError(
            f"{what}: not finite; lower alpha0 = {self.update.learning_rate:g}, or set nonfinite to drop or continue"
        )

    def _check_sum(self) -> None:
        """Where a gradient that is not finite stops the run anyway, large sums are checked while the new weights are under way.

        The pass over the bytes then costs nothing. Weights made from a bad sum reach only learners that are about to end.
        """
        if not self.update.sum_is_finite():
            self._refuse(f"sum of the gradients of learners {sorted(self._unchecked)} that made clock {self.clock}")
        self._unchecked.clear()

    # --------------------------------------------------------------------------------------------------------- updates

    def _update_if_due(self) -> None:
        while not self.finished and self.protocol.update_due():
            start_s = self.channel.now_s()
            epochs_before = self.update.epochs
            step = self.update.begin_step() if self._chunked() else self.update.step()
            self.clock += 1
            if self._check_later:
                self._unchecked = set(self._summed_learners)
            self._summed_learners.clear()
            self.protocol.on_update()
            self.finished = self.update.samples >= self.budget_samples
            if self._chunked():
                self._make_and_answer(start_s)
                now_s, update_s = self.updated_s, self._making_s
            else:
                self.updated_s = now_s = self.channel.now_s()
                update_s = now_s - start_s
            self._over_s = now_s + self.timeout_s
            mean_loss = self._losses / step.gradients if step.gradients else math.nan
            self._losses = 0.0
            self.log.update(self.clock, step, self.update.samples, now_s=now_s, update_s=update_s, mean_loss=mean_loss)
            self.progress.update(self.clock, self.update.epochs, mean_loss, now_s)
            if self.finished:
                self._over_s = math.inf
                if self._unchecked:
                    self._check_sum()
                self.log.event(Event.STOPPED, self.clock, now_s)
            elif self.snapshots.due(epochs_before, self.update.epochs):
                self._take_snapshot()
            if self._aborts:
                self._tell_the_late()
            if self._pulls:
                self._answer_waiting()
            self._answer_snapshot()
            if self.checkpoints is not None:
                self._make_mark()
                if not self.finished and self.checkpoints.due(self.clock):
                    self.write_checkpoint(self.checkpoints)

    def _chunked(self) -> bool:
        """Whether weights are sent while they are made."""
        return self.update.chunks_count > 1

    def _make_and_answer(self, start_s: float) -> None:
        """Make the new weights, begun at that second, chunk by chunk; who waits for them is sent each as soon as it is made.

        The learner whose push has made the update, for one, asks while chunks are being made.
        """
        self._making_s, answered = self.channel.now_s() - start_s, list[int]()
        for chunk in self._timed(self.update.chunks()):
            if len(answered) < len(self.present) and not (self.finished or self.interrupted):
                self._take_pulls()
                if ready := self._ready():
                    self.channel.open_answers(ready, self.update.served, self.clock, self._verdicts)
                    answered += ready
            self.channel.add_chunk(chunk)
        self.channel.close_answers()
        if answered:
            self._finish_answers(answered, self.updated_s)

    def _timed(self, chunks: Iterator[Buffer]) -> Iterator[Buffer]:
        """The same, the seconds of their making summed; when the last one is made, the update is.

        That is before it leaves: a learner that has it goes on at once, and this rank may have to wait for a core just then.
        """
        start_s = self.channel.now_s()
        for chunk in chunks:
            self.updated_s = self.channel.now_s()
            self._making_s += self.updated_s - start_s
            yield chunk
            start_s = self.channel.now_s()

    def _take_pulls(self) -> None:
        """Let those whose pulls have come, and may be answered, wait with the others; all else is put off."""
        while (message := self.channel.receive_pull()) is not None:
            if isinstance(message, Pull) and self._may_answer(message.learner_id, message.min_clock):
                self._wait(message.learner_id, message.min_clock)
            else:
                self._put_off.append(message)

    def _tell_the_late(self) -> None:
        """Those who compute from older weights, and have not been told before, are told once; they give up (`Protocol.aborts`)."""
        late = [learner_id for learner_id, clock in self._computing.items() if clock < self.clock]
        if late:
            self.channel.notify(late, self.clock)
            for learner_id in late:
                del self._computing[learner_id]

    def _time_out(self) -> None:
        """The update in the making has taken its time; what has come is enough, or what comes next may be."""
        self._over_s = math.inf
        self.log.event(Event.TIMEOUT, self.clock, self.channel.now_s())
        self.protocol.on_timeout()
        self._update_if_due()

    # ----------------------------------------------------------------------------------------------------------- pulls

    def _pull(self, learner_id: int, min_clock: int) -> None:
        if self.finished:
            self.channel.stop(learner_id, self.clock, Ending.FINISHED)
        elif self.interrupted:
            self.channel.stop(learner_id, self.clock, Ending.INTERRUPTED)
        elif self._may_answer(learner_id, min_clock):
            self._answer([learner_id])
        else:
            self._wait(learner_id, min_clock)

    def _wait(self, learner_id: int, min_clock: int) -> None:
        """A learner's pull is answered later."""
        self.refusals.check_waiting(learner_id)
        self._pulls[learner_id] = min_clock

    def _may_answer(self, learner_id: int, min_clock: int) -> bool:
        return min_clock <= self.clock and self.protocol.may_pull(learner_id, self.clock)

    def _answer_waiting(self) -> None:
        """Answer those who wait and whose pulls the protocol now allows."""
        if self.finished:
            self._stop_waiting(Ending.FINISHED)
        elif ready := self._ready():
            self._answer(ready)

    def _ready(self) -> list[int]:
        """Those who waited and whose pulls the protocol now allows: they wait no more."""
        pulls = self._pulls
        ready = [learner_id for learner_id, min_clock in pulls.items() if self._may_answer(learner_id, min_clock)]
        for learner_id in ready:
            del pulls[learner_id]
        return ready

    def _stop_waiting(self, ending: int) -> None:
        for learner_id in self._pulls:
            self.channel.stop(learner_id, self.clock, ending)
        self._pulls.clear()

    def _answer(self, learner_ids: list[int]) -> None:
        clock, now_s = self.clock, self.channel.now_s()
        if self._chunked():
            self.channel.open_answers(learner_ids, self.update.served, clock, self._verdicts)
            for chunk in self.update.chunks():
                self.channel.add_chunk(chunk)
            self.channel.close_answers()
        else:
            self.channel.start_answers(learner_ids, self.update.served, clock, self._verdicts)
        self._finish_answers(learner_ids, now_s)

    def _finish_answers(self, learner_ids: list[int], now_s: float) -> None:
        """The newest weights are on their way to these learners, since that second."""
        clock = self.clock
        if self._unchecked:
            self._check_sum()
        if not self.channel.finish_answers():
            self.update.renew_weights()
        for learner_id in learner_ids:
            self.given[learner_id] = (clock, now_s)
            if self._aborts:
                self._computing[learner_id] = clock
            if self._compensation is not None:
                self._compensation.given(learner_id, clock)
            self.log.answered(learner_id, now_s)

    def _part(self, goodbye: Goodbye) -> None:
        learner_id = goodbye.learner_id
        lost = goodbye.pushed - self.received[learner_id]
        if not 0 <= lost <= self.refusals.pushes[learner_id]:
            raise ProtocolError(
                f"the books do not balance: learner {learner_id} says it pushed {goodbye.pushed} gradients to this shard,"
                f" which received {self.received[learner_id]}"
            )
        self.pushed[learner_id] = self.received[learner_id]
        self.log.event(Event.GOODBYE, self.clock, self.channel.now_s(), learner_id, goodbye.pushed)
        if goodbye.ending == Ending.INTERRUPTED:
            self._interrupt(0)
            self._cut_short = True
        elif goodbye.ending == Ending.NONE and learner_id in self.present:
            self.log.event(Event.DEPARTED, self.clock, self.channel.now_s(), learner_id)
            self._go_on_without(learner_id)
        self._forget(learner_id)
        self._end_if_all_have_left()

    def _end_if_all_have_left(self) -> None:
        if not self.present:
            self.finished = self.finished or not self._cut_short
            self._over_s = math.inf
            self._answer_snapshot()

    def _forget(self, learner_id: int) -> None:
        """Nothing more comes from this learner."""
        self.present.discard(learner_id)
        self._computing.pop(learner_id, None)
        if self._compensation is not None:
            self._compensation.gone(learner_id)

    def _go_on_without(self, learner_id: int) -> None:
        """A learner leaves while others go on; what it has pushed, whole, counts."""
        self._forget(learner_id)
        if learner_id in self._parked:
            self.update.unpark(learner_id)
            self._sum(self._parked.pop(learner_id))
        self.protocol.on_departure(learner_id)
        self._sum_parked()
        self._update_if_due()
        self._answer_waiting()

    def _interrupt(self, signal: int) -> None:
        """A signal has come, to this rank or (0) to another: nobody is given weights any more."""
        if self.finished or self.interrupted:
            return
        self.interrupted = True
        self.log.event(Event.INTERRUPTED, self.clock, self.channel.now_s(), value=signal)
        self._stop_waiting(Ending.INTERRUPTED)

    # ------------------------------------------------------------------------------------------------------- snapshots

    def _take_snapshot(self) -> None:
        now_s = self.channel.now_s()
        self.snapshots.take(self.update, self.clock, now_s)
        self.log.event(Event.SNAPSHOT, self.clock, now_s)

    def _make_mark(self) -> None:
        """Just after an update: this is where the run can go on from."""
        if self.checkpoints is None:
            return
        self._mark = Mark(
            self.clock,
            self.channel.now_s(),
            self._carried + sum(self.received) - len(self._parked),
            self.applied_seq,
            self._dropped_seq,
            self.log.rows(),
            self.snapshots.count,
            self.diverged,
        )

    def _save(self) -> None:
        """All learners have left an interrupted run: write a checkpoint of the last update, unless there is one."""
        self.log.flush()
        if self.checkpoints is not None and self._saved_clock != self.clock:
            self.checkpoints.wait()
            self.write_checkpoint(self.checkpoints, last=True)

    def write_checkpoint(self, checkpoints: Checkpoints, last: bool = False) -> None:
        """Begin to write a checkpoint of the last update; `last`: there will be no other.

        It is complete when all shards have done so at this clock (`Checkpoints.also_at`); `checkpoints.wait()` waits for this one.
        """
        mark, start_s = self._mark, self.channel.now_s()
        assert mark is not None
        if self._unchecked:
            self._check_sum()
        if checkpoints.busy():
            self.log.event(Event.SKIPPED, self.clock, start_s)
            return
        self.log.flush()
        self._saved_clock = self.clock
        self._note_unsaved(checkpoints)
        checkpoints.take(
            clock=self.clock,
            now_s=mark.now_s,
            received=mark.received,
            applied_seq=mark.applied_seq,
            next_seq=mark.next_seq,
            rows=mark.rows,
            snapshots=self.snapshots.taken[: mark.snapshots],
            diverged=mark.diverged,
            counts=self.log.counts(),
            last=last,
        )
        now_s = self.channel.now_s()
        self.log.event(Event.CHECKPOINT, self.clock, now_s, value=now_s - start_s)

    def _note_unsaved(self, checkpoints: Checkpoints) -> None:
        for clock in checkpoints.lost():
            self.log.event(Event.UNSAVED, self.clock, self.channel.now_s(), value=clock)

    def _answer_snapshot(self) -> None:
        """Answer the evaluator, if it waits and what it waits for is there or will never be."""
        number = self._snapshot_pull
        if number is None:
            return
        if number == NOTHING_MORE:
            self.evaluating = False
        elif self.interrupted and not self.finished:
            if self.present:  # what they still push may finish the run
                return
            self.channel.answer_snapshot(self.snapshots.nothing(), 0, 0, 0.0)
        elif number == FINAL and self.finished:
            vectors = [self.update.weights] if self.update.averaged is None else [self.update.weights, self.update.averaged]
            now_s = self.channel.now_s()
            self.channel.answer_snapshot([on_host(vector) for vector in vectors], self.clock, self.update.samples, now_s)
        elif 0 <= number < self.snapshots.count:
            taken = self.snapshots.get(number)
            self.channel.answer_snapshot(taken.vectors, taken.clock, taken.samples, taken.taken_s)
        elif self.finished:
            self.channel.answer_snapshot(self.snapshots.nothing(), 0, 0, 0.0)
        else:
            return
        self._snapshot_pull = None
