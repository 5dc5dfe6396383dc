"""Faults of learners at a fault-tolerant shard: they may die or hang, and others go on (DESIGN 4, laws 2, 4).

    lost      dead, by MPI: departed from the protocol
    missed    owed a push or a pull beyond the patience: departed until its next message. The last present learner is missed only
              where the run is over for others; else the shard waits while any candidate gives signs of life
    torn      a gradient came in part, as its learner died. Another shard may have it whole, or not at all
    passed    a learner asked for another shard's clock: no gradient of the own clock will come
    broken    a rank of another stage is lost, as its goodbye says

The rules decide (`rules/`), the shard acts.
"""

from __future__ import annotations

import math

from mpisgd.base.errors import PeerError
from mpisgd.base.terminal import warn
from mpisgd.comm.messages import (
    NOT_OVER,
    NOTHING_MORE,
    Ending,
    FromLearner,
    GivenUp,
    Goodbye,
    Lost,
    Message,
    Pull,
    Push,
    Refused,
    SnapshotPull,
    Stuck,
    Torn,
)
from mpisgd.exchange.shard_channel import ShardChannel
from mpisgd.exchange.survivors import Survivors
from mpisgd.records.log.schema import Event
from mpisgd.rules.membership import Gone
from mpisgd.serving.fail_fast import FailFast, Serves


class FaultTolerant(FailFast):
    """Presence of a shard's learners; `patience_s`: longest time to owe a message, `lambda_`: number of learners."""

    tolerant = True
    _shard: Serves

    def __init__(self, channel: ShardChannel, survivors: Survivors, lambda_: int, patience_s: float, name: str) -> None:
        self._channel = channel
        self._survivors = survivors
        self._name = name
        self._unheeded = set[int]()
        """Learners with a refused goodbye: lost if nothing else comes."""
        self._gone = set[int]()
        """Lost learners, perhaps alive; their messages count for nothing."""
        self._patience_s = patience_s
        self._since_s = [0.0] * lambda_
        """Second since when each learner owes a push or a pull; inf = its pull waits."""
        self._owes_push = [False] * lambda_
        self.look_s = math.inf

    def attend(self, shard: Serves) -> None:
        self._shard, self._rules = shard, shard.rules

    def begin(self) -> None:
        self._since_s = [self._channel.now_s()] * len(self._since_s)
        self.look_s = self._since_s[0] + self._patience_s / 4

    def hear(self, message: Message) -> bool:
        """Take a message; return whether nothing else is to be done with it."""
        if isinstance(message, FromLearner) and message.learner_id in self._gone:
            if isinstance(message, Push):
                message.body.release()
            return True
        self._hear_from(message)
        if isinstance(message, Goodbye):
            return self._hear_goodbye(message)
        if isinstance(message, Lost):
            self._lose(message.rank, message.learner_id)
        elif isinstance(message, Torn):
            self._owes(message.push.learner_id, message.push.arrival_ns * 1e-9)
            self._shard.tear(message.push)
        elif isinstance(message, Stuck):
            self._unstick(message.rank, message.learner_id)
        elif isinstance(message, GivenUp):
            self._rules.membership.on_end_elsewhere(message.clock)
            self._lose_for_good(self._channel.rank_of(message.learner_id), message.learner_id)
        elif isinstance(message, SnapshotPull):
            self._shard.see_enough(message)
            self._ask(message.number)
        else:
            return False
        return True

    def _hear_from(self, message: Message) -> None:
        if isinstance(message, Push):
            self._unheeded.discard(message.learner_id)
            self._owes(message.learner_id, message.arrival_ns * 1e-9)
        elif isinstance(message, Pull):
            self._unheeded.discard(message.learner_id)
            self._since_s[message.learner_id] = math.inf
        elif isinstance(message, Refused) and message.push and (learner_id := self._channel.learner_of(message.rank)) >= 0:
            self._owes(learner_id, self._channel.now_s())

    def _owes(self, learner_id: int, now_s: float, push: bool = False) -> None:
        self._since_s[learner_id], self._owes_push[learner_id] = now_s, push

    def note_if_passed(self, learner_id: int, min_clock: int) -> None:
        """Note a pull in place of an owed push, for a clock reached only by another shard."""
        rules = self._rules
        if rules.membership.stuck:
            self.note_who_passes()
        elif self._owes_push[learner_id] and rules.membership.passes(learner_id, min_clock, stuck=False):
            self._pass(learner_id)

    def note_who_passes(self) -> None:
        """Check waiting pulls again: they came before a loss or a standstill was known."""
        rules = self._rules
        for learner_id, min_clock in list(rules.waiting.items()):
            if self._owes_push[learner_id] and rules.membership.passes(learner_id, min_clock, rules.membership.stuck):
                self._pass(learner_id)

    def _pass(self, learner_id: int) -> None:
        self._shard.log.event(Event.PASSED, self._rules.clock, self._channel.now_s(), learner_id)
        self._shard.settle()

    # ------------------------------------------------------------------------------------------------- dead, or missed

    def _lose(self, rank: int, learner_id: int) -> None:
        if learner_id >= 0:
            self._end_if_none_is_left(self._note_if_lost(learner_id))
        elif rank == self._survivors.evaluator_rank:
            self._shard.snapshot_server.ask(None)
            if self._survivors.is_first:
                self._survivors.lose_evaluator()

    def _note_if_lost(self, learner_id: int) -> bool:
        """Lose a learner, unless it has left; return whether it was lost."""
        if learner_id not in self._rules.present and learner_id not in self._rules.absent:
            return False
        self._note_lost(learner_id, "is lost")
        self._shard.go_on_without(learner_id, Gone.LOST)
        return True

    def _end_if_none_is_left(self, lost: bool) -> None:
        """End the run after the last learner's loss; nobody waits for missed learners after a signal.

        Raises PeerError: no orderly end.
        """
        rules = self._rules
        if not lost or rules.present or (rules.absent and not rules.interrupted):
            return
        if not (rules.membership.is_over or rules.finished or rules.interrupted):
            raise PeerError(f"no learner is left at clock {rules.clock}")
        self._shard.end_if_deserted()

    def look(self, whose: int | None) -> None:
        """Miss overdue learners, at most a quarter of the patience late; `whose`: the only learner waited for."""
        now_s, present = self._channel.now_s(), self._rules.present
        self.look_s = now_s + self._patience_s / 4
        over, last = self._rules.finished or self._rules.interrupted, -1
        for learner_id in sorted(present if whose is None else {whose} & present):
            if over and math.isinf(self._since_s[learner_id]) and learner_id not in self._rules.waiting:
                self._owes(learner_id, now_s)  # told of the end, it owes its goodbye
            if now_s - self._since_s[learner_id] <= self._patience_s:
                continue
            if self._may_miss():
                self._miss(learner_id)
            elif learner_id in self._unheeded:
                self._lose_for_good(self._channel.rank_of(learner_id), learner_id)
            else:
                last = learner_id
        self._look_for_life(last)

    def _look_for_life(self, last: int = -1) -> None:
        """Stop waiting for silent ranks where no other goes on; `last`: an overdue learner. Raises PeerError: no orderly end."""
        rules, survivors = self._rules, self._survivors
        hang, all_do = self._silent(last)
        back = sorted(rules.absent & rules.waiting.keys()) if last >= 0 and survivors.ranks_of(last) in hang else []
        if not (back or all_do):
            return
        names = ", ".join(f"rank {rank}" for ranks in hang for rank in ranks)
        warn(f"mpisgd: {self._name}, clock {rules.clock}: {names} gave no sign of life, and nobody else goes on")
        for learner_id in back:
            self._return(learner_id)
        if back:
            self._miss(last)
        elif not survivors.is_first and hang == [(survivors.first_rank,)]:
            raise PeerError(f"shard 0 (rank {survivors.first_rank}) gave no sign of life, and the job needs shard 0")
        elif hang == [(survivors.evaluator_rank,)]:
            self._lose_for_good(survivors.evaluator_rank, self._channel.learner_of(survivors.evaluator_rank))
        else:
            self._lose_all()

    def _hopes(self, last: int) -> list[tuple[int, ...]]:
        """Return candidates to wait for, by their ranks of all stages; none where others go on. `last`: as in `_look_for_life`.

        Overdue learners are missed, except for the last, which may take any time; so may the evaluator after all learners left.
        But stopped for ever, either would hold up the job. Other shards hear of the evaluation's end from shard 0.
        """
        rules, survivors = self._rules, self._survivors
        if rules.present and last < 0:
            return []
        if not rules.present and (rules.finished or rules.interrupted):
            if not self._shard.snapshot_server.is_open or survivors.evaluates:
                return []
            return [(survivors.evaluator_rank if survivors.is_first else survivors.first_rank,)]
        return list(map(survivors.ranks_of, sorted(rules.present | rules.absent)))

    def _silent(self, last: int) -> tuple[list[tuple[int, ...]], bool]:
        """Ask all candidates for a sign of life; return the candidates with a silent rank, and whether all have one."""
        hopes = self._hopes(last)
        silent = self._survivors.silent(rank for ranks in hopes for rank in ranks)
        hang = [ranks for ranks in hopes if silent.intersection(ranks)]
        return hang, bool(hopes) and len(hang) == len(hopes)

    def _lose_all(self) -> None:
        for learner_id in sorted(self._rules.present | self._rules.absent):
            self._tell_given_up(learner_id)
            self._lose_for_good(self._channel.rank_of(learner_id), learner_id)
        self._end_if_none_is_left(lost=True)

    def _may_miss(self) -> bool:
        return len(self._rules.present) > 1 or self._rules.membership.ends

    def _miss(self, learner_id: int) -> None:
        """Go on without a learner, until it asks for weights."""
        silent_s = max(0.0, self._channel.now_s() - self._since_s[learner_id])
        self._note(
            Event.MISSED, learner_id, f"was not heard of for {silent_s:.2f} s: the others go on without this learner", silent_s
        )
        self._shard.go_on_without(learner_id, Gone.MISSED)
        self._shard.end_if_deserted()

    def note_if_back(self, learner_id: int) -> None:
        if learner_id in self._rules.present:
            self._note(Event.RETURNED, learner_id, "is back")

    def note_if_alone(self, learner_id: int) -> None:
        """Take back a missed learner without others present: its pull would never be answered."""
        if learner_id in self._rules.absent and not self._rules.present:
            self._return(learner_id)
            self._shard.settle()

    def _return(self, learner_id: int) -> None:
        self._rules.membership.on_return(learner_id)
        self._note(Event.RETURNED, learner_id, "is back")

    def note_given(self, learner_id: int) -> None:
        """Note weights given to a learner; a missed learner is back."""
        self._owes(learner_id, self._channel.now_s(), push=True)
        if learner_id in self._rules.absent:
            self._return(learner_id)

    def _unstick(self, rank: int, learner_id: int) -> None:
        if learner_id in self._rules.present:
            self._shard.log.event(Event.STUCK, self._rules.clock, self._channel.now_s(), learner_id)
            if self._may_miss():
                self._miss(learner_id)
        elif learner_id not in self._rules.absent:
            self._lose_for_good(rank, learner_id)  # after its goodbye, or as evaluator

    def _lose_for_good(self, rank: int, learner_id: int) -> None:
        self._survivors.give_up(rank)
        self._gone.add(learner_id)
        self._lose(rank, learner_id)

    def _tell_given_up(self, learner_id: int) -> None:
        rules = self._rules
        self._survivors.tell_given_up(learner_id, rules.clock if rules.finished else NOT_OVER)

    @property
    def evaluates(self) -> bool:
        return self._survivors.evaluates

    def end(self) -> None:
        """Lose all missed learners."""
        for learner_id in sorted(self._rules.absent):
            self._note_lost(learner_id, "is lost: not back before the end of the run")
            self._gone.add(learner_id)
            self._rules.membership.on_departure(learner_id, Gone.LOST)
            self._survivors.give_up_learner(learner_id)
            self._tell_given_up(learner_id)

    # ------------------------------------------------------------------------------------------ goodbyes, and evaluation

    def _hear_goodbye(self, goodbye: Goodbye) -> bool:
        """Refuse an impossible goodbye, lose a learner of a broken group; return whether done with it."""
        if self._cannot_part(goodbye):
            return True
        broken = goodbye.ending == Ending.BROKEN
        if broken:
            self._end_if_none_is_left(self._note_if_lost(goodbye.learner_id))
        return broken

    def _cannot_part(self, goodbye: Goodbye) -> bool:
        """Refuse an impossible goodbye; return whether refused."""
        learner_id, rules, why = goodbye.learner_id, self._rules, ""
        received = self._shard.received[learner_id]
        most = received + self._shard.refusals.pushes[learner_id]
        if learner_id not in rules.present and learner_id not in rules.absent:
            why = f"learner {learner_id} says goodbye, and has left already"
        elif not received <= goodbye.pushed <= most:
            why = f"learner {learner_id} says goodbye after {goodbye.pushed} pushes: expected {received} ... {most}"
        if why:
            self._unheeded.add(learner_id)
            self._shard.refuse(Refused(self._channel.rank_of(learner_id), why, push=False))
            return True
        if learner_id in rules.absent:
            self._note(Event.DEPARTED, learner_id, "is back, and leaves")
        return False

    def _ask(self, number: int) -> None:
        self._shard.snapshot_server.ask(number)
        if number == NOTHING_MORE and self._survivors.is_first:
            self._survivors.pass_on_nothing_more()

    def _note_lost(self, learner_id: int, text: str) -> None:
        """Log a loss with the clock of the last given weights: another shard may have their gradient."""
        self._shard.pushed[learner_id] = self._shard.received[learner_id]
        clock, _ = self._shard.answering.given[learner_id]
        self._note(Event.LOST, learner_id, text, clock)

    def _note(self, event: Event, learner_id: int, text: str, value: float = 0.0) -> None:
        self._shard.log.event(event, self._rules.clock, self._channel.now_s(), learner_id, value)
        warn(f"mpisgd: {self._name}, clock {self._rules.clock}: learner {learner_id} {text}")
