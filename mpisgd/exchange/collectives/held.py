"""Gathered weights as bfloat16: the learner's end of `deltas.Common`, for all slices.

First all of h travels, then only the bits of d: a learner gets every clock. With buckets, d arrives while the rest is made.
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
    """A learner's h; `weights`: (parameters,) float32 host memory, or a `SizedVector`."""

    def __init__(self, weights: Any, slice_nbytes: int) -> None:
        self._weights = weights
        self._slice_nbytes = slice_nbytes
        self._deltas: Any = weights.in_half() if isinstance(weights, SizedVector) else np.zeros(len(weights), np.int16)
        self._whole = True

    def share(self, team: Team, own: Any) -> Any:
        """Begin to gather; `own`: the bits of d, or all of h, as int16."""
        self._whole = own.nbytes == self._slice_nbytes
        if self._whole and not isinstance(own, SizedVector):
            own = own.view(np.float32)
        return team.share(own, self._weights if self._whole else self._deltas)

    def open(self, team: Team, parts: Sequence[Part]) -> Any:
        self._whole = False
        return team.open_shares(self._deltas, parts)

    def arrive(self, team: Team, shared: Any, number: int) -> None:
        team.arrive(shared, number, self._take)

    def finish(self, team: Team, shared: Any, meanwhile: Callable[[], None]) -> None:
        team.finish(shared, meanwhile, None if self._whole else self._take)

    def _take(self, part: slice) -> None:
        if not isinstance(self._deltas, SizedVector):
            add_delta(torch.from_numpy(self._weights[part]), torch.from_numpy(self._deltas[part]))
