"""The flat vectors: no copy between autograd and the wire rests on the parameters really being views (DESIGN 5)."""

from __future__ import annotations

import copy
import itertools
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mpisgd.base.errors import ConfigError
from mpisgd.vectors.flat import FlatModel, slice_bounds, squared_norm
from mpisgd.vectors.memory import host_vector, host_view

FORMATS = ["channels_last", "contiguous"]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2))


def backward(module: nn.Module, inputs: torch.Tensor) -> None:
    module(inputs).square().sum().backward()


@pytest.mark.parametrize("memory_format", FORMATS)
def test_parameters_and_gradients_are_views_that_keep_their_values(memory_format: str) -> None:
    original = network()
    model = FlatModel(copy.deepcopy(original), memory_format)
    assert model.size == sum(parameter.numel() for parameter in original.parameters())
    for before, now in zip(original.parameters(), model.module.parameters(), strict=True):
        assert torch.equal(before, now)
    model.weights.fill_(0.5)
    model.gradients.fill_(0.25)
    for parameter in model.module.parameters():
        assert (parameter == 0.5).all()
        assert (parameter.grad == 0.25).all()
    model.zero_gradients()
    assert not any(parameter.grad.any() for parameter in model.module.parameters())


@pytest.mark.parametrize("memory_format", FORMATS)
def test_autograd_accumulates_into_the_flat_gradient(memory_format: str) -> None:
    """Twice, so that a gradient that autograd replaced instead of adding to would be seen."""
    original = network()
    model = FlatModel(copy.deepcopy(original), memory_format)
    inputs = torch.randn(4, 2, 4, 4)
    places = [parameter.grad.data_ptr() for parameter in model.module.parameters()]
    for _ in range(2):
        backward(original, inputs)
        backward(model.module, model.inputs(inputs))
    assert places == [parameter.grad.data_ptr() for parameter in model.module.parameters()]
    for ours, theirs in zip(model.module.parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    total = sum(parameter.grad.double().sum() for parameter in original.parameters())
    torch.testing.assert_close(model.gradients.double().sum(), total, rtol=1e-4, atol=1e-4)


def test_channels_last_lies_in_the_vector_as_out_height_width_in() -> None:
    original = network()
    weight = original[0].weight.detach().clone()
    model = FlatModel(original, "channels_last")
    assert torch.equal(model.weights[: weight.numel()], weight.permute(0, 2, 3, 1).reshape(-1))
    assert model.module[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert model.inputs(torch.zeros(2, 2, 4, 4)).is_contiguous(memory_format=torch.channels_last)
    assert FlatModel(network(), "contiguous").module[0].weight.is_contiguous()
    assert model.inputs(torch.zeros(2, 7)).shape == (2, 7)


@pytest.mark.parametrize("memory_format", FORMATS)
def test_a_state_dict_goes_out_and_comes_back(memory_format: str) -> None:
    model = FlatModel(network(), memory_format)
    model.weights.add_(1.0)
    other = FlatModel(network(), memory_format)
    place = other.weights.data_ptr()
    other.module.load_state_dict(model.module.state_dict())
    assert torch.equal(other.weights, model.weights)
    assert other.weights.data_ptr() == place
    plain = network()
    plain.load_state_dict(model.module.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.module.parameters(), strict=True))


def test_frozen_parameters_and_buffers_stay_outside_and_tied_ones_count_once() -> None:
    module = network()
    module[4].weight.requires_grad = False
    frozen = module[4].weight.detach().clone()
    model = FlatModel(module)
    assert model.size == 3 * 2 * 9 + 3 + 3 + 3 + 2
    model.weights.zero_()
    assert torch.equal(module[4].weight, frozen)
    assert (module[1].running_var == 1).all()
    tied = nn.ModuleList([nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)])
    tied[1].weight = tied[0].weight
    assert FlatModel(tied).size == 9


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.ReLU(), "no trainable parameters"),
        (nn.Linear(2, 2).requires_grad_(False), "no trainable parameters"),
        (nn.Sequential(nn.Linear(2, 2).double()), r"parameter 0.weight is torch.float64, expected torch.float32"),
    ],
)
def test_models_that_cannot_be_flat(module: nn.Module, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FlatModel(module)


@given(parameters=st.integers(1, 10**9), shards=st.integers(1, 50))
def test_slices_cover_exactly_and_evenly(parameters: int, shards: int) -> None:
    if parameters < shards:
        with pytest.raises(ConfigError, match=f"shards = {shards}: expected at most the number of parameters, {parameters}"):
            slice_bounds(parameters, shards)
        return
    bounds = slice_bounds(parameters, shards)
    assert [start for start, _ in bounds] == [0, *(end for _, end in bounds[:-1])]
    assert bounds[-1][1] == parameters
    lengths = [end - start for start, end in bounds]
    assert len(lengths) == shards
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


def test_the_host_view_shares_memory() -> None:
    vector = host_vector(3)
    assert vector.dtype == torch.float32
    host_view(vector)[:] = [1, 2, 3]
    assert vector.tolist() == [1, 2, 3]
    parameter = nn.Parameter(vector)
    assert host_view(parameter)[2] == 3


@pytest.mark.parametrize("value, expected", [(1e30, np.inf), (np.inf, np.inf), (np.nan, np.nan), (2.0, 4.0)])
def test_a_squared_norm_that_is_too_large_is_no_warning(value: float, expected: float) -> None:
    vector = np.zeros(1000, np.float32)
    vector[500] = value
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        np.testing.assert_equal(squared_norm(vector), expected)


@pytest.mark.parametrize("shape", [(4, 1, 3, 3), (1, 5), (4, 3, 1, 1), (1, 1, 2), (3, 2)])
def test_strides_are_kept_those_of_dimensions_of_1_too(shape: tuple[int, ...]) -> None:
    """Torch chooses a convolution's kernel by them, and so its last bits."""
    for order in itertools.permutations(range(len(shape))):
        tensor = torch.randn([shape[at] for at in order]).permute([order.index(at) for at in range(len(order))])
        module = nn.Module()
        module.weight = nn.Parameter(tensor)
        expected = tensor.clone(), tensor.stride()
        FlatModel(module, "contiguous", "cpu")
        assert torch.equal(module.weight, expected[0])
        assert module.weight.stride() == expected[1]
