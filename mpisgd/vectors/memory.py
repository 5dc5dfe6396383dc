"""Places of a vector, and its ways between computing and MPI (DESIGN 5).

host         computing and MPI share the memory
shared       host memory common to a node's ranks
GPU          a CUDA-aware MPI takes GPU memory, ignorant of the GPU's order of work: data to send must be there (`wait_for`), memory
             to receive into must be free
pinned       host memory beside a GPU, for other MPIs: copies are begun, and waited for (`Copy`)
size only    a number of bytes, on a virtual cluster (`SizedVector`)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

# The last bits of a product with one row depend on a matrix's offset.
_ALIGNED = 4
"""Alignment of host memory, in float32 elements; a part in its own memory keeps its offset."""


class SizedVector:
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
        return SizedVector(count * self.size, self._itemsize)

    def in_half(self) -> SizedVector:
        """Return the size with elements of half the bytes."""
        return SizedVector(self.size, self._itemsize // 2)


@dataclass(frozen=True, eq=False)
class Memory:
    """A learner's two vectors as they travel, (parameters,) each, in a fixed place.

    Attributes:
        weights: float32, target of pulls: numpy on the host, torch on a GPU, or a `SizedVector`.
        gradients: float32 or coded words (`push_format.py`), source of pushes.
        shared: weights common to a node's ranks; nobody may step alone.
    """

    weights: Any
    gradients: Any
    shared: bool = False
    cuts: Sequence[tuple[int, int]] = ()
    """Each shard's slice in `gradients`, if unlike the weights'."""
    outboxes: Sequence[Any] = ()
    """Like `gradients`, the first of these, for mini-batches in turn (`outbox_of`)."""

    @classmethod
    def zeros(cls, size: int, device: str = "cpu", begins: int = 0) -> Memory:
        """Return zeros for elements from `begins` on of a larger vector."""
        skipped = begins % _ALIGNED
        weights, gradients = (host_vector(skipped + size)[skipped:].to(device) for _ in range(2))
        return cls(view_of(weights), view_of(gradients))

    @property
    def has_numbers(self) -> bool:
        return not isinstance(self.weights, SizedVector)

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Weights and gradients as torch tensors, in the same memory."""
        return as_tensor(self.weights), as_tensor(self.gradients)

    def another(self) -> Memory:
        """Return as much host memory."""
        if not self.has_numbers:
            return self
        return replace(self, weights=np.empty_like(self.weights), gradients=np.empty_like(self.gradients), shared=False)

    def pinned(self) -> Memory:
        """Return host memory for a GPU's vectors."""
        weights, gradients = self.tensors
        return Memory(host_view(staging(weights)), host_view(staging(gradients)))


def as_tensor(vector: np.ndarray | Tensor) -> Tensor:
    return vector if isinstance(vector, Tensor) else torch.from_numpy(vector)


def outbox_of(outboxes: Sequence[Any], seq: int) -> Any:
    """Return the outbox of mini-batch `seq`."""
    return outboxes[seq % len(outboxes)]


def host_vector(size: int) -> Tensor:
    """Return (size,) float32 zeros in host memory."""
    # numpy asks for huge pages, torch does not: single-copy transfers between processes then take up to twice as long
    return torch.from_numpy(np.zeros(size, np.float32))


def pin(memory: np.ndarray) -> None:
    """Pin host memory for a GPU's copies, until `unpin`; otherwise copies are slow."""
    torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)  # type: ignore[no-untyped-call]


def unpin(memory: np.ndarray) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)  # type: ignore[no-untyped-call]


def vector_like(vector: Tensor) -> Tensor:
    """Return float32 zeros beside a vector; on the CPU a `host_vector`."""
    return host_vector(len(vector)) if vector.device.type == "cpu" else torch.zeros_like(vector)


def copy_of(vector: Any) -> Any:
    """Return a copy on the same device; of a size, the size."""
    if isinstance(vector, np.ndarray):
        return np.array(vector)
    return vector.clone() if isinstance(vector, Tensor) else vector


def copy_into(into: Any, vector: Any) -> None:
    """Copy a vector between any devices; a size copies nothing."""
    if type(into) is np.ndarray and type(vector) is np.ndarray:
        into[:] = vector
    elif not isinstance(vector, SizedVector):
        as_tensor(into).copy_(as_tensor(vector))


def staging(vector: Tensor) -> Tensor:
    """Return host memory for a vector; pinned for a GPU's, for asynchronous copies."""
    return torch.empty_like(vector, device="cpu", pin_memory=vector.device.type == "cuda")


def host_view(vector: Tensor) -> np.ndarray:
    """Return a CPU vector's numpy view."""
    array: np.ndarray = vector.detach().numpy()
    return array


def view_of(vector: Tensor) -> np.ndarray | Tensor:
    """Return a numpy view on the CPU; a GPU's vector itself."""
    return host_view(vector) if vector.device.type == "cpu" else vector


def on_host(vector: Tensor) -> np.ndarray:
    """Return elements to read, copied from a GPU."""
    return host_view(vector.cpu())


def wait_for(vector: Tensor) -> None:
    """Wait for all earlier work of the vector's GPU, if any."""
    if vector.device.type == "cuda":
        torch.cuda.current_stream(vector.device).synchronize()


class Copy:
    """A copy begun, after the GPU's earlier work.

    Until `wait`, a host `source` must stay, and a host `into` is undefined.
    """

    def __init__(self, into: Tensor, source: Tensor) -> None:
        into.copy_(source, non_blocking=True)
        self._made: torch.cuda.Event | None = None
        on_gpu = next((vector for vector in (into, source) if vector.device.type == "cuda"), None)
        if on_gpu is not None:
            self._made = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._made.record(torch.cuda.current_stream(on_gpu.device))

    def wait(self) -> None:
        if self._made is not None:
            self._made.synchronize()
            self._made = None
