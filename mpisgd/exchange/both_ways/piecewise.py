"""A shard's end whose bodies cross to other nodes in pieces: where both directions are full, no question may wait behind a body.

A whole gradient asks whether its receive is posted, and the answer to that waits behind the weights that leave on the same
connection: two nodes that use both directions of 1 Gbit/s so need 0.45 s for what takes 0.38 in pieces (`comm/pieces.py`). What
comes before its turn is kept by MPI: at most a slice for each learner, which has one push under way. Where that would be more than
`MOST_KEPT` vectors, gradients and weights travel whole.

Weights that are rounded leave in one, as nobody knows before how many bytes they take.
"""

from __future__ import annotations

from typing import Any

from mpisgd.comm import pieces
from mpisgd.comm.communicator import Buffer, Opened, is_far
from mpisgd.comm.messages import Fields, Push
from mpisgd.exchange.gathering import GatheringShardChannel
from mpisgd.exchange.roles import Roles
from mpisgd.exchange.shard_channel import ShardChannel
from mpisgd.vectors.chunks import chunks_of

MOST_KEPT = 4
"""Vectors of the model's size."""


def fits(roles: Roles) -> bool:
    """Whether a shard has so few learners that bodies may travel in pieces."""
    return len(roles.learner_ranks) <= MOST_KEPT * len(roles.shard_ranks)


class _InPieces(Opened):
    """An answer, each of whose chunks is several bodies."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened

    def add(self, body: Any) -> None:
        for piece in pieces.bodies([body]):
            self._opened.add(piece)

    def close(self) -> Any:
        return self._opened.close()


class PiecewiseShardChannel(ShardChannel):
    """A shard's end; before the first answer, `cut` is called."""

    _pieces_count = 0
    """Of an answer to another node; 0: it is not cut."""

    def cut(self, weights: Buffer) -> None:
        """Weights like these are pulled in pieces."""
        self._pieces_count = len(pieces.bodies(chunks_of(weights)))

    def _bodies(self, push: Push, vector: Any) -> tuple[Any, ...]:
        *runs, vector = super()._bodies(push, vector)
        return (*runs, *(pieces.bodies([vector]) if is_far(self._wire, self.rank_of(push.learner_id)) else (vector,)))

    def _is_cut(self, rank: int) -> bool:
        return self._pieces_count > 0 and is_far(self._wire, rank)

    def start_answers(self, learner_ids: list[int], weights: Buffer, clock: int, verdicts: dict[int, int]) -> None:
        near, far = list[int](), list[int]()
        for learner_id in learner_ids:
            (far if self._is_cut(self.rank_of(learner_id)) else near).append(learner_id)
        if near:  # of whose weights a copy may be made
            super().start_answers(near, weights, clock, verdicts)
        self.open_answers(far, weights, clock, verdicts)
        self.add_chunk(weights)
        self.close_answers()

    def _open(self, rank: int, fields: Fields) -> Opened:
        opened = super()._open(rank, fields)
        return _InPieces(opened) if self._is_cut(rank) else opened

    def _empty_count(self, rank: int) -> int:
        return self._pieces_count if self._is_cut(rank) else super()._empty_count(rank)


class PiecewiseGatheringShardChannel(GatheringShardChannel, PiecewiseShardChannel):
    """The same, of a shard that gathers gradients."""
