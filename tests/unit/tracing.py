"""Rules fed events in words, one a line; after `->` stands everything that is then decided.

push L @T    learner L pushes a gradient of timestamp T   -> apply WEIGHT, drop, reject, late, park or leave; `update C` for
             `#S`: of its mini-batch S                       update; `L: …` for each that was parked; `drop REASON` unless STALE
bad L @T     the same, but it cannot be used
torn L @T    only a part of it has come
pull L       learner L asks for weights                   -> weights C, wait or stop
pull L >=C   of at least that clock; if it waits, it will be answered: `weights L` after what lets it go on
owing L >=C  the same of one that owes a push             -> `passes`, too, where that says that none will come
timeout      the time for this update is over             -> `update C`, or -
leave L      learner L leaves for good                    -> `update C`, or -; so do `lose L`, `miss L`
bye L        it leaves because it was stopped             -> `finished` where the run is over; `interrupted L`: by a signal
interrupt    a signal                                     -> in time, or -
late         who is told that an update was made          -> learners, or -
whose        whose push must be summed next
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable

from mpisgd.protocols import Protocol
from mpisgd.rules.membership import OTHERS_GO_ON, Gone
from mpisgd.rules.rules import GIVE, LEAVE, PARK, STOP, Rules
from mpisgd.rules.verdict import Kind, Reason, Verdict


def disagreements(text: str, decide: Callable[[str], str]) -> list[tuple[str, str]]:
    """(what is decided, what the trace says) wherever these differ, of each line `event -> decisions`."""
    lines = [" ".join(line.split()) for line in textwrap.dedent(text).strip().splitlines()]
    found = [(f"{event} -> {decide(event)}", line) for line in lines for event in [line.split(" -> ")[0]]]
    return [(decided, line) for decided, line in found if decided != line]


class Traced:
    """A shard without weights, as `shard.py` is one with: each gradient is of one sample."""

    def __init__(self, protocol: Protocol, lambda_: int, budget: float = math.inf) -> None:
        self.rules = Rules(protocol, lambda_, budget)
        self.parked: dict[int, tuple[int, int, bool]] = {}
        self.samples = self.pending = 0

    def decide(self, event: str) -> str:
        """What is decided, in words."""
        rules, said = self.rules, list[str]()
        what, *rest = event.translate(str.maketrans("@#>=", "    ")).split()
        learner_id, number, seq = (*map(int, rest), *[-1] * 3)[:3]
        if what == "whose":
            return str(rules.turn())
        if what == "late":
            return " ".join(map(str, rules.late())) or "-"
        if what == "interrupt":
            said += ["in time"] * rules.on_interrupt()
        elif what in ("pull", "owing"):
            said.append(self._pull(learner_id, number))
            if what == "owing" and rules.membership.passes(learner_id, number, rules.membership.stuck):
                said.append("passes")
        elif what in ("push", "bad"):
            seq = rules.applied_seq[learner_id] + 1 if seq < 0 else seq
            said += self._push(learner_id, (number, seq, what == "push"))
        elif what == "torn":
            said.append(_said(rules.on_torn(learner_id, number, 0)))
        elif what == "timeout":
            rules.on_timeout()
        else:
            gone = {"leave": Gone.LEFT, "bye": Gone.STOPPED, "lose": Gone.LOST, "miss": Gone.MISSED}.get(what, Gone.INTERRUPTED)
            said += self._go(learner_id, gone)
        said = [each for each in said + self._settle() if each]
        if (
            what in ("leave", "bye", "lose", "interrupted")
            and not rules.present | rules.absent
            and rules.membership.end_if_deserted()
            and rules.finished
        ):
            said.append("finished")
        return ", ".join(said) or "-"

    def _pull(self, learner_id: int, min_clock: int) -> str:
        answer = self.rules.on_pull(learner_id, min_clock)
        if min_clock < 0:  # it asks again
            self.rules.waiting.pop(learner_id, None)
        if answer is GIVE and learner_id in self.rules.absent:
            self.rules.membership.on_return(learner_id)
        return f"weights {self.rules.clock}" if answer is GIVE else "stop" if answer is STOP else "wait"

    def _push(self, learner_id: int, push: tuple[int, int, bool]) -> list[str]:
        place = self.rules.on_push(learner_id, push[0])
        if place is PARK:
            self.parked[learner_id] = push
        return ["park"] if place is PARK else ["leave"] if place is LEAVE else [self._sum(learner_id, *push)]

    def _sum(self, learner_id: int, timestamp: int, seq: int, usable: bool) -> str:
        verdict = self.rules.judge(learner_id, timestamp, seq, usable)
        self.pending += verdict.kind is Kind.APPLY
        return _said(verdict) if usable or verdict.reason is not Reason.NONFINITE else ""

    def _go(self, learner_id: int, gone: Gone) -> list[str]:
        said = []
        if learner_id in self.parked and gone in OTHERS_GO_ON:
            said.append(f"{learner_id}: {self._sum(learner_id, *self.parked.pop(learner_id))}")
        self.rules.membership.on_departure(learner_id, gone)
        return said

    def _settle(self) -> list[str]:
        rules, said = self.rules, list[str]()
        while True:
            if rules.update_due():
                self.samples, self.pending = self.samples + self.pending, 0
                rules.on_update(self.samples)
                said.append(f"update {rules.clock}")
            elif (turn := rules.turn()) in self.parked:
                assert turn is not None
                said.append(f"{turn}: {self._sum(turn, *self.parked.pop(turn))}")
            else:
                said += [f"{'stop' if rules.finished or rules.interrupted else 'weights'} {who}" for who in rules.ready()]
                return said


def _said(verdict: Verdict) -> str:
    if verdict.kind is Kind.APPLY:
        return f"apply {verdict.weight:.3g}"
    why = f" {verdict.reason.name}" if verdict.kind is Kind.DROP and verdict.reason is not Reason.STALE else ""
    return verdict.kind.name.lower() + why
