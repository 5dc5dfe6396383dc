"""Memory that tensors are received into between the ranks of a group: when it is taken again, and when it must not be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mpisgd.pipeline import travelling
from mpisgd.pipeline.travelling import Rooms, describe


def received(rooms: Rooms, tensor: Tensor) -> tuple[Tensor, int]:
    """A copy by way of the wire, and where its bytes lie."""
    described, sent = describe(tensor, "a test")
    copy, body = rooms.room(described)
    body[:] = sent
    return copy, int(body.ctypes.data)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).reshape(2, 3, 4),
        torch.arange(24.0).reshape(4, 6).T,
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_(),
        torch.tensor(3.5),
        torch.zeros(0, 3),
        torch.tensor([[True, False]]),
        torch.randn(5).bfloat16(),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)}-{tensor.dtype}",
)
def test_a_tensor_comes_as_it_was(tensor: Tensor) -> None:
    copy, _ = received(Rooms(), tensor)
    assert torch.equal(copy, tensor) and copy.dtype == tensor.dtype
    assert copy.stride() == tensor.stride() and copy.requires_grad == tensor.requires_grad
    assert copy.is_leaf and not copy._is_view()


def test_memory_is_taken_again_once_nobody_has_it() -> None:
    rooms, tensor = Rooms(), torch.ones(1000)
    one, first = received(rooms, tensor)
    other, second = received(rooms, tensor)
    assert first != second
    del one
    assert received(rooms, tensor)[1] == first
    assert other.tolist() == [1.0] * 1000


@pytest.mark.parametrize("keeps", ["view", "graph", "gradient", "numpy"])
def test_not_while_anything_refers_to_it(keeps: str) -> None:
    rooms, weight = Rooms(), torch.ones(50, requires_grad=True)
    tensor, where = received(rooms, torch.full((50,), 3.0))
    kept: Any = tensor[3:5]
    if keeps == "graph":
        kept = (tensor * weight).sum()  # has kept the tensor for its backward pass
    elif keeps == "gradient":
        weight.grad = tensor
    elif keeps == "numpy":
        kept = tensor.numpy()
    if keeps == "gradient":
        del kept
    del tensor
    assert received(rooms, torch.zeros(50))[1] != where
    if keeps == "graph":
        kept.backward()
        assert weight.grad is not None and weight.grad.tolist() == [3.0] * 50


def test_memory_of_shapes_that_come_no_more_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(travelling, "_LONG", 10)
    rooms = Rooms()
    for size in range(1, 41):
        received(rooms, torch.zeros(size))
    assert sum(map(len, rooms._had.values())) <= 12
