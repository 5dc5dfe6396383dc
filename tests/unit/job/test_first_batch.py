"""What is wrong with a user's model, loss or data is said before the start, in words (law 9); and little is read for that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpisgd.base.errors import ConfigError
from mpisgd.config import Config, make_options
from mpisgd.config.config_file import from_mapping
from mpisgd.gradient import stages
from mpisgd.job import parts
from mpisgd.job.parts import UserObjects
from mpisgd.simulate import simulate
from tests.unit.data.test_data_custom import Squares

MU = 16


def first_batch(model: Any = None, loss: Any = None, data: Any = None, kind: str = "mlp") -> float:
    """As a rank does before the start."""
    config = Config(mu=MU, model=make_options("model", kind))
    user_objects = UserObjects(model, loss, data or ((torch.randn(40, 5), torch.arange(40) % 3), None))
    found = parts.load_data(config, user_objects)
    meta = parts.meta_of(found)
    flat = parts.build_model(config, meta, user_objects)
    sampling = parts.make_sampling(config, meta, 1)
    made = stages.make_gradient(config, flat, parts.load_loss(config, user_objects), found, sampling, 0)
    return parts.check_first_batch(config, meta, flat, made)


class Two(nn.Module):
    """As many networks with a second head do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(inputs), inputs


class Mapping_(Two):
    def forward(self, inputs: Tensor) -> Any:
        return {"logits": self.layer(inputs)}


def linear(**how: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(5, 3, **how)


def as_number(output: Tensor, target: Tensor) -> Any:
    return nn.functional.cross_entropy(output, target).item()


def as_array(output: Tensor, target: Tensor) -> Any:
    return nn.functional.cross_entropy(output, target).numpy()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a tuple": (
        {"model": Two},
        r"model: returned a tuple of 2 \(Tensor, Tensor\), and the loss fails: .*: expected a tensor, or a loss for this output",
    ),
    "a mapping": ({"model": Mapping_}, "model: returned dict, and the loss fails: .*: expected a tensor"),
    "a loss of outputs' attributes": (
        {"model": Two, "loss": lambda output, target: output.mean()},
        r"model: returned a tuple of 2 \(Tensor, Tensor\), and the loss fails: AttributeError: ",
    ),
    "a float": (
        {"model": linear(), "loss": as_number},
        r"loss: returned float \d.*, expected a scalar tensor that autograd can",
    ),
    "an array": ({"model": linear(), "loss": as_array}, r"loss: returned ndarray, expected a scalar tensor"),
    "nothing": ({"model": linear(), "loss": lambda output, target: None}, "loss: returned NoneType, expected a scalar tensor"),
    "a vector": ({"model": linear(), "loss": lambda output, target: output.sum(1)}, r"loss: expected a scalar, got shape \(16,\)"),
    "complex": (
        {"model": linear(), "loss": lambda output, target: output.sum().to(torch.complex64)},
        "loss: returned a tensor of torch.complex64, expected a scalar tensor",
    ),
    "infinite": ({"model": linear(), "loss": lambda output, target: output.sum() / 0}, "loss = -?inf at the first mini-batch"),
    "too few outputs": (
        {"model": lambda: nn.Linear(5, 2)},
        r"the loss fails at the first mini-batch, inputs of shape \(16, 5\), output of shape \(16, 2\), targets torch.int64",
    ),
    "another input": (
        {"model": lambda: nn.Linear(4, 3)},
        r"the model fails at the first mini-batch, inputs of shape \(16, 5\): Runt",
    ),
    "lazy": (
        {"model": lambda: nn.Sequential(nn.LazyLinear(3))},
        r"model: 0.weight of a lazy module has no shape yet, expected a model that has seen a batch of inputs \(n, 5\)",
    ),
    "lazy buffers": ({"model": lambda: nn.Sequential(nn.Linear(5, 3), nn.LazyBatchNorm1d())}, "model: 1.weight of a lazy module"),
    "meta": (
        {"model": linear(device="meta")},
        "model: weight is on the device 'meta', without values, expected initial weights on",
    ),
    "half": ({"model": linear(dtype=torch.float16)}, "model: parameter weight is torch.float16, expected torch.float32"),
    "double": ({"model": linear(dtype=torch.float64)}, "model: parameter weight is torch.float64, expected torch.float32"),
    "complex weights": ({"model": linear(dtype=torch.complex64)}, "parameter weight is torch.complex64, expected torch.float32"),
    "nothing to train": ({"model": nn.ReLU}, "model: returned ReLU without parameters to train, expected at least one"),
    "frozen": ({"model": lambda: nn.Linear(5, 3).requires_grad_(False)}, "model: returned Linear without parameters to train"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said(name: str) -> None:
    user_objects, message = WRONG[name]
    with pytest.raises(ConfigError, match=message):
        first_batch(**user_objects)


def test_a_loss_may_take_what_the_model_returns() -> None:
    """And so does the evaluation, which then has no share of wrong classes."""

    def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output[0], target)

    assert first_batch(Two, loss) > 0


def test_a_loss_that_was_detached(tmp_path: Path) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target).detach()

    with pytest.raises(
        ConfigError, match="loss: the result does not depend on the model's weights by autograd: was the loss detached"
    ):
        simulate(_config(tmp_path), UserObjects(loss=loss))


def _config(out: Path, **more: Any) -> Config:
    table = {"out": str(out / "run"), "model": "softmax", "epochs": 0.1, "overwrite": True, "log": {"progress": "off"}}
    return from_mapping({**table, "virtual": {"learners": 2}, **more})


def test_what_the_users_code_raises_in_a_virtual_run_is_raised(tmp_path: Path) -> None:
    """Also in the middle of it, and the next run can begin."""
    calls = 0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyError("mine")
        return nn.functional.cross_entropy(output, target)

    with pytest.raises(KeyError, match="mine"):
        simulate(_config(tmp_path), UserObjects(loss=loss))
    assert not simulate(_config(tmp_path), UserObjects(loss=loss)).diverged


# ------------------------------------------------------------------------------------------------------------- what is read


class Many(Squares):
    """Tells nothing but its samples."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.fetched += 1
        return torch.full((5,), float(index % 7)), index % 3


def test_a_mini_batch_is_read_of_a_lazy_data_set() -> None:
    train, test = Many(6000), Many(1000)
    first_batch(linear(), data=(train, test))
    assert train.fetched == 1 + MU
    assert test.fetched == 1


@pytest.mark.parametrize(
    ("kind", "factory", "who"),
    [
        ("mlp", None, "model 'mlp'"),
        ("softmax", None, "model 'softmax'"),
        ("mlp", lambda classes: nn.Linear(5, classes), "model"),
    ],
)
def test_a_model_that_needs_the_number_of_classes_says_so(kind: str, factory: Any, who: str) -> None:
    train = Many(6000)
    message = rf"^{who} needs the number of classes: the data set does not tell, .*: expected an attribute `classes`"
    with pytest.raises(ConfigError, match=message):
        first_batch(factory, data=(train, None), kind=kind)
    assert train.fetched == 1
    train.classes = 3  # type: ignore[attr-defined]
    assert first_batch(factory, data=(train, None), kind=kind) > 0
    assert train.fetched <= 2 + MU


@pytest.mark.parametrize("factory", [lambda classes=3: nn.Linear(5, classes), lambda input_shape: nn.Linear(*input_shape, 3)])
def test_a_factory_that_need_not_know_it_is_not_told(factory: Callable[..., nn.Module]) -> None:
    assert first_batch(factory, data=(Many(50), None)) > 0
