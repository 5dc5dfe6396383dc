"""Tensors on the wire between the ranks of a group: what the header says of one, and its bytes."""

from __future__ import annotations

from typing import Any

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
_NONE = (0, 0, -1, *([0] * 2 * MOST_DIMENSIONS))


def describe(passed: Any, who: str) -> tuple[tuple[int, ...], Any]:
    """What a tensor, or None, is for the header, and its bytes, or None: of one that is not dense, those of a contiguous copy.

    Raises ConfigError for what cannot travel; `who` passes it on.
    """
    if passed is None:
        return _NONE, None
    if passed.dtype not in _TYPES or passed.dim() > MOST_DIMENSIONS:
        found = f"{passed.dtype} of {passed.dim()} dimensions"
        raise ConfigError(f"{who} passes on {found}, expected at most {MOST_DIMENSIONS}, of floats or integers")
    tensor = travelled(passed.detach())
    rest = [0] * (MOST_DIMENSIONS - tensor.dim())
    kind = (_TYPES.index(tensor.dtype), int(passed.requires_grad), tensor.dim())
    flat = torch.as_strided(tensor, (tensor.numel(),), (1,), tensor.storage_offset())
    return (*kind, *tensor.shape, *rest, *tensor.stride(), *rest), flat.view(torch.uint8).numpy()


def room(described: tuple[int, ...]) -> tuple[Any, Any]:
    """Memory for a tensor that the other end described so, and its bytes; (None, None) where there is none."""
    kind, wanted, dimensions, *rest = described
    if dimensions < 0:
        return None, None
    sizes, strides = rest[:dimensions], rest[MOST_DIMENSIONS : MOST_DIMENSIONS + dimensions]
    tensor = torch.empty_strided(sizes, strides, dtype=_TYPES[kind])
    body = torch.as_strided(tensor, (tensor.numel(),), (1,)).view(torch.uint8).numpy()
    return tensor.requires_grad_() if wanted else tensor, body


def travelled(tensor: Any) -> Any:
    """A tensor as it is on the other side: strides are kept, but of one that is not dense."""
    return tensor if tensor is None or _dense(tensor) else tensor.contiguous()


def _dense(tensor: Tensor) -> bool:
    """Whether its elements lie one behind the other in memory, in the order of any of its dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
