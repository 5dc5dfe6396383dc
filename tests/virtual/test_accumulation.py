"""Several mini-batches that make one gradient are one larger mini-batch, to everybody else."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mpisgd import data, models
from mpisgd.base.errors import ConfigError
from mpisgd.config import DigitsOptions, MlpOptions
from mpisgd.data.sampling import EpochSampling
from mpisgd.job.parts import UserObjects
from mpisgd.replay import replay
from tests.effort import spread
from tests.virtual.jobs import HOW, SIZES, simulated
from tests.virtual.test_optimisers import JOB, LEARNERS, MU, SEED, Weights, check_equal, weights

COUNT, UPDATES = 3, 6
ACCUMULATED: dict[str, Any] = {**JOB, "accumulation": COUNT, "epochs": UPDATES * COUNT * LEARNERS * MU / 1437}


def loop(clip: float) -> tuple[Weights, Weights]:
    """First and last weights of a loop that accumulates the gradients of as many learners; each learner's mean is clipped."""
    digits = data.load(DigitsOptions(), seed=SEED)
    model = models.make(MlpOptions(hidden=(24,)), input_shape=digits.input_shape, classes=digits.classes, seed=SEED)
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), JOB["alpha0"], momentum=0.9)
    sampling = EpochSampling(len(digits.train), MU, LEARNERS, SEED)
    for seq in range(UPDATES):
        clipped = []
        for learner_id in range(LEARNERS):
            optimizer.zero_grad()
            for number in range(seq * COUNT, (seq + 1) * COUNT):
                inputs, targets = digits.train.batch(sampling.indices(learner_id, number))
                (nn.functional.cross_entropy(model(inputs), targets) / COUNT).backward()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            clipped.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
        for parameter, *own in zip(model.parameters(), *clipped, strict=True):
            parameter.grad = torch.stack(own).mean(0)
        optimizer.step()
    return before, {name: each.detach() for name, each in model.named_parameters()}


@pytest.mark.parametrize(
    ("shards", "clip", "how"),
    spread([(3, 0.3, "whole"), (1, math.inf, "whole"), (2, 0.3, "layerwise")], 2, unpack=True),
)
def test_hardsync_is_a_loop_that_accumulates(shards: int, clip: float, how: str, tmp_path: Path) -> None:
    changes = {} if math.isinf(clip) else {"clip_norm": clip}
    run = simulated(tmp_path / "run", ACCUMULATED, shards=shards, **HOW[how], **changes)
    check_equal(weights(tmp_path / "run"), loop(clip))
    assert set(run.pushes["samples"]) == {COUNT * MU}


def test_a_team_of_one_node_has_the_bits_of_hardsync(tmp_path: Path) -> None:
    teams = {"aggregation": "node", "virtual": {"learners": LEARNERS, "ranks_per_node": 9}}
    for name, changes in (("alone", {}), ("team", teams)):
        simulated(tmp_path / name, ACCUMULATED, **changes)
    one, other = weights(tmp_path / "alone"), weights(tmp_path / "team")
    assert all(torch.equal(one[name], other[name]) for name in one)


def now_and_then_nan(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target) * (math.nan if int(target.sum()) % 11 == 0 else 1.0)


def test_a_mini_batch_that_is_not_finite_takes_the_others_of_its_gradient_along(tmp_path: Path) -> None:
    user_objects = UserObjects(loss=now_and_then_nan)
    run = simulated(tmp_path / "run", ACCUMULATED, user_objects, nonfinite="drop", shards=2)
    lost = np.isnan(run.pushes["loss"])
    assert 0 < lost.sum() < len(lost)
    assert np.isfinite(run.evaluations["loss"]).all()
    assert replay(tmp_path / "run", user_objects).holds


@pytest.mark.parametrize("how", HOW)
def test_it_takes_the_time_of_all(how: str, tmp_path: Path) -> None:
    run = simulated(tmp_path / "run", SIZES, compute={"name": "constant", "mean_s": 0.5}, accumulation=4, **HOW[how])
    assert run.pushes["compute_s"].tolist() == pytest.approx([2.0] * len(run.pushes))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"virtual": {"learners": 3, "batched": True}}, "accumulation = 3: expected 1 beside virtual.batched"),
        ({"accumulation": 0}, "accumulation = 0: expected"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why.replace(".", r"\.")):
        simulated(tmp_path / "run", ACCUMULATED, **changes)
