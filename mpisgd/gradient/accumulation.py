"""Gradient accumulation: several mini-batches at the same weights, pushed as one; the mean is clipped."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from mpisgd.vectors.computing import Travels
from mpisgd.vectors.flat import clip, is_finite
from mpisgd.vectors.memory import vector_like
from mpisgd.vectors.skipped import common


class Accumulated(Travels):
    """Mean gradient of mini-batches s * count to s * count + count - 1, as the learner's s-th.

    Args:
        gradient: single mini-batches; the mean overwrites `memory.gradients`.
    """

    def __init__(self, gradient: Travels, count: int, *, clip_norm: float, tell_nonfinite: bool) -> None:
        self._gradient = gradient
        self._count = count
        self._clip_norm = clip_norm
        self._tell_nonfinite = tell_nonfinite
        self.memory, self.scaled = gradient.memory, gradient.scaled
        self.samples = 0
        if self.memory.has_numbers:
            self._vector = self.memory.tensors[1]
            self._sum = vector_like(self._vector)

    @property
    def single(self) -> Any:
        return self._gradient

    def prepare(self, seq: int) -> None:
        self._gradient.prepare(seq * self._count)

    def interrupt_by(self, check: Callable[[], None]) -> None:
        self._gradient.interrupt_by(check)

    def move_out(self) -> None:
        self._gradient.move_out()

    def compute(self, seq: int) -> float:
        first, loss, self.samples = seq * self._count, 0.0, 0
        for number in range(first, first + self._count):
            if number > first:
                self._gradient.prepare(number)
            loss += self._gradient.compute(number)
            self.samples += self._gradient.samples
            self.skipped = common(self.skipped, self._gradient.skipped) if number > first else self._gradient.skipped
            if self.memory.has_numbers:
                if number == first:
                    self._sum.copy_(self._vector)
                else:
                    self._sum.add_(self._vector)
        if self.memory.has_numbers:
            torch.div(self._sum, self._count, out=self._vector)
            clip(self._vector, self._clip_norm)
            if self._tell_nonfinite and not is_finite(self.memory.gradients):
                return math.nan
        return loss / self._count
