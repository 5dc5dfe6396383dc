"""Memory for received gradients: single, parked, or many at once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpisgd.update.norms import Norms
from mpisgd.vectors.chunks import squared_norm_of_chunks
from mpisgd.vectors.computing import Rooms, Updates
from mpisgd.vectors.flat import is_finite
from mpisgd.vectors.memory import host_vector, host_view, vector_like, view_of
from mpisgd.vectors.push_format import PushFormat
from mpisgd.vectors.skipped import NOTHING, Runs, why_not

PARKED_NBYTES = 2**30
"""Limit for gradients before their turn."""


class Reception(Updates):
    """Memory for a slice's incoming gradients, and their norms.

    `scratch`, (slice,) float32, holds the last. Vectors lie beside the weights; `device_update.py` has the GPU's.
    """

    def __init__(self, weights: Tensor, push_format: PushFormat, *, measured: bool = True) -> None:
        self.weights: Tensor = weights
        self._size = weights.numel()  # costs half a microsecond in torch
        self._scratch = vector_like(weights)
        self.scratch: Any = view_of(self._scratch)
        self._format = push_format
        self._coded = push_format.inbox(weights)
        self._norms = Norms(on=measured)
        self._parked: dict[int, Tensor] = {}
        self._spare: list[Tensor] = []
        self._spare_coded: list[Tensor] = []
        self._lent = 0
        self._room: tuple[Tensor, ...] = ()

    @property
    def inbox(self) -> Any:
        """Memory for the next gradient: `scratch`, or coded words."""
        return self.scratch if self._coded is None else view_of(self._coded)

    def take_in(self, skipped: Runs = NOTHING) -> str:
        why = why_not(skipped, self._size)
        if self._coded is None:
            return why
        why = why or self._format.why_not(self._coded, self._size)
        if not why:
            self._format.widen(self._coded, self._scratch)
        return why

    @property
    def room_to_park(self) -> bool:
        return (len(self._parked) + self._lent + 1) * self._scratch.nbytes <= PARKED_NBYTES

    def park(self, learner_id: int) -> None:
        self._parked[learner_id] = self._scratch
        self._receive_into(self._spare.pop() if self._spare else vector_like(self.weights))

    def unpark(self, learner_id: int) -> None:
        self._spare.append(self._scratch)
        self._receive_into(self._parked.pop(learner_id))

    @property
    def rooms(self) -> Rooms:  # type: ignore[override]
        return self

    def lend(self) -> np.ndarray:
        self._lent += 1
        if self._coded is None:
            return host_view(self._spare.pop() if self._spare else vector_like(self.weights))
        return host_view(self._spare_coded.pop() if self._spare_coded else torch.zeros_like(self._coded))

    def take_back(self, room: np.ndarray) -> None:
        """Make lent memory the last gradient, without a copy."""
        self._lent -= 1
        if self._coded is None:
            self._spare.append(self._scratch)
            self._receive_into(torch.from_numpy(room))
        else:
            self._spare_coded.append(self._coded)
            self._coded = torch.from_numpy(room)

    def make_room(self, gradients: int) -> np.ndarray:
        coded = self._coded
        room = host_vector(gradients * self._size) if coded is None else coded.new_zeros(gradients * len(coded))
        self._room = torch.split(room, len(room) // gradients)
        return host_view(room)

    def turn_to(self, place: int) -> None:
        """Let `scratch` be this place of `make_room`; if coded, `take_in` reads it.

        Neither the gradient nor a sum begun with it is copied.
        """
        if self._coded is None:
            self._receive_into(self._room[place])
        else:
            self._coded = self._room[place]

    def renew_scratch(self) -> None:
        if self._coded is not None:
            self._coded = torch.zeros_like(self._coded)
        self._receive_into(vector_like(self.weights))

    def _receive_into(self, vector: Tensor) -> None:
        self._scratch = vector
        self.scratch = view_of(vector)
        self._norms.received = None

    def scratch_is_finite(self) -> bool:
        """Return whether the received gradient is finite.

        `accumulate` reuses the squared norm: check each summed gradient, or none.
        """
        self._norms.received = squared = squared_norm_of_chunks(self.scratch)
        return math.isfinite(squared) or is_finite(self.scratch)
