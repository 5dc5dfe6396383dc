"""Agreement of shards on the norm of each averaged gradient before clipping: `clip_average` of a model on several shards.

                 learner                                      shard
    push         a gradient                             ->    sums it
    agree        posts NORM_ANSWER; NORM_PULL           ->    keeps the request until its sum is whole
                 <- NORM_ANSWER: the norm of the shard's slice of the average
                 NORM_TOLD: the norm of the whole       ->    makes the update, at the first
    pull         the weights

No shard asks another (law 2): learners carry norms, in a round trip more of each update; learners that double as shards tell each
other. Updates of all shards have the same mini-batches (`ProtocolOptions.alike`). Norms are added in the order of shards, in double
precision.

When a signal ends the run, and all present wait for an incomplete sum, shards tell them. No deadlock: `no-deadlock.md`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from mpisgd.comm.messages import Ending, Message, NormPull, NormTold, Refused, Tag
from mpisgd.config import Config
from mpisgd.exchange.collectives.team_channel import TeamChannel
from mpisgd.rules.rules import Rules
from mpisgd.shard import Shard
from mpisgd.vectors.flat import norm_of_parts


class AgreeingRules(Rules):
    """Rules whose updates need an agreed norm, too."""

    agreed = False

    @property
    def whole(self) -> bool:
        """The sum is complete."""
        return super().update_due()

    def update_due(self) -> bool:
        return self.agreed and super().update_due()

    def on_update(self, samples: int) -> None:
        self.agreed = False
        super().on_update(samples)


class AgreeingShard(Shard):
    rules: AgreeingRules

    _asked: frozenset[int] = frozenset()
    """Learners waiting for the norm."""
    _own = _norm = math.nan
    """Norms of this slice of the last average, and of the whole."""
    _own_clock = -1
    """Clock of the last average."""

    def begin(self) -> None:
        self.channel.take_also({Tag.NORM_PULL: NormPull, Tag.NORM_TOLD: NormTold})
        self._handlers |= {NormPull: self._norm_pull, NormTold: self._norm_told}
        super().begin()

    def handle(self, message: Message) -> None:
        super().handle(message)
        self._look_at_sum()

    def _norm_pull(self, asked: NormPull) -> None:
        if asked.clock == self._own_clock:
            self._answer([asked.learner_id], Ending.NONE)
        elif asked.clock == self.rules.clock:
            self._asked |= {asked.learner_id}
        else:
            self._refuse(asked.learner_id, f"asks for the norm of the update of clock {asked.clock}")

    def _norm_told(self, told: NormTold) -> None:
        """Make the update at the first telling; others must agree."""
        clock = self.rules.clock
        if told.clock == self._own_clock == clock:
            self._agree_on(told.value)
        elif told.clock != self._own_clock or told.clock != clock - 1 or repr(told.value) != repr(self._norm):
            self._refuse(told.learner_id, f"tells a norm of {told.value!r} of the update of clock {told.clock}")

    def _refuse(self, learner_id: int, what: str) -> None:
        why = f"learner {learner_id} {what}: expected the norm of clock {self.rules.clock}, or the value agreed on before"
        self.refuse(Refused(self.channel.rank_of(learner_id), why, push=False))

    def _look_at_sum(self) -> None:
        """Answer requests for the norm, once the sum is whole or never will be."""
        rules = self.rules
        if rules.whole and self._own_clock != rules.clock:
            self._own, self._own_clock = self.update.norm_of_average(), rules.clock
            self._answer_asked(Ending.NONE)
        elif self._asked and rules.interrupted and rules.present <= self._asked:
            self._answer_asked(Ending.INTERRUPTED)

    def _answer_asked(self, ending: Ending) -> None:
        asked, self._asked = self._asked, frozenset()
        self._answer(sorted(asked), ending)

    def _answer(self, learner_ids: Iterable[int], ending: Ending) -> None:
        """Answer requests for the norm of this slice; `ending`: why there is none."""
        self.channel.tell(map(self.channel.rank_of, learner_ids), Tag.NORM_ANSWER, ending, self._own)

    def _agree_on(self, norm: float) -> None:
        self._norm = norm
        self.update.agree(norm)
        self.rules.agreed = True
        self.settle()


class AgreeingTeamShard(AgreeingShard):
    channel: TeamChannel

    def _look_at_sum(self) -> None:
        if self.rules.whole:
            self._agree_on(norm_of_parts(self.channel.tell_norm(self.update.norm_of_average())))


def of_run(config: Config) -> tuple[Callable[..., Rules], Callable[..., Shard]]:
    if not config.agrees:
        return Rules, Shard
    return AgreeingRules, AgreeingTeamShard if config.protocol.collective else AgreeingShard
