"""Data sets and models that draw from torch, numpy and `random`: random virtual jobs, each replayed to the same bits (law 5)."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import default_collate

from mpisgd import replay
from mpisgd.base.draws import as_in_the_run, seeds_of
from mpisgd.base.streams import Domain
from mpisgd.config import Part
from mpisgd.job import parts
from mpisgd.job.parts import UserObjects
from tests.effort import examples, spread
from tests.virtual.jobs import TENSORS, config, simulated

SIDE = 4


class Crops:
    """Pictures of 6x6 numbers, of which a sample is a part of 4x4, mirrored or not, with noise: three generators."""

    def __init__(self, samples: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.targets = torch.randint(3, (samples,), generator=generator)
        self.pictures = torch.randn(samples, 6, 6, generator=generator) + self.targets[:, None, None]

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row, column = torch.randint(0, 3, (2,)).tolist()
        part = self.pictures[index, row : row + SIDE, column : column + SIDE]
        part = part.flip(1) if random.random() < 0.5 else part
        return part + np.float32(0.1 * np.random.randn()), self.targets[index]  # noqa: NPY002


class Stochastic(nn.Module):
    """A layer that is scaled by what numpy draws, after a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Dropout(0.1), nn.Linear(SIDE * SIDE, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.layers(inputs) * (1 + 0.1 * np.random.rand() + 0.1 * random.random())  # noqa: NPY002
        return output


def cropping(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["pictures"]), batch["targets"])


class Named(Crops):
    """Samples as dicts."""

    def __getitem__(self, index: int) -> Any:
        pictures, targets = super().__getitem__(index)
        return {"pictures": pictures, "targets": targets}


def plain() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 8), nn.ReLU(), nn.Linear(8, 3))


BROUGHT = UserObjects(model=Stochastic, data=lambda: (Crops(60, 1), Crops(20, 2)))
BATCHED = UserObjects(model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 3)), data=BROUGHT.data)

PROTOCOLS: list[dict[str, Any]] = [
    {"name": "hardsync"},
    {"name": "softsync", "n": 1},
    {"name": "softsync", "n": 2},
    {"name": "async"},
    {"name": "backup", "b": 1},
    {"name": "versioned"},
    {"name": "ssp", "get_model_frequency": 3},
    {"name": "downpour", "n_push": 2, "n_fetch": 4},
    {"name": "allreduce"},
]


@pytest.mark.slow
@settings(
    max_examples=examples(12), deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(
    protocol=st.sampled_from(PROTOCOLS),
    learners=st.integers(2, 5),
    shards=st.integers(1, 3),
    seed=st.integers(0, 2**32),
    sampling=st.sampled_from(["epoch", "own", "replacement"]),
)
def test_random_schedules_with_random_samples_are_replayed(
    protocol: dict[str, Any], learners: int, shards: int, seed: int, sampling: str
) -> None:
    changes = {"protocol": protocol, "virtual": {"learners": learners}, "seed": seed, "sampling": sampling, "epochs": 1}
    shards = 1 if protocol["name"] == "allreduce" else shards
    with tempfile.TemporaryDirectory() as directory:
        simulated(Path(directory) / "run", TENSORS, BROUGHT, shards=shards, **changes)
        proof = replay.replay(Path(directory) / "run", BROUGHT)
    assert (proof.reason, proof.other_losses) == ("", 0)
    assert all(each.elements == 0 for each in proof.differences)


def loop(made: Any, user_objects: UserObjects) -> dict[str, Tensor]:
    """A plain loop of AdamW over the mini-batches of three learners, each cropped with the seeds of its name."""
    data = parts.load_data(made, user_objects)
    meta = parts.meta_of(data)
    model = parts.build_model(made, meta, user_objects).module
    optimizer = torch.optim.AdamW(model.parameters(), lr=made.alpha0)
    dealt = parts.make_sampling(made, meta, 3)
    samples = Named(60, 1)
    for seq in range(60 // (3 * made.mu)):
        optimizer.zero_grad()
        for learner_id in range(3):
            seeds = seeds_of(Domain.SAMPLES, made.seed, learner_id, seq)
            torch.manual_seed(seeds.torch)
            np.random.seed(seeds.numpy)  # noqa: NPY002
            random.seed(seeds.python)
            batch = default_collate([samples[index] for index in dealt.indices(learner_id, seq).tolist()])
            (cropping(model, batch) / 3).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("shards", spread([3, 1, 2], 3))
def test_hardsync_of_random_crops_is_a_plain_loop_of_those_crops(shards: int, tmp_path: Path) -> None:
    user_objects = UserObjects(model=plain, data=lambda: (Named(60, 1), Named(20, 2)), step=cropping)
    changes = {"protocol": "hardsync", "virtual": {"learners": 3}, "optimizer": "adamw", "alpha0": 0.01, "epochs": 1}
    simulated(tmp_path / "run", TENSORS, user_objects, shards=shards, **changes)
    found = torch.load(tmp_path / "run" / "weights.pt", weights_only=True)["theta"]
    for name, value in loop(config(tmp_path / "run", TENSORS, shards=shards, **changes), user_objects).items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
    assert replay.replay(tmp_path / "run", user_objects).holds


CASES: dict[str, dict[str, Any]] = {
    "layer by layer": {"per_layer": True, "protocol": {"name": "softsync", "n": 2}},
    "teams": {"aggregation": "node", "protocol": "hardsync", "virtual": {"learners": 4, "ranks_per_node": 5}},
}


@pytest.mark.parametrize("name", spread(CASES, 2))
def test_so_are_those_of_other_ways_to_a_gradient(name: str, tmp_path: Path) -> None:
    simulated(tmp_path / "run", TENSORS, BROUGHT, epochs=1, **CASES[name])
    proof = replay.replay(tmp_path / "run", BROUGHT)
    assert (proof.reason, proof.other_losses) == ("", 0)


def test_batches_of_learners_draw_as_each_learner_does(tmp_path: Path) -> None:
    """To float tolerance: another draw would change the losses by far more."""
    virtual = {"learners": 4, "batched": True}
    run = simulated(tmp_path / "run", TENSORS, BATCHED, epochs=1, protocol={"name": "softsync", "n": 2}, virtual=virtual)
    assert replay.replay(tmp_path / "run", BATCHED, tolerance=1e-4).reason == ""
    assert len(run.pushes) >= 15


def test_the_last_weights_are_evaluated_again_to_the_same_bits(tmp_path: Path) -> None:
    """Whatever was drawn before: what an evaluation draws has names of its own."""
    run = simulated(tmp_path / "run", TENSORS, BROUGHT, epochs=1, protocol="hardsync", evaluation={"train": True})
    made = config(tmp_path / "run", TENSORS, epochs=1)
    data = parts.load_data(made, BROUGHT)
    model = parts.build_model(made, parts.meta_of(data), BROUGHT)
    model.module.load_state_dict(torch.load(run.path / "weights.pt", weights_only=True)["theta"])
    with as_in_the_run(threads=1):
        measure = parts.make_measure(made, model, nn.functional.cross_entropy, data)
        again = [measure.of(part)[:2] for part in (Part.TEST, Part.TRAINING)]
    last = run.evaluations[-2:]
    assert again == list(zip(last["loss"].tolist(), last["error"].tolist(), strict=True))
