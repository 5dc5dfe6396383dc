"""Where a model is cut into stages, which ranks and shards each has, and what is refused of it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mpisgd import models
from mpisgd.base.errors import ConfigError
from mpisgd.config import Config, MlpOptions, SmallCnnOptions
from mpisgd.exchange.roles import Role, of_job, world_size
from mpisgd.job import parts
from mpisgd.job.parts import UserObjects
from mpisgd.job.tensors import Tensors, crossing_nbytes
from mpisgd.pipeline.micro_batches import StagePasses, crossing
from mpisgd.vectors.cut import cut_into_stages
from mpisgd.vectors.flat import FlatModel
from tests.effort import examples


def mlp(*hidden: int) -> nn.Module:
    return models.make(MlpOptions(hidden=hidden, batch_norm=True), input_shape=(6,), classes=3, seed=1)


@settings(max_examples=examples(100, 4), deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(1, 6), st.integers(0, 6))
def test_stages_are_runs_of_the_flat_vector_with_shards_of_their_own(hidden: list[int], count: int, more: int) -> None:
    model = mlp(*hidden)
    flat = FlatModel(model)
    if count > 1 + 2 * len(hidden):
        most = 1 + 2 * len(hidden)
        with pytest.raises(ConfigError, match=rf"group_size = {count}: expected at most .* possible stages of the model, {most}"):
            cut_into_stages(model, count, count + more)
        return
    stages = cut_into_stages(model, count, count + more)
    assert list(itertools.chain(*stages.children)) == list(range(len(list(model))))
    assert list(itertools.chain(*stages.shards)) == list(range(count + more))
    assert all(len(shards) >= 1 for shards in stages.shards)
    assert [edge for slice_ in stages.slices for edge in slice_][1:-1:2] == [start for start, _ in stages.slices][1:]
    assert (stages.slices[0][0], stages.slices[-1][1]) == (0, flat.size)
    for stage, module in enumerate(stages.runs(model)):
        start, end = stages.bounds[stage]
        own = torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])
        assert torch.equal(own, flat.weights[start:end])
        assert [stages.of_shard(shard) for shard in stages.shards[stage]] == [stage] * len(stages.shards[stage])
        for (begin, stop), shard in zip(stages.slices_of(stage), stages.shards[stage], strict=True):
            assert (start + begin, start + stop) == stages.slices[shard]


def test_stages_are_as_even_as_can_be_and_layers_without_parameters_stay_with_those_before() -> None:
    model = models.make(SmallCnnOptions(), input_shape=(1, 8, 8), classes=10, seed=1)
    stages = cut_into_stages(model, 2, 3)
    assert [list(range_) for range_ in stages.children] == [[0, 1, 2, 3, 4, 5], [6]]
    assert [end - start for start, end in stages.bounds] == [160 + 4640, 5130]
    assert stages.shards == (range(1), range(1, 3)), "the larger stage has one shard more"


def test_a_module_may_be_in_the_model_twice() -> None:
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(6, 6), relu, nn.Linear(6, 6), relu, nn.Linear(6, 6), relu)
    one, other = cut_into_stages(model, 2, 2).runs(model)
    assert [type(each).__name__ for each in (*one, *other)] == ["Linear", "ReLU"] * 3


def tied() -> nn.Module:
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    second.weight = first.weight
    return nn.Sequential(first, nn.ReLU(), second, nn.Linear(6, 3))


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)


@pytest.mark.parametrize(
    ("model", "count", "refused"),
    [
        (Whole(), 2, "group_size = 2: the model is a Whole: expected a torch.nn.Sequential, or a factory that returns a list"),
        (nn.Sequential(nn.Flatten(), nn.Linear(6, 3)), 2, "group_size = 2: expected at most .*, 1 "),
        (tied(), 3, "group_size = 3: expected at most .*, 2 .* parameters of their own"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(model: nn.Module, count: int, refused: str) -> None:
    with pytest.raises(ConfigError, match=refused):
        cut_into_stages(model, count, 4)


def test_modules_with_weights_in_common_are_in_one_stage() -> None:
    model = tied()
    stages = cut_into_stages(model, 2, 2)
    assert [list(children) for children in stages.children] == [[0, 1, 2], [3]]
    assert stages.bounds[-1][1] == FlatModel(model).size


def test_each_stage_sees_its_own_shards_and_ranks() -> None:
    roles = of_job(Config(shards=3, group_size=2, evaluator=True), "n" * 10)
    assert roles.groups == ((3, 4), (5, 6), (7, 8)) and roles.lambda_ == roles.streams == 3
    assert [roles.of(rank) for rank in (2, 3, 4, 9)] == [Role.SHARD, Role.LEARNER, Role.LEARNER, Role.EVALUATOR]
    assert [(roles.index(rank), roles.stage(rank), roles.stream(rank)) for rank in (5, 6)] == [(1, 0, 1), (1, 1, 1)]
    assert [roles.number(rank) for rank in (3, 6, 8)] == [0, 3, 5]
    assert roles.describe(6) == "stage 1 of learner 1"
    seen = roles.seen_by(1, range(1, 3))
    assert (seen.shard_ranks, seen.first_shard, seen.learner_ranks, seen.evaluator_rank) == ((1, 2), 1, (4, 6, 8), 9)
    assert world_size(Config(shards=3, group_size=2, evaluator=True), 3) == 10


@pytest.mark.parametrize(
    ("shards", "ranks", "refused"),
    [
        (2, 6, "shards = 2: expected at least group_size = 3, one for each stage of the model"),
        (3, 8, "group_size = 3: 5 computing ranks do not divide into groups of 3: expected 3 or 6 ranks"),
        (3, 5, "group_size = 3: 2 computing ranks do not divide into groups of 3: expected 3 ranks"),
    ],
)
def test_ranks_that_make_no_groups_are_refused(shards: int, ranks: int, refused: str) -> None:
    with pytest.raises(ConfigError, match=refused):
        of_job(Config(shards=shards, group_size=3), "n" * ranks)


def test_micro_batches_divide_a_mini_batch() -> None:
    with pytest.raises(ConfigError, match="micro_batches = 3: expected a divisor of mu = 16"):
        Config(micro_batches=3)
    with pytest.raises(ConfigError, match="group_size = 0: expected a finite number >= 1"):
        Config(group_size=0)


# ------------------------------------------------------------------------------------------------------------ own models

INPUTS, TARGETS = torch.randn(32, 6), torch.randint(0, 3, (32,))


class Fork(nn.Module):
    """Passes on a pair: what came, and what it makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, inputs: torch.Tensor) -> Any:
        return [inputs, self.layer(inputs)]


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        output: torch.Tensor = self.layer(pair[0] + pair[1])
        return output


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, inputs: torch.Tensor) -> Any:
        return {"output": self.layer(inputs)}


def tensors(model: Any, **options: Any) -> Tensors:
    config = Config(**{"group_size": 2, "shards": 2, "micro_batches": 2, "mu": 4, **options})
    user_objects = UserObjects(model=model, data=((INPUTS, TARGETS), (INPUTS, TARGETS)))
    return Tensors.load(config, user_objects, parts.load_data(config, user_objects), 2)


@pytest.mark.parametrize(
    ("model", "refused"),
    [
        (
            lambda: [nn.Linear(6, 5), nn.Linear(4, 3)],
            r"of stage 0, of shape \(2, 5\), does not fit stage 1 with first weights of shape \(3, 4\): RuntimeError",
        ),
        (lambda: [Named(), Join()], "stage 0 of the model returned dict, expected a tensor or a tuple of tensors"),
        (lambda: (nn.Linear(6, 3), "layer"), "returned tuple, expected a torch.nn.Module, or a list of modules"),
    ],
)
def test_stages_that_do_not_fit_are_refused(model: Any, refused: str) -> None:
    with pytest.raises(ConfigError, match=refused):
        tensors(model).check()


def test_a_list_of_modules_is_a_model_and_a_pair_may_cross() -> None:
    for made in ([Fork(), Join()], nn.ModuleList([Fork(), Join()])):
        loaded = tensors(lambda made=made: made)
        assert loaded.check() > 0
        assert crossing_nbytes(loaded.model, loaded.gradient(0)) == [2 * 2 * 6 * 4], "two samples, twice"


@pytest.mark.parametrize(("batch", "found"), [({"x": torch.randn(3, 6)}, r"shape \(3, 6\)"), (torch.tensor(1.0), r"shape \(\)")])
def test_a_batch_that_cannot_be_cut_is_refused(batch: Any, found: str) -> None:
    gradient: Any = tensors(lambda: [Fork(), Join()]).gradient(0)
    gradient.samples = 4
    with pytest.raises(ConfigError, match=f"micro_batches = 2: batch.* is of {found}, expected a tensor of 4 samples"):
        gradient._part(batch, 0)


# -------------------------------------------------------------------------------------------------------------- the wire


def passes() -> StagePasses:
    return tensors(lambda: [Fork(), Join()]).passes(0, 0)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3, 4, 5),
        torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.randn(5, 4).t(),
        torch.randn(()),
        torch.randn(0, 3),
        torch.arange(6).view(2, 3),
        torch.tensor([True, False]),
        torch.randn(6).to(torch.bfloat16),
        torch.randn(4, 6)[:, :3],
        torch.randn(3, 1).expand(3, 4),
        torch.randn(8)[2:5],
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}",
)
def test_tensors_keep_their_bits_and_strides(tensor: torch.Tensor) -> None:
    described, body = passes().describe(tensor)
    room, into = passes().room(described)
    assert body.nbytes == into.nbytes == tensor.nbytes
    np.copyto(into, body)
    assert torch.equal(room, tensor) and room.dtype == tensor.dtype and not room.requires_grad
    dense = tensor if tensor.numel() == tensor.untyped_storage().nbytes() // tensor.element_size() else tensor.contiguous()
    assert room.stride() == dense.stride() or 0 in room.shape or tensor.storage_offset() > 0


def test_what_cannot_cross_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"stage 0 passes on torch.complex64 of 1 dimensions, expected at most 8"):
        passes().describe(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ConfigError, match=r"stage 0 passes on torch.float32 of 9 dimensions"):
        passes().describe(torch.zeros([1] * 9))
    assert passes().room(passes().describe(None)[0]) == (None, None)
    assert crossing([INPUTS], 0) == (INPUTS,)
