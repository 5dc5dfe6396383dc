"""All that a module keeps beside its trainable parameters: taken, and put back.

Buffers may grow, be replaced, or be expanded views; a module may keep more by torch's `get_extra_state`.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mpisgd.base.errors import ConfigError


class KeptState:
    """The state of a module at one moment: every buffer, persistent or not, and extra state."""

    def __init__(self, module: nn.Module) -> None:
        self._owners = [(owner, dict(owner._buffers)) for owner in module.modules()]
        self._values = [{name: _copied(each) for name, each in buffers.items()} for _, buffers in self._owners]
        self._extra = [(owner, copy.deepcopy(owner.get_extra_state())) for owner in module.modules() if has_extra_state(owner)]

    def put_back(self, only: Iterable[nn.Module] | None = None) -> None:
        """Let the module, or `only` these of its modules, have the buffers of that moment: the same tensors and values."""
        wanted = None if only is None else set(only)
        for (owner, buffers), values in zip(self._owners, self._values, strict=True):
            if wanted is not None and owner not in wanted:
                continue
            for name in set(owner._buffers) - set(buffers):
                del owner._buffers[name]
            for name, buffer in buffers.items():
                owner._buffers[name] = _filled(buffer, values[name])
        for owner, state in self._extra:
            if wanted is None or owner in wanted:
                owner.set_extra_state(copy.deepcopy(state))


@contextmanager
def state_kept(module: nn.Module) -> Iterator[None]:
    """Leave the module's state as it was."""
    before = KeptState(module)
    try:
        yield
    finally:
        before.put_back()


def check_saving(module: nn.Module) -> None:
    """Save and read what is no plain tensor of a module's state, before hours of training. Raises ConfigError where that fails."""
    what = "state_dict()"
    try:
        state = module.state_dict()
        for what, value in state.items():
            if not isinstance(value, Tensor) or value.layout != torch.strided:
                file = io.BytesIO()
                torch.save({what: value}, file)
                file.seek(0)
                torch.load(file, weights_only=True)
    except Exception as error:  # whatever the user's hooks, or pickle, raise
        raise ConfigError(
            f"model: {what} of its state cannot be saved, and read by torch.load(..., weights_only=True): {type(error).__name__}:"
            f" {error}; expected tensors, numbers and text, in lists and dicts"
        ) from error


def has_extra_state(module: nn.Module) -> bool:
    """Whether a module keeps state that is no tensor of its own."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _copied(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else buffer.detach().clone()


def _filled(buffer: Tensor | None, value: Tensor | None) -> Tensor | None:
    """The buffer with this value; a copy of the value where elements of the buffer share memory, or its shape has changed."""
    if buffer is None or value is None:
        return buffer
    if buffer.shape != value.shape or any(stride == 0 for stride in buffer.stride()):
        return value.clone()
    buffer.detach().copy_(value)
    return buffer
