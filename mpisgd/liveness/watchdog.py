"""Says who waits for whom when a rank has been in one and the same wait for long, instead of silence.

A rank notes what it begins to wait for (`waiting.Waiting`), and that a wait is over, by a stored attribute each; the thread that
waits for signals (`signals.py`) looks at that every second. It only reads, and says one line on stderr, again after twice the time.
Whoever seems stuck may just be computing for long: nothing is ended here. (`MPISGD_HANG_S` dumps the stacks of all ranks.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from mpisgd.base.speech import warn
from mpisgd.exchange.roles import Roles
from mpisgd.shard import Shard


class Waits(Protocol):
    """A rank's end of the wire, as far as it is looked at."""

    awaited: object
    """Object of this rank's wait; None = it does not wait."""
    waits: int
    """Waits that are over."""


class Watchdog:
    """Watches one rank.

    Args:
        quiet_s: a wait is told of when it has lasted for so long, then for twice as long, and so on; 0 = never.
        who: the rank, its role and host.
        describe: what it waits for, in words; called while it waits, from another thread.
    """

    def __init__(
        self,
        waits: Waits,
        quiet_s: float,
        who: str,
        describe: Callable[[], str],
        *,
        now_s: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] = warn,
    ) -> None:
        self._waits = waits
        self._quiet_s = quiet_s
        self._who = who
        self._describe = describe
        self._now_s = now_s
        self._say = say
        self._seen = -1
        self._since_s = 0.0
        self._next_s = quiet_s

    def look(self) -> None:
        """To be called every now and then."""
        now_s, seen = self._now_s(), self._waits.waits
        if self._quiet_s == 0:
            return
        if seen != self._seen or self._waits.awaited is None:
            self._seen, self._since_s, self._next_s = seen, now_s, self._quiet_s
            return
        waited_s = now_s - self._since_s
        if waited_s < self._next_s:
            return
        self._next_s *= 2
        text = self._describe()
        if self._waits.waits == seen:  # else it has just gone on
            self._say(f"mpisgd: nothing has moved for {waited_s:.0f} s: {self._who} {text}")


def of_shard(server: Shard, roles: Roles, hosts: Sequence[str]) -> str:
    """Which learners a shard waits for, and which wait for it; whose loop is in a wait."""

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
        text += f"; {learner(learner_id)} waits for it, for clock {clock} or later"
    return text
