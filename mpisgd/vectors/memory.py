"""Where a vector lies, and how it crosses between who computes on it and MPI (DESIGN 5).

host         who computes and MPI look at the same memory; nothing is copied
shared       host memory that the ranks of one node have in common
GPU          a CUDA-aware MPI is given the GPU's memory itself. It knows nothing of the GPU's own order of work: so what it sends
             must be there (`wait_for`), and what it receives into must not be in use any more
pinned       host memory beside a GPU, where MPI is not CUDA-aware: copies are begun, and waited for (`Copy`)
size only    a number of bytes, on a virtual cluster without tensors (`SizedVector`)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ALIGNED = 4
"""Elements of float32 at whose multiples memory of the host begins. The last bits of a product with one row depend on where in
between a matrix begins: so a part of a larger vector that has memory of its own begins there, too."""


class SizedVector:
    """A size: that of a vector of so many elements, of float32 unless `itemsize` says otherwise."""

    __slots__ = ("_itemsize", "nbytes", "size")

    nbytes: int

    def __init__(self, size: int, itemsize: int = 4) -> None:
        self.size = size
        self._itemsize = itemsize
        self.nbytes = itemsize * size

    def __getitem__(self, part: slice) -> SizedVector:
        start, stop, _ = part.indices(self.size)
        return SizedVector(stop - start, self._itemsize)

    def times(self, count: int) -> SizedVector:
        """Size of so many of it, one behind the other."""
        return SizedVector(count * self.size, self._itemsize)

    def in_half(self) -> SizedVector:
        """Size of as many elements of half the bytes (`rounding.py`)."""
        return SizedVector(self.size, self._itemsize // 2)


@dataclass(frozen=True, eq=False)
class Memory:
    """A learner's two vectors as they travel, (parameters,) each; where they lie does not change.

    Attributes:
        weights: float32, which pulled slices are received into: numpy's on the host, torch's on a GPU, or a `SizedVector`.
        gradients: float32, or words of another format (`push_format.py`), which pushed slices are sent from.
        shared: the ranks of a node have these weights in common: nobody may step from them alone.
    """

    weights: Any
    gradients: Any
    shared: bool = False
    cuts: Sequence[tuple[int, int]] = ()
    """Where each shard's slice lies in `gradients`, where that is not as in the weights."""

    @classmethod
    def zeros(cls, size: int, device: str = "cpu", begins: int = 0) -> Memory:
        """Memory on the host, or of a GPU; for elements from `begins` on of a larger vector."""
        skipped = begins % _ALIGNED
        weights, gradients = (host_vector(skipped + size)[skipped:].to(device) for _ in range(2))
        return cls(view_of(weights), view_of(gradients))

    @property
    def has_numbers(self) -> bool:
        """Whether there is more than sizes."""
        return not isinstance(self.weights, SizedVector)

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Weights and gradient as torch's, in the same memory."""
        weights, gradients = (
            each if isinstance(each, Tensor) else torch.from_numpy(each) for each in (self.weights, self.gradients)
        )
        return weights, gradients

    def another(self) -> Memory:
        """As much memory, on the host; where there are only sizes, the same."""
        if not self.has_numbers:
            return self
        return replace(self, weights=np.empty_like(self.weights), gradients=np.empty_like(self.gradients), shared=False)

    def pinned(self) -> Memory:
        """Memory on the host for what lies on a GPU."""
        weights, gradients = self.tensors
        return Memory(host_view(staging(weights)), host_view(staging(gradients)))


def host_vector(size: int) -> Tensor:
    """(size,) float32 zeros in host memory to send from or receive into.

    Made by numpy, which asks the kernel for huge pages where the vector is large; torch does not, and a single-copy transfer
    between processes then takes up to twice as long.
    """
    return torch.from_numpy(np.zeros(size, np.float32))


def vector_like(vector: Tensor) -> Tensor:
    """Float32 zeros as many as these, where these are: a `host_vector` on the CPU."""
    return host_vector(len(vector)) if vector.device.type == "cpu" else torch.zeros_like(vector)


def copy_into(into: Any, vector: Any) -> None:
    """Copy a vector, on the host or a GPU, to either; nothing, where it is but a size."""
    if type(into) is np.ndarray and type(vector) is np.ndarray:
        into[:] = vector
    elif not isinstance(vector, SizedVector):
        one, other = (each if isinstance(each, Tensor) else torch.from_numpy(each) for each in (into, vector))
        one.copy_(other)


def staging(vector: Tensor) -> Tensor:
    """Host memory for what is in this vector, of its type: pinned where that lies on a GPU, so that copies go by themselves."""
    return torch.empty_like(vector, device="cpu", pin_memory=vector.device.type == "cuda")


def host_view(vector: Tensor) -> np.ndarray:
    """The numpy view of a vector on the CPU, without a copy: what goes over the wire."""
    array: np.ndarray = vector.detach().numpy()
    return array


def view_of(vector: Tensor) -> np.ndarray | Tensor:
    """View of a vector to look at, and to give to MPI: numpy's on the CPU; on a GPU the vector itself."""
    return host_view(vector) if vector.device.type == "cpu" else vector


def on_host(vector: Tensor) -> np.ndarray:
    """A vector's elements, to be read: a copy where it lies on a GPU."""
    return host_view(vector.cpu())


def wait_for(vector: Tensor) -> None:
    """Wait until the GPU has done all that it was told to do before, if this vector lies on one."""
    if vector.device.type == "cuda":
        torch.cuda.current_stream(vector.device).synchronize()


class Copy:
    """A copy that was begun; the GPU makes it when it has done what it was told to do before.

    Until `wait`, `source` must stay as it is, where it lies on the host, and `into` says nothing there.
    """

    def __init__(self, into: Tensor, source: Tensor) -> None:
        into.copy_(source, non_blocking=True)
        self._made: torch.cuda.Event | None = None
        on_gpu = next((vector for vector in (into, source) if vector.device.type == "cuda"), None)
        if on_gpu is not None:
            self._made = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._made.record(torch.cuda.current_stream(on_gpu.device))

    def wait(self) -> None:
        """Wait until it is made."""
        if self._made is not None:
            self._made.synchronize()
            self._made = None
