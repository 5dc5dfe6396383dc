"""A shard that receives the gradients of all learners at the same time, so that one slow link holds up nobody else.

    header of a push      memory is lent for its gradient, and a receive begun; the shard goes on with other messages
    the gradient is whole it counts as come, in this order: staleness, turns and the log are as if its header had come now
    answers leave         weights may change: where some have not left yet, the new ones are made in a copy (`renew_weights`)

What a learner says after its push is heard after it: pulls, too. Where no memory is left for one more gradient
(`Rooms.room_to_park`), the next is taken as it comes, while all others wait, as in `shard_channel.py`.

A copy of the weights is made only for answers that are still under way when the next update is made, and at most `COPIES` such
sets of answers are: then the shard waits for the oldest. So memory is bounded, by one vector for each learner and `COPIES` slices.

No deadlock, by the argument of `channel.py`. A shard waits for a message or a gradient, whichever comes first, of anybody; it waits
for one learner only where there is no memory, for a gradient that has begun to leave, or for answers, whose receives were posted
before it was asked for them: by learners that wait inside MPI, which moves what was begun.
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
"""Sets of answers that may be under way, each from weights of its own, beside those from the weights as they are."""


class _Begun(NamedTuple):
    """A push whose header has come, and the memory that its gradient is received into."""

    push: Push
    room: Any


class GatheringShardChannel(ShardChannel):
    """A shard's end; `rooms` lends the memory."""

    def __init__(self, wire: Communicator, roles: Roles, shard: int, rooms: Rooms) -> None:
        super().__init__(wire, roles, shard, duplex=True)
        self._rooms = rooms
        self._room: Any = None
        """Lent for the push that has come last; None: its gradient was taken as it came."""
        self._begun: list[_Begun] = []
        """In the order of their headers, as `_coming`."""
        self._begun_by: defaultdict[int, int] = defaultdict(int)
        """How many of them are of each learner."""
        self._behind: defaultdict[int, list[Message]] = defaultdict(list)
        """What each learner has said behind pushes that are still coming."""
        self._heard: deque[Message] = deque()
        """What was behind them, until all of its learner's were whole."""
        self._older: list[list[Any]] = []
        """Answers under way from weights that were changed since."""

    def receive(
        self,
        gradient: Buffer,
        learner_id: int | None = None,
        until_s: float = math.inf,
        patterns: tuple[Pattern, ...] | None = None,
    ) -> Message | None:
        """As ever; a push is returned when its gradient is whole, and is what `rooms` took back last."""
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
        """A pull that has come of a learner whose push has, too."""
        while (message := super().receive_pull()) is not None and self._put_behind(message):
            pass
        return message

    def _take_body(self, push: Push, gradient: Any) -> bool:
        """Begin to receive it; where there is no memory, take it, unless one of the same learner is to come before."""
        self._room = None
        if not (self._rooms.room_to_park or self._is_coming(push.learner_id)):
            return super()._take_body(push, gradient)
        self._room = self._rooms.lend()
        rank = self.rank_of(push.learner_id)
        bodies = self._bodies(push, self._room)
        self._coming.append(self._wire.post(rank, Tag.GRADIENT, *bodies))
        return True

    def _come(self) -> Message | None:
        """The first push whose gradient is whole; those of one learner come in their order."""
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
        """Whether a message must wait for a push that its sender has begun before."""
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
        """Whether all answers have left. Else those that have not go on, from weights that must stay as they are."""
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
    """Those that have not left yet."""
    return [answer for answer in answers if not answer.has_left()]
