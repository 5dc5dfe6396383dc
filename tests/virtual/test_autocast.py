"""Training passes in bfloat16 and float16 are those of torch.autocast; evaluations are not; replay has the bits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from torch import nn

from mpisgd import data, models
from mpisgd.base.errors import ConfigError
from mpisgd.config import DigitsOptions, MlpOptions
from mpisgd.data.sampling import EpochSampling
from mpisgd.gradient.scaling import FIRST
from mpisgd.job.parts import UserObjects
from mpisgd.records.log import schema
from mpisgd.replay import replay
from tests.effort import spread
from tests.forge import forge
from tests.virtual.jobs import simulated
from tests.virtual.test_optimisers import JOB, LEARNERS, MU, SEED, UPDATES, weights

CAST: dict[str, Any] = {**JOB, "autocast": "bfloat16"}


def loop(dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """The last weights of a loop under autocast, which takes the mean of the learners' gradients in their order."""
    digits = data.load(DigitsOptions(), seed=SEED)
    model = models.make(MlpOptions(hidden=(24,)), input_shape=digits.input_shape, classes=digits.classes, seed=SEED)
    optimizer = torch.optim.SGD(model.parameters(), JOB["alpha0"], momentum=0.9)
    sampling = EpochSampling(len(digits.train), MU, LEARNERS, SEED)
    for seq in range(UPDATES):
        sums = [torch.zeros_like(each) for each in model.parameters()]
        for learner_id in range(LEARNERS):
            inputs, targets = digits.train.batch(sampling.indices(learner_id, seq))
            model.zero_grad()
            with torch.autocast("cpu", dtype):
                loss = nn.functional.cross_entropy(model(inputs), targets)
            (loss * scale).backward()
            sums = [total + parameter.grad / scale for total, parameter in zip(sums, model.parameters(), strict=True)]
        for total, parameter in zip(sums, model.parameters(), strict=True):
            parameter.grad = total / LEARNERS
        optimizer.step()
    return {name: each.detach() for name, each in model.named_parameters()}


@pytest.mark.parametrize("shards", spread([3, 1], 2))
def test_hardsync_is_a_loop_under_autocast(shards: int, tmp_path: Path) -> None:
    """To the last bits of the optimiser's kernels; without autocast it is another."""
    found = {}
    for name, changes in {"cast": CAST, "not": JOB}.items():
        simulated(tmp_path / name, changes, shards=shards)
        found[name] = weights(tmp_path / name)
    expected = loop()
    for name, value in expected.items():
        apart = float((found["cast"][name] - value).abs().max())
        assert apart <= 1e-6 < float((found["not"][name] - value).abs().max())


@pytest.mark.parametrize("shards", spread([2, 1, 3], 3))
def test_float16_is_a_loop_with_a_scaled_loss(shards: int, tmp_path: Path) -> None:
    """Of a loss so small that without a scale hardly anything of its gradients would be left; the rate is as much larger."""
    small = 2.0**-20

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return small * nn.functional.cross_entropy(output, target)

    simulated(tmp_path / "run", CAST, UserObjects(loss=loss), autocast="float16", alpha0=JOB["alpha0"] / small, shards=shards)
    found = weights(tmp_path / "run")
    for scale, near in ((small * 2**16, True), (small, False)):
        apart = max(float((found[name] - other).abs().max()) for name, other in loop(torch.float16, scale).items())
        assert (apart <= 1e-6) == near, (scale, apart)


HALF: dict[str, Any] = {**JOB, "autocast": "float16", "epochs": JOB["epochs"] / 3}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    spread(
        [
            {"protocol": "hardsync", "shards": 3, "clip_norm": 0.5},
            {"protocol": {"name": "softsync", "n": LEARNERS}, "shards": 2, "push_format": "bfloat16", "sampling": "dealt"},
            {"protocol": {"name": "backup", "b": 1}},
            {"protocol": "versioned", "accumulation": 2},
            {"protocol": "hardsync", "shards": 2, "per_layer": True, "accumulation": 2, "push_format": "bfloat16"},
            {"local_steps": 3, "alpha0": 0.5},
            {"protocol": "hardsync", "aggregation": "node", "virtual": {"ranks_per_node": 6}},
        ],
        4,
    ),
    ids=str,
)
def test_replay_has_the_bits_of_gradients_that_overflowed(changes: dict[str, Any], tmp_path: Path) -> None:
    """At the first scales; each learner finds its own."""
    passes: list[float] = []

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        passes.extend([0.0] * torch.is_grad_enabled())
        return 64 * nn.functional.cross_entropy(output, target)

    run = simulated(tmp_path / "run", HALF, UserObjects(loss=loss), **{"alpha0": 0.001, **changes})
    shards, per_push = changes.get("shards", 1), changes.get("accumulation", 1) * changes.get("local_steps", 1)
    assert len(passes) > len(run.pushes) // shards * per_push
    assert replay(tmp_path / "run", UserObjects(loss=loss)).holds
    scales = run.pushes["scale"]
    assert scales.max() < FIRST, "it was halved"
    assert all(math.log2(scale).is_integer() for scale in scales)
    with h5py.File(tmp_path / "run" / schema.shard_file(0, 0), "r+") as file:
        forge(file)
        rows = file["pushes"][:]
        rows["scale"][3] /= 2
        file["pushes"][:] = rows
    proof = replay(tmp_path / "run", UserObjects(loss=loss))
    assert not proof.holds
    assert "scale " in proof.reason


def test_float16_where_a_pass_is_not_known_as_a_whole(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"autocast = 'float16': expected 'off' or 'bfloat16' beside micro_batches"):
        simulated(tmp_path / "run", HALF, micro_batches=2)


def test_only_training_passes_are_cast(tmp_path: Path) -> None:
    seen: dict[bool, set[torch.dtype]] = {True: set(), False: set()}

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        seen[torch.is_grad_enabled()].add(output.dtype)
        return nn.functional.cross_entropy(output, target)

    simulated(tmp_path / "run", CAST, UserObjects(loss=loss), epochs=0.02)
    assert seen == {True: {torch.bfloat16}, False: {torch.float32}}


def test_not_batched(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"autocast = 'bfloat16': expected 'off' beside virtual\.batched"):
        simulated(tmp_path / "run", CAST, virtual={"learners": 3, "batched": True})
