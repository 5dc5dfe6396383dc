"""State that Python keeps, and no module: checks before the start leave it as it was, and say that there is some."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mpisgd.records.log import schema
from mpisgd.simulate import simulate
from tests.torch_law.law import Idiom, plain_loop
from tests.torch_law.optimizers import net


def loss_of(model: nn.Module, batch: Any, factor: float = 1.0) -> Tensor:
    return factor * functional.cross_entropy(model(batch[0]), batch[1])


def closure() -> Any:
    calls = 0

    def step(model: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        calls += model.training
        return loss_of(model, batch, 1 + 0.1 * calls)

    return step


def listed() -> Any:
    seen: list[float] = []

    def step(model: nn.Module, batch: Any) -> Tensor:
        if model.training:
            seen.append(1.0)
        return loss_of(model, batch, 1 + 0.1 * len(seen))

    return step


def counted() -> Any:
    numbers = itertools.count()
    return lambda model, batch: loss_of(model, batch, 1 + 0.1 * (next(numbers) if model.training else 0))


class Called:
    """An object in the place of a function."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += model.training
        return loss_of(model, batch, 1 + 0.1 * self.calls)

    def method(self, model: nn.Module, batch: Any) -> Tensor:
        return self(model, batch)


def drawing(make: Callable[[], Any], draw: Callable[[Any], float]) -> Any:
    generator = make()
    return lambda model, batch: loss_of(model, batch, 1 + draw(generator) * model.training)


CALLS = [0]


def in_globals(model: nn.Module, batch: Any) -> Tensor:
    CALLS[0] += model.training
    return loss_of(model, batch, 1 + 0.1 * CALLS[0])


def as_an_attribute(model: nn.Module, batch: Any) -> Tensor:
    """A function that counts its calls by itself."""
    as_an_attribute.calls = getattr(as_an_attribute, "calls", 0) + model.training  # type: ignore[attr-defined]
    return loss_of(model, batch, 1 + 0.1 * as_an_attribute.calls)  # type: ignore[attr-defined]


class Meter:
    """A running average of losses, of the object and of its class."""

    all = 0.0

    def __init__(self) -> None:
        self.mean = 0.0

    def see(self, loss: Tensor) -> None:
        self.mean = 0.9 * self.mean + 0.1 * loss.item()
        Meter.all += 0.1


def helped(model: nn.Module, batch: Any) -> Tensor:
    """What counts is a function beside the step."""
    return loss_of(model, batch, counting(model))


def counting(model: nn.Module) -> float:
    CALLS[0] += model.training
    return 1 + 0.1 * CALLS[0]


def metered() -> Any:
    meter = Meter()

    def step(model: nn.Module, batch: Any) -> Tensor:
        loss = loss_of(model, batch, 1 + meter.mean + Meter.all)
        if model.training:
            meter.see(loss)
        return loss

    return step


def in_cycles() -> Any:
    factors = itertools.cycle(torch.linspace(1, 2, 5))
    return lambda model, batch: loss_of(model, batch, float(next(factors)) if model.training else 1.0)


def taught() -> Any:
    """By a teacher outside of the model, which follows its weights."""
    torch.manual_seed(0)
    teacher = net()

    def step(model: nn.Module, batch: Any) -> Tensor:
        loss = loss_of(model, batch) + functional.mse_loss(model(batch[0]), teacher(batch[0]).detach())
        if model.training:
            with torch.no_grad():
                for own, newest in zip(teacher.parameters(), model.parameters(), strict=True):
                    own.lerp_(newest, 0.1)
        return loss

    return step


def against_another() -> Any:
    """Another network, with an optimiser of its own."""
    torch.manual_seed(0)
    other = net()
    optimizer = torch.optim.Adam(other.parameters(), 0.1)

    def step(model: nn.Module, batch: Any) -> Tensor:
        if model.training:
            optimizer.zero_grad()
            loss_of(other, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return loss_of(model, batch) + functional.mse_loss(model(batch[0]), other(batch[0]).detach())

    return step


class Attribute(nn.Module):
    """A running mean that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mean = nn.Linear(8, 2), torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        found: Tensor = self.layer(x - self.mean)
        return found


KEPT: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], str]] = {
    "a variable of a closure": (net, closure, "the loss depends on calls, kept by Python"),
    "a list of a closure": (net, listed, "the loss depends on seen, kept"),
    "a counter": (net, counted, "the loss depends on numbers, kept"),
    "an object that is called": (net, Called, "the loss depends on calls, kept"),
    "a method": (net, lambda: Called().method, "the loss depends on calls, kept"),
    "a global": (net, lambda: in_globals, "the loss depends on CALLS, kept"),
    "an attribute of a function": (net, lambda: as_an_attribute, "the loss depends on as_an_attribute.calls, kept"),
    "a helper": (net, lambda: helped, "the loss depends on CALLS, kept"),
    "an object": (net, metered, "the loss depends on meter.mean, Meter.all, kept"),
    "a cycle": (net, in_cycles, "the loss depends on factors, kept"),
    "a teacher": (net, taught, "the loss depends on teacher, kept"),
    "another network": (net, against_another, "the loss depends on optimizer, other, kept"),
    "an attribute of the model": (Attribute, lambda: None, "the loss depends on mean, kept"),
    "a generator of torch": (
        net,
        lambda: drawing(lambda: torch.Generator().manual_seed(1), lambda it: torch.rand((), generator=it).item()),
        "kept by Python",
    ),
    "a generator of numpy": (net, lambda: drawing(lambda: np.random.default_rng(1), lambda it: it.random()), "kept by Python"),
    "a generator of Python": (net, lambda: drawing(lambda: random.Random(1), lambda it: it.random()), "kept by Python"),
}


def forget() -> None:
    CALLS[0] = Meter.all = as_an_attribute.calls = 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", KEPT)
def test_one_learner_has_the_bits_of_the_loop_and_is_warned(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model, step, said = KEPT[name]
    forget()
    idiom = Idiom(model, step=step())
    config = idiom.made(tmp_path / "run")
    loop = plain_loop(idiom, config)
    forget()
    idiom = Idiom(model, step=step())
    simulate(config, idiom.user_objects)
    ours = torch.load(tmp_path / "run" / schema.WEIGHTS, weights_only=True)["theta"]
    assert [key for key, value in loop.state.items() if not torch.equal(ours[key], value)] == []
    told = capfd.readouterr().err
    assert "mpisgd: warning: the first mini-batch has the loss " in told and said in told


def test_it_is_so_layer_by_layer_too(tmp_path: Path) -> None:
    """A first pass shows which layers there are; and a variable of the step has no value yet."""

    def made() -> Any:
        def step(model: nn.Module, batch: Any) -> Tensor:
            nonlocal calls
            calls += model.training
            return loss_of(model, batch, 1 + 0.1 * calls + (later if calls > 1000 else 0.0))

        calls = 0
        if calls:
            later = 1.0
        return step

    idiom = Idiom(net, step=made(), config={"per_layer": True, "shards": 2})
    config = idiom.made(tmp_path / "run")
    loop = plain_loop(idiom, config)
    simulate(config, Idiom(net, step=made()).user_objects)
    ours = torch.load(tmp_path / "run" / schema.WEIGHTS, weights_only=True)["theta"]
    assert [key for key, value in loop.state.items() if not torch.equal(ours[key], value)] == []


def test_nobody_is_warned_of_what_changes_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A model that keeps its last output, say."""

    class Keeps(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.last = super().forward(x)
            return self.last

    idiom = Idiom(lambda: Keeps(8, 2))
    simulate(idiom.made(tmp_path / "run"), idiom.user_objects)
    assert capfd.readouterr().err == ""
