"""Slices of whole layers, and when a model's passes ask for them and let them go [Chen16 2, A.3]."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mpisgd.base.errors import ConfigError
from mpisgd.config import replace
from mpisgd.gradient import stages
from mpisgd.gradient.by_layers.entrances import AllThere
from mpisgd.gradient.by_layers.parts import GradientInParts
from mpisgd.gradient.rounding import Rounded
from mpisgd.job import parts
from mpisgd.job.tensors import Tensors
from mpisgd.protocols import AllreduceOptions, HardsyncOptions
from mpisgd.records.log.schema import RULES
from mpisgd.vectors.buckets import buckets
from mpisgd.vectors.computing import Travels
from mpisgd.vectors.flat import FlatModel, bounds_of, cut_between, slice_bounds
from tests.effort import spread
from tests.torch_law import ZOO


class Net(nn.Module):
    """Layers by name, and what is done with them."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self._forward = forward

    def forward(self, inputs: Tensor) -> Tensor:
        return self._forward(self, inputs)


class Scaled(nn.Module):
    """Parameters beside layers, of the model itself and in a list, which is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.randn(6))
        self.shifts = nn.ParameterList([torch.randn(6) for _ in range(2)])

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs) * self.scale + self.shifts[0] * self.shifts[1]


def tied() -> nn.Module:
    net = Net(lambda net, x: net.last(torch.relu(net.first(x))), first=linear(), last=linear())
    net.last.weight = net.first.weight
    return net


def linear() -> nn.Linear:
    return nn.Linear(6, 6)


def two(net: Any, x: Tensor, **how: Any) -> Tensor:
    """Layer a, then b, checkpointed: computed again in the backward pass."""
    return checkpoint(net.b, torch.relu(checkpoint(net.a, x, **how)), **how)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "in order": lambda: nn.Sequential(linear(), nn.Tanh(), linear(), nn.Tanh(), linear()),
    "out of order": lambda: Net(lambda net, x: net.a(torch.tanh(net.c(torch.tanh(net.b(x))))), a=linear(), b=linear(), c=linear()),
    "tied": tied,
    "tied, the second owner first": lambda: Net(lambda net, x: net.one(torch.tanh(net.two(x))), one=(t := tied()), two=t.last),
    "entered three times": lambda: Net(lambda net, x: net.a(net.b(net.a(torch.tanh(net.a(x))))), a=linear(), b=linear()),
    "one unused": lambda: Net(lambda net, x: net.c(torch.tanh(net.a(x))), a=linear(), b=linear(), c=linear()),
    "some frozen": lambda: nn.Sequential(linear().requires_grad_(False), linear(), linear()),
    "batch norm": lambda: nn.Sequential(linear(), nn.BatchNorm1d(6), nn.ReLU(), linear()),
    "convolutions": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(24, 2)
    ),
    "weight norm": lambda: nn.Sequential(*(nn.utils.parametrizations.weight_norm(linear()) for _ in range(3))),
    "weight norm of old": lambda: nn.Sequential(*(nn.utils.weight_norm(linear()) for _ in range(2))),  # type: ignore[no-untyped-call]
    "recurrent": lambda: Net(lambda net, x: net.out(net.lstm(x[:, None])[0][:, 0]), lstm=nn.LSTM(6, 6, 2), out=linear()),
    "attention": lambda: Net(
        lambda net, x: net.out(net.blocks(x[None])[0]),
        blocks=nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0), 2),
        out=linear(),
    ),
    "parameters of its own": Scaled,
    "used before it is called": lambda: Net(lambda net, x: net.b(torch.tanh(net.a(x @ net.b.weight.T))), a=linear(), b=linear()),
    "used without a call": lambda: Net(lambda net, x: net.b(F.linear(x, net.a.weight, net.a.bias).tanh()), a=linear(), b=linear()),
    "checkpointed": lambda: Net(lambda net, x: two(net, x, use_reentrant=False), a=linear(), b=linear()),
    "checkpointed, reentrant": lambda: Net(lambda net, x: two(net, x.requires_grad_(), use_reentrant=True), a=linear(), b=linear()),
}


class Batch(Travels):
    """A `Gradient` that computes one mini-batch, whatever it is called."""

    samples = 5
    objective = None

    def __init__(self, model: FlatModel) -> None:
        self.memory = model.memory
        self.model = model
        self.inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))

    def prepare(self, seq: int) -> None:
        self.model.zero_gradients()

    def interrupt_by(self, check: Any) -> None: ...

    def note_skipped(self) -> None: ...

    def compute(self, seq: int) -> float:
        loss = self.forward(seq)
        loss.backward()  # type: ignore[no-untyped-call]
        return self.hand_over(loss)

    def hand_over(self, loss: Tensor) -> float:
        """Clipped, say."""
        self.model.gradients.mul_(0.5)
        return loss.item() + 1.0

    def forward(self, seq: int) -> Tensor:
        torch.manual_seed(seq)
        return self.model.module(self.inputs.clone()).square().sum()  # type: ignore[no-any-return]


class Shards:
    """Gives weights when they are needed, and not before; keeps each gradient as it was when it was left."""

    early = True

    def __init__(self, model: FlatModel, bounds: list[tuple[int, int]]) -> None:
        self.model = model
        self.bounds = bounds
        self.weights = model.weights.clone()
        self.gradients = torch.full_like(self.weights, math.nan)
        self.told: list[tuple[str, int]] = []
        self.seen: set[tuple[int, int, float]] = set()
        self.rounded: list[float] = []
        self.stop_at = -1

    def take_back(self) -> None:
        self.model.weights.fill_(math.nan)
        self.gradients.fill_(math.nan)
        self.told.clear()
        self.seen.clear()

    def need(self, shard: int) -> None:
        self.told.append(("need", shard))
        if shard == self.stop_at:
            raise InterruptedError
        start, end = self.bounds[shard]
        self.model.weights[start:end] = self.weights[start:end]

    def leave(self, shard: int, seq: int, samples: int, loss: float, rounded: float, scale: float, skipped: Any) -> None:
        self.told.append(("leave", shard))
        self.seen.add((seq, samples, loss))
        self.rounded.append(rounded)
        start, end = self.bounds[shard]
        self.gradients[start:end] = self.model.gradients[start:end]


def followed(module: nn.Module, shards: int | None = None, held: bool = False) -> tuple[GradientInParts, Shards, Batch]:
    model = FlatModel(module)
    bounds = bounds_of(cut_between(model.layers, shards or len(model.layers)))
    exchange, batch = Shards(model, bounds), Batch(model)
    return GradientInParts(batch, batch, model, bounds, exchange, held=held), exchange, batch  # type: ignore[arg-type]


def streamed(module: nn.Module, elements: int = 5) -> tuple[GradientInParts, Shards, Batch]:
    """In chunks, which know nothing of layers."""
    model = FlatModel(module)
    bounds = [(start, min(start + elements, model.size)) for start in range(0, model.size, elements)]
    exchange, batch = Shards(model, bounds), Batch(model)
    return GradientInParts(batch, batch, model, bounds, exchange, held=False, streamed=True), exchange, batch  # type: ignore[arg-type]


def computed_by_both(seq: int, whole: Batch, gradient: GradientInParts, exchange: Shards) -> float:
    """The loss of a mini-batch, which must be the same; so must be the bits of the gradient."""
    whole.prepare(seq)
    expected = whole.forward(seq)
    expected.backward()  # type: ignore[no-untyped-call]
    exchange.take_back()
    if isinstance(gradient._entrances, AllThere):
        exchange.model.weights.copy_(exchange.weights)
    gradient.prepare(seq)
    assert gradient.compute(seq) == expected.item()
    assert torch.equal(exchange.gradients, whole.model.gradients)
    return expected.item()


def seeded(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return KINDS[kind]()


@pytest.mark.parametrize("kind", spread(KINDS, 3))
@pytest.mark.parametrize("shards", [None, 1, 2])
def test_weights_come_before_they_are_used_and_gradients_leave_when_they_are_whole(kind: str, shards: int | None) -> None:
    """Weights are NaN until they are needed; what was left is bit for bit the gradient of the whole vector."""
    if shards == 2 and len(FlatModel(seeded(kind)).layers) < 2:
        pytest.skip("one layer")
    whole = Batch(FlatModel(seeded(kind)))
    gradient, exchange, _ = followed(seeded(kind), shards)
    for seq in range(3):
        expected = computed_by_both(seq, whole, gradient, exchange)
        slices = range(len(exchange.bounds))
        assert sorted(exchange.told) == [(what, shard) for what in ("leave", "need") for shard in slices], "each once"
        assert [what for what, _ in exchange.told] == ["need" for _ in slices] + ["leave" for _ in slices]
        assert exchange.seen == {(seq, 5, expected)}
    buffers = dict(exchange.model.module.named_buffers())
    assert all(torch.equal(buffers[name], buffer) for name, buffer in whole.model.module.named_buffers())


@pytest.mark.parametrize("kind", spread(KINDS, 3))
def test_chunks_leave_once_each_with_the_bits_of_the_whole(kind: str) -> None:
    """Whatever the order of the passes; weights are there before."""
    whole = Batch(FlatModel(seeded(kind)))
    gradient, exchange, _ = streamed(seeded(kind))
    for seq in range(3):
        expected = computed_by_both(seq, whole, gradient, exchange)
        assert sorted(exchange.told) == [("leave", chunk) for chunk in range(len(exchange.bounds))]
        assert exchange.seen == {(seq, 5, expected)}


@pytest.mark.parametrize(
    ("kind", "early"),
    [("in order", True), ("tied", True), ("checkpointed", True), ("one unused", True), ("twice in reentrant checkpoints", False)],
)
def test_chunks_leave_early_unless_the_first_mini_batch_has_a_gradient_in_pieces(kind: str, early: bool) -> None:
    """Of the first nobody knows yet."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        if kind in KINDS:
            return KINDS[kind]()
        return Net(lambda net, x: two(net, x.requires_grad_(), use_reentrant=True), a=(a := linear()), b=a)

    whole = Batch(FlatModel(make()))
    gradient, exchange, _ = streamed(make())
    there: list[bool] = []
    leave = exchange.leave

    def looking(chunk: int, *told: Any) -> None:
        there.append(bool(exchange.model.gradients[: exchange.bounds[0][1]].any()))
        leave(chunk, *told)

    exchange.leave = looking  # type: ignore[method-assign]
    for seq in range(3):
        there.clear()
        computed_by_both(seq, whole, gradient, exchange)
        assert all(there) == (seq == 0 or not early), "the first layer's gradient is the last to come"


def in_function() -> nn.Module:
    compiled = torch.compile(lambda x, weight: torch.tanh(x @ weight), backend="eager")
    return Net(lambda net, x: net.b(compiled(net.a(x), net.b.weight)), a=linear(), b=linear())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["whole", "a layer", "a function"])
def test_of_a_compiled_model_all_weights_come_first(kind: str) -> None:
    """Compiled layers are entered without a hook that could wait; a function in a layer is found to use another's weights."""

    def make() -> nn.Module:
        module = in_function() if kind == "a function" else seeded("in order")
        if kind == "a layer":
            module[2].compile(backend="eager")
        return torch.compile(module, backend="eager") if kind == "whole" else module

    torch.manual_seed(0)
    whole = Batch(FlatModel(make()))
    torch.manual_seed(0)
    gradient, exchange, _ = followed(make())
    for seq in range(3):
        computed_by_both(seq, whole, gradient, exchange)
        assert [what for what, _ in exchange.told] == ["need" for _ in exchange.bounds] + ["leave" for _ in exchange.bounds]


ORDERS = {
    "in order": ([0, 1, 2], [2, 1, 0]),
    "out of order": ([1, 2, 0], [0, 2, 1]),
    "one unused": ([1, 0, 2], [2, 0, 1]),  # it might be used without being called: asked for at once
    "tied": ([0, 1], [1, 0]),
    "entered three times": ([0, 1], [1, 0]),
    "weight norm": ([0, 1, 2], [2, 1, 0]),
    "weight norm of old": ([0, 1], [1, 0]),
    "used before it is called": ([1, 0], [0, 1]),
    "used without a call": ([0, 1], [1, 0]),
}


@pytest.mark.parametrize("kind", ORDERS)
def test_the_order_is_that_of_the_passes(kind: str) -> None:
    gradient, exchange, _ = followed(seeded(kind))
    gradient.prepare(0)
    gradient.compute(0)
    needed, left = ORDERS[kind]
    assert exchange.told == [*(("need", shard) for shard in needed), *(("leave", shard) for shard in left)]


@pytest.mark.parametrize("rounds", [False, True])
def test_what_is_looked_at_as_a_whole_leaves_when_that_is_done(rounds: bool) -> None:
    """What leaves is what was made of all of it; its loss, too. Rounded, each slice says its own share."""
    whole = Batch(FlatModel(seeded("in order")))
    whole.prepare(0)
    expected = whole.forward(0)
    expected.backward()
    gradient, exchange, batch = followed(seeded("in order"), held=True)
    exchange.take_back()
    if rounds:
        gradient._pushed = Rounded(batch, exchange.bounds, tell_nonfinite=False, slices=exchange.bounds)
    gradient.prepare(0)
    assert gradient.compute(0) == expected.item() + 1.0
    assert torch.equal(exchange.gradients, whole.model.gradients * 0.5)
    assert [what for what, _ in exchange.told] == ["need"] * 3 + ["leave"] * 3
    assert exchange.seen == {(0, 5, expected.item() + 1.0)}
    assert len(set(exchange.rounded)) == (3 if rounds else 1)
    assert (gradient._pushed.rounded > 0) == rounds


def test_a_gradient_leaves_while_those_below_are_still_to_be_computed() -> None:
    """The top layer's is whole when nothing of the lower ones is there yet [Chen16 A.3]."""
    gradient, exchange, _ = followed(seeded("in order"))
    there: list[list[bool]] = []
    leave = exchange.leave

    def looking(shard: int, *told: Any) -> None:
        there.append([bool(exchange.model.gradients[start:end].any()) for start, end in exchange.bounds])
        leave(shard, *told)

    exchange.leave = looking  # type: ignore[method-assign]
    gradient.prepare(0)
    gradient.compute(0)
    assert there == [[False, False, True], [False, True, True], [True, True, True]]


def test_buffers_are_as_they_were_before_the_first_mini_batch() -> None:
    gradient, _, _ = followed(module := seeded("batch norm"))
    assert module[1].num_batches_tracked == 0
    assert (module[1].running_mean == 0).all()
    gradient.prepare(0)
    gradient.compute(0)
    assert module[1].num_batches_tracked == 1


def test_a_pull_may_end_the_mini_batch_and_after_it_nobody_is_told() -> None:
    gradient, exchange, batch = followed(seeded("in order"))
    exchange.stop_at = 1
    gradient.prepare(0)
    with pytest.raises(InterruptedError):
        gradient.compute(0)
    assert exchange.told == [("need", 0), ("need", 1)], "nothing of it was pushed"
    exchange.told.clear()
    batch.forward(0).backward()
    assert exchange.told == [], "the model goes on being used, for evaluation"


@pytest.mark.parametrize("held", [False, True])
def test_layers_that_do_not_show_when_they_are_used_are_refused(held: bool) -> None:
    """Called in the first mini-batch, so that it may be waited for; later its weights are used without a call."""
    calls = itertools.count()
    net = Net(lambda net, x: net.a(x) if next(calls) == 0 else F.linear(x, net.a.weight), a=linear(), b=linear())
    gradient, _, _ = followed(net, held=held)
    gradient.prepare(0)
    with pytest.raises(ConfigError, match=r"expected whole vectors .*: the weights were used before .*: parameter a.weight"):
        gradient.compute(0)


def test_gradients_that_come_in_parts_are_refused() -> None:
    """A layer in two reentrant checkpoints is accumulated twice, and nobody knows before whether it will be."""
    net = Net(lambda net, x: two(net, x.requires_grad_(), use_reentrant=True), a=(a := linear()), b=a)
    gradient, _, _ = followed(net)
    gradient.prepare(0)
    with pytest.raises(ConfigError, match="expected whole vectors for this model: the gradient came in parts: parameter a"):
        gradient.compute(0)


PARTED: dict[str, dict[str, Any]] = {
    "buckets": {"protocol": AllreduceOptions(), "way": "buckets"},
    "streamed": {"protocol": HardsyncOptions(), "way": "streamed"},
}
"""The program's own choice over slow links: nothing that goes in whole may be refused."""


SEEN = ("torch.jit.script", "adversarial samples")
"""Refused once, for what the trial pass is."""
TAKEN = [name for name, idiom in ZOO.items() if not idiom.refused]


@pytest.mark.parametrize("way", PARTED)
@pytest.mark.parametrize("name", [name if name in SEEN else pytest.param(name, marks=pytest.mark.slow) for name in TAKEN])
def test_what_torchs_loop_takes_goes_in_parts(name: str, way: str, tmp_path: Path) -> None:
    """Of three owners; in buckets weights are NaN until they are needed."""
    idiom, early = ZOO[name], way == "streamed"
    config = replace(idiom.made(tmp_path), **PARTED[way])
    whole, parted = (
        Tensors.load(config, idiom.user_objects, parts.load_data(config, idiom.user_objects), 1, RULES, "cpu") for _ in range(2)
    )
    whole.check()
    parted.check()
    one, other, model = whole.gradient(0), parted.gradient(0), parted.model
    bounds = [(each.start, each.end) for each in buckets(model.layers, slice_bounds(model.size, min(3, model.size)), 64)]
    exchange = Shards(model, bounds)
    how: dict[str, Any] = {"held": stages.held(config), "streamed": early}
    gradient = GradientInParts(other, other, model, bounds, exchange, **how)  # type: ignore[arg-type]
    for seq in range(3):
        one.prepare(seq)
        loss = one.compute(seq)
        exchange.take_back()
        if early:
            model.weights.copy_(exchange.weights)
        gradient.prepare(seq)
        assert gradient.compute(seq) == loss
        assert torch.equal(exchange.gradients, whole.model.gradients)
