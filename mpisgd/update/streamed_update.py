"""An update that receives gradients, and sends weights, chunk by chunk (`chunks.py`).

A chunk is summed once all gradients have delivered it, in their order: the bits are `SliceUpdate`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpisgd.update.slice_update import SliceUpdate
from mpisgd.vectors.chunks import ChunkedReceive
from mpisgd.vectors.memory import view_of
from mpisgd.vectors.skipped import NOTHING, Runs


class StreamedUpdate(SliceUpdate):
    """A `SliceUpdate` on the host, with a few chunks of each gradient and a whole sum."""

    receives_again = False

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.cached = False  # gradients are checked when summed
        self._receive_into(self.weights[:0])
        word = np.float32 if self._coded is None else np.int16
        self._coded = None
        self._inflow = ChunkedReceive(self._size, lambda size: np.zeros(size, word))
        self._wide = self.weights.new_empty(0 if word is np.float32 else self._inflow.pieces[0].stop)
        """(chunk,) float32, for widening a bfloat16 chunk."""
        self._weights: list[float] = []
        self._pieces: Iterator[slice] = iter(())
        """Chunks not summed yet."""

    @property
    def inbox(self) -> ChunkedReceive:
        return self._inflow

    def park(self, learner_id: int) -> None:
        self._inflow.park(learner_id)

    def unpark(self, learner_id: int) -> None:
        self._inflow.unpark(learner_id)

    def accumulate(
        self, weight: float, samples: int, timestamp: int = 0, gradients: int = 1, *, last: bool = False, skipped: Runs = NOTHING
    ) -> None:
        """Include the last gradient; the update adds its chunks."""
        self._charges.gradient()
        if self.gradients == 0:
            self._weights, self._pieces, self._added = [], iter(self._inflow.pieces), 0
        self._inflow.include()
        self._weights.append(self._weighting.add(weight, gradients))
        self._norms.add_later()
        self._note_skipped(skipped)
        self.gradients += gradients
        self._pending_samples += samples

    def _add(self, stop: int) -> None:
        """Complete the sum at least up to this element."""
        while self._added < stop:
            piece = next(self._pieces)
            summed = self._sum[piece]
            for place, (came, weight) in enumerate(zip(self._inflow.chunk(), self._weights, strict=True)):
                gradient = self._widened(came)
                self._norms.add_chunk(view_of(gradient), weight)
                if place > 0:
                    summed.add_(gradient, alpha=weight)
                    continue
                summed.copy_(gradient)
                if weight != 1.0:
                    summed.mul_(weight)
            self._added = piece.stop

    def _widened(self, chunk: np.ndarray) -> Tensor:
        came = torch.from_numpy(chunk)
        if not len(self._wide):
            return came
        wide = self._wide[: len(came)]
        self._format.widen(came, wide)
        return wide
