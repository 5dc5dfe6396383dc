"""Refusal of parameters that share memory: each has its own in the flat vector."""

from __future__ import annotations

import itertools
from collections import defaultdict

import torch
from torch import Tensor, nn

from mpisgd.base.errors import ConfigError


def refuse_shared_memory(module: nn.Module, field: str) -> None:
    """Raise ConfigError for a trainable parameter that overlaps another parameter or buffer.

    One `nn.Parameter` may have several names.
    """
    trainable = {name for name, each in module.named_parameters() if each.requires_grad}
    by_storage: defaultdict[int, list[tuple[str, Tensor]]] = defaultdict(list)
    for name, each in itertools.chain(module.named_parameters(), module.named_buffers()):
        if not each.is_meta and each.layout == torch.strided and each.numel():
            by_storage[each.untyped_storage().data_ptr()].append((name, each))
    for sharing in by_storage.values():
        for (first, one), (second, other) in itertools.combinations(sharing, 2):
            if {first, second} & trainable and overlap(one, other):
                raise ConfigError(
                    f"{field}: {first} and {second} share memory (tied by .data, or a view?), and would come apart in training:"
                    " expected one nn.Parameter under both names (b.weight = a.weight), or the view made in forward (a.weight.t())"
                )


def overlap(one: Tensor, other: Tensor) -> bool:
    """Tell whether tensors of one storage share an element, or differ in element size."""
    if one.element_size() != other.element_size():
        return True
    used = torch.zeros(one.untyped_storage().nbytes() // one.element_size(), dtype=torch.bool)
    ours, theirs = (used.as_strided(_once(each), each.stride(), each.storage_offset()) for each in (one, other))
    ours.fill_(True)
    return bool(theirs.any())


def _once(tensor: Tensor) -> list[int]:
    """Return the shape without an expanded tensor's repeats."""
    return [size if stride else 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
