"""Check of a shard's log, row by row, beside the shard's own rules; equal seconds allow either order."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from mpisgd.base.errors import ProtocolError
from mpisgd.config import Config
from mpisgd.job.parts import budget_samples, portions_of
from mpisgd.records.log.schema import Event
from mpisgd.replay.checks.finding import refuse, same
from mpisgd.replay.checks.record import Departure, Record, Row, ShardRecord, TimeOut
from mpisgd.rules.membership import Gone
from mpisgd.rules.rules import Rules
from mpisgd.rules.verdict import Kind, Reason, Verdict
from mpisgd.update import schedule
from mpisgd.update.weighting import Weighting

_OF_THE_MISSED = (Reason.MISSED, Reason.TORN)
_GONE = {Event.DEPARTED: Gone.LEFT, Event.LOST: Gone.LOST, Event.MISSED: Gone.MISSED}


def walk(record: Record, shard: ShardRecord) -> None:
    """Raise Untrue at the first impossible row."""
    _check_seconds(shard)
    _Walk(record, shard).walk()


def learning_rates(config: Config, gradients_per_update: float, train_samples: int) -> Callable[[int], float]:
    """Return the learning rate by applied samples; `gradients_per_update` at the start."""
    alpha0 = config.alpha0 * (gradients_per_update if config.linear_scaling else 1)
    factor = schedule.of_run(config, gradients_per_update, train_samples)
    return lambda samples: alpha0 * factor(samples / train_samples)


def _check_seconds(shard: ShardRecord) -> None:
    """Check the order of updates in time."""
    times = shard.updates["time_s"]
    wrong = np.flatnonzero(~(np.diff(times, prepend=0.0) >= 0))
    if len(wrong):
        row = int(wrong[0])
        before = f"the previous update at {times[row - 1]} s" if row else "the start"
        refuse(f"done at {times[row]} s, before {before}", shard.shard, "updates", row=row, clock=row + 1)


class _Walk:
    """A shard without weights."""

    def __init__(self, record: Record, shard: ShardRecord) -> None:
        train_samples = record.environment("train_samples")
        self.config = record.config
        self.lambda_ = record.lambda_
        self.shard = shard
        protocol, start = record.protocol(), shard.start
        self.portions = portions_of(self.config, train_samples, self.lambda_, shard.shard)
        budget = budget_samples(self.config, protocol, train_samples, shard.shard)
        self.rules = Rules(protocol, self.lambda_, budget, self.portions)
        self.rules.clock, self.rules.applied_seq = start.clock, list(start.applied_seq)
        if self.portions is not None:
            self.portions.apply_all(start.portions)
        self.rejects = any((each.pushes["verdict"] == Kind.REJECT).any() for each in record.shards)
        self.members = [len(team) for team in record.members]
        self.rate_at = learning_rates(self.config, record.gradients_per_update, train_samples)
        self.departures = list(shard.departures)
        gone = {each.kind for any_shard in record.shards for each in any_shard.departures}
        timed = math.isfinite(self.config.protocol.deadline_s)
        self.may_be_stuck = timed or not gone.isdisjoint((Event.LOST, Event.MISSED))
        """All learners may have waited; the log does not tell."""
        self.departed_s, self.departed_kind = 0.0, int(Event.STARTED)
        said = shard.events[shard.events["kind"] == Event.GOODBYE]
        self.goodbyes = dict(zip(said["learner_id"].tolist(), said["time_s"].tolist(), strict=True))
        self.timeouts = list(shard.timeouts)
        self.timeout_s = self.config.protocol.deadline_s
        self.first_seq = record.next_seq
        self.updated_s: list[float] = [start.time_s] * start.clock + shard.updates["time_s"].tolist()
        answers = shard.pushes["answer_s"]
        self.least = (start.clock + np.searchsorted(shard.updates["time_s"], answers, side="left")).tolist()
        self.most = (start.clock + np.searchsorted(shard.updates["time_s"], answers, side="right")).tolist()
        self.last: dict[int, tuple[int, Row]] = {}
        self.place = {"row": -1}
        self.arrival_s = 0.0
        self.samples = start.samples
        self.rate = self.rate_at(self.samples)
        self.weighting = Weighting(self.config.modulate)
        self._begin_sum()

    def _begin_sum(self) -> None:
        self.gradients = self.pending_samples = 0
        self.losses = 0.0

    def walk(self) -> None:
        for number, row in enumerate(self.shard.rows()):
            if number in self.shard.inserted:
                continue
            self.place = {"row": number, "clock": row.clock, "learner_id": row.learner_id, "seq": row.seq}
            self._check_numbers(row)
            self._let_happen(row)
            self._end_if_deserted(row)
            self._end_if_enough(row)
            self._check_clock(row)
            self._check_turn(row)
            self._check_learner(row)
            self._check_seconds(row)
            self._check_verdict(row)
            self.last[row.learner_id] = (number, row)
            if row.verdict == Kind.APPLY:
                self.gradients += row.gradients
                self.pending_samples += row.samples
                self.losses += row.loss * row.gradients
                self.weighting.add(row.weight, row.gradients)
            self._update_while_due()
        self._check_end()

    def _refuse(self, why: str) -> NoReturn:
        refuse(why, self.shard.shard, "pushes", **self.place)

    def _check_numbers(self, row: Row) -> None:
        if row.shard != self.shard.shard:
            self._refuse(f"the row says shard {row.shard}")
        if not 0 <= row.learner_id < self.lambda_:
            self._refuse(f"there are learners 0 to {self.lambda_ - 1}")
        if row.samples < 1:
            self._refuse(f"{row.samples} samples")
        if row.gradients != self.members[row.learner_id]:
            self._refuse(f"the sum of {row.gradients} gradient(s): {self.members[row.learner_id]} rank(s) compute for this learner")
        if row.staleness != row.clock - row.timestamp:
            self._refuse(f"staleness {row.staleness} is not clock - timestamp = {row.clock} - {row.timestamp}")
        if not 0 <= row.timestamp <= row.clock:
            self._refuse(f"timestamp {row.timestamp}: weights of clocks 0 to {row.clock} were there")
        if self.portions is not None and not 0 <= row.portion < self.portions.total:
            self._refuse(f"portion {row.portion}: there are portions 0 to {self.portions.total - 1}")

    def _check_clock(self, row: Row) -> None:
        clock = self.rules.clock
        if row.clock > clock:
            wanted = f"the protocol makes no update {clock + 1} of {self.gradients} gradient(s) before this row"
            self._refuse(f"the shard was at clock {clock}: {wanted}")
        if row.clock < clock:
            self._refuse(f"the shard was at clock {clock}: update {clock} was due after the row before")

    def _check_turn(self, row: Row) -> None:
        """Check turns, unless the row's learner, or the learner in turn, had left."""
        turn = self.rules.turn()
        if turn in (None, row.learner_id) or row.reason in _OF_THE_MISSED:
            return
        departs = any(each.learner_id == row.learner_id and each.clock <= self.rules.clock for each in self.departures)
        if not departs and turn in self.shard.pushes["learner_id"][self.place["row"] :]:
            self._refuse(f"learner {turn}'s turn")

    def _check_learner(self, row: Row) -> None:
        """Check that mini-batches follow each other, from weights given to the learner."""
        late = self.rules.finished and row.learner_id in self.rules.absent
        if row.learner_id not in self.rules.present and row.reason not in _OF_THE_MISSED and not late:
            self._refuse("this learner had left")
        number, last = self.last.get(row.learner_id, (-1, None))
        if last is None:
            first = self.first_seq[row.learner_id]
            if row.seq != first:
                self._refuse(f"the first push of this learner: expected mini-batch {first}")
            return
        again = self.rejects and row.seq == last.seq
        if row.seq != last.seq + 1 and not again:
            self._refuse(f"the learner's mini-batch before was {last.seq}, in row {number}")
        if row.timestamp < last.timestamp:
            self._refuse(
                f"timestamp {row.timestamp}: the learner's gradient before was computed from {last.timestamp}, in row {number}"
            )
        if math.isnan(last.answer_s):
            if self.shard.finished and row.timestamp != last.timestamp:
                self._refuse(f"timestamp {row.timestamp}: the learner got no weights after {last.timestamp}, row {number} says")
            return
        least, most = self.least[number], self.most[number]
        if row.timestamp < least or (row.timestamp > most and not self.rules.protocol.consistent):
            given = f"clock {least}" if least == most else f"clocks {least} to {most}"
            self._refuse(
                f"timestamp {row.timestamp}: the learner got the weights of {given} at {last.answer_s} s, row {number} says"
            )
        if row.arrival_s < last.answer_s:
            self._refuse(f"the push arrived at {row.arrival_s} s, before the weights were given, {last.answer_s} s")

    def _check_seconds(self, row: Row) -> None:
        """Check the order of arrival."""
        if not row.arrival_s >= 0:
            self._refuse(f"the push arrived at {row.arrival_s} s")
        if self.rules.clock < len(self.updated_s) and row.arrival_s > self.updated_s[self.rules.clock]:
            done_s = self.updated_s[self.rules.clock]
            self._refuse(f"the push arrived at {row.arrival_s} s, after update {self.rules.clock + 1} was done, {done_s} s")
        if self.rules.turn() is None and not (self.rules.finished and self.shard.enough):  # waited until the end
            before_s = max(self.arrival_s, self.updated_s[self.rules.clock - 1] if self.rules.clock else 0.0)
            if row.arrival_s < before_s:
                self._refuse(f"the push arrived at {row.arrival_s} s, before the entry above in the log, {before_s} s")
        self.arrival_s = max(self.arrival_s, row.arrival_s)

    def _check_verdict(self, row: Row) -> None:
        if row.learning_rate != self.rate:
            self._refuse(f"learning rate {row.learning_rate}, the schedule says {self.rate}")
        expected = self._judge(row)
        if (row.verdict, row.reason, row.weight) != (expected.kind, expected.reason, expected.weight):
            said = _said(row.verdict, row.reason, row.weight)
            self._refuse(f"{said}, the protocol says {_said(expected.kind, expected.reason, expected.weight)}")

    def _judge(self, row: Row) -> Verdict:
        """Judge a row."""
        rules, learner_id = self.rules, row.learner_id
        hangs = learner_id in self.shard.stuck or learner_id in rules.absent  # of a learner missed before, no STUCK is logged
        if row.reason == Reason.TORN and (learner_id in self.shard.lost or hangs or self._is_cut_off(learner_id)):
            return rules.on_torn(learner_id, row.timestamp, row.seq, row.portion)
        usable = math.isfinite(row.loss) or self.config.nonfinite == "continue"
        if not usable and self.config.nonfinite == "stop" and rules.is_wanted(learner_id, row.seq, row.portion):
            self._refuse(f"loss {row.loss}: the run would have ended here, for nonfinite = 'stop'")
        try:
            return rules.judge(learner_id, row.timestamp, row.seq, usable, row.portion)
        except ProtocolError as error:
            self._refuse(str(error))

    def _is_cut_off(self, learner_id: int) -> bool:
        """Return whether the shard died before logging the loss of a learner's last row."""
        return not self.shard.finished and learner_id not in self.shard.pushes["learner_id"][self.place["row"] + 1 :]

    def _update_while_due(self) -> None:
        while self.rules.update_due():
            if self.rules.clock == self.shard.final_clock:
                if self.shard.finished:
                    place = {"row": len(self.shard.updates), "clock": self.rules.clock + 1}
                    refuse(
                        f"the update is missing: due after row {self.place['row']} of pushes", self.shard.shard, "updates", **place
                    )
                return
            self._check_update(self.shard.update(self.rules.clock + 1))
            self.samples += self.pending_samples
            self.rate = self.rate_at(self.samples)
            self._begin_sum()
            self.rules.on_update(self.samples)

    def _check_update(self, update: np.void) -> None:
        expected: dict[str, Any] = {
            "shard": self.shard.shard,
            "clock": self.rules.clock + 1,
            "gradients": self.gradients,
            "samples": self.samples + self.pending_samples,
            "learning_rate": self.rate * self.weighting.take(),
            "mean_loss": self.losses / self.gradients if self.gradients else math.nan,
        }
        for name, value in expected.items():
            if not same(update[name].item(), value):
                why = f"{name} {update[name].item()}: the gradients up to row {self.place['row']} of pushes give {value}"
                refuse(why, self.shard.shard, "updates", row=self.rules.clock - self.shard.start.clock, clock=self.rules.clock + 1)

    def _let_happen(self, row: Row | None) -> None:
        """Let learners leave, and time end, before this row; None = to the end."""
        while True:
            left = next((each for each in self.departures[:1] if self._is_before(each, row)), None)
            over = next((each for each in self.timeouts[:1] if self._is_before(each, row)), None)
            if left is not None and (over is None or left[:2] <= over[:2]):
                self._depart()
            elif over is not None:
                self._time_out()
            else:
                return

    def _end_if_deserted(self, row: Row) -> None:
        """End a run finished by another shard, or left by all."""
        rules = self.rules
        if rules.finished or row.learner_id not in rules.absent or not self._is_deserted(row.arrival_s):
            return
        for learner_id in sorted(rules.present):
            rules.membership.on_departure(learner_id, Gone.STOPPED)
        rules.membership.end_if_deserted()

    def _is_deserted(self, now_s: float) -> bool:
        """Return whether all learners left or are missed, the last not LOST."""
        present = self.rules.present
        if not present <= self.goodbyes.keys():
            return False
        last_s = max((self.goodbyes[learner_id] for learner_id in present), default=-math.inf)
        return last_s <= now_s and (self.departed_s <= last_s or self.departed_kind in (Event.DEPARTED, Event.MISSED))

    def _end_if_enough(self, row: Row) -> None:
        """End a run ended by evaluations at its last update."""
        if self.rules.ordered and self.shard.enough and row.clock == self.shard.final_clock and row.reason == Reason.FINISHED:
            self.rules.finished = True

    def _is_before(self, event: Departure | TimeOut, row: Row | None) -> bool:
        clock = self.rules.clock
        if row is None:
            return event.clock <= clock or self.shard.finished
        if event.clock > clock:
            return False
        first = isinstance(event, Departure) and self._must_come_first(event, row)
        return event.time_s < row.arrival_s or row.clock > clock or first

    def _must_come_first(self, left: Departure, row: Row) -> bool:
        """Return whether an event with later seconds precedes the row."""
        if left.kind == Event.RETURNED and left.learner_id == row.learner_id and row.reason not in _OF_THE_MISSED:
            return True
        turn = self.rules.turn()
        if turn in (None, row.learner_id) or row.reason in _OF_THE_MISSED:
            return False
        for each in self.departures:  # the learner in turn had left, perhaps after others; or the row's own learner left
            if each.clock > self.rules.clock:
                break
            if each.kind != Event.RETURNED and each.learner_id in (turn, row.learner_id):
                return each.learner_id == turn
        return False

    def _depart(self) -> None:
        left = self.departures.pop(0)
        if left.kind != Event.LOST or left.learner_id in self.rules.present:  # a missed learner's loss ends nothing
            self.departed_s, self.departed_kind = left.time_s, left.kind
        at_once = left.clock == self.rules.clock - 1 and left.time_s == self.arrival_s  # with the gradient that made the update
        if left.clock != self.rules.clock and not at_once:
            self._refuse_departure(
                left, f"{Event(left.kind).name} at clock {left.clock}, but the next entry is of clock {self.rules.clock}"
            )
        after_s = self.updated_s[left.clock - 1] if left.clock else 0.0
        before_s = self.updated_s[left.clock] if left.clock < len(self.updated_s) else math.inf
        if not after_s <= left.time_s <= before_s:
            self._refuse_departure(
                left, f"{Event(left.kind).name} at {left.time_s} s, but clock {left.clock} was from {after_s} to {before_s} s"
            )
        if left.kind == Event.PASSED:
            if not self.rules.membership.passes(left.learner_id, self.rules.clock + 1, self.may_be_stuck):
                self._refuse_departure(left, "nothing says that the learner's gradient of this clock would not come")
        elif left.kind != Event.RETURNED:
            self.rules.membership.on_departure(left.learner_id, _GONE[Event(left.kind)])
        elif left.learner_id not in self.rules.present:
            self.rules.membership.on_return(left.learner_id)
        self._update_while_due()

    def _refuse_departure(self, left: Departure, why: str) -> NoReturn:
        refuse(why, self.shard.shard, "events", clock=left.clock, learner_id=left.learner_id)

    def _time_out(self) -> None:
        over = self.timeouts.pop(0)
        if over.clock == self.rules.clock - 1 and over.time_s == self.arrival_s:
            return  # coincides with the gradient that made the update
        least_s = (self.updated_s[over.clock - 1] if over.clock else 0.0) + self.timeout_s
        most_s = self.updated_s[over.clock] if over.clock < len(self.updated_s) else math.inf
        if over.clock != self.rules.clock or not least_s <= over.time_s <= most_s:
            why = f"a time-out at {over.time_s} s: clock {over.clock} had the time-out at {least_s} s, the end at {most_s} s"
            refuse(why, self.shard.shard, "events", clock=over.clock)
        self.rules.on_timeout()
        self._update_while_due()

    def _check_end(self) -> None:
        self._let_happen(None)
        shard = self.shard
        if self.rules.clock < shard.final_clock:
            why = f"the protocol makes no update of {self.gradients} gradient(s), and pushes has no more"
            refuse(why, shard.shard, "updates", row=self.rules.clock - shard.start.clock, clock=self.rules.clock + 1)
        if shard.finished:
            received = shard.start.received + len(shard.pushes) - len(shard.inserted)
            expected = {"final_clock": self.rules.clock, "samples": self.samples, "received": received, "pushed": received}
            for name, value in expected.items():
                if shard.summary[name] != value:
                    refuse(f"{name} {shard.summary[name]}, but the rows of pushes and updates give {value}", shard.shard, "summary")


def _said(kind: int, reason: int, weight: float) -> str:
    verdict = Kind(kind).name if kind in set(Kind) else f"verdict {kind}"
    why = Reason(reason).name if reason in set(Reason) else f"reason {reason}"
    return f"{verdict} with weight {weight}{f' ({why})' if reason else ''}"
