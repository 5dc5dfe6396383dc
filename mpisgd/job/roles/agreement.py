"""Shards that agree on the norm of each averaged gradient before they clip it: `clip_average` of a model on several shards.

                 learner                                      shard
    push         as ever                                ->    sums it
    agree        posts NORM_ANSWER; NORM_PULL           ->    keeps the request until its sum is whole
                 <- NORM_ANSWER: the norm of the shard's slice of the average
                 NORM_TOLD: the norm of the whole       ->    makes the update, when the first tells it
    pull         as ever

Where learners double as shards, they tell each other instead, in the round in which the sum is whole.

So no shard asks another (law 2): learners carry what each must know, for one round trip more in each update. Every learner tells,
for none knows who else will. All shards make an update of the same mini-batches (`ProtocolOptions.alike`), so the sum of one is
whole where those of all will be. Norms are added in the order of shards, in double precision: all clip by the same factor, and
replay finds its bits again.

No deadlock, by the argument of `channel.py`: a learner has finished its push before it asks, and the receives of the answers
are posted (law 1). An answer waits for the pushes of other learners; these come after pulls of the clock before, whose update was
told of by a learner that waits for nothing but shards, which always get back to their probe. Where a signal ends the run, and a sum
will never be whole, since all who are present wait for it, they are told so; then all shards tell them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from mpisgd.base.errors import PeerError
from mpisgd.comm.messages import Ending, Message, NormPull, NormTold, Refused, Tag
from mpisgd.config import Config
from mpisgd.exchange.base import Answers
from mpisgd.exchange.channel import LearnerChannel
from mpisgd.exchange.collectives.channel import TeamChannel
from mpisgd.exchange.layerwise import PipelinedChannel
from mpisgd.rules.rules import Rules
from mpisgd.shard import Shard
from mpisgd.vectors.flat import norm_of_parts


class AgreeingChannel(LearnerChannel):
    """A learner's end, whose shards have all the same clock."""

    _agreed = 0
    """Of how many pushes the norm was told."""

    def pull(self, min_clock: int, meanwhile: Callable[[], None] | None = None) -> Answers:
        """As ever; before it, the shards agree on the norm of the update that is made with the last push."""
        if self._agreed == self._pushes:
            return super().pull(min_clock, meanwhile)
        self._agreed = self._pushes
        if self._wire.signal > 0:
            self._tell_of_signal()
        start_ns = self.now_ns()
        telling = self._agree(meanwhile)
        agreed_ns = self.now_ns() - start_ns
        answers = super().pull(min_clock)
        for transfer in telling:
            self._wire.finish(transfer)
        self._wait_ns += agreed_ns
        return answers

    def _agree(self, meanwhile: Callable[[], None] | None) -> list[Any]:
        """Ask all shards for their norms, and begin to tell them that of the whole, unless the run is over for one of them.

        Returns what `finish` waits for. Raises PeerError where an answer is another's.
        """
        wire, ranks, clock, norms, goes_on = self._wire, self._ranks, self._clocks[0], list[float](), True
        asked = [wire.ask(rank, Tag.NORM_PULL, (self._learner_id, clock), Tag.NORM_ANSWER) for rank in ranks]
        if meanwhile is not None:
            meanwhile()
        for rank, number, answer in zip(ranks, self._numbers, asked, strict=True):
            sender, ending, norm = wire.header(answer)
            wire.finish(answer)
            if sender != number or ending > Ending.INTERRUPTED:
                raise PeerError(f"rank {rank} answers as shard {sender}, ending {ending}: expected {number}", rank)
            goes_on = goes_on and ending == Ending.NONE
            norms.append(norm)
        told = (self._learner_id, clock, norm_of_parts(norms))
        return [wire.start(rank, Tag.NORM_TOLD, told) for rank in ranks] if goes_on else []


class AgreeingPipelinedChannel(AgreeingChannel, PipelinedChannel):
    """That of a learner which pushes layer by layer."""


class AgreeingRules(Rules):
    """An update is due when the norm of its average is agreed on, too."""

    agreed = False

    @property
    def whole(self) -> bool:
        """Whether all that is to be summed has been."""
        return super().update_due()

    def update_due(self) -> bool:
        return self.agreed and super().update_due()

    def on_update(self, samples: int) -> None:
        self.agreed = False
        super().on_update(samples)


class AgreeingShard(Shard):
    """A shard whose learners carry norms."""

    rules: AgreeingRules

    _asked: frozenset[int] = frozenset()
    """Learners that wait for the norm of the sum in the making."""
    _own = _norm = math.nan
    """The norms of this slice of the last average, and of the whole."""
    _own_clock = -1
    """The clock at which that average was made."""

    def begin(self) -> None:
        self.channel.said |= {Tag.NORM_PULL: NormPull, Tag.NORM_TOLD: NormTold}
        super().begin()

    def handle(self, message: Message) -> None:
        if isinstance(message, NormPull):
            self._norm_pull(message)
        elif isinstance(message, NormTold):
            self._norm_told(message)
        else:
            super().handle(message)
        self._look_at_sum()

    def _norm_pull(self, asked: NormPull) -> None:
        if asked.clock == self._own_clock:
            self.channel.answer_norm([asked.learner_id], Ending.NONE, self._own)
        elif asked.clock == self.rules.clock:
            self._asked |= {asked.learner_id}
        else:
            self._refuse(asked.learner_id, f"asks for the norm of the update of clock {asked.clock}")

    def _norm_told(self, told: NormTold) -> None:
        """The first who tells it has the update made; the others say the same."""
        clock = self.rules.clock
        if told.clock == self._own_clock == clock:
            self._agree_on(told.value)
        elif told.clock != self._own_clock or told.clock != clock - 1 or repr(told.value) != repr(self._norm):
            self._refuse(told.learner_id, f"tells a norm of {told.value!r} of the update of clock {told.clock}")

    def _refuse(self, learner_id: int, what: str) -> None:
        why = f"learner {learner_id} {what}: expected that of clock {self.rules.clock}, or what was agreed on before"
        self.refuse(Refused(self.channel.rank_of(learner_id), why, push=False))

    def _look_at_sum(self) -> None:
        """Answer those who ask for its norm, once it is whole, or will never be."""
        rules = self.rules
        if rules.whole and self._own_clock != rules.clock:
            self._own, self._own_clock = self.update.norm_of_average(), rules.clock
            self._answer_asked(Ending.NONE)
        elif self._asked and rules.interrupted and rules.present <= self._asked:
            self._answer_asked(Ending.INTERRUPTED)

    def _answer_asked(self, ending: Ending) -> None:
        asked, self._asked = self._asked, frozenset()
        self.channel.answer_norm(sorted(asked), ending, self._own)

    def _agree_on(self, norm: float) -> None:
        self._norm = norm
        self.update.agree(norm)
        self.rules.agreed = True
        self.settle()


class AgreeingTeamShard(AgreeingShard):
    """A shard whose learner is of a team, whose members tell each other."""

    channel: TeamChannel

    def _look_at_sum(self) -> None:
        if self.rules.whole:
            self._agree_on(norm_of_parts(self.channel.tell_norm(self.update.norm_of_average())))


def of_run(config: Config) -> tuple[Callable[..., Rules], Callable[..., Shard]]:
    """What makes the rules and the shards of a run."""
    if not config.agrees:
        return Rules, Shard
    return AgreeingRules, AgreeingTeamShard if config.protocol.collective else AgreeingShard
