"""A look that says who waits for whom when a rank is long in the same wait.

A rank notes its wait and counts finished waits (`waiting.Waiting`); the watch reads both every second, and says a line, again after
twice the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from mpisgd.base.terminal import warn
from mpisgd.comm.waiting import Waiting
from mpisgd.exchange.roles import Roles
from mpisgd.liveness.watch import Look, aside
from mpisgd.shard import Shard


class Watchdog(Look):
    """The look at a rank's waits.

    Args:
        quiet_s: seconds until a wait is told, then doubled; 0 = never.
        describe: called during the wait, from another thread.
    """

    def __init__(
        self,
        waiting: Waiting,
        quiet_s: float,
        who: str,
        describe: Callable[[], str],
        *,
        now_s: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] = lambda text: aside(warn, text),
    ) -> None:
        super().__init__()
        self._waiting = waiting
        self._quiet_s = quiet_s
        self._who = who
        self._describe = describe
        self._now_s = now_s
        self._say = say
        self._seen = -1
        self._since_s = 0.0
        self._next_s = quiet_s

    def begin(self) -> bool:
        return self._quiet_s > 0

    def look(self) -> None:
        """Warn of a long wait."""
        now_s, waiting = self._now_s(), self._waiting
        seen = waiting.waits
        if seen != self._seen or waiting.awaited is None or waiting.patient:
            self._seen, self._since_s, self._next_s = seen, now_s, self._quiet_s
            return
        waited_s = now_s - self._since_s
        if waited_s < self._next_s:
            return
        self._next_s *= 2
        text = self._describe()
        if waiting.waits == seen:  # else it has just gone on
            self._say(f"mpisgd: nothing has moved for {waited_s:.0f} s: {self._who} {text}")


def of_shard(server: Shard, roles: Roles, hosts: Sequence[str]) -> str:
    """Describe learners that a waiting shard waits for, and learners waiting for it."""

    def learner(learner_id: int) -> str:
        rank = server.channel.rank_of(learner_id)
        return f"learner {learner_id} (rank {rank} on {hosts[rank]})"

    now_s, rules, waiting = server.channel.now_s(), server.rules, dict(server.rules.waiting)
    text = f"at clock {rules.clock} waits for "
    if not rules.present:
        rank = roles.evaluator_rank
        return f"{text}the evaluator (rank {rank} on {hosts[rank]}), for all learners have left"
    parts = []
    for learner_id in sorted(rules.present.difference(waiting)):
        clock, given_s = server.answering.given[learner_id]
        since = f"was given clock {clock} {now_s - given_s:.0f} s ago: computing or gone"
        parts.append(f"{learner(learner_id)}, which {since if clock >= 0 else 'has not asked for weights yet'}")
    text += "; ".join(parts) or "nobody"
    for learner_id, clock in list(waiting.items()):  # the loop goes on meanwhile
        text += f"; {learner(learner_id)} waits for this shard, for clock {clock} or later"
    return text
