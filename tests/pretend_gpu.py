"""A GPU for machines without one: real numbers, but in memory of its own, and nothing is done before somebody waits for it.

What a program can get wrong about a GPU, and what no CPU shows, is seen here. Tensors of "cuda" are of a class of their own: an
operation that mixes them with tensors of the host raises, as torch does. What is asked of them is put on a list, and a `late` GPU
does it when it is waited for, and no further than that: who sends host memory before the copy into it was waited for sends what was
there before, and who overwrites host memory before the copy out of it was waited for gives the GPU what came later. One that is not
late does all at once: who lets it write to memory that is still being sent is found so. Waits are counted.

Its memory can be shared by processes, as CUDA's can. It knows what the flat vectors need; no autograd.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

_COPY, _ITEM, _TO = torch.ops.aten.copy_.default, torch.ops.aten._local_scalar_dense.default, torch.ops.aten._to_copy.default
_FACTORIES = {torch.zeros, torch.ones, torch.empty}


class OnGpu(Tensor):
    """A tensor of the pretended GPU; `held` has its numbers, once what was asked of it is done."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OnGpu:
        made: OnGpu = Tensor._make_wrapper_subclass(
            cls, held.size(), held.stride(), held.storage_offset(), dtype=held.dtype, device=torch.device("cuda:0")
        )
        made.held = held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:  # type: ignore[override]
        return Gpu.present.call(function, arguments, named or {})

    def __dlpack__(self, **how: Any) -> Any:
        """What MPI is given: it asks no GPU whether what it was asked to do is done; torch asks whether this is the current one."""
        if not Gpu.present.chosen:
            raise BufferError("Can't export tensors on a different CUDA device index")
        return self.held.__dlpack__(**how)

    def __dlpack_device__(self) -> Any:
        return self.held.__dlpack_device__()


class Event:
    """`torch.cuda.Event`: a place in the list of what is to be done."""

    def __init__(self) -> None:
        self._at = 0

    def record(self, stream: Gpu) -> None:
        self._at = stream.asked

    def synchronize(self) -> None:
        Gpu.present.wait(self._at)


class Gpu:
    """The GPU, and its one stream.

    Args:
        late: whether it does anything only when somebody waits for it.

    Attributes:
        asked: operations that were asked for so far.
        waits: how often somebody waited for what was not done yet.
        chosen: whether somebody made it the current one.
    """

    present: Gpu

    def __init__(self, late: bool) -> None:
        self._late = late
        self._todo: deque[Callable[[], object]] = deque()
        self.asked = self._done = self.waits = 0
        self.chosen = False
        self.pinned = set[int]()
        """Addresses of host memory that is not torch's."""

    def choose(self, device: int) -> None:
        self.chosen = device == 0

    def cudaHostRegister(self, place: int, nbytes: int, flags: int) -> int:
        assert place % 4096 == 0 and nbytes > 0 and flags == 0 and place not in self.pinned
        self.pinned.add(place)
        return 0

    def cudaHostUnregister(self, place: int) -> int:
        self.pinned.remove(place)
        return 0

    def wait(self, until: int) -> None:
        self.waits += self._done < until
        while self._done < until:
            if self._late:
                self._todo.popleft()()
            self._done += 1

    def synchronize(self) -> None:
        self.wait(self.asked)

    def _ask(self, action: Callable[[], object]) -> None:
        self._todo.append(action)
        self.asked += 1
        if not self._late:
            self._todo.popleft()()

    def call(self, function: Any, arguments: Any, named: dict[str, Any]) -> Any:
        """Do or put off an operation of which at least one tensor is here."""
        if function is _COPY:
            into, source, *rest = arguments
            self._ask(lambda: held(into).copy_(held(source)))
            both = isinstance(into, OnGpu) and isinstance(source, OnGpu)
            if not (both or any(rest) or named.get("non_blocking")):
                self.synchronize()
            return into
        if function is _ITEM or (function is _TO and named.get("device") is not None):
            self.synchronize()
            assert function is _ITEM or torch.device(named["device"]).type == "cpu", "there is one GPU alone"
            return function(arguments[0].held) if function is _ITEM else arguments[0].held.clone()
        tensors = [each for each in tree_flatten((arguments, named))[0] if isinstance(each, Tensor)]
        strangers = [each for each in tensors if not isinstance(each, OnGpu)]
        if any(each.dim() or "fused" in str(function) for each in strangers):
            raise RuntimeError(f"{function}: expected all tensors to be on the same device, but found cuda:0 and cpu")
        to_host = torch.device(named.pop("device", None) or "cuda").type == "cpu"

        def do() -> Any:
            return function(*tree_map(held, arguments), **tree_map(held, named))

        if function._schema.is_mutable:
            self._ask(do)
            return named.get("out", arguments[0]) if function._schema.returns else None
        if any(each.alias_info is not None for each in function._schema.returns):  # a view
            return tree_map(lambda made: OnGpu(made) if isinstance(made, Tensor) else made, do())
        if to_host:  # as many elements as these
            return do()
        made = OnGpu(do())  # of the right shape; its numbers come later
        self._ask(lambda: made.held.copy_(do()))
        return made


def _mapped(file: int, size: int) -> Tensor:
    return torch.from_numpy(np.frombuffer(mmap.mmap(file, 4 * size), np.float32))


def _shared(tensor: OnGpu) -> tuple[Callable[..., OnGpu], tuple[str, int]]:
    """How another process comes to the memory of a new float32 vector: what was cut from it before does not follow."""
    Gpu.present.synchronize()
    file = os.memfd_create("gpu")
    os.truncate(file, 4 * len(tensor))
    tensor.held = _mapped(file, len(tensor)).copy_(tensor.held)
    return _opened, (f"/proc/{os.getpid()}/fd/{file}", len(tensor))


def _opened(path: str, size: int) -> OnGpu:
    file = os.open(path, os.O_RDWR)
    try:
        return OnGpu(_mapped(file, size))
    finally:
        os.close(file)


ForkingPickler.register(OnGpu, _shared)


def held(value: Any) -> Any:
    return value.held if isinstance(value, OnGpu) else value


class _Factories(TorchFunctionMode):
    """Tensors that are made on the GPU, moved there, or pinned for it."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        named = dict(named or {})
        named.pop("pin_memory", None)
        if function is Tensor.to and arguments[1:] and "cuda" in str(arguments[1]):
            return OnGpu(arguments[0].clone())
        if function in _FACTORIES and "cuda" in str(named.get("device")):
            return OnGpu(function(*arguments, **named | {"device": "cpu"}))
        if function is Tensor.copy_ and any(isinstance(each, OnGpu) for each in arguments):  # here torch would look for CUDA
            return Gpu.present.call(_COPY, arguments, named)
        if function is Tensor.__getitem__ and isinstance(arguments[0], OnGpu):  # and here
            return OnGpu(arguments[0].held[arguments[1]])
        if function is torch.linalg.vector_norm and isinstance(arguments[0], OnGpu):  # and here
            Gpu.present.synchronize()
            return function(arguments[0].held, *arguments[1:], **named)
        if function == Tensor.data.__set__ and isinstance(arguments[0], OnGpu):  # type: ignore[attr-defined]
            arguments[0].held = arguments[1].held
        return function(*arguments, **named)


@contextmanager
def pretend_gpu(late: bool = True, name: str = "GPU-0") -> Iterator[Gpu]:
    """There is one."""
    Gpu.present = gpu = Gpu(late)
    instead: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "set_device": gpu.choose,
        "Event": Event,
        "cudart": lambda: gpu,
        "current_stream": lambda device=None: gpu,
        "get_device_properties": lambda device: SimpleNamespace(uuid=name),
        "can_device_access_peer": lambda device, peer: True,
    }
    with mock.patch.multiple(torch.cuda, **instead), _Factories():
        yield gpu
