"""The networks: their size, their shapes, the same bits on every rank."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mpisgd import models
from mpisgd.base.errors import ConfigError
from mpisgd.config import (
    AlexNetOptions,
    Cifar10FullOptions,
    CustomModelOptions,
    MlpOptions,
    MnistCnnOptions,
    ModelOptions,
    SmallCnnOptions,
    SoftmaxOptions,
)
from mpisgd.models.cifar10_full import WithinChannels

Shape = tuple[int, ...]

NETWORKS: list[tuple[ModelOptions, Shape, int]] = [
    (SoftmaxOptions(), (1, 8, 8), 64 * 10 + 10),
    (MlpOptions(), (1, 8, 8), 64 * 128 + 128 + 128 * 10 + 10),
    (MlpOptions(hidden=(5, 6), batch_norm=True), (7,), 7 * 5 + 5 + 10 + 5 * 6 + 6 + 12 + 6 * 10 + 10),
    (MlpOptions(hidden=()), (7,), 80),
    (SmallCnnOptions(), (1, 8, 8), (9 * 16 + 16) + (9 * 16 * 32 + 32) + (32 * 16 * 10 + 10)),
    (SmallCnnOptions(channels=(2, 3)), (4, 5, 7), (9 * 4 * 2 + 2) + (9 * 2 * 3 + 3) + (3 * 2 * 3 * 10 + 10)),
    # Directions, lengths and biases of 16, 32, 64, 128 filters of 3x3, then of the read-out.
    (MnistCnnOptions(), (1, 28, 28), 9 * (1 * 16 + 16 * 32 + 32 * 64 + 64 * 128) + 2 * 240 + 1280 + 10 + 10),
    (Cifar10FullOptions(), (3, 32, 32), 89_578),
]


def names(value: object) -> str | None:
    return type(value).__name__ if not isinstance(value, tuple | int) else None


def make(options: ModelOptions, input_shape: Shape, seed: int = 1) -> nn.Module:
    return models.make(options, input_shape=input_shape, classes=10, seed=seed)


def bits(model: nn.Module) -> list[bytes]:
    return [value.numpy().tobytes() for value in model.state_dict().values()]


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


@pytest.mark.parametrize(("options", "input_shape", "parameters"), NETWORKS, ids=names)
def test_size_shape_and_gradients(options: ModelOptions, input_shape: Shape, parameters: int) -> None:
    model = make(options, input_shape)
    assert parameter_count(model) == parameters
    inputs = torch.randn(4, *input_shape, generator=torch.Generator().manual_seed(0))
    outputs = model(inputs)
    assert outputs.shape == (4, 10)
    nn.functional.cross_entropy(outputs, torch.arange(4)).backward()  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        # A bias just before batch normalisation has no effect, so its gradient is rounding only.
        if not (isinstance(options, MlpOptions) and options.batch_norm and name in ("1.bias", "4.bias")):
            assert parameter.grad.abs().max() > 1e-6, name


@pytest.mark.parametrize(("options", "input_shape", "parameters"), NETWORKS, ids=names)
def test_bits_depend_on_the_seed_alone(options: ModelOptions, input_shape: Shape, parameters: int) -> None:
    torch.manual_seed(11)
    first = bits(make(options, input_shape))
    torch.manual_seed(12)
    assert bits(make(options, input_shape)) == first
    assert bits(make(options, input_shape, seed=2)) != first


def test_random_state_is_left_as_it_was() -> None:
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    make(MlpOptions(), (4,))
    with pytest.raises(ConfigError):
        make(Cifar10FullOptions(), (4,))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.slow
@pytest.mark.parametrize("side", [224, 227])
def test_alexnet_is_near_72_million_parameters(side: int) -> None:
    with torch.device("meta"):  # shapes without memory
        model = models.make(AlexNetOptions(), input_shape=(3, side, side), classes=1000, seed=1)
        outputs = model(torch.empty(2, 3, side, side))
    assert outputs.shape == (2, 1000)
    assert parameter_count(model) == 74_596_712
    assert abs(parameter_count(model) / 72e6 - 1) < 0.05
    dropouts = [layer for layer in model.modules() if isinstance(layer, nn.Dropout)]
    assert [layer.p for layer in dropouts] == [0.5, 0.5]


def test_cifar10_full_has_the_layers_of_caffe() -> None:
    model = make(Cifar10FullOptions(), (3, 32, 32))
    shapes = []
    inputs = torch.zeros(1, 3, 32, 32)
    for layer in model.children():
        inputs = layer(inputs)
        shapes.append((type(layer).__name__, *inputs.shape[1:]))
    assert shapes == [
        ("Conv2d", 32, 32, 32),
        ("MaxPool2d", 32, 16, 16),
        ("ReLU", 32, 16, 16),
        ("Conv2d", 32, 16, 16),
        ("ReLU", 32, 16, 16),
        ("AvgPool2d", 32, 8, 8),
        ("Conv2d", 64, 8, 8),
        ("ReLU", 64, 8, 8),
        ("AvgPool2d", 64, 4, 4),
        ("Flatten", 1024),
        ("Linear", 10),
    ]


def test_caffes_form_has_the_first_weights_and_the_normalisation_of_caffes_files() -> None:
    model = make(Cifar10FullOptions(form="caffe"), (3, 32, 32))
    order = ["conv1", "pool1", "relu1", "norm1", "conv2", "relu2", "pool2", "norm2", "conv3", "relu3", "pool3", "flatten", "ip1"]
    assert [name for name, _ in model.named_children()] == order
    assert parameter_count(model) == 89_578
    for name, deviation in {"conv1": 0.0001, "conv2": 0.01, "conv3": 0.01, "ip1": 0.01}.items():
        weight, bias = model.get_submodule(name).weight.detach(), model.get_submodule(name).bias
        assert float(weight.std()) == pytest.approx(deviation, rel=0.05)
        assert abs(float(weight.mean())) < deviation / 20
        assert not bias.any()
    assert sum(weight.numel() for weight in make(Cifar10FullOptions(), (3, 32, 32)).parameters()) == 89_578


def test_responses_are_normalised_over_three_by_three_places_of_their_channel() -> None:
    inputs = 100 * torch.randn(2, 3, 4, 5)
    found = WithinChannels()(inputs)
    for image, channel, row, column in [(0, 0, 0, 0), (1, 2, 3, 4), (0, 1, 2, 2), (1, 0, 0, 3)]:
        places = inputs[image, channel, max(0, row - 1) : row + 2, max(0, column - 1) : column + 2]
        expected = inputs[image, channel, row, column] / (1 + 5e-5 * float(places.square().sum()) / 9) ** 0.75
        assert float(found[image, channel, row, column]) == pytest.approx(float(expected), rel=1e-5)


def test_weight_normalisation_is_in_every_layer_of_the_mnist_network() -> None:
    model = make(MnistCnnOptions(), (1, 28, 28))
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    assert len(layers) == 5
    for layer in layers:
        with torch.no_grad():
            directions: torch.Tensor = layer.parametrizations.weight.original1  # type: ignore[union-attr,assignment]
            before = layer.weight.clone()
            directions.mul_(3.0)
            assert torch.allclose(layer.weight, before)  # the length of v has no say


@pytest.mark.parametrize(
    ("options", "input_shape", "message"),
    [
        (SmallCnnOptions(), (64,), r"model = 'small_cnn': inputs of shape \(64,\), expected \(channels, height >= 2"),
        (SmallCnnOptions(), (1, 1, 8), r"model = 'small_cnn': inputs of shape \(1, 1, 8\)"),
        (MnistCnnOptions(), (1, 8, 8), r"model = 'mnist_cnn': inputs of shape \(1, 8, 8\), expected \(channels, 28, 28\)"),
        (
            Cifar10FullOptions(),
            (1, 28, 28),
            r"model = 'cifar10_full': inputs of shape \(1, 28, 28\), expected \(3, 32, 32\)",
        ),
        (AlexNetOptions(), (3, 32, 32), r"model = 'alexnet': inputs of shape \(3, 32, 32\), expected \(3, 227, 227\) or"),
    ],
)
def test_an_input_the_network_is_not_cut_for(options: ModelOptions, input_shape: Shape, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(options, input_shape)


USER_MODULE = """
import torch
from torch import nn

def plain(width=3):
    return nn.Linear(4, width)

def shaped(input_shape, *, classes, extra=0):
    return nn.Linear(input_shape[0] + extra, classes)

class Net(nn.Module):
    def __init__(self, classes, seed):
        super().__init__()
        self.seed = seed
        self.layer = nn.Linear(4, classes)

def number():
    return 7

def idle():
    return nn.ReLU()

def broken():
    raise KeyError("the user's own")

made = nn.Linear(4, 3)
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_models.py").write_text(USER_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_models", raising=False)
    return "my_models"


def custom(user_module: str, name: str, **kwargs: Any) -> nn.Module:
    return make(CustomModelOptions(factory=f"{user_module}:{name}", kwargs=kwargs), (4,))


def test_a_users_factory(user_module: str) -> None:
    assert custom(user_module, "plain", width=5)(torch.zeros(1, 4)).shape == (1, 5)
    assert custom(user_module, "shaped", extra=2)(torch.zeros(1, 6)).shape == (1, 10)
    assert custom(user_module, "Net").seed == 1
    assert bits(custom(user_module, "plain")) == bits(custom(user_module, "plain"))


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("number", {}, "model.factory = 'my_models:number': returned int, expected a torch.nn.Module"),
        ("idle", {}, "returned ReLU without parameters to train"),
        ("plain", {"widht": 3}, r"the parameters are \(width=3\), but got an unexpected keyword argument 'widht'"),
        ("made", {}, "found a Linear, expected a function"),
        ("__name__", {}, "expected a callable, found str"),
    ],
)
def test_a_factory_that_is_none(user_module: str, name: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        custom(user_module, name, **kwargs)


def test_what_a_factory_raises_goes_through(user_module: str) -> None:
    with pytest.raises(KeyError, match="the user's own"):
        custom(user_module, "broken")


def test_a_factory_at_hand() -> None:
    def factory(classes: int) -> nn.Module:
        return nn.Linear(4, classes)

    first, second = (models.from_factory(factory, input_shape=(4,), classes=6, seed=3) for _ in range(2))
    assert first(torch.zeros(1, 4)).shape == (1, 6)
    assert bits(first) == bits(second)
    with pytest.raises(ConfigError, match="model: found a Linear, expected a function"):
        models.from_factory(first, input_shape=(4,), classes=6, seed=3)
