"""Gradients for an update, as a shard takes them from its channel."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mpisgd.update.slice_update import SliceUpdate
from mpisgd.vectors.body import Body
from mpisgd.vectors.skipped import NOTHING
from tests.pretend_gpu import held


def write(memory: Any, gradient: Any) -> None:
    """Write float32, rounded where the memory is for bfloat16, or words."""
    words = torch.as_tensor(gradient)
    if memory.dtype in (np.int16, torch.int16) and words.dtype.is_floating_point:
        words = words.to(torch.bfloat16).view(torch.int16)
    torch.as_tensor(memory)[:] = words


def come(update: SliceUpdate, gradient: Any, why: str = "") -> Body:
    """Receive a gradient as it travels, float32 or words, as MPI does: it asks nobody, on the host or on the GPU."""
    body = update.bodies.take()
    write(held(body.memory), gradient)
    assert body.arrive(NOTHING) == why
    return body


def give(update: SliceUpdate, gradient: Any, weight: float = 1.0, samples: int = 1, timestamp: int = 0, **named: Any) -> None:
    """Sum a gradient that comes now, or has come."""
    update.accumulate(gradient if isinstance(gradient, Body) else come(update, gradient), weight, samples, timestamp, **named)
