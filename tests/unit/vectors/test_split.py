"""Any model cut by torch's own splitter: what crosses the cuts, the bits, what stays as it was, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpisgd.base.errors import ConfigError
from mpisgd.config import Config
from mpisgd.config.run import StagesOptions
from mpisgd.job import parts
from mpisgd.job.parts import UserObjects
from mpisgd.job.tensors import Tensors
from mpisgd.vectors.cut import stages_from
from mpisgd.vectors.flat import FlatModel
from mpisgd.vectors.split import split
from tests import cut_models


class Deep(nn.Module):
    """Values that pass over stages: an input, an early output; a parameter and buffers of the model itself; draws."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3)) for _ in range(3))
        self.scale = nn.Parameter(torch.full((1,), 0.5))
        self.shift: Tensor
        self.register_buffer("shift", torch.ones(1), persistent=False)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        inputs = batch["x"]
        early = inputs * self.scale
        for layer in self.layers:
            inputs = layer(inputs)
        return {"logits": self.head(inputs + early + self.shift + batch["x"].mean()), "more": (inputs, batch["y"])}


BATCH = {"x": torch.randn(5, 6), "y": torch.arange(5)}


def through(modules: Any, batch: Any) -> Any:
    passed = batch
    for module in modules:
        passed = module(passed)
    return passed


def test_values_pass_over_stages_and_the_bits_are_those_of_the_whole() -> None:
    model = Deep()
    traced = split(model, ["layers.1", "layers.2"], BATCH)
    state = {name: each.clone() for name, each in model.state_dict().items()}
    torch.manual_seed(3)
    output = through(traced.modules, BATCH)
    output["logits"].sum().backward()
    found = {name: (each.grad.clone(), each) for name, each in model.named_parameters() if each.grad is not None}
    norms = {name: each.clone() for name, each in model.named_buffers()}
    model.zero_grad()
    model.load_state_dict(state)
    torch.manual_seed(3)
    expected = model(BATCH)
    expected["logits"].sum().backward()
    assert torch.equal(output["logits"], expected["logits"]) and torch.equal(output["more"][1], BATCH["y"])
    assert list(found) == [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        assert parameter is found[name][1] and parameter.grad is not None and torch.equal(parameter.grad, found[name][0])
    assert all(torch.equal(each, norms[name]) for name, each in model.named_buffers()), "stages have the model's own buffers"


def test_the_model_stays_whole_for_batches_of_any_size() -> None:
    model = Deep()
    split(model, ["layers.1"], BATCH)
    assert not any("forward" in module.__dict__ for module in model.modules())
    model.eval()
    assert model({"x": torch.randn(11, 6), "y": torch.arange(11)})["logits"].shape == (11, 3)


def test_nothing_is_drawn() -> None:
    model, before = Deep(), torch.get_rng_state()
    split(model, ["layers.1"], BATCH)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_stage_has_its_parameters_together_in_the_flat_vector() -> None:
    """Those of `Deep` are not in the order in which it uses them."""
    model = Deep()
    flat = FlatModel(model, traced=split(model, ["layers.1", "layers.2"], BATCH))
    stages = stages_from(flat, 3, 5)
    assert [list(shards) for shards in stages.shards] == [[0], [1, 2], [3, 4]] or sum(map(len, stages.shards)) == 5
    before = flat.weights.clone()
    for stage, (start, end) in enumerate(stages.bounds):
        own = stages.model_of(flat, stage, "contiguous", "off")
        assert torch.equal(own.weights, before[start:end])
    names = list(flat.views(flat.weights))
    assert (names[0] == "scale" and names[-2:] == ["layers.2.1.weight", "layers.2.1.bias"]) or "head.weight" in names[-6:]


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.second(self.second(self.first(inputs)))
        return output


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.relu = nn.Linear(6, 6), nn.Linear(6, 6), nn.ReLU()
        self.second.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.relu(self.second(self.first(inputs)))
        return output


class TiedBehind(nn.Module):
    """Modules with weights in common, in one stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.tied = nn.Linear(6, 6), Tied()

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.tied(self.first(inputs))
        return output


def test_weights_in_common_may_be_in_one_stage() -> None:
    model, inputs = TiedBehind(), torch.randn(4, 6)
    traced = split(model, ["tied"], inputs)
    through(traced.modules, inputs).sum().backward()
    found: list[Any] = [each.grad for each in model.parameters()]
    model.zero_grad(set_to_none=True)
    model(inputs).sum().backward()
    assert [len(own) for own in traced.parameters] == [2, 3]
    assert all(one is not None and one.equal(each.grad) for one, each in zip(found, model.parameters(), strict=True))


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.second(self.first(inputs))
        return output


@pytest.mark.parametrize(
    ("model", "at", "refused"),
    [
        (Deep(), ["layers.7"], r"stages.at: the model has no module 'layers.7', expected some of head, layers, layers.0, "),
        (
            cut_models.Fickle(),
            ["second"],
            r"stages.at = \['second'\]: torch's splitter cannot trace the Fickle: \w+: .*: expected a model with the same"
            " passes for all values .* or let the factory return a list of modules",
        ),
        (Twice(), ["second"], r"made 3 stages, expected 2: a module called more than once begins a stage each time"),
        (Unused(), ["third"], r"made 1 stages, expected 2: .* a module never called begins none"),
        (Unused(), ["second"], r"parameter third.weight has no part in the model's output"),
        (
            Tied(),
            ["second"],
            r"parameter first.weight is used in stages 0 and 1, expected cuts that leave each parameter in one stage",
        ),
        (Tied(), ["relu"], r"stages.at = \['relu'\]: stage 1 has no trainable parameters, expected some in each"),
    ],
)
def test_what_cannot_be_cut_is_refused(model: nn.Module, at: list[str], refused: str) -> None:
    inputs = {"Deep": BATCH, "Fickle": torch.randn(4, 1, 8, 8)}.get(type(model).__name__, torch.randn(4, 6))
    with pytest.raises(ConfigError, match=f"(?s){refused}"):
        split(model, at, inputs)
    assert not any("forward" in module.__dict__ for module in model.modules())


def load(model: Any, at: tuple[str, ...], **options: Any) -> Tensors:
    config = Config(**{"group_size": 2, "shards": 2, "micro_batches": 2, "mu": 8, "stages": StagesOptions(at), **options})
    user_objects = UserObjects(model=model)
    return Tensors.load(config, user_objects, parts.load_data(config, user_objects), 1)


def test_a_job_traces_at_the_size_of_a_micro_batch() -> None:
    loaded = load(cut_models.whole, ("blocks.1",))
    assert loaded.meta.example.shape == (4, 1, 8, 8)
    assert loaded.check() > 0 and loaded.stages is not None and loaded.stages.listed == [[0], [1]]


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1), nn.Linear(256, 10)

    def forward(self, images: Tensor) -> Tensor:
        passed = self.first(images).relu()
        output: Tensor = self.last((self.second(passed) + passed).reshape(len(images), -1))
        return output


@pytest.mark.parametrize("memory_format", ["channels_last", "contiguous"])
def test_images_keep_the_memory_format_in_which_they_are_traced(memory_format: Any) -> None:
    loaded = load(Convolutions, ("second",), memory_format=memory_format)
    alone = load(Convolutions, (), memory_format=memory_format, group_size=1, shards=1)
    losses = [each.gradient(0).compute(0) for each in (loaded, alone)]
    assert losses[0] == losses[1]
    for one, other in zip(*(each.model.views(each.model.gradients).values() for each in (loaded, alone)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("at", "refused"),
    [
        (("blocks.0", "blocks.1"), r"stages.at = \['blocks.0', 'blocks.1'\]: expected 1 names for group_size = 2"),
        (("blocks.2",), "the model has no module 'blocks.2', expected some of end, end.layer, "),
    ],
)
def test_names_that_do_not_fit_are_refused(at: tuple[str, ...], refused: str) -> None:
    with pytest.raises(ConfigError, match=refused):
        load(cut_models.whole, at)
