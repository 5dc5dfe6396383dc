"""A learner's own step is taken while its push is under way [ElasticDL], in virtual time at no cost but what it takes longer; and
its learning rate follows the schedule."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from mpisgd import replay
from mpisgd.gradient import stages
from mpisgd.gradient.mini_batches import LocalSteps
from mpisgd.job.parts import UserObjects
from tests.effort import spread
from tests.virtual.jobs import SIZES, TENSORS, simulated
from tests.virtual.scene import FREE

COMPUTE_S, PUSH_S = 0.1, 0.04
#: One learner and one shard; only bytes take time: 4,000 of them 40 ms, in each direction.
JOB = {
    "virtual": {"learners": 1, "ranks_per_node": 1},
    "compute": {"name": "constant", "mean_s": COMPUTE_S},
    "network": {**vars(FREE), "bandwidth": 1e5},
    "service": {"gradient_s": 0.0, "gradient_s_per_byte": 0.0, "update_s": 0.0, "update_s_per_byte": 0.0},
}


@pytest.mark.parametrize(
    ("protocol", "step_s"),
    spread(
        itertools.product(
            ({"name": "ssp", "get_model_frequency": 4}, {"name": "downpour", "n_push": 1, "n_fetch": 4}), (0.01, 0.0, 0.04, 0.05)
        ),
        3,
        unpack=True,
    ),
)
def test_only_what_outlasts_the_push_takes_time(
    protocol: dict[str, object], step_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(LocalSteps):
        def take_own_step(self) -> None:
            super().take_own_step()
            self._gradient._rank.work(round(step_s * 1e9))  # type: ignore[attr-defined]

    monkeypatch.setattr(stages, "LocalSteps", Slow)
    pushes = simulated(tmp_path / "run", SIZES, **JOB, protocol=protocol).pushes
    assert len(pushes) == 100
    apart_s = np.diff(pushes["arrival_s"])
    pulled = np.arange(1, 100) % 4 == 0
    assert apart_s[~pulled] == pytest.approx(COMPUTE_S + max(PUSH_S, step_s), rel=1e-9), "one after the other, it were the sum"
    assert apart_s[pulled] == pytest.approx(COMPUTE_S + 2 * PUSH_S, rel=1e-9), "before a pull there is no step"


OWN = {
    "ssp": {"name": "ssp", "get_model_frequency": 3},
    "downpour": {"name": "downpour", "n_push": 2},
    "downpour, n_fetch": {"name": "downpour", "n_push": 2, "n_fetch": 4, "local_alpha": 0.025},
}


SCHEDULES = {"name": "step", "epochs": [2.0]}, {"name": "exponential", "warmup_epochs": 0.5}


@pytest.mark.parametrize(("name", "schedule"), spread(itertools.product(OWN, SCHEDULES), 5, unpack=True), ids=str)
def test_own_steps_have_the_rate_that_the_shard_had_when_it_gave_the_weights(
    name: str, schedule: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The schedule's, at the samples that had been applied by then; and replay, which has the clocks alone, takes the same steps.

    Every gradient is 1, so that a step is as long as its rate.
    """
    taken: list[tuple[int, float]] = []

    class Told(LocalSteps):
        clock = -1

        def at_clock(self, clock: int) -> None:
            super().at_clock(clock)
            self.clock = clock

        def take_own_step(self) -> None:
            before = self.memory.weights.item()
            super().take_own_step()
            taken.append((self.clock, before - self.memory.weights.item()))

    ones = torch.ones(120, 1)
    user_objects = UserObjects(lambda: nn.Linear(1, 1, bias=False), lambda output, _: output.mean(), ((ones, ones), (ones, ones)))
    monkeypatch.setattr(stages, "LocalSteps", Told)
    job = {"protocol": OWN[name], "schedule": schedule, "epochs": 4}
    run = simulated(tmp_path / "run", TENSORS, user_objects, **job, optimizer={"name": "sgd", "momentum": 0.0})
    monkeypatch.undo()
    local = OWN[name].get("local_alpha", 0.05)
    rates = dict(zip((run.updates["clock"] - 1).tolist(), run.updates["learning_rate"].tolist(), strict=True))
    assert len(taken) > 20
    for clock, rate in taken:
        assert rate == pytest.approx(local / 0.05 * rates[clock], rel=1e-4)
    factors = [rate / local for _, rate in taken]
    assert max(factors) > 1.5 * min(factors), "the rate has changed"
    assert replay.check(run.path, user_objects=user_objects) == ""
