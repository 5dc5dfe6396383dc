"""A shard under a coordinator: it keeps vectors, obeys commands, gives weights to whoever pulls, and decides nothing [Dean12 4.2].

It waits for nobody, and sends only to receives that are posted (law 1). A push is parked until the coordinator commits it: so one
that came to this shard and not to another is in no sum.
"""

from __future__ import annotations

from collections.abc import Callable

from mpisgd.base.errors import ProtocolError
from mpisgd.comm.messages import ANSWERED, Command, Ending, Goodbye, Interrupt, Message, Op, Pull, Push, Refused, SnapshotPull
from mpisgd.records.log.schema import Event
from mpisgd.records.shard_records import ShardRecords
from mpisgd.rules.rules import Gone, Rules
from mpisgd.rules.verdict import APPLY, DROP_MISSED
from mpisgd.sandblaster.channels import BatchShardChannel
from mpisgd.sandblaster.slots import Slots
from mpisgd.serving.refusals import Refusals
from mpisgd.serving.snapshot_desk import SnapshotDesk
from mpisgd.update.slice_update import Step
from mpisgd.vectors.memory import host_view

_GONE = {Ending.NONE: Gone.LEFT, Ending.FINISHED: Gone.STOPPED, Ending.INTERRUPTED: Gone.INTERRUPTED}


class BatchShard:
    """One shard.

    Args:
        rules: count evaluations, and know who is present; they are asked nothing.
        train_samples: samples of one epoch.
        costs: called before a gradient is summed, and before an evaluation is ended: let the time pass that this is to cost.

    Attributes:
        updated_s: when the last evaluation was over.
    """

    def __init__(
        self,
        channel: BatchShardChannel,
        rules: Rules,
        slots: Slots,
        records: ShardRecords,
        train_samples: int,
        costs: tuple[Callable[[], None], Callable[[], None]],
    ) -> None:
        lambda_ = len(rules.present)
        self.channel = channel
        self.rules = rules
        self.slots = slots
        self.records = records
        self.refusals = Refusals(lambda_)
        self.updated_s = 0.0
        self._desk = SnapshotDesk(channel, rules, slots, records.snapshots)
        self._train_samples = train_samples
        self._summing, self._ending = costs
        self._parked: dict[tuple[int, int], Push] = {}
        self._received = [0] * lambda_
        self._told = 0
        self._losses = 0.0
        self._portions = 0
        self._epochs = 0.0
        """Of the last iteration."""
        self._signal = 0
        self._over = False

    def serve(self) -> None:
        """Serve until the coordinator has no more commands, and all learners and the evaluator have said goodbye."""
        rules, records, log = self.rules, self.records, self.records.log
        log.event(Event.STARTED, 0, self.channel.now_s())
        records.take_snapshot(self.slots, 0, self.channel.now_s())
        self._mark()
        while not self._over or rules.present or self._desk.is_open:
            message = self.channel.receive(self.slots.inbox)
            assert message is not None
            self.handle(message)
        if rules.interrupted and records.checkpoints is not None:
            records.save(self.channel.now_s, last=True)
        records.end(self.channel.now_s)
        if rules.finished:
            log.summary(rules.clock, self.slots.samples, sum(self._received), self._told, diverged=False)
        else:
            log.flush()

    def handle(self, message: Message) -> None:
        """Do what a message asks for; the gradient of a push lies in the inbox."""
        if isinstance(message, Push):
            self._take(message)
        elif isinstance(message, Command):
            self._obey(message)
        elif isinstance(message, Pull):
            self.channel.give(message.learner_id, host_view(self.slots.served), self.rules.clock)
            self.records.log.answered(message.learner_id, self.channel.now_s())
        elif isinstance(message, Goodbye):
            self._part(message)
        elif isinstance(message, SnapshotPull):
            self._desk.ask(message.number)
        elif isinstance(message, Interrupt):
            self._signal = self._signal or message.signal
        elif isinstance(message, Refused):
            learner_id = self.channel.learner_of(message.rank)
            self.refusals.refuse(message, learner_id)
            self._tell(Event.REFUSED, learner_id, message.rank)
        else:
            raise ProtocolError(f"{message}: a shard under a coordinator is not told")

    def _tell(self, event: Event, learner_id: int = -1, value: float = float("nan")) -> None:
        self.records.log.event(event, self.rules.clock, self.channel.now_s(), learner_id, value)

    def _take(self, push: Push) -> None:
        learner_id = push.learner_id
        why = self.refusals.why_not(push, self.rules.clock, fresh_only=True)
        if why:
            self.handle(Refused(self.channel.rank_of(learner_id), why, push=True))
            return
        self._received[learner_id] += 1
        self.slots.park(learner_id, push.seq)
        self._parked[learner_id, push.seq] = push

    # ------------------------------------------------------------------------------------------------------- commands

    def _obey(self, command: Command) -> None:
        """Raises ProtocolError for a command that cannot be obeyed."""
        op, value, slots = command.op, 0.0, self.slots
        if op == Op.COMMIT:
            self._commit(command)
        elif op == Op.DISCARD:
            for seq in slots.discard(command.a):
                self.records.log.push(self._parked.pop((command.a, seq)), self.rules.clock, DROP_MISSED, 0.0)
        elif op == Op.BEGIN:
            slots.begin(command.a)
        elif op == Op.END:
            value = self._end(command)
        elif op == Op.ACCEPT:
            self._accept(command.a)
        elif op == Op.FINISH:
            self._finish(command.a)
        else:
            value = slots.compute(op, command.out, command.a, command.b, command.alpha)
        if op in ANSWERED:
            self.channel.result(value, self._signal)

    def _commit(self, command: Command) -> None:
        learner_id, seq, portions = command.a, command.b, command.out
        push = self._parked.pop((learner_id, seq), None)
        if push is None:
            raise ProtocolError(f"push {seq} of learner {learner_id} is to be summed, and is not here")
        self._summing()
        push.gradients = portions
        self.slots.commit(learner_id, seq, push.samples)
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
        """An iteration is over: evaluators may have its weights."""
        self.slots.accept(number)
        self._mark()
        before, self._epochs = self._epochs, self.slots.samples / self._train_samples
        if self.records.snapshots.due(before, self._epochs):
            self.records.take_snapshot(self.slots, self.rules.clock, self.channel.now_s())
            self._desk.answer()

    def _mark(self) -> None:
        """If a signal comes, these weights are what is saved."""
        if self.records.checkpoints is not None:
            self.records.mark(self.rules, self.channel.now_s(), sum(self._received), diverged=False)

    def _finish(self, ending: int) -> None:
        self._over = True
        if ending == Ending.FINISHED:
            self.rules.finished = True
            self._tell(Event.STOPPED)
        else:
            self.rules.on_interrupt()
            self._tell(Event.INTERRUPTED, value=self._signal)
        self._desk.answer()

    def _part(self, goodbye: Goodbye) -> None:
        learner_id, received = goodbye.learner_id, self._received[goodbye.learner_id]
        if goodbye.pushed != received:
            raise ProtocolError(
                f"the books do not balance: learner {learner_id} says it pushed {goodbye.pushed} gradients to this shard,"
                f" which received {received}"
            )
        self._told += received
        self._tell(Event.GOODBYE, learner_id, goodbye.pushed)
        if goodbye.ending == Ending.NONE:
            self._tell(Event.DEPARTED, learner_id)
        self.rules.on_departure(learner_id, _GONE[Ending(goodbye.ending)])
        self._desk.answer()
