"""A shard receiving all gradients at once: a slow link holds up no other learner.

    push header         begins a receive; the shard goes on with other messages
    complete gradient   counts as a push from now on, for staleness, turns and the log
    leaving answers     do not stop updates: new weights are made in a copy (`renew_weights`)

A learner's later messages wait behind its push. Without memory (`Pool.has_room`) the shard takes a push whole, in turn. No
deadlock: `no-deadlock.md`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from mpisgd.base.errors import PeerError
from mpisgd.comm.communicator import Communicator, IncomingBodies
from mpisgd.comm.messages import Message, Push, Refused, Tag

COPIES = 2
"""Most sets of answers under way from older weights."""


class Gathering:
    """Pushes and answers of a shard that are under way.

    Attributes:
        coming: receives under way, in the order of their headers.
    """

    def __init__(self, wire: Communicator) -> None:
        self._wire = wire
        self.coming: list[IncomingBodies] = []
        self._begun: list[Push] = []
        self._begun_by: defaultdict[int, int] = defaultdict(int)
        self._behind: defaultdict[int, list[Message]] = defaultdict(list)
        """Messages of each learner behind its begun pushes."""
        self._heard: deque[Message] = deque()
        """Messages released since all pushes before are complete."""
        self._older: list[list[Any]] = []
        """Answers under way from older weights."""

    def receive(self, take: Callable[[], Message | None], whose: Callable[[Message], int], until_s: float) -> Message | None:
        """Return the next message; a push once its gradient is complete."""
        while True:
            if self._heard:
                return self._heard.popleft()
            said = take()
            if said is None:
                if (come := self._come()) is not None:
                    return come
                if self._wire.clock.now_ns() * 1e-9 >= until_s:
                    return None
            elif not (self._begun and said is self._begun[-1]) and not self.put_behind(said, whose(said)):
                return said

    def begin(self, push: Push, rank: int, bodies: tuple[Any, ...]) -> None:
        self.coming.append(self._wire.post(rank, Tag.GRADIENT, *bodies))
        self._begun.append(push)
        self._begun_by[push.learner_id] += 1

    def _come(self) -> Message | None:
        """Return the first complete push, in order for each learner, or None."""
        earlier: set[int] = set()
        for at, push in enumerate(self._begun):
            if push.learner_id not in earlier and self.coming[at].is_whole():
                coming = self.coming.pop(at)
                del self._begun[at]
                self._begun_by[push.learner_id] -= 1
                if not self.is_coming(push.learner_id):
                    self._heard.extend(self._behind.pop(push.learner_id, ()))
                try:
                    coming.check()
                except PeerError as error:
                    push.body.lose()
                    return Refused(error.rank, str(error), push=True)
                push.arrival_ns = self._wire.clock.now_ns()
                return push
            earlier.add(push.learner_id)
        return None

    def put_behind(self, message: Message, learner_id: int) -> bool:
        """Put a message behind a learner's begun pushes; return False without any."""
        if not self.is_coming(learner_id):
            return False
        self._behind[learner_id].append(message)
        return True

    def is_coming(self, learner_id: int) -> bool:
        return learner_id >= 0 and self._begun_by[learner_id] > 0

    def set_aside(self, answers: list[Any]) -> bool:
        """Return whether all answers have left; the rest go on, from weights not to be changed."""
        self._older = [left for older in self._older if (left := _left(older))]
        left = _left(answers)
        if not left:
            return True
        self._older.append(left)
        while len(self._older) > COPIES:
            self._finish(self._older.pop(0))
        return False

    def see_out(self) -> None:
        """Wait for answers from older weights."""
        for answers in self._older:
            self._finish(answers)
        self._older.clear()

    def _finish(self, answers: list[Any]) -> None:
        for answer in answers:
            self._wire.finish(answer)


def _left(answers: list[Any]) -> list[Any]:
    return [answer for answer in answers if not answer.has_left()]
