"""Buffers of a run made again, of any dtype and layout, are compared."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mpisgd.replay.rerun.results import _near

FLOATS = torch.tensor([[1.0, 0.0], [torch.nan, 2.0]])
KINDS: dict[str, Tensor] = {
    "float32": FLOATS,
    "bfloat16": FLOATS.bfloat16(),
    "float8": FLOATS.to(torch.float8_e4m3fn),
    "complex": FLOATS.to(torch.complex64),
    "int64": torch.arange(4).reshape(2, 2),
    "bool": torch.eye(2, dtype=torch.bool),
    "sparse": FLOATS.to_sparse(),
    "sparse rows": FLOATS.to_sparse_csr(),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("tolerance", [0.0, 1e-3])
@pytest.mark.parametrize("kind", KINDS)
def test_any_buffer_is_compared(kind: str, tolerance: float) -> None:
    buffer = KINDS[kind]
    other = buffer.to_dense() if buffer.layout != torch.strided else buffer
    other = other.float().clone() if kind == "float8" else other.clone()
    other[1, 1] = ~other[1, 1] if kind == "bool" else other[1, 1] + 1
    changed = other.to_sparse() if kind == "sparse" else other.to_sparse_csr() if kind == "sparse rows" else other.to(buffer.dtype)
    assert _near(buffer, buffer.clone(), tolerance)
    assert not _near(buffer, changed, tolerance)
    assert not _near(buffer, None, tolerance)
    assert not _near(buffer, torch.zeros(3), tolerance)


def test_a_tolerance_is_kept() -> None:
    assert _near(torch.tensor([1.0]), torch.tensor([1.0005]), 1e-3)
    assert not _near(torch.tensor([1.0]), torch.tensor([1.0005]), 0.0)
