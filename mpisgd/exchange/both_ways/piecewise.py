"""A shard's end with bodies in pieces between nodes (`comm/pieces.py`).

MPI's question for a whole gradient's receive waits behind weights on the same connection: 0.45 s between two nodes at 1 Gbit/s both
ways, in pieces 0.38. MPI keeps early pieces, at most a slice per learner; beyond `MOST_KEPT` vectors bodies travel whole. So do
rounded weights, of unknown size.
"""

from __future__ import annotations

from typing import Any

from mpisgd.comm import pieces
from mpisgd.comm.communicator import Buffer, OpenMessage, is_far
from mpisgd.comm.messages import Fields, Push
from mpisgd.exchange.gathering import GatheringShardChannel
from mpisgd.exchange.roles import Roles
from mpisgd.exchange.shard_channel import ShardChannel
from mpisgd.vectors.chunks import chunks_of

MOST_KEPT = 4
"""Limit on kept pieces, in vectors of the model's size."""


def fits(roles: Roles) -> bool:
    return len(roles.learner_ranks) <= MOST_KEPT * len(roles.shard_ranks)


class _InPieces(OpenMessage):
    def __init__(self, opened: OpenMessage) -> None:
        self._opened = opened

    def add(self, body: Any) -> None:
        for piece in pieces.bodies([body]):
            self._opened.add(piece)

    def close(self) -> Any:
        return self._opened.close()


class PiecewiseShardChannel(ShardChannel):
    """A shard's end; call `cut` before the first answer."""

    _pieces_count = 0
    """Pieces of an answer to another node; 0: uncut."""

    def cut(self, weights: Buffer) -> None:
        """Answer other nodes in pieces of weights like these."""
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
        if near:  # the weights may be copied
            super().start_answers(near, weights, clock, verdicts)
        self.open_answers(far, weights, clock, verdicts)
        self.add_chunk(weights)
        self.close_answers()

    def _open(self, rank: int, fields: Fields) -> OpenMessage:
        opened = super()._open(rank, fields)
        return _InPieces(opened) if self._is_cut(rank) else opened

    def _empty_count(self, rank: int) -> int:
        return self._pieces_count if self._is_cut(rank) else super()._empty_count(rank)


class PiecewiseGatheringShardChannel(GatheringShardChannel, PiecewiseShardChannel):
    """The same with gathered gradients."""
