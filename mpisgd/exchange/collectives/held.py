"""Weights that are gathered from all shards as bfloat16: the learner's end of `deltas.Common`, for all slices in one vector.

At the start all of h travels, in float32, and then the bits of d alone: a learner is given every clock. Where gradients leave in
buckets, d leaves, and is taken in, part by part, while the rest is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from mpisgd.comm.communicator import Part, Team
from mpisgd.exchange.deltas import add_delta
from mpisgd.vectors.memory import SizedVector


class Gathered:
    """What a learner holds.

    Args:
        weights: (parameters,) float32 host memory, which it computes from; or, where only sizes travel, a `SizedVector`.
        slice_nbytes: of its own shard's slice.
    """

    def __init__(self, weights: Any, slice_nbytes: int) -> None:
        self._weights = weights
        self._slice_nbytes = slice_nbytes
        self._deltas: Any = weights.in_half() if isinstance(weights, SizedVector) else np.zeros(len(weights), np.int16)
        self._whole = True

    def share(self, team: Team, own: Any) -> Any:
        """Begin to gather; `own` is what `Deltas.answers` gives: the bits of d, or all of h, as int16."""
        self._whole = own.nbytes == self._slice_nbytes
        if self._whole and not isinstance(own, SizedVector):
            own = own.view(np.float32)
        return team.share(own, self._weights if self._whole else self._deltas)

    def open(self, team: Team, parts: Sequence[Part]) -> Any:
        """Begin to gather the bits of d, while they are made."""
        self._whole = False
        return team.open_shares(self._deltas, parts)

    def arrive(self, team: Team, shared: Any, number: int) -> None:
        """Wait until the weights of a part of what `open` began are what is held now."""
        team.arrive(shared, number, self._take)

    def finish(self, team: Team, shared: Any, meanwhile: Callable[[], None]) -> None:
        """Wait until the weights are what is held now."""
        team.finish(shared, meanwhile, None if self._whole else self._take)

    def _take(self, part: slice) -> None:
        if not isinstance(self._deltas, SizedVector):
            add_delta(torch.from_numpy(self._weights[part]), torch.from_numpy(self._deltas[part]))
