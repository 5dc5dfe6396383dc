"""Shard under a coordinator: keeps vectors, obeys commands, answers pulls, decides nothing [Dean12 4.2].

It waits for nobody, and sends only to posted receives (law 1). A push is parked until committed: if missing on another shard, it is
in no sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from mpisgd.base.errors import ProtocolError
from mpisgd.comm.messages import (
    ANSWERED,
    NOTHING_MORE,
    Command,
    Ending,
    Goodbye,
    Interrupt,
    Message,
    Op,
    Pull,
    Push,
    Refused,
    SnapshotPull,
    Tag,
)
from mpisgd.exchange.shard_channel import ShardChannel
from mpisgd.records.checkpoint.checkpoint import Account
from mpisgd.records.checkpoint.snapshots import Taken
from mpisgd.records.log.schema import Event
from mpisgd.records.shard_records import ShardRecords
from mpisgd.rules.membership import Gone
from mpisgd.rules.rules import Rules
from mpisgd.rules.verdict import APPLY, DROP_MISSED, DROP_TORN, Verdict
from mpisgd.sandblaster.membership import Given
from mpisgd.sandblaster.slots import Slots, name_of
from mpisgd.serving.fail_fast import FailFast
from mpisgd.serving.refusals import Refusals
from mpisgd.serving.snapshot_server import SnapshotServer
from mpisgd.update.slice_update import Step
from mpisgd.vectors.chunks import chunks_of
from mpisgd.vectors.computing import Charges
from mpisgd.vectors.memory import host_view

_GONE = {Ending.NONE: Gone.LEFT, Ending.FINISHED: Gone.STOPPED, Ending.INTERRUPTED: Gone.INTERRUPTED}


class BatchShard:
    """Shard of a batch optimisation.

    Args:
        coordinator: rank of the coordinator.
        rules: for clock and membership; they decide nothing.
        charges: pays each sum, and each end of an evaluation as an update.
    """

    def __init__(
        self,
        channel: ShardChannel,
        coordinator: int,
        rules: Rules,
        slots: Slots,
        records: ShardRecords,
        train_samples: int,
        charges: Charges,
        presence: FailFast,
    ) -> None:
        lambda_ = len(rules.present)
        self.channel = channel
        self._coordinator = coordinator
        channel.take_also({Tag.COMMAND: Command}, coordinator)
        self.rules = rules
        self.slots = slots
        self.records = records
        self.refusals = Refusals(lambda_)
        self.updated_s = 0.0
        self.log = records.log
        self.answering = Given(lambda_)
        self._presence = presence
        self.received, self.pushed = [0] * lambda_, [0] * lambda_
        self.snapshot_server = SnapshotServer(channel, rules, slots, records.snapshots)
        self._train_samples = train_samples
        self._summing, self._ending = charges.gradient, charges.update
        self._parked: dict[tuple[int, int], Push] = {}
        self._discarded = [-1] * lambda_
        """Last discarded push, by learner."""
        self._to_keep: list[int] = []
        self._resumed = False
        self._losses = 0.0
        self._portions = 0
        self._epochs = 0.0
        self._signal = 0
        self._over = False
        self._handlers: dict[Any, Callable[[Any], None]] = {
            Push: self._take,
            Command: self._obey,
            Pull: lambda pull: self._give(pull.learner_id),
            Goodbye: self._part,
            SnapshotPull: lambda pull: self.snapshot_server.ask(pull.number),
            Interrupt: lambda told: self.interrupt(told.signal),
            Refused: self.refuse,
        }
        presence.attend(self)

    def serve(self, evaluate: Callable[[], None] | None = None) -> None:
        """Serve until the last command and goodbye; `evaluate`: to be run once learners have left."""
        rules, records, log = self.rules, self.records, self.records.log
        log.event(Event.RESUMED if self._resumed else Event.STARTED, rules.clock, self.channel.now_s())
        if not self._resumed:
            records.take_snapshot(self.slots, 0, self.channel.now_s())
        self._mark()
        self._presence.begin()
        while (learning := not self._over or rules.present) or self.snapshot_server.is_open:
            if not learning and evaluate is not None and self._presence.evaluates:
                evaluate()
            else:
                self._serve_one()
        records.end(self.channel.now_s)
        if rules.finished:
            received, told = records.carried + sum(self.received), records.carried + sum(self.pushed)
            log.summary(rules.clock, self.slots.samples, received, told, diverged=False)
        else:
            log.flush()

    def _serve_one(self) -> None:
        message = self.channel.receive(self.slots.bodies, None, self._presence.look_s)
        if message is not None:
            self.handle(message)
        else:
            self._presence.look(None)

    def snapshot(self, number: int) -> Taken:
        while (taken := self.snapshot_server.find(number)) is None:
            self._serve_one()
        return taken

    def interrupt(self, signal: int) -> None:
        self._signal = self._signal or signal

    def end_evaluation(self) -> None:
        self.snapshot_server.ask(NOTHING_MORE)

    def handle(self, message: Message) -> None:
        if self._presence.hear(message):
            return
        try:
            handler = self._handlers[message.__class__]
        except KeyError:
            raise ProtocolError(f"{message}: a shard under a coordinator is not told") from None
        handler(message)

    def _give(self, learner_id: int) -> None:
        channel, weights = self.channel, host_view(self.slots.served)
        channel.open_answers([learner_id], weights, self.rules.clock, {})
        for chunk in chunks_of(weights):
            channel.add_chunk(chunk)
        channel.close_answers()
        if not channel.finish_answers():  # an answer was given up
            self.slots.lose_served()
        self.answering.given[learner_id] = (self.rules.clock, channel.now_s())
        self.records.log.answered(learner_id, channel.now_s())

    def _tell(self, event: Event, learner_id: int = -1, value: float = float("nan")) -> None:
        self.records.log.event(event, self.rules.clock, self.channel.now_s(), learner_id, value)

    def refuse(self, refused: Refused) -> None:
        learner_id = self.channel.learner_of(refused.rank)
        self.refusals.refuse(refused, learner_id)
        self._tell(Event.REFUSED, learner_id, refused.rank)

    def _take(self, push: Push) -> None:
        learner_id = push.learner_id
        if push.seq <= self._discarded[learner_id]:
            push.body.release()
            self._count(push)
            self._drop(push)
            self._acknowledge(push, whole=True)
            return
        why = self.refusals.why_not(push, self.rules.clock, fresh_only=True)
        if why:
            push.body.release()
            self.refuse(Refused(self.channel.rank_of(learner_id), why, push=True))
            return
        self._count(push)
        self.slots.park(learner_id, push.seq, push.body)
        self._parked[learner_id, push.seq] = push
        self._acknowledge(push, whole=True)

    def tear(self, push: Push) -> None:
        """Count a push that came in part; MPI may yet write into its body."""
        push.body.lose()
        self._count(push)
        self._drop(push, DROP_TORN)
        self._acknowledge(push, whole=False)

    def _count(self, push: Push) -> None:
        self.received[push.learner_id] += 1
        self.refusals.last_seq[push.learner_id] = max(self.refusals.last_seq[push.learner_id], push.seq)

    def _acknowledge(self, push: Push, *, whole: bool) -> None:
        if self._presence.tolerant:
            self.channel.tell([self.channel.rank_of(push.learner_id)], Tag.TAKEN, push.seq, int(whole))

    def _drop(self, push: Push, verdict: Verdict = DROP_MISSED) -> None:
        dropped = self.rules.dropped_seq
        dropped[push.learner_id] = max(dropped[push.learner_id], push.seq)
        self.records.log.push(push, self.rules.clock, verdict, 0.0)

    # ------------------------------------------------------------------------------------------------------- commands

    def _obey(self, command: Command) -> None:
        op, value, slots = command.op, 0.0, self.slots
        if op == Op.COMMIT:
            self._commit(command)
        elif op == Op.DISCARD:
            self._discarded[command.a] = command.b
            for seq in slots.discard(command.a, command.b):
                self._drop(self._parked.pop((command.a, seq)))
        elif op == Op.BEGIN:
            slots.begin(command.a)
        elif op == Op.END:
            value = self._end(command)
        elif op in _BETWEEN:
            _BETWEEN[op](self, command.a)
        else:
            value = slots.compute(op, command.out, command.a, command.b, command.alpha)
        if op in ANSWERED:
            self.channel.tell([self._coordinator], Tag.RESULT, self._signal, value)

    def _commit(self, command: Command) -> None:
        learner_id, seq, portions = command.a, command.b, command.out
        push = self._parked.pop((learner_id, seq), None)
        if push is None:
            raise ProtocolError(f"push {seq} of learner {learner_id} is to be summed, and is not here")
        self._summing()
        push.gradients = portions
        self.slots.commit(learner_id, seq, push.samples)
        applied = self.rules.applied_seq
        applied[learner_id] = max(applied[learner_id], seq)  # sums are in another order than pushes
        self._losses += push.loss * push.samples
        self._portions += portions
        self.records.log.push(push, self.rules.clock, APPLY, 0.0)

    def _end(self, command: Command) -> float:
        rules, start_s = self.rules, self.channel.now_s()
        if command.a != rules.clock:
            raise ProtocolError(f"evaluation {command.a} is over for the coordinator: this shard is at clock {rules.clock}")
        self._ending()
        squared = self.slots.end(command.out)
        rules.on_update(self.slots.samples)
        self.updated_s = self.channel.now_s()
        step = Step(self._portions, command.beta, sum_sq=squared)
        self._losses, self._portions = 0.0, 0
        samples, update_s = self.slots.samples, self.updated_s - start_s
        self.records.log.update(rules.clock, step, samples, now_s=self.updated_s, update_s=update_s, mean_loss=command.alpha)
        self.records.progress.update(rules.clock, samples / self._train_samples, command.alpha, self.updated_s)
        return squared

    def _accept(self, number: int) -> None:
        checkpoints = self.records.checkpoints
        if self.slots.kept.tensors and (checkpoints is None or not checkpoints.busy()):
            self.slots.keep([])
        self.slots.accept(number)
        before, self._epochs = self._epochs, self.slots.samples / self._train_samples
        if self.records.snapshots.due(before, self._epochs):
            self.records.take_snapshot(self.slots, self.rules.clock, self.channel.now_s())
            self.snapshot_server.answer()
        self._mark()

    def _mark(self) -> None:
        if self.records.checkpoints is not None:
            received = sum(self.received) - len(self._parked)
            self.records.mark(self.rules, self.channel.now_s(), received, diverged=False)

    def _keep(self, number: int) -> None:
        self._to_keep.append(number)

    def _save(self, last: int) -> None:
        """Write the kept slots, unless saved; while busy, only the last."""
        numbers, self._to_keep = self._to_keep, []
        records, checkpoints = self.records, self.records.checkpoints
        if checkpoints is None or records.saved_clock == records.marked_clock:
            return
        if last:
            checkpoints.wait()
        if not checkpoints.busy():
            self.slots.keep(numbers)
        records.save(self.channel.now_s, last=True)  # a slot never changes

    def restore(self, account: Account, next_seq: list[int], tensors: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint, before `serve`; slots are numbered by place, and learner l goes on with push `next_seq[l]`."""
        self.slots.restore({place: tensors[name_of(place)] for place in range(len(tensors))}, account.samples)
        self.rules.resume(account.clock, account.applied_seq, [seq - 1 for seq in account.next_seq], next_seq)
        self.refusals.last_seq = [seq - 1 for seq in account.next_seq]
        self.records.carried, self.records.saved_clock = account.received, account.clock
        self._epochs = account.samples / self._train_samples
        self._resumed = True

    def _finish(self, ending: int) -> None:
        self._over = True
        if ending == Ending.FINISHED:
            self.rules.finished = True
            self._tell(Event.STOPPED)
        else:
            self.rules.on_interrupt()
            self._tell(Event.INTERRUPTED, value=self._signal)
        self._presence.end_of_commands()
        self.snapshot_server.answer()

    def _part(self, goodbye: Goodbye) -> None:
        learner_id, received = goodbye.learner_id, self.received[goodbye.learner_id]
        if goodbye.pushed != received:
            raise ProtocolError(
                f"the books do not balance: learner {learner_id} says {goodbye.pushed} gradients pushed to this shard,"
                f" the shard received {received}"
            )
        self.pushed[learner_id] = received
        self._tell(Event.GOODBYE, learner_id, goodbye.pushed)
        if goodbye.ending == Ending.NONE:
            self._tell(Event.DEPARTED, learner_id)
        self.go_on_without(learner_id, _GONE[Ending(goodbye.ending)])

    # ------------------------------------------------------------------------------------------- what `Faults` asks for

    def go_on_without(self, learner_id: int, gone: Gone) -> None:
        self.rules.membership.on_departure(learner_id, gone)
        self.snapshot_server.answer()

    def end_if_deserted(self) -> None:
        """Do nothing: the coordinator ends the run."""

    def settle(self) -> None:
        """Do nothing: the coordinator updates."""

    def see_enough(self, asked: SnapshotPull) -> None:
        """Do nothing."""


_BETWEEN: Mapping[int, Callable[[BatchShard, int], None]] = {
    Op.ACCEPT: BatchShard._accept,
    Op.KEEP: BatchShard._keep,
    Op.SAVE: BatchShard._save,
    Op.FINISH: BatchShard._finish,
}
