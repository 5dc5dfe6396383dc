"""A shard receiving all learners' gradients at once: a slow link holds up no other learner.

    push header         begins a receive into lent memory; the shard goes on with other messages
    complete gradient   counts as a push from now on, for staleness, turns and the log
    leaving answers     do not stop updates: new weights are made in a copy (`renew_weights`)

A learner's later messages wait behind its push. Without memory (`Rooms.room_to_park`) the shard takes a push whole, as in
`shard_channel.py`. At most `COPIES` sets of answers leave from older weights; then the shard waits for the oldest. So memory is
bounded. No deadlock: `no-deadlock.md`.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from typing import Any, NamedTuple

from mpisgd.base.errors import PeerError
from mpisgd.comm.communicator import Buffer, Communicator, Pattern
from mpisgd.comm.messages import GaveUp, Goodbye, Message, Pull, Push, Refused, SnapshotPull, Tag
from mpisgd.exchange.roles import Roles
from mpisgd.exchange.shard_channel import ShardChannel
from mpisgd.vectors.computing import Rooms

COPIES = 2
"""Most sets of answers under way from older weights."""


class _Begun(NamedTuple):
    push: Push
    room: Any


class GatheringShardChannel(ShardChannel):
    """A shard's end; `rooms` lends the memory."""

    def __init__(self, wire: Communicator, roles: Roles, shard: int, rooms: Rooms) -> None:
        super().__init__(wire, roles, shard, duplex=True)
        self._rooms = rooms
        self._room: Any = None
        """Memory lent for the last push; None: its gradient was taken at once."""
        self._begun: list[_Begun] = []
        """Begun pushes in the order of headers, as `_coming`."""
        self._begun_by: defaultdict[int, int] = defaultdict(int)
        self._behind: defaultdict[int, list[Message]] = defaultdict(list)
        """Messages of each learner behind its begun pushes."""
        self._heard: deque[Message] = deque()
        """Messages released since all pushes before are complete."""
        self._older: list[list[Any]] = []
        """Answers under way from older weights."""

    def receive(
        self,
        gradient: Buffer,
        learner_id: int | None = None,
        until_s: float = math.inf,
        patterns: tuple[Pattern, ...] | None = None,
    ) -> Message | None:
        """Return the next message; a push once its gradient is complete, in the room taken back last."""
        while True:
            if self._heard:
                return self._heard.popleft()
            said = super().receive(gradient, learner_id, until_s, patterns)
            if said is None:
                if (come := self._come()) is not None:
                    return come
                if self.now_s() >= until_s:
                    return None
            elif isinstance(said, Push) and self._room is not None:
                self._begun.append(_Begun(said, self._room))
                self._begun_by[said.learner_id] += 1
            elif not self._put_behind(said):
                return said

    def receive_pull(self) -> Message | None:
        while (message := super().receive_pull()) is not None and self._put_behind(message):
            pass
        return message

    def _take_body(self, push: Push, gradient: Any) -> bool:
        """Begin to receive a gradient; without memory take it whole, unless an earlier push of its learner is under way."""
        self._room = None
        if not (self._rooms.room_to_park or self._is_coming(push.learner_id)):
            return super()._take_body(push, gradient)
        self._room = self._rooms.lend()
        rank = self.rank_of(push.learner_id)
        bodies = self._bodies(push, self._room)
        self._coming.append(self._wire.post(rank, Tag.GRADIENT, *bodies))
        return True

    def _come(self) -> Message | None:
        """Return the first complete push, in order for each learner, or None."""
        earlier = set[int]()
        for at, (push, room) in enumerate(self._begun):
            if push.learner_id not in earlier and self._coming[at].is_whole():
                coming = self._coming.pop(at)
                del self._begun[at]
                self._begun_by[push.learner_id] -= 1
                if not self._is_coming(push.learner_id):
                    self._heard.extend(self._behind.pop(push.learner_id, ()))
                self._rooms.take_back(room)
                try:
                    coming.check()
                except PeerError as error:
                    return Refused(error.rank, str(error), push=True)
                push.arrival_ns = self._wire.clock.now_ns()
                return push
            earlier.add(push.learner_id)
        return None

    def _put_behind(self, message: Message) -> bool:
        """Put a message behind its sender's begun pushes; return False without any."""
        if isinstance(message, Pull | Goodbye | GaveUp):
            whose = message.learner_id
        elif isinstance(message, SnapshotPull):
            whose = self.learner_of(self._evaluator_rank)
        else:
            return False
        if not self._is_coming(whose):
            return False
        self._behind[whose].append(message)
        return True

    def _is_coming(self, learner_id: int) -> bool:
        return self._begun_by[learner_id] > 0

    def finish_answers(self) -> bool:
        """Return whether all answers have left; the rest go on, from weights not to be changed."""
        self._older = [left for older in self._older if (left := _left(older))]
        left = _left(self._under_way)
        self._under_way.clear()
        if not left:
            return True
        self._older.append(left)
        while len(self._older) > COPIES:
            self._finish(self._older.pop(0))
        return False

    def see_out_answers(self) -> bool:
        for answers in (*self._older, self._under_way):
            self._finish(answers)
        self._older.clear()
        self._under_way.clear()
        return True

    def _finish(self, answers: list[Any]) -> None:
        for answer in answers:
            self._wire.finish(answer)


def _left(answers: list[Any]) -> list[Any]:
    return [answer for answer in answers if not answer.has_left()]
