"""Script of a shard: the order in which a run's shard took its messages, from its log.

push        at its arrival
pull        by other rows (`pulls.py`)
event       at its second

After the last update, or a signal, pulls are told to stop, in any order.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from mpisgd.comm.messages import NOTHING_MORE, Ending, Fields, Tag
from mpisgd.comm.virtual.scripted import Arrived, Script
from mpisgd.comm.virtual.wire import Sending
from mpisgd.records.log.schema import Event, Reason
from mpisgd.replay.checks.finding import Finding
from mpisgd.replay.checks.record import ShardRecord
from mpisgd.replay.rerun.pulls import Asks, Given, Item, Pull, Turns, pulls_of
from mpisgd.rules.portions import NO_PORTION

_AT_ONCE = (Tag.NORM_PULL, Tag.NORM_TOLD)
_LAST = (*_AT_ONCE, Tag.PULL, Tag.GOODBYE)
"""Behind a whole log; an earlier mpisgd logged no goodbyes."""
_NO_TAG = -1
_PRESENCE = -2
_BROKEN = -3
_TAGS = {
    Event.TIMEOUT: _NO_TAG,
    Event.GOODBYE: Tag.GOODBYE,
    Event.GAVE_UP: Tag.GAVE_UP,
    Event.INTERRUPTED: Tag.INTERRUPT,
    Event.ENOUGH: Tag.SNAPSHOT_PULL,
    Event.LOST: Tag.LOST,
    Event.STUCK: Tag.STUCK,
    Event.MISSED: _PRESENCE,
    Event.RETURNED: _PRESENCE,
    Event.PASSED: _PRESENCE,
}
_TOLD = (Tag.INTERRUPT, Tag.LOST, Tag.STUCK, Tag.GAVE_UP, _BROKEN)
"""Not sent by a rank, run again."""
_OF_LEARNER = (Tag.PULL, Tag.PUSH, Tag.GOODBYE)
_ENDINGS = (Tag.INTERRUPT, Tag.SNAPSHOT_PULL)


_END = Item(_NO_TAG, -1, "", -1)


class ShardScript(Script):
    """Script of a shard; others as of `pulls_of`. Raises Untrue.

    Args:
        ranks: of its learners, in the order of learner_ids.
        agrees: updates are made when a norm is told.
        late: no learner was told of a signal.
    """

    def __init__(
        self,
        log: ShardRecord,
        ranks: Sequence[int],
        asks: Asks,
        on_push: Callable[[int], None],
        given: Given,
        *,
        both_ways: bool,
        agrees: bool,
        late: bool,
    ) -> None:
        turns = Turns(log, list(_TAGS))
        self._on_push = on_push
        self._log = turns.log
        self._ranks = ranks
        self._items = list(items_of(turns, pulls_of(turns, asks, given, both_ways=both_ways)))
        self._at = 0
        self._last = self._last_counted()
        self._endings = () if late and self._last >= 0 else _ENDINGS
        self._to_come: list[deque[int]] = [deque() for _ in ranks]
        self._pushes_to_come: list[deque[int]] = [deque() for _ in ranks]
        """Rows of learners."""
        for item in self._items:
            if item.tag in _OF_LEARNER:
                self._to_come[item.learner_id].append(item.tag)
            if item.tag == Tag.PUSH:
                self._pushes_to_come[item.learner_id].append(item.row)
        self._asked = set[int]()
        """Ranks whose last message was a pull."""
        self._unlogged = _unlogged(log)
        self._departing = {ranks[learner_id] for learner_id in range(log.lambda_) if _leaves_first(log, learner_id)}
        """Ranks with a pull, or none, and no push: not stopped, hence given weights."""
        self._given = {ranks[learner_id] for learner_id in given.elsewhere}
        """Ranks with weights and no further push."""
        self._lost = {ranks[learner_id] for learner_id in log.lost if learner_id not in _parted(log)}
        self._silences = 0
        self._let_in = -1
        """Rank with a pull that no row tells."""
        self._gives_up = Event.GAVE_UP in log.events["kind"]
        self._torn = False
        self._agreed = log.start.clock if agrees else math.inf
        """Clock of the updates with a norm that was told."""
        self._stops = False
        """Pulls are told to stop."""

    def _last_counted(self) -> int:
        """Return the item of the last update; -1 = no end."""
        log = self._log
        if Event.STOPPED not in log.events["kind"]:
            return -1
        clocks = {"pushes": log.pushes["clock"], "events": log.events["clock"]}
        items = ((at, item) for at, item in enumerate(self._items) if item.tag != Tag.PULL)
        return max((at for at, item in items if clocks[item.table][item.row] < log.final_clock), default=-1)

    # ------------------------------------------------------------------------------------------------------ what is next

    @property
    def at_end(self) -> bool:
        return self._at == len(self._items)

    @property
    def _next(self) -> Item:
        return _END if self.at_end else self._items[self._at]

    @property
    def tells_presence(self) -> bool:
        """A learner is missed, back, or passes next."""
        return self._next.tag == _PRESENCE

    @property
    def pulls_first(self) -> bool:
        return self._stops and self._next.tag in (_PRESENCE, *_TOLD)

    @property
    def torn(self) -> bool:
        return self._torn

    def expects(self, learner_id: int) -> bool:
        """Return whether a learner has a message to come."""
        return bool(self._to_come[learner_id])

    def describe(self) -> tuple[str, int | None]:
        item = self._next
        if item.learner_id < 0:
            return "waits, by its log, for an event", None
        return f"waits, by its log, for {Tag(item.tag).name} of learner {item.learner_id}", self._ranks[item.learner_id]

    def portion_of(self, learner_id: int) -> int:
        """Return the portion of a learner's next push; NO_PORTION = no push comes."""
        rows = self._pushes_to_come[learner_id]
        return int(self._log.pushes["portion"][rows[0]]) if rows else NO_PORTION

    def hears(self, arrived: Arrived) -> bool:
        return self._stops and self._at_any_time(arrived) is not None

    def wanted(self) -> Sequence[int]:
        if self.at_end:
            return self._ranks
        item = self._next
        comes_anyway = item.learner_id < 0 or (item.tag == Tag.PULL and not self._gives_up)
        untold = [self._ranks[learner_id] for learner_id, left in self._unlogged.items() if left > 0] if self._stops else []
        return untold if comes_anyway else [self._ranks[item.learner_id], *untold]

    def stuck(self) -> Finding:
        """Return the row that never comes, run again."""
        item, log = self._next, self._log
        if item.table == "events":
            event = log.events[item.row]
            name, clock, learner_id = Event(event["kind"]).name, int(event["clock"]), item.learner_id
            return Finding(f"run again, {name} never comes", log.shard, "events", row=item.row, clock=clock, learner_id=learner_id)
        row = log.row(item.row)
        what = "this push" if item.tag == Tag.PUSH else "the pull before this push"
        place = {"row": item.row, "clock": row.clock, "learner_id": row.learner_id, "seq": row.seq}
        return Finding(f"run again, {what} never comes", log.shard, "pushes", **place)

    # ------------------------------------------------------------------------------------------------------------ go on

    def _go_on(self) -> None:
        item = self._items[self._at]
        self._silences = 0
        self._torn = item.tag == Tag.PUSH and self._log.row(item.row).reason == Reason.TORN
        self._stops = self._stops or self._at == self._last or item.tag in self._endings or self._ends_all(item)
        if item.tag == Tag.PUSH:
            self._on_push(item.row)
        self._pass(item)
        while self._stops and self._next.tag == Tag.PULL:  # taken as they come
            self._pass(self._next)

    def _ends_all(self, item: Item) -> bool:
        """Return whether a goodbye told of a signal, or of the evaluations' end."""
        if item.tag != Tag.GOODBYE:
            return False
        following = self._log.events["kind"][item.row + 1 : item.row + 2]
        return bool(np.isin(following, (Event.INTERRUPTED, Event.ENOUGH)).any())

    def _pass(self, item: Item) -> None:
        self._at += 1
        if item.tag in _OF_LEARNER:
            self._to_come[item.learner_id].popleft()
        if item.tag == Tag.PUSH:
            self._pushes_to_come[item.learner_id].popleft()

    def time_out(self) -> bool:
        if self.at_end or self._next.tag != _NO_TAG:
            return self.tells_presence
        self._go_on()
        return True

    def presence(self) -> tuple[Event, int]:
        """Return the event of a learner's presence, and the learner."""
        item = self._next
        self._go_on()
        return Event(self._log.events["kind"][item.row]), item.learner_id

    def told(self) -> tuple[int, int, Fields] | None:
        if (item := self._next).tag not in _TOLD or self._log.events["clock"][item.row] > self._agreed:
            return None
        self._go_on()
        if item.tag == Tag.INTERRUPT:
            return self._ranks[0], Tag.INTERRUPT, (int(item.value),)
        rank, learner_id = self._ranks[item.learner_id], item.learner_id
        if item.tag == _BROKEN:
            return rank, Tag.GOODBYE, (learner_id, len(self._log.rows_of[learner_id]), Ending.BROKEN)
        if item.tag == Tag.GAVE_UP:
            return rank, Tag.GAVE_UP, (learner_id, int(item.value))
        return rank, item.tag, (-1,)

    # ------------------------------------------------------------------------------------------------------------- find

    def find(self, arrived: Arrived) -> Sending | None:
        if self._let_in >= 0:
            rank, self._let_in = self._let_in, -1
            return next(message for message in arrived[Tag.PULL] if message.source.rank == rank)
        if self.at_end and not self._log.finished:
            return None
        return (
            self._first_of_departing(arrived[Tag.PULL])
            or self._unlogged_push(arrived)
            or self._at_any_time(arrived)
            or self._snapshot_pull(arrived[Tag.SNAPSHOT_PULL])
            or self._by_item(arrived)
        )

    def _at_any_time(self, arrived: Arrived) -> Sending | None:
        pushing = _pushing(arrived)
        tags = _LAST if self.at_end else (*_AT_ONCE, Tag.PULL) if self._stops else _AT_ONCE
        found = (message for tag in tags for message in arrived[tag] if message.source.rank not in pushing)
        message = next((message for message in found if not self._never_taken(message)), None)
        if message is not None and message.tag == Tag.NORM_TOLD:
            self._agreed = max(self._agreed, message.fields[1] + 1)
        return message

    def _never_taken(self, message: Sending) -> bool:
        """Return whether a lost rank says goodbye, or a pull got weights beyond this cut log."""
        rank = message.source.rank
        if message.tag == Tag.GOODBYE:
            return rank in self._lost
        return message.tag == Tag.PULL and rank in self._given and not self._pushes_to_come[self._ranks.index(rank)]

    def _first_of_departing(self, pulls: Iterable[Sending]) -> Sending | None:
        for message in pulls if self._departing else ():
            if message.source.rank in self._departing:
                self._departing.remove(message.source.rank)
                return message
        return None

    def _unlogged_push(self, arrived: Arrived) -> Sending | None:
        """Return a push that only a goodbye counts."""
        for message in arrived[Tag.PUSH] if self._unlogged else ():
            learner_id = self._ranks.index(message.source.rank)
            left, next_up = self._unlogged.get(learner_id, 0), self._stops or self._next.learner_id == learner_id
            if left > 0 and next_up and not self._pushes_to_come[learner_id] and not self._is_missed(learner_id):
                self._unlogged[learner_id] -= 1
                self._torn = False
                return message
        return None

    def _is_missed(self, learner_id: int) -> bool:
        """Return whether a learner's absence, or return, is to come."""
        kinds = self._log.events["kind"]
        items = (item for item in self._items[self._at :] if item.tag == _PRESENCE and item.learner_id == learner_id)
        return any(kinds[item.row] in (Event.MISSED, Event.RETURNED) for item in items)

    def _snapshot_pull(self, pulls: Iterable[Sending]) -> Sending | None:
        for message in pulls:
            number, enough = message.fields
            if self.at_end or (not enough and number != NOTHING_MORE):
                return message
            if enough and self._next.tag == Tag.SNAPSHOT_PULL:
                self._go_on()
                return message
        return None

    def _by_item(self, arrived: Arrived) -> Sending | None:
        if self._next.learner_id < 0:
            return None
        for at in self._alike():
            item = self._items[at]
            rank = self._ranks[item.learner_id]
            for message in arrived[item.tag]:
                if message.source.rank == rank:
                    (self._asked.add if item.tag == Tag.PULL else self._asked.discard)(rank)
                    self._items[at], self._items[self._at] = self._next, item
                    self._go_on()
                    return message
        return None

    def _alike(self) -> Iterator[int]:
        """Yield the next item, then, if a pull, the pulls behind it: no row tells their order."""
        yield self._at
        for at in range(self._at, len(self._items) - 1):
            if not self._items[at].tag == self._items[at + 1].tag == Tag.PULL:
                return
            yield at + 1

    def relax(self, arrived: Arrived) -> None:
        """Let in a pull that no row tells."""
        pushing = _pushing(arrived)
        asks = [message.source.rank for message in arrived[Tag.PULL] if message.source.rank not in pushing]
        again = [rank for rank in asks if rank in self._asked]
        coming = {rank: self._to_come[self._ranks.index(rank)] for rank in asks}
        if self._log.finished:
            again += [rank for rank in asks if rank not in self._lost and Tag.PULL not in coming[rank]]
        again += [rank for rank in asks if list(coming[rank])[:1] == [Tag.GOODBYE]]  # a killed shard's log lacks the answer
        self._silences += 1
        if self._silences == 1:  # another shard may let the awaited learner go on
            again = [rank for rank in again if rank in self._asked or rank in self.wanted()]
        self._let_in = next(iter(again), -1)


def _unlogged(log: ShardRecord) -> dict[int, int]:
    """Return, by learner, the number of pushes that only a goodbye counts."""
    said = log.events[log.events["kind"] == Event.GOODBYE][["learner_id", "value"]].tolist()
    counts = {learner_id: int(value) - len(log.rows_of[learner_id]) for learner_id, value in said}
    return {learner_id: count for learner_id, count in counts.items() if count > 0}


def _parted(log: ShardRecord) -> set[int]:
    return set(log.events["learner_id"][log.events["kind"] == Event.GOODBYE].tolist())


def leaves(log: ShardRecord, learner_id: int) -> bool:
    """Return whether a learner leaves by itself: its departure is the row behind its goodbye."""
    goodbyes = np.flatnonzero((log.events["kind"] == Event.GOODBYE) & (log.events["learner_id"] == learner_id))
    following = log.events[goodbyes[goodbyes + 1 < len(log.events)] + 1]
    return bool(((following["kind"] == Event.DEPARTED) & (following["learner_id"] == learner_id)).any())


def _leaves_first(log: ShardRecord, learner_id: int) -> bool:
    return not len(log.rows_of[learner_id]) and leaves(log, learner_id)


def _pushing(arrived: Arrived) -> set[int]:
    return {message.source.rank for message in arrived[Tag.PUSH]}


def items_of(turns: Turns, pulls: list[Pull]) -> Iterator[Item]:
    """Yield a script's items: pushes, events, and pulls among them."""
    waiting = deque(pulls)
    for place, number in enumerate(turns.order.tolist()):
        while waiting and waiting[0].place <= place:
            yield waiting.popleft().item
        if number < turns.count:
            yield Item(Tag.PUSH, int(turns.log.pushes["learner_id"][number]), "pushes", number)
        else:
            yield from _of_event(turns.log, int(turns.rows[number - turns.count]))
    yield from (pull.item for pull in waiting)


def _of_event(log: ShardRecord, row: int) -> Iterator[Item]:
    kind, learner_id, value = (log.events[row][name].item() for name in ("kind", "learner_id", "value"))
    before = log.events[max(0, row - 1)]
    behind = before["kind"] if before["learner_id"] == learner_id else None
    if kind == Event.MISSED and behind == Event.STUCK:  # missed without a look
        return
    if (kind == Event.INTERRUPTED and value == 0) or (kind == Event.ENOUGH and math.isnan(value)):  # a goodbye tells
        return
    broken = kind == Event.LOST and behind == Event.DEPARTED  # absent, with another rank of its group lost
    yield Item(_BROKEN if broken else _TAGS[Event(kind)], learner_id, "events", row, value)
