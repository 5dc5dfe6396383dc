"""Pulls of a shard's learners, placed among the log's pushes and events: no row tells of pulls.

A push tells the clock of its weights, hence of the pull before. The second of the answer is in the row of the push before.
Mini-batches given up have no pulls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mpisgd.comm.messages import Tag
from mpisgd.records.log.schema import Event, LogRows
from mpisgd.replay.checks.finding import refuse
from mpisgd.replay.checks.record import ShardRecord


class Item(NamedTuple):
    """A message, or an event; `row`: of the push, of the push after the pull, or of the event."""

    tag: int
    learner_id: int
    table: str
    row: int
    value: float = 0.0


class Pull(NamedTuple):
    """A pull before the push or event `place`; `turn`: among pulls of one place."""

    place: int
    turn: int
    item: Item


class Asks(NamedTuple):
    """Pulls by the protocol; `next_clock`: awaited since the push, -1 = none."""

    next_clock: Callable[[int], int]
    pushes_per_pull: int


class Given(NamedTuple):
    """Clocks of weights that no push tells, by learner (`given_elsewhere`, `fates.given_last`)."""

    elsewhere: Mapping[int, int]
    last: Mapping[int, int]


class Turns:
    """Pushes and some events of a shard's log, in turn.

    Attributes:
        order: numbers of pushes, then events, by place.
        place: the inverse; last: by clock since the start, the last place before its end.
    """

    def __init__(self, log: ShardRecord, kinds: Sequence[int]) -> None:
        self.log = log
        self.rows = np.flatnonzero(np.isin(log.events["kind"], kinds))
        self.events: LogRows = log.events[self.rows]
        self.count = len(log.pushes)
        self._times = np.concatenate((log.pushes["arrival_s"], self.events["time_s"]))
        self.order = self._by_time()
        self.place = np.empty(len(self.order), np.int64)
        self.place[self.order] = np.arange(len(self.order))
        self.seconds = self._times[self.order]
        clocks = np.concatenate((log.pushes["clock"], self.events["clock"])) - log.start.clock
        last = np.full(log.final_clock - log.start.clock + 2, -1)
        np.maximum.at(last, clocks, self.place)
        self.last = np.maximum.accumulate(last)

    def _by_time(self) -> np.ndarray:
        """Return numbers by time, in one nanosecond by clock; an event comes before the push that ends its clock, a time-out before
        the first push.
        """
        clocks, arrivals = self.log.pushes["clock"], self.log.pushes["arrival_s"]
        pushes, events = 2.0 * clocks, 2.0 * self.events["clock"] + 0.5
        last = np.full(self.log.final_clock + 1, -1)
        by_arrival = np.argsort(arrivals, kind="stable")
        last[clocks[by_arrival]] = by_arrival
        pushes[last[: self.log.final_clock][last[: self.log.final_clock] >= 0]] += 1
        first = dict(zip(clocks[::-1].tolist(), arrivals[::-1].tolist(), strict=True))
        over = np.flatnonzero(self.events["kind"] == Event.TIMEOUT)
        early = [number for number in over.tolist() if first.get(self.events["clock"][number]) == self.events["time_s"][number]]
        events[early] -= 1
        return np.lexsort((np.concatenate((pushes, events)), self._times))

    def places_of(self, learner_id: int, *kinds: Event) -> np.ndarray:
        mine = np.isin(self.events["kind"], kinds) & (self.events["learner_id"] == learner_id)
        return self.place[self.count + np.flatnonzero(mine)]

    def first_return(self, place: int) -> int:
        """Return the first place of the returns in a row that end here."""
        while place > 0 and self._is_return(place - 1):
            place -= 1
        return place

    def _is_return(self, place: int) -> bool:
        number = int(self.order[place]) - self.count
        return number >= 0 and bool(self.events["kind"][number] == Event.RETURNED)

    def after(self, clock: int) -> int:
        """Return the first place at a clock since the start."""
        return int(self.last[clock - 1]) + 1 if clock > 0 else 0


def given_elsewhere(log: ShardRecord, others: Sequence[ShardRecord], *, consistent: bool) -> dict[int, int]:
    """Return the clock of weights whose push only a killed shard's log lacks, by learner; -1 = own to each shard."""
    found = {}
    for learner_id, rows in enumerate(() if log.finished else log.rows_of):
        further = [other for other in others if len(other.rows_of[learner_id]) > len(rows)]
        if further and learner_id not in log.lacks:
            other = further[0]
            found[learner_id] = int(other.pushes["timestamp"][other.rows_of[learner_id][len(rows)]]) if consistent else -1
    return found


def pulls_of(turns: Turns, asks: Asks, given: Given, *, both_ways: bool) -> list[Pull]:
    """Return all learners' pulls by place. Raises Untrue: a pull has no place.

    Args:
        both_ways: a pull may be answered before the push that it follows.
    """
    found: list[Pull] = []
    for learner_id in range(turns.log.lambda_):
        clocks = given.elsewhere.get(learner_id, -1), given.last.get(learner_id, -1)
        found += LearnerPulls(turns, learner_id, asks, clocks, both_ways).all()
    return sorted(found)


class LearnerPulls:
    """Pulls of one learner."""

    def __init__(self, turns: Turns, learner_id: int, asks: Asks, given: tuple[int, int], both_ways: bool) -> None:
        self._given, self._given_last = given
        self._turns, self._log, self._learner_id, self._start = turns, turns.log, learner_id, turns.log.start.clock
        rows = turns.log.rows_of[learner_id]
        self._rows = rows[np.argsort(turns.place[rows])]
        self._at = turns.place[self._rows]
        self._goes_on = (turns.log.pushes["seq"][self._rows] + 1) % asks.pushes_per_pull != 0
        """No pull follows."""
        self._next_clock, self._both_ways = asks.next_clock, both_ways
        self._lost = turns.log.lost.get(learner_id)

    def all(self) -> Iterator[Pull]:
        if not len(self._at):
            yield from self._without_push()
            return
        places = self._places()
        told = np.concatenate(([True], ~np.isnan(self._answers[:-1])))
        never = self._earliest > self._latest
        abandoned = np.searchsorted(self._at, self._turns.places_of(self._learner_id, Event.STUCK))
        abandoned = abandoned[abandoned < len(told)]
        told[abandoned] |= ~never[abandoned]  # an abandoned answer has no second
        told[1:] &= ~self._goes_on[:-1]
        for number in np.flatnonzero(told & never)[:1].tolist():
            row = self._log.row(int(self._rows[number]))
            why = f"timestamp {row.timestamp}: no pull can have got these weights"
            place = {"row": int(self._rows[number]), "clock": row.clock, "learner_id": row.learner_id, "seq": row.seq}
            refuse(why, self._log.shard, "pushes", **place)
        for number in np.flatnonzero(told).tolist():
            row_number = int(self._rows[number])
            yield Pull(int(places[number]), row_number, Item(Tag.PULL, self._learner_id, "pushes", row_number))
        if self._is_given_last:
            item = Item(Tag.PULL, self._learner_id, "pushes", int(self._rows[-1]))
            yield Pull(self._final, len(self._turns.order), item)

    def _without_push(self) -> Iterator[Pull]:
        mine = self._log.events_of[self._learner_id]
        pull = Pull(0, len(self._turns.order), Item(Tag.PULL, self._learner_id, "events", 0))
        if self._lost is not None:
            if self._lost.given >= 0:
                yield pull._replace(place=self._turns.after(self._lost.given - self._start))
        elif (mine["value"][mine["kind"] == Event.GOODBYE] > 0).any():  # the push is not logged
            yield pull
        elif 0 <= self._given <= self._log.final_clock:
            yield pull._replace(place=self._turns.after(self._given - self._start))

    def _places(self) -> np.ndarray:
        """Place each pull in the clock of its weights, at the answer to the push before."""
        pushes, at, last = self._log.pushes[self._rows], self._at, self._turns.last
        given, self._answers = pushes["timestamp"] - self._start, pushes["answer_s"]
        self._earliest = earliest = np.where(given > 0, last[given - 1] + 1, 0)
        self._latest = np.where(last[given] >= earliest, np.minimum(at, last[given]), at)
        if not self._both_ways:
            earliest[1:] = np.maximum(earliest[1:], at[:-1] + 1)
        for back in self._returns():
            following = int(np.searchsorted(at, back))
            if following < len(at) and earliest[following] <= self._latest[following]:
                earliest[following] = self._latest[following] = np.clip(back, earliest[following], self._latest[following])
        told = np.searchsorted(self._turns.seconds, self._answers, side="left")
        self._told = told = np.where(np.isnan(self._answers), 0, told)
        places = np.minimum(np.maximum(np.concatenate(([0], told[:-1])), earliest), self._latest)
        asked = np.array([self._next_clock(clock) for clock in given[:-1].tolist()], np.int64)
        waits = (given[1:] == asked) & (pushes["clock"][:-1] - self._start < asked) & self._is_there()  # from the push on
        places[1:] = np.where(waits, at[:-1] + 1, places[1:])
        return np.asarray(places)

    def _returns(self) -> list[int]:
        """Return places of the missed learner's returns that a pull tells; of returns in a row, the first: pulls may wait."""
        turns, found = self._turns, []
        missed, returns = turns.places_of(self._learner_id, Event.MISSED), turns.places_of(self._learner_id, Event.RETURNED)
        for back in returns.tolist():
            since = int(missed[missed < back].max(initial=-1))
            if not ((self._at > since) & (self._at < back)).any() and not self._owed_a_push(since):
                found.append(turns.first_return(back))
        return found

    def _owed_a_push(self, place: int) -> bool:
        """Return whether weights were given before a place, and no push came since."""
        pushes = int(np.searchsorted(self._at, place))
        if place < 0 or not pushes:
            return False
        if not self._goes_on[pushes - 1] and not self._answers[pushes - 1] < self._turns.seconds[place]:
            return False
        return not (self._turns.places_of(self._learner_id, Event.GAVE_UP) > self._at[pushes - 1]).any()

    def _is_there(self) -> np.ndarray:
        """Return whether the learner was not missed between each push and the next."""
        missed = np.searchsorted(self._turns.places_of(self._learner_id, Event.MISSED), self._at)
        return np.asarray(missed[1:] == missed[:-1])

    @property
    def _is_given_last(self) -> bool:
        """Return whether weights were given after the last push, and came to nothing."""
        if self._learner_id in self._log.lacks:
            return not self._goes_on[-1]
        if self._given >= 0:
            return self._given <= self._log.final_clock
        gave_up = self._turns.places_of(self._learner_id, Event.GAVE_UP)
        return not math.isnan(self._answers[-1]) and not (gave_up > self._at[-1]).any()

    @property
    def _final(self) -> int:
        if self._given >= 0:
            return max(0 if self._both_ways else int(self._at[-1]) + 1, self._turns.after(self._given - self._start))
        back = max(self._returns(), default=-1)
        given = self._given_last if self._lost is None else self._lost.given
        given = self._turns.after(given - self._start) if given <= self._log.final_clock else 0
        return back if back > self._at[-1] else max(int(self._told[-1]), 0 if self._both_ways else int(self._at[-1]) + 1, given)
