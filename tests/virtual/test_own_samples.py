"""Learners that draw from subsets of their own (`sampling = "own"`), in whole jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mpisgd import data, models
from mpisgd.base.errors import ConfigError
from mpisgd.config import DigitsOptions, MlpOptions
from mpisgd.data.sampling import OwnSampling
from mpisgd.replay import replay
from tests.virtual.jobs import TENSORS, simulated
from tests.virtual.test_optimisers import JOB, LEARNERS, MU, SEED, Weights, check_equal, weights

OWN: dict[str, Any] = {**JOB, "sampling": "own"}


def loop(updates: int) -> tuple[Weights, Weights]:
    """First and last weights of a plain loop over the same samples, one mini-batch for all learners together."""
    digits = data.load(DigitsOptions(), seed=SEED)
    model = models.make(MlpOptions(hidden=(24,)), input_shape=digits.input_shape, classes=digits.classes, seed=SEED)
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), JOB["alpha0"], momentum=0.9)
    sampling = OwnSampling(len(digits.train), MU, LEARNERS, SEED)
    for seq in range(updates):
        inputs, targets = digits.train.batch(np.concatenate([sampling.indices(each, seq) for each in range(LEARNERS)]))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return before, {name: each.detach() for name, each in model.named_parameters()}


@pytest.mark.parametrize("shards", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_hardsync_is_a_plain_loop_over_the_same_samples(shards: int, tmp_path: Path) -> None:
    run = simulated(tmp_path / "run", OWN, shards=shards)
    updates = int(run.done["clock"][0])  # type: ignore[index]
    assert updates > 10
    check_equal(weights(tmp_path / "run"), loop(updates))
    assert replay(tmp_path / "run").holds


def test_batches_of_learners(tmp_path: Path) -> None:
    for name, batched in (("one", False), ("all", True)):
        simulated(tmp_path / name, TENSORS, sampling="own", virtual={"batched": batched}, protocol="hardsync")
    one, other = weights(tmp_path / "one"), weights(tmp_path / "all")
    for name, each in one.items():
        torch.testing.assert_close(each, other[name], rtol=1e-4, atol=1e-6)


def test_fewer_samples_than_learners_are_refused(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"data": {"samples": 3}, "virtual": {"learners": 4}}
    with pytest.raises(ConfigError, match="sampling = 'own': 3 training samples for 4 learners, expected one for each at least"):
        simulated(tmp_path / "run", TENSORS, sampling="own", **changes)
    assert not (tmp_path / "run").exists()
