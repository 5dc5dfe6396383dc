"""The kernel of `windows.py`: what a window takes, each program for a few parameters."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128


@triton.jit
def _take(  # type: ignore[no-untyped-def] # noqa: PLR0913 - a kernel, whose annotations Triton reads
    now,
    real,
    gradients,
    pulled,
    weights,
    momenta,
    sums,
    averages,
    factors,
    decays,
    momentum,
    size,
    learners: tl.constexpr,
    taken: tl.constexpr,
    pulls: tl.constexpr,
    block: tl.constexpr,
):
    element = tl.program_id(0) * block + tl.arange(0, block)
    inside = element < size
    theta = tl.load(weights + element, inside)
    speed = tl.load(momenta + element, inside)
    total = tl.load(sums + element, inside)
    average = tl.load(averages + element, inside)
    factor = tl.load(factors + element, inside)
    decay = tl.load(decays + element, inside)
    for at in range(taken, taken + tl.load(now)):
        gradient = tl.load(gradients + tl.load(now + at) * size + element, inside)
        begins = tl.load(now + at + learners) > 0
        total = tl.where(begins, 0.0, total) + tl.load(real + at + 2 * learners) * gradient
        divisor = tl.load(real + at + 3 * learners)
        if divisor > 0:
            speed = momentum * speed + (total / divisor + decay * theta)
            theta = theta - tl.load(real + at + 4 * learners) * factor * speed
            average = average + tl.load(real + at + 5 * learners) * (theta - average)
        for each in range(tl.load(now + at + 6 * learners), tl.load(now + at + 6 * learners + 1)):
            tl.store(pulled + tl.load(now + pulls + each) * size + element, theta, inside)
    tl.store(weights + element, theta, inside)
    tl.store(momenta + element, speed, inside)
    tl.store(sums + element, total, inside)
    tl.store(averages + element, average, inside)


def take(now: Tensor, vectors: tuple[Tensor, ...], places: tuple[int, int], momentum: float) -> None:
    """Sum gradients, make updates and let learners pull, as the row `now` of the table says.

    Args:
        vectors: gradients and weights pulled, (learners, parameters); weights, momentum, sum, average, factors of the rate and
            weight decays, (parameters,).
        places: in the row, of the gradients that are taken, and of the learners that pull.
    """
    learners, size = vectors[0].shape
    grid = (triton.cdiv(size, BLOCK),)
    floats = now.view(dtype=vectors[0].dtype)
    _take[grid](now, floats, *vectors, momentum, size, learners, *places, BLOCK)
