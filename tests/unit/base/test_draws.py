"""What the user's code draws from the global generators depends on names alone, and what others draw is not disturbed (law 5)."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mpisgd import models
from mpisgd.base.draws import Seeds, kept, seed_all, seeded, seeds_of
from mpisgd.base.streams import Domain
from mpisgd.config import Config, Part, make_options
from mpisgd.data import DataSet, as_dataset, fetch, fetch_each
from mpisgd.data.sampling import EpochSampling
from mpisgd.gradient.gradient import Gradient
from mpisgd.gradient.measure import Measure
from mpisgd.job import parts
from mpisgd.job.parts import UserObjects
from mpisgd.vectors.flat import FlatModel

MU, SEED = 4, 3


class Noisy:
    """Samples that draw from all three generators, one number each."""

    def __init__(self, samples: int = 40) -> None:
        self.samples = samples
        self.fails = False
        self.classes = 3

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        drawn = torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()])  # noqa: NPY002
        if self.fails:
            raise OSError("no such picture")
        return drawn, index % 3


def states() -> list[Any]:
    of_numpy = [np.asarray(each).tolist() for each in np.random.get_state()]  # noqa: NPY002
    return [torch.get_rng_state().tolist(), of_numpy, random.getstate()]


def gradient(data: DataSet, learner_id: int = 0) -> Gradient:
    module = nn.Linear(3, 3)
    model = FlatModel(module)
    return Gradient(
        model,
        nn.functional.cross_entropy,
        data.train,
        EpochSampling(len(data.train), MU, 2, SEED),
        model.memory,
        seed=SEED,
        learner_id=learner_id,
    )


def fetched(data: DataSet, learner_id: int, seq: int) -> list[list[float]]:
    inputs: list[list[float]] = gradient(data, learner_id)._batch(seq)[0][0].tolist()
    return inputs


def test_a_mini_batch_draws_by_its_name() -> None:
    data = as_dataset((Noisy(), None))
    names = [(learner_id, seq) for learner_id in range(2) for seq in range(4)]
    first = {name: fetched(data, *name) for name in names}
    seed_all(Seeds(9, 9, 9))
    assert {name: fetched(data, *name) for name in reversed(names)} == first
    for column in range(3):  # each of the three generators, in every mini-batch of every learner
        assert len({drawn[row][column] for drawn in first.values() for row in range(MU)}) == len(names) * MU
    for row in fetched(data, 0, 0):
        assert len(set(row)) == 3, "numpy's is torch's algorithm: from one seed they would draw the same"


def test_a_learners_steps_between_are_drawn_by_their_own_names() -> None:
    """`prepare` goes on to the next mini-batch before the last one's is computed, or not."""
    data = as_dataset((Noisy(), None))
    computed = gradient(data)
    apart = [fetched(data, 0, seq) for seq in range(3)]
    for seq in range(3):
        computed.prepare(seq)
        computed.prepare(seq)
        assert computed._prepared is not None
        assert computed._prepared[1][0].tolist() == apart[seq]
        computed.compute(seq)


def test_fetches_of_several_learners_at_once_are_those_of_each() -> None:
    data = as_dataset((Noisy(), None))
    names = [(1, 0), (0, 0), (0, 3)]
    indices = [EpochSampling(40, MU, 2, SEED).indices(*name) for name in names]
    inputs, targets = fetch_each(data.train, indices, lambda at: seeds_of(Domain.SAMPLES, SEED, *names[at]))
    assert inputs.tolist() == [row for name in names for row in fetched(data, *name)]
    assert targets.tolist() == [int(index) % 3 for each in indices for index in each]


@pytest.mark.parametrize("fails", [False, True])
def test_a_fetch_leaves_the_generators_as_they_were(fails: bool) -> None:
    noisy = Noisy()
    data = as_dataset((noisy, None))
    noisy.fails = fails
    seed_all(Seeds(1, 2, 3))
    np.random.randn()  # noqa: NPY002  one of a pair: the other one is kept, and is part of the state
    before = states()
    try:
        fetch(data.train, np.arange(3), lambda: seeds_of(Domain.SAMPLES, 1))
    except OSError:
        assert fails
    assert states() == before


@pytest.mark.parametrize("manager", [kept, lambda: seeded(Seeds(4, 5, 6))])
def test_generators_are_as_before_also_after_an_exception(manager: Callable[[], Any]) -> None:
    seed_all(Seeds(1, 2, 3))
    before = states()
    with pytest.raises(KeyError), manager():
        Noisy()[0]
        raise KeyError
    assert states() == before


class Layers(nn.Module):
    """Drops layers by what all three generators draw, as stochastic depth does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.seen: list[tuple[float, float, float]] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen.append((torch.rand(()).item(), np.random.rand(), random.random()))  # noqa: NPY002
        output: Tensor = self.layer(inputs) * self.seen[-1][1]
        return output


def test_a_forward_pass_draws_by_its_name() -> None:
    data, module = as_dataset((Noisy(), None)), Layers()
    model, dealt = FlatModel(module), EpochSampling(40, MU, 1, SEED)
    computed = Gradient(model, nn.functional.cross_entropy, data.train, dealt, model.memory, seed=SEED, learner_id=0)
    for seq in (0, 1, 2, 1):
        computed.compute(seq)
        computed.prepare(seq + 1)
    assert module.seen[3] == module.seen[1]
    assert len({number for each in module.seen for number in each}) == 9


def test_an_evaluation_draws_by_the_place_in_its_split() -> None:
    data = as_dataset((Noisy(), Noisy(9)))
    module = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 3), nn.BatchNorm1d(3))
    found = []
    for seed in (SEED, SEED, SEED + 1):
        measure = Measure(
            FlatModel(module),
            nn.functional.cross_entropy,
            data=data,
            batch=4,
            buffers="recalibrate",
            recalibrate_batches=3,
            seed=seed,
        )
        seed_all(Seeds(len(found), 2, 3))
        before = states()
        measure.prepare()
        found.append((measure.of(Part.TEST), measure.of(Part.TRAINING), module[3].running_mean.tolist()))
        assert states() == before
    assert found[0] == found[1]
    assert all(one != other for one, other in zip(found[0], found[2], strict=True))


def draw() -> list[float]:
    return [torch.rand(()).item(), np.random.rand(), random.random()]  # noqa: NPY002


def test_factories_draw_by_the_seed() -> None:
    drawn: list[list[float]] = []

    def make_data() -> Any:
        drawn.append(draw())
        return (torch.randn(8, 3), torch.arange(8) % 3), None

    def make_model() -> nn.Module:
        drawn.append(draw())
        return nn.Linear(3, 3)

    for number, seed in enumerate((1, 1, 2)):
        config, user_objects = Config(seed=seed), UserObjects(model=make_model, data=make_data)
        seed_all(Seeds(number, number, number))
        before = states()
        parts.build_model(config, parts.meta_of(parts.load_data(config, user_objects)), user_objects)
        assert states() == before
    assert drawn[:2] == drawn[2:4]
    numbers = [number for each in drawn[2:] for number in each]
    assert len(set(numbers)) == len(numbers), "data and model of one seed, and those of two, draw apart"


def test_the_models_own_seed_is_as_it_was() -> None:
    """The weights of every seeded run so far."""
    made = models.make(make_options("model", "softmax"), input_shape=(4,), classes=3, seed=7)
    torch.manual_seed(7)
    assert torch.equal(made[1].weight, nn.Linear(4, 3).weight)  # type: ignore[index]
