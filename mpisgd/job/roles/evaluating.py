"""Evaluation by a group of ranks, each with a piece of each layer, none with the whole model (`models/partitioned.py`).

Each pulls its own piece, and all pass each batch together: outputs and loss have the same bits. Shards decide alone (law 2): a
snapshot exists once all have it, and a signal to any rank interrupts all. Piece 0 writes the log and the weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mpisgd.base import durable
from mpisgd.base.storage import writing
from mpisgd.comm.communicator import Group
from mpisgd.comm.messages import LAYOUTS, Tag
from mpisgd.evaluator import Evaluator, OnEvaluation, WeightsInParts
from mpisgd.exchange.evaluator_channel import Snapshot
from mpisgd.exchange.exchange import Interrupted
from mpisgd.job.roles.role import RankRole
from mpisgd.models.partition import Partition
from mpisgd.pipeline.partitioned_gradient import joined, links_of
from mpisgd.pipeline.stage_messages import WireLinks

_OF_WEIGHTS = -2
"""In place of a call's number, when weights are gathered."""
_WORDS = len(LAYOUTS[Tag.AGREE].fields)


class PieceEvaluator(Evaluator):
    """A rank's part; model, `pulled` and `channel` are of its piece.

    Args:
        whole: the model, for names and shapes.
        group, links: all ranks of the group, by piece.
    """

    def __init__(
        self, *arguments: Any, whole: nn.Module, partition: Partition, group: Group, links: WireLinks, **named: Any
    ) -> None:
        super().__init__(*arguments, **named)
        self._whole = whole
        self._partition = partition
        self._group = group
        self._links = links

    def evaluate_all(self, weights_file: Path, first: int = 0, on_evaluation: Sequence[OnEvaluation] = ()) -> None:
        """Evaluate; `first` is piece 0's, and callbacks get no weights."""
        (first, *_), *_ = self._say(first)
        with joined(self._model.module, self._partition, self._links):
            super().evaluate_all(weights_file, first, on_evaluation)

    def _say(self, *words: int) -> list[tuple[Any, ...]]:
        return self._group.tell(Tag.AGREE, (*words, *([0] * (_WORDS - len(words)))))

    def _pull(self, number: int) -> Snapshot | None:
        own = super()._pull(number)
        clocks = (0,) if own is None else own.clocks
        there, oldest, newest, _ = zip(*self._say(int(own is not None), min(clocks), max(clocks)), strict=True)
        return own._replace(clocks=(min(oldest), max(newest))) if own is not None and all(there) else None

    def _before_batch(self) -> None:
        heard = 0
        try:
            super()._before_batch()
        except Interrupted:
            heard = 1
        if any(each for each, *_ in self._say(heard)):
            raise Interrupted

    def _state(self, last: bool) -> dict[str, Tensor]:
        """Return weights, copied if about to change, and copies of the rest."""
        if last and len(self._pulled) > 1:
            return self._model.state()
        trained = dict(self._model.module.named_parameters())
        return {name: each if name in trained else each.clone() for name, each in self._model.module.state_dict().items()}

    def _tell(self, rows: list[dict[str, Any]], states: dict[str, dict[str, Tensor]], last: bool) -> None:
        if self._partition.place == 0:
            super()._tell(rows, {}, last)

    def _save(self, states: dict[str, dict[str, Tensor]], path: Path) -> None:
        if self._partition.place:
            for state in states.values():
                for each in state.values():
                    self._swap(0, each)
            return
        with writing(path):
            with durable.made_aside(path) as aside:
                file = WeightsInParts(aside, self._whole, len(states))
                for vector, state in enumerate(states.values()):
                    file.fill(vector, state)
                for place in range(1, self._partition.places):
                    names = [name for name in self._whole.state_dict() if name.startswith(f"{place}.")]
                    for vector in range(len(states)):
                        for name in names:
                            file.fill(vector, {name: self._swap(place, torch.empty(0))})
            durable.sync_directory(path.parent)

    def _swap(self, place: int, tensor: Tensor) -> Tensor:
        parts: list[Tensor | None] = [None] * self._partition.places
        parts[place] = tensor
        taken: Tensor = self._links.deal(_OF_WEIGHTS, parts, back=False)[place]
        return taken


def of_piece(role: RankRole, group: Group) -> Callable[..., Evaluator]:
    tensors, rank, roles = role.world.tensors, role.rank, role.setup.roles
    assert tensors is not None
    return functools.partial(
        PieceEvaluator,
        whole=tensors.model.module,
        partition=tensors.partition(roles.stage(rank)),
        group=group,
        links=links_of(role.wire, roles.groups[role.index]),
    )
