"""A shard's answers to pulls: weights, whole or in chunks still being made (`chunks.py`), or an ending."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from mpisgd.comm.messages import Ending, Message, Pull
from mpisgd.exchange.deltas import Deltas
from mpisgd.exchange.shard_channel import ShardChannel
from mpisgd.records.log.writer import ShardLog
from mpisgd.rules.rules import GIVE, STOP, Do, Rules
from mpisgd.serving.fail_fast import FailFast
from mpisgd.serving.finiteness import Finiteness
from mpisgd.vectors.computing import Updates


class Answering:
    """Answers by decision of the rules.

    Attributes:
        chunked: whether weights are sent while being made.
        given: clock and second of each learner's last weights.
        put_off: messages for after the update.
    """

    def __init__(
        self,
        channel: ShardChannel,
        rules: Rules,
        update: Updates,
        log: ShardLog,
        finiteness: Finiteness,
        deltas: Deltas | None,
        presence: FailFast,
    ) -> None:
        self._channel = channel
        self._rules = rules
        self._update = update
        self._log = log
        self._finiteness = finiteness
        self._deltas = deltas
        self._in_chunks = deltas.in_chunks() if deltas is not None and channel.rounds_in_chunks else None
        self._chunks_count = update.chunks_count if deltas is None or self._in_chunks is not None else 1
        self.chunked = self._chunks_count > 1
        self.given: list[tuple[int, float]] = [(-1, 0.0)] * len(rules.present)
        self.put_off: deque[Message] = deque()
        self._note_given = presence.note_given if presence.tolerant else None

    def begin(self) -> None:
        if self._deltas is not None:
            self._deltas.begin(self._update.weights)

    def give_first(self, learner_ids: list[int]) -> None:
        """Send the first weights to learners doubling as shards, without pulls."""
        weights, clock = self._update.weights, self._rules.clock
        to_all = [(learner_ids, self._update.served)]
        for alike, body in to_all if self._deltas is None else self._deltas.answers(learner_ids, weights, clock):
            self._channel.start_answers(alike, body, clock, {})

    def follow(self) -> None:
        """Follow an update; in chunks, `make` does so."""
        if self._deltas is not None and not self.chunked:
            self._deltas.follow(self._update.weights)

    def gone(self, learner_id: int) -> None:
        if self._deltas is not None:
            self._deltas.gone(learner_id)

    def answer(self, pull: Pull) -> Do:
        learner_id = pull.learner_id
        decided = self._rules.on_pull(learner_id, pull.min_clock)
        if decided is GIVE:
            self._give([learner_id])
        elif decided is STOP:
            self._stop([learner_id])
        return decided

    def answer_waiting(self) -> None:
        if self._rules.waiting and (ready := self._rules.ready()):
            if self._rules.finished or self._rules.interrupted:
                self._stop(ready)
            else:
                self._give(ready)

    def _stop(self, learner_ids: list[int]) -> None:
        rules = self._rules
        ending = Ending.FINISHED if rules.finished else Ending.ENOUGH if rules.enough else Ending.INTERRUPTED
        for learner_id in learner_ids:
            self._channel.stop(learner_id, rules.clock, ending, self._chunks_count)

    def _give(self, learner_ids: list[int]) -> None:
        channel, update, rules = self._channel, self._update, self._rules
        now_s = channel.now_s()
        if self.chunked and self._deltas is None:
            channel.open_answers(learner_ids, update.served, rules.clock, rules.verdicts)
            for chunk in update.chunks():
                channel.add_chunk(chunk)
            channel.close_answers()
        elif self._deltas is not None:
            for alike, body in self._deltas.answers(learner_ids, update.weights, rules.clock):
                channel.start_answers(alike, body, rules.clock, rules.verdicts)
                if not (channel.duplex or channel.finish_answers()):
                    self._deltas.renew()
        else:
            channel.start_answers(learner_ids, update.served, rules.clock, rules.verdicts)
        self._finish(learner_ids, now_s)

    def _finish(self, learner_ids: list[int], now_s: float) -> None:
        if self._finiteness.later:
            self._finiteness.check()
        channel, clock, compensation, note_given = self._channel, self._rules.clock, self._update.compensation, self._note_given
        if not channel.duplex and not channel.finish_answers():
            self._update.renew_weights()
        for learner_id in learner_ids:
            self.given[learner_id] = (clock, now_s)
            self._log.answered(learner_id, now_s)
            if compensation is not None:
                compensation.given(learner_id, clock)
            if note_given is not None:
                note_given(learner_id)

    def leave(self) -> None:
        """Let the weights change: wait until answers have left, or go on elsewhere."""
        if not self._channel.finish_answers():
            if self._deltas is None:
                self._update.renew_weights()
            else:
                self._deltas.renew()

    def end(self) -> None:
        self._channel.finish_answers(last=True)

    def make(self, made: Callable[[], None]) -> tuple[float, float]:
        """Make the new weights in chunks, sent at once to waiting learners; return the last second, and the seconds of making.

        `made` is called before answers are logged.
        """
        channel, update, rules, deltas = self._channel, self._update, self._rules, self._in_chunks
        start_s = made_s = channel.now_s()
        making_s = 0.0
        answered: list[int] = []
        if deltas is not None:
            deltas.open()
        for chunk in update.chunks():
            if deltas is not None:
                chunk = deltas.follow_chunk(update.weights, chunk)  # noqa: PLW2901 - d leaves in place of the weights
            made_s = channel.now_s()  # before the chunk leaves: its learner goes on at once
            making_s += made_s - start_s
            if len(answered) < len(rules.present) and (ready := self._ready_meanwhile()):
                served = update.served if deltas is None else deltas.give(ready, rules.clock)
                channel.open_answers(ready, served, rules.clock, rules.verdicts)
                answered += ready
            channel.add_chunk(chunk)
            start_s = channel.now_s()
        channel.close_answers()
        made()
        if answered:
            self._finish(answered, made_s)
        return made_s, making_s

    def _ready_meanwhile(self) -> list[int]:
        """Return learners ready during the update: often the learner of the last push."""
        rules = self._rules
        asked: list[int] = []
        if rules.finished or rules.interrupted:
            return asked
        while (message := self._channel.receive_pull()) is not None:
            if isinstance(message, Pull) and rules.on_pull(message.learner_id, message.min_clock) is GIVE:
                asked.append(message.learner_id)
            else:
                self.put_off.append(message)
        return rules.ready() + asked
