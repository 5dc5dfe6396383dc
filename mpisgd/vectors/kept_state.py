"""State of a module beside trainable parameters: taken, and put back.

Buffers may grow, be replaced, or be expanded views. `get_extra_state` and frozen parameters may hold more.
"""

from __future__ import annotations

import copy
import io
import itertools
import random
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mpisgd.base.errors import ConfigError
from mpisgd.vectors.memory import host_view

_TORCHS_OWN = frozenset(vars(nn.Module()))
_LARGEST = 1000
"""Most parts of a compared container; squared, of a tensor."""
_ITERATORS = itertools.count | itertools.cycle | type(iter([])) | type(iter(())) | type(iter(range(1)))
_OF_OTHERS = {"builtins", "itertools", "functools", "torch", "numpy", "mpisgd"}
_LOOKS = 3
"""Turns that look for changed frozen parameters."""


class KeptState:
    """A module's buffers and extra state at one moment; `frozen`: parameters, too."""

    def __init__(self, module: nn.Module, *, frozen: bool = False) -> None:
        self._frozen = [(each, each.detach().clone()) for each in _frozen(module).values()] if frozen else []
        self._owners = [(owner, dict(owner._buffers.items())) for owner in module.modules()]
        self._values = [{name: _copied(each) for name, each in buffers.items()} for _, buffers in self._owners]
        self._extra = [(owner, copy.deepcopy(owner.get_extra_state())) for owner in module.modules() if has_extra_state(owner)]

    def put_back(self, only: Iterable[nn.Module] | None = None) -> None:
        """Restore the module, or `only` these modules, in the same tensors."""
        for parameter, value in self._frozen:
            parameter.data.copy_(value)
        wanted = None if only is None else set(only)
        for (owner, buffers), values in zip(self._owners, self._values, strict=True):
            if wanted is not None and owner not in wanted:
                continue
            if _is_script(owner):  # its buffers cannot be replaced
                _copy_into(owner, values)
                continue
            for name in set(owner._buffers) - set(buffers):
                del owner._buffers[name]
            for name, buffer in buffers.items():
                owner._buffers[name] = _filled(buffer, values[name])
        for owner, state in self._extra:
            if wanted is None or owner in wanted:
                owner.set_extra_state(copy.deepcopy(state))


class Turns:
    """State of a module used in turn: each user's own, from the factory's values on.

    Dicts of buffers are swapped, not copied; also memory of frozen parameters, if the first turns change any.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._made = {name: each.detach().clone() for name, each in _frozen(module).items()}
        self._frozen: dict[int | None, dict[str, Tensor]] = {}
        self._looks, self._moves = _LOOKS, False
        self._of: dict[int | None, list[dict[str, Tensor | None]]] = {}
        self._extra: dict[int | None, Any] = {}
        self._turn: int | None = None

    def take(self, number: int | None) -> None:
        """Give the module this user's state; None is the factory's, never to change."""
        if number == self._turn or not is_stateful(self._module):
            return
        owners = list(self._module.modules())
        self._of[self._turn] = [_values(owner) if _is_script(owner) else owner._buffers for owner in owners]
        self._extra[self._turn] = _extra_of(self._module)
        if number not in self._of:
            self._of[number], self._extra[number] = copy.deepcopy((self._of[None], self._extra[None]))
        for owner, buffers in zip(owners, self._of[number], strict=True):
            if _is_script(owner):
                _copy_into(owner, buffers)
            else:
                owner._buffers = buffers
        for owner, state in zip(filter(has_extra_state, owners), self._extra[number], strict=True):
            owner.set_extra_state(state)
        self._change_frozen(number)
        self._turn = number

    def _change_frozen(self, number: int | None) -> None:
        parameters = _frozen(self._module) if self._made and (self._moves or self._looks) else {}
        if self._looks and self._turn is not None:
            self._looks -= 1
            self._moves = any(not torch.equal(each, self._made[name]) for name, each in parameters.items())
            self._looks = 0 if self._moves else self._looks
        if self._moves:
            self._frozen[self._turn] = {name: each.data for name, each in parameters.items()}
            own = self._frozen.get(number) or {name: value.clone() for name, value in self._made.items()}
            for name, each in parameters.items():
                each.data = own[name]


def is_stateful(module: nn.Module) -> bool:
    return any(len(owner._buffers) or has_extra_state(owner) for owner in module.modules()) or bool(_frozen(module))


def digests(module: nn.Module) -> dict[str, int]:
    """Return checksums of frozen parameters."""
    return {
        name: zlib.crc32(host_view(_on_host(each).reshape(-1).view(torch.uint8)).data) for name, each in _frozen(module).items()
    }


def taken(module: nn.Module, made: Mapping[str, int]) -> dict[str, Any]:
    """Copy the state to the host; of frozen parameters, only those changed since `made` (`digests`)."""
    now, frozen = digests(module), _frozen(module)
    changed = {name: _on_host(frozen[name]) for name, digest in now.items() if made.get(name) != digest}
    owners = list(module.named_modules())
    buffers = {
        name: {at: None if each is None else _on_host(each) for at, each in owner._buffers.items()}
        for name, owner in owners
        if len(owner._buffers)
    }
    return {"buffers": buffers, "extra": _extra_of(module), "frozen": changed}


def put(module: nn.Module, state: dict[str, Any]) -> None:
    """Restore a state `taken`."""
    device = next((each.device for each in module.parameters()), torch.device("cpu"))
    for name, owner in module.named_modules():
        buffers = state["buffers"].get(name, {})
        if _is_script(owner):
            _copy_into(owner, buffers)
            continue
        for at, value in buffers.items():
            owner._buffers[at] = None if value is None else value.to(device, copy=True)
    parameters = _frozen(module)
    for name, value in state["frozen"].items():
        parameters[name].data.copy_(value)
    for owner, extra in zip(filter(has_extra_state, module.modules()), state["extra"], strict=True):
        owner.set_extra_state(extra)


def _is_script(owner: nn.Module) -> bool:
    """Return whether buffers can be written, but not replaced."""
    return isinstance(owner, torch.jit.ScriptModule)


def _values(owner: nn.Module) -> dict[str, Tensor | None]:
    return {name: _copied(each) for name, each in owner._buffers.items()}


def _copy_into(owner: nn.Module, values: Mapping[str, Tensor | None]) -> None:
    for name, value in values.items():
        buffer = owner._buffers[name]
        if buffer is not None and value is not None:
            buffer.detach().copy_(value)


def _extra_of(module: nn.Module) -> list[Any]:
    return [copy.deepcopy(owner.get_extra_state()) for owner in module.modules() if has_extra_state(owner)]


def _frozen(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: each for name, each in module.named_parameters() if not (each.requires_grad or each.is_meta)}


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


class Hidden:
    """State kept by Python: module attributes, and variables outside the user's functions.

    Compared are numbers, text, tensors, plain containers, random generators, copyable iterators, other modules and optimisers,
    also as attributes of the user's objects; nothing else.
    """

    def __init__(self, module: nn.Module, *functions: Any) -> None:
        self._places = _attributes(module)
        for function in functions:
            self._places |= _variables(function, {id(module)})
        self._values = {name: copy.deepcopy(get()) for name, (get, _) in self._places.items()}

    @property
    def changed(self) -> list[str]:
        """Places with new values."""
        return [name for name, (get, _) in self._places.items() if not _same(get(), self._values[name])]

    def put_back(self) -> None:
        """Restore all values; containers stay the same objects."""
        for name in self.changed:
            get, put = self._places[name]
            value, now = copy.deepcopy(self._values[name]), get()
            if isinstance(now, list | deque) and type(now) is type(value):
                now.clear()
                now.extend(value)
            elif isinstance(now, dict | set) and type(now) is type(value):
                now.clear()
                now.update(value)
            else:
                put(value)


_Place = tuple[Callable[[], Any], Callable[[Any], object]]
"""Getter and setter of a value."""


def _attributes(module: nn.Module) -> dict[str, _Place]:
    found = {}
    for name, owner in module.named_modules():
        found.update({f"{name}.{key}" if name else key: place for key, place in _of(owner).items()})
    return found


def _of(owner: Any) -> dict[str, _Place]:
    own = {key: value for key, value in vars(owner).items() if key not in _TORCHS_OWN and not key.startswith("__")}
    places = {key: _place(value, partial(getattr, owner, key), partial(setattr, owner, key)) for key, value in own.items()}
    return {key: place for key, place in places.items() if place is not None}


def _within(name: str, value: Any) -> dict[str, _Place]:
    """Return the places of a user's object, another network's tensors, or an optimiser's state."""
    if isinstance(value, nn.Module):
        own = itertools.chain(value.parameters(), value.buffers())
        tensors = [each for each in own if each.numel() <= _LARGEST**2 and not each.is_meta]
        return {name: (lambda: tuple(each.detach() for each in tensors), partial(_write, tensors))}
    if isinstance(value, torch.optim.Optimizer):
        return {name: (lambda: (value.state_dict(),), lambda state: value.load_state_dict(*state))}
    made_by = value.__module__ if isinstance(value, type | FunctionType) else type(value).__module__
    if not hasattr(value, "__dict__") or not isinstance(made_by, str) or made_by.partition(".")[0] in _OF_OTHERS:
        return {}
    return {f"{name}.{key}": place for key, place in _of(value).items()}


def _write(tensors: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    with torch.no_grad():
        for tensor, value in zip(tensors, values, strict=True):
            tensor.data.copy_(value)


def _place(value: Any, get: Callable[[], Any], put: Callable[[Any], object]) -> _Place | None:
    """Return a value's place, or None to ignore it."""
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return lambda: (bits.state,), lambda state: setattr(bits, "state", state[0])
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    return (get, put) if _is_plain(value) else None


def _variables(function: Any, seen: set[int]) -> dict[str, _Place]:
    """Return a function's outside variables, in closure, globals and its object; skip values `seen`."""
    while isinstance(function, partial):
        function = function.func
    code, owner = getattr(function, "__code__", None), getattr(function, "__self__", function)
    found = _of(owner) if hasattr(owner, "__dict__") and not isinstance(owner, type | nn.Module | FunctionType) else {}
    if code is None:
        return found
    places: dict[str, tuple[Any, _Place]] = {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # a variable without a value
            places[name] = cell.cell_contents, (partial(getattr, cell, "cell_contents"), partial(setattr, cell, "cell_contents"))
    around = function.__globals__
    for name in code.co_names:
        if name in around:
            places[name] = around[name], (partial(around.get, name), partial(around.__setitem__, name))
    for name, (value, ways) in places.items():
        if (place := _place(value, *ways)) is not None:
            found[name] = place
        elif id(value) not in seen:
            seen.add(id(value))
            found |= _within(name, value)
            if isinstance(value, FunctionType) and value.__globals__ is around:
                found |= _variables(value, seen)
    return found


def _is_plain(value: Any, room: int = _LARGEST) -> bool:
    if isinstance(value, list | tuple | set | deque):
        return len(value) <= room and all(_is_plain(each, room // 10) for each in value)
    if isinstance(value, dict):
        return len(value) <= room and all(_is_plain(each, room // 10) for each in value.values())
    if isinstance(value, Tensor):
        return not (isinstance(value, nn.Parameter) or value.requires_grad) and value.numel() <= _LARGEST**2
    if isinstance(value, np.ndarray):
        return value.size <= _LARGEST**2
    if isinstance(value, _ITERATORS):
        return (parts := _parts(value)) is not None and all(_is_plain(each) for each in parts)
    return isinstance(value, int | float | str | bytes | np.generic | None)


def _parts(iterator: Any) -> Any:
    """Take an iterator apart; None if Python cannot (itertools since 3.14)."""
    with suppress(TypeError):
        return iterator.__reduce__()[1:]
    return None


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor | np.ndarray):
        return one.shape == other.shape and bool((one == other).all())
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, _ITERATORS):
        return _same(_parts(one), _parts(other))
    return repr(one) == repr(other)


@contextmanager
def state_kept(module: nn.Module, *functions: Any) -> Iterator[tuple[KeptState, Hidden]]:
    """Restore the state of module and `functions` after this block."""
    before, hidden = KeptState(module, frozen=True), Hidden(module, *functions)
    try:
        yield before, hidden
    finally:
        before.put_back()
        hidden.put_back()


def check_saving(module: nn.Module) -> None:
    """Save and read a module's state, before hours of training.

    Raises ConfigError on failure, or if a parameter's own name is missing.
    """
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
            f"model: {what} of the state cannot be saved, and read by torch.load(..., weights_only=True): {type(error).__name__}:"
            f" {error}; expected tensors, numbers and text, in lists and dicts"
        ) from error
    for name, parameter in module.named_parameters():
        if not (isinstance(found := state.get(name), Tensor) and found.shape == parameter.shape):
            raise ConfigError(
                f"model: state_dict() has no {name} of shape {tuple(parameter.shape)}: expected each parameter under its own"
                " name, for saving, reading and replaying weights; other names in a file of your own, made of weights.pt"
            )


def has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _copied(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else buffer.detach().clone()


def _filled(buffer: Tensor | None, value: Tensor | None) -> Tensor | None:
    """Return the buffer with this value; a copy if elements share memory or the shape has changed."""
    if buffer is None or value is None:
        return buffer
    if buffer.shape != value.shape or any(stride == 0 for stride in buffer.stride()):
        return value.clone()
    buffer.detach().copy_(value)
    return buffer
