"""Tensors on the wire between a group's ranks: description in the header, and bytes."""

from __future__ import annotations

import functools
import math
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpisgd.base.errors import ConfigError
from mpisgd.comm.messages import MOST_DIMENSIONS

_TYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.uint8,
    torch.bool,
)
_UNUSED = 2
"""References to an unused buffer: the list's, and the counting call's."""
_LONG = 1000
"""Tensors after which memory of an unused size is released."""
_SHAPES = 256
"""Cached descriptions."""
_NONE = (0, 0, -1, *([0] * 2 * MOST_DIMENSIONS))


def describe(passed: Any, who: str) -> tuple[tuple[int, ...], Any]:
    """Return a tensor's description for the header, and its bytes, without gaps. Raises ConfigError: impossible to send."""
    if passed is None:
        return _NONE, None
    tensor = passed.detach()
    dense = tensor.is_contiguous()
    if not dense:
        tensor = travelled(tensor)
    described = _described(passed.dtype, passed.requires_grad, tensor.shape, tensor.stride(), who)
    flat = tensor.view(-1) if dense else torch.as_strided(tensor, (tensor.numel(),), (1,), tensor.storage_offset())
    return described, flat.view(torch.uint8).numpy()


@functools.lru_cache(_SHAPES)
def _described(dtype: torch.dtype, wanted: bool, sizes: tuple[int, ...], strides: tuple[int, ...], who: str) -> tuple[int, ...]:
    if dtype not in _TYPES or len(sizes) > MOST_DIMENSIONS:
        raise ConfigError(
            f"{who} passes on {dtype} of {len(sizes)} dimensions, expected at most {MOST_DIMENSIONS}, of floats or integers"
        )
    rest = [0] * (MOST_DIMENSIONS - len(sizes))
    return (_TYPES.index(dtype), int(wanted), len(sizes), *sizes, *rest, *strides, *rest)


@functools.lru_cache(_SHAPES)
def _told(described: tuple[int, ...]) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]:
    kind, _, dimensions, *rest = described
    sizes, strides = rest[:dimensions], rest[MOST_DIMENSIONS : MOST_DIMENSIONS + dimensions]
    return _TYPES[kind], tuple(sizes), tuple(strides), math.prod(sizes) * _TYPES[kind].itemsize


class Rooms:
    """Reused memory for received tensors; a buffer is free once nothing refers to it, autograd included."""

    def __init__(self) -> None:
        self._had: dict[int, list[np.ndarray]] = {}
        """Buffers by size, in the order of last use."""
        self._taken: dict[int, int] = {}
        """Count at the last use of each size."""
        self._count = 0

    def room(self, described: tuple[int, ...]) -> tuple[Any, Any]:
        """Return memory for a described tensor, and its bytes; (None, None) without any."""
        if described[2] < 0:
            return None, None
        dtype, sizes, strides, nbytes = _told(described)
        body = self._free(nbytes)
        tensor = torch.empty(0, dtype=dtype).set_(torch.from_numpy(body).untyped_storage(), 0, sizes, strides)
        return tensor.requires_grad_() if described[1] else tensor, body

    def _free(self, nbytes: int) -> np.ndarray:
        self._count += 1
        self._taken[nbytes] = self._count
        had = self._had.setdefault(nbytes, [])
        for place in range(len(had)):
            if sys.getrefcount(had[place]) == _UNUSED:
                body = had.pop(place)
                had.append(body)
                return body
        for other in [each for each, last in self._taken.items() if self._count - last > _LONG]:
            del self._had[other], self._taken[other]  # shapes have changed
        had.append(body := np.empty(nbytes, np.uint8))
        return body


def travelled(tensor: Any) -> Any:
    """Return a tensor as received: with its strides if dense, else contiguous."""
    return tensor if tensor is None or _dense(tensor) else tensor.contiguous()


def _dense(tensor: Tensor) -> bool:
    """Return whether elements fill memory without gaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
