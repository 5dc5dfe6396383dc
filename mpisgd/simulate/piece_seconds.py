"""The gradient of a virtual group's piece, in virtual time; all pieces work on the same layer.

A piece costs its parameters' share of its rank's mini-batch: a third forward, two thirds backward, in equal parts between the
calls, which exchange sizes. With tensors, the whole gradient is computed when the last piece begins, as virtual ranks share one
model (`passes.py`): no piece has then passed the joining call, and earlier pushes were taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from mpisgd.comm.communicator import Group
from mpisgd.comm.messages import MOST_DIMENSIONS, Tag
from mpisgd.comm.virtual.wire import VirtualWire
from mpisgd.config import Config
from mpisgd.models.interleaved import Dealt
from mpisgd.pipeline.stage_messages import WireLinks
from mpisgd.vectors.computing import Travels, Waited
from mpisgd.vectors.memory import Memory, SizedVector


class Step(NamedTuple):
    """A piece's work until its next call, and that call; None = the end.

    Attributes:
        share: of a micro-batch's nanoseconds.
    """

    share: float
    call: int
    dealt: Dealt | None


def program_of(dealt: Sequence[Dealt]) -> list[Step]:
    """Return a piece's steps from its calls of a micro-batch."""
    forward, backward = ([each for each in dealt if each.back is back] for back in (False, True))
    program = []
    for calls, part in ((forward, 1 / 3), (backward, 2 / 3)):
        share = part / (len(calls) + 1)
        program += [Step(share, call, each) for call, each in enumerate(calls)]
        program.append(Step(share, -1, None))
    return program


class WholeGroup:
    """State of a group's pieces: the number begun, and the whole gradient, if tensors exist."""

    def __init__(self, whole: Travels | None, places: int) -> None:
        self._whole = whole
        self._places = places
        self._begun = 0
        self.loss = 0.0

    def begin(self, seq: int) -> None:
        self._begun += 1
        if self._begun % self._places == 0 and self._whole is not None:
            self.loss = self._whole.compute(seq)


class PieceSeconds(Travels):
    """A piece of a group.

    Args:
        next_ns: cost of this piece in the next mini-batch.
        program: steps of a micro-batch.
        clips: the group, for a clipped gradient: each piece tells its norm.
    """

    def __init__(
        self,
        rank: VirtualWire,
        ranks: Sequence[int],
        memory: Memory,
        next_ns: Callable[[], int],
        config: Config,
        program: Sequence[Step],
        group: WholeGroup,
        clips: Group | None = None,
    ) -> None:
        self.memory = memory
        self.samples = config.mu
        self.waited = Waited()
        self._rank = rank
        self._links = WireLinks(rank, ranks, _Sizes(), self.waited)
        self._next_ns = next_ns
        self._micro_batches = config.micro_batches
        self._program = program
        self._group = group
        self._clips = clips

    def compute(self, seq: int) -> float:
        ns, links = self._next_ns() / self._micro_batches, self._links
        self._group.begin(seq)
        links.seq, done = seq, 0.0
        for links.micro in range(self._micro_batches):
            for share, call, dealt in self._program:
                self._rank.work(round(done + share * ns) - round(done))
                done += share * ns
                if dealt is not None:
                    parts = [None if nbytes is None else SizedVector(nbytes, 1) for nbytes in dealt.nbytes]
                    links.deal(call, parts, back=dealt.back)
        if self._clips is not None:
            self._clips.tell(Tag.NORM, (0.0,))
        return self._group.loss


class _Sizes:
    """Parts without values (`links.Carrier`)."""

    def describe(self, part: SizedVector) -> tuple[tuple[int, ...], SizedVector]:
        return (part.nbytes, *([0] * (2 + 2 * MOST_DIMENSIONS))), part

    def room(self, described: tuple[int, ...]) -> tuple[SizedVector, SizedVector]:
        vector = SizedVector(described[0], 1)
        return vector, vector
