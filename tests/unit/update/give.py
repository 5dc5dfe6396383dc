"""Gradients for an update, as a shard takes them from its channel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mpisgd.update.slice_update import SliceUpdate
from mpisgd.vectors.skipped import NOTHING, Runs
from tests.pretend_gpu import held


class Came:
    """A gradient that an update has received last, to be summed or dropped; or later, once it is kept.

    `received`: the memory in which it came.
    """

    def __init__(self, update: SliceUpdate, received: Any) -> None:
        self._update = update
        self._kept = False
        self.received = received

    def keep(self) -> Came:
        self._update.park(id(self))
        self._kept = True
        return self

    def is_finite(self) -> bool:
        return self._update.scratch_is_finite()

    @property
    def vector(self) -> Any:
        """Its elements, as float32."""
        self._turn()
        return self._update.scratch

    def add(
        self,
        weight: float = 1.0,
        samples: int = 1,
        timestamp: int = 0,
        gradients: int = 1,
        *,
        last: bool = False,
        skipped: Runs = NOTHING,
    ) -> None:
        self._turn()
        self._update.accumulate(weight, samples, timestamp, gradients, last=last, skipped=skipped)

    def _turn(self) -> None:
        if self._kept:
            self._update.unpark(id(self))
            self._kept = False


def write(memory: Any, gradient: Any) -> None:
    """Write float32, rounded where the memory is for bfloat16, or words."""
    words = torch.as_tensor(gradient)
    if memory.dtype in (np.int16, torch.int16) and words.dtype.is_floating_point:
        words = words.to(torch.bfloat16).view(torch.int16)
    torch.as_tensor(memory)[:] = words


def come(update: SliceUpdate, gradient: Any, meanwhile: Callable[[], None] | None = None, why: str = "") -> Came:
    """Receive a gradient as it travels, float32 or words, as MPI does: it asks nobody, on the host or on the GPU."""
    received = held(update.inbox)
    write(received, gradient)
    if meanwhile is not None:
        meanwhile()
    assert update.take_in() == why
    return Came(update, received)


def tear(update: SliceUpdate) -> Any:
    """Begin to receive a gradient that breaks off; return its memory, into which MPI may yet write."""
    torn = held(update.inbox)
    update.renew_scratch()
    return torn


def give(update: SliceUpdate, gradient: Any, weight: float = 1.0, samples: int = 1, **named: Any) -> None:
    come(update, gradient).add(weight, samples, **named)
