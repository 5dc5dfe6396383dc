"""Batches of any shape: what is in them is moved, and nothing else is changed."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from mpisgd.base.errors import DataError
from mpisgd.vectors import nest


@dataclasses.dataclass(frozen=True)
class Record:
    x: Tensor
    name: str


Point = namedtuple("Point", "x y")

ONE = torch.ones(2)
NESTS: dict[str, tuple[Any, list[str]]] = {
    "tensor": (ONE, [""]),
    "tuple": ((ONE, [ONE, None]), ["[0]", "[1][0]"]),
    "dict": ({"a": ONE, "b": {"c": ONE, "d": "text"}}, ["['a']", "['b']['c']"]),
    "mapping": (UserDict(a=ONE, b=(ONE, 3)), ["['a']", "['b'][0]"]),
    "dataclass": ({"r": Record(ONE, "name")}, ["['r'].x"]),
    "named tuple": (Point(ONE, 2.0), [".x"]),
    "ordered": (OrderedDict(z=ONE, a=ONE), ["['z']", "['a']"]),
}


@pytest.mark.parametrize("name", NESTS)
def test_each_tensor_is_replaced_and_the_rest_is_kept(name: str) -> None:
    given, names = NESTS[name]
    doubled = nest.mapped(given, lambda _, tensor: 2 * tensor)
    assert type(doubled) is type(given)
    assert sorted(nest.tensors_of(given)) == sorted(names)
    assert all(tensor.tolist() == [2, 2] for tensor in nest.tensors_of(doubled).values())
    assert all(tensor is ONE for tensor in nest.tensors_of(given).values()), "the nest itself is not changed"
    if name == "dataclass":
        assert doubled["r"].name == "name"


def test_what_can_be_moved_is_moved_by_itself() -> None:
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    moved = []
    assert nest.mapped({"p": packed}, lambda name, value: moved.append(name) or value.to("cpu"))["p"].data.tolist() == [1, 1, 1]
    assert moved


def test_what_is_neither_is_refused_by_its_place() -> None:
    with pytest.raises(DataError, match=r"batch\['a'\]\[1\]\.x is a object, expected a nest"):
        nest.mapped({"a": [ONE, Record(object(), "")]}, lambda _, tensor: tensor)  # type: ignore[arg-type]
