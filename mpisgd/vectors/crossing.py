"""Between a GPU and MPI: host memory that both know, and copies that are begun and waited for (DESIGN 5).

Where MPI is CUDA-aware it is given the GPU's memory itself, and nothing is copied; but MPI knows nothing of the GPU's own order of
work, so what it sends must be there (`wait_for`), and what it receives into must not be in use any more.
"""

from __future__ import annotations

import torch
from torch import Tensor


def staging(vector: Tensor) -> Tensor:
    """Host memory for what is in this vector, of its type: pinned where that lies on a GPU, so that copies go by themselves."""
    return torch.empty_like(vector, device="cpu", pin_memory=vector.device.type == "cuda")


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
