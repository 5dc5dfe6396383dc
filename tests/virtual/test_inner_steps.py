"""Local SGD and DiLoCo on a virtual cluster are plain loops of PyTorch; and `replay` proves stale runs of them, too."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mpisgd import data, models
from mpisgd.base.errors import ConfigError, ProtocolError
from mpisgd.config import AdamwOptions, DigitsOptions, MlpOptions
from mpisgd.config.config_file import from_mapping
from mpisgd.data.sampling import EpochSampling
from mpisgd.gradient.mini_batches import InnerSteps
from mpisgd.job.parts import UserObjects
from mpisgd.replay import replay
from mpisgd.vectors.computing import Travels
from mpisgd.vectors.memory import Memory
from tests.effort import spread
from tests.virtual.jobs import SIZES, TENSORS, merged, simulated
from tests.virtual.test_optimisers import SEED, Weights, check_equal, weights

LEARNERS, MU, H, ROUNDS = 3, 8, 5, 6
OUTER, INNER, DECAY = 0.7, 0.003, 0.5
DILOCO: dict[str, Any] = {
    "protocol": "hardsync",
    "virtual": {"learners": LEARNERS},
    "compute": {"name": "lognormal"},
    "model": {"name": "mlp", "hidden": [24]},
    "mu": MU,
    "local_steps": H,
    "alpha0": OUTER,
    "optimizer": {"name": "sgd", "momentum": 0.9, "nesterov": True},
    "inner_alpha0": INNER,
    "inner_optimizer": {"name": "adamw", "weight_decay": DECAY, "eps": 1e-3},
    "seed": SEED,
    "epochs": ROUNDS * H * LEARNERS * MU / 1437,
    "threads": 1,
    "memory_format": "contiguous",
    "log": {"progress": "off"},
}


def loop(inner: Any, outer: Any, *, rounds: int = ROUNDS, count: int = H, clip: float = math.inf) -> tuple[Weights, Weights]:
    """The first and the last weights of DiLoCo as its paper writes it; `inner`: makes an optimiser and a scheduler or None."""
    digits = data.load(DigitsOptions(), seed=SEED)

    def make() -> nn.Module:
        return models.make(MlpOptions(hidden=(24,)), input_shape=digits.input_shape, classes=digits.classes, seed=SEED)

    model, replicas = make(), [make() for _ in range(LEARNERS)]
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    step, inners = outer(model.parameters()), [inner(replica) for replica in replicas]
    sampling = EpochSampling(len(digits.train), MU, LEARNERS, SEED)
    for number in range(rounds):
        for learner_id, (replica, (optimizer, scheduler)) in enumerate(zip(replicas, inners, strict=True)):
            replica.load_state_dict(model.state_dict())
            for seq in range(number * count, number * count + count):
                inputs, targets = digits.train.batch(sampling.indices(learner_id, seq))
                optimizer.zero_grad()
                nn.functional.cross_entropy(replica(inputs), targets).backward()
                nn.utils.clip_grad_norm_(replica.parameters(), clip)
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()
        for parameter, *theirs in zip(model.parameters(), *(replica.parameters() for replica in replicas), strict=True):
            parameter.grad = torch.stack([parameter.detach() - own.detach() for own in theirs]).mean(0)
        step.step()
    return before, {name: each.detach() for name, each in model.named_parameters()}


def adamw(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    biases = [each for name, each in model.named_parameters() if name.endswith("bias")]
    others = [each for name, each in model.named_parameters() if not name.endswith("bias")]
    groups = [{"params": others, "weight_decay": DECAY}, {"params": biases, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=INNER, eps=1e-3)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, ROUNDS * H)


@pytest.mark.parametrize("shards", spread([3, 1, 2], 3))
def test_diloco_is_the_papers_loop(shards: int, tmp_path: Path) -> None:
    """With groups, a schedule and clipping, which are of the inner steps."""
    more = {"groups": {"weight_decay": {"*bias": 0.0}}, "schedule": "CosineAnnealingLR", "clip_norm": 0.8}
    run = simulated(tmp_path / "run", DILOCO, shards=shards, **more)
    expected = loop(adamw, lambda them: torch.optim.SGD(them, OUTER, momentum=0.9, nesterov=True), clip=0.8)
    check_equal(weights(tmp_path / "run"), expected)
    assert set(run.pushes["samples"]) == {H * MU}
    assert np.allclose(run.updates["learning_rate"], OUTER), "the schedule is not the shards'"
    assert replay(tmp_path / "run").holds


def test_local_sgd_averages_weights(tmp_path: Path) -> None:
    plain = {"name": "sgd", "momentum": 0.0, "nesterov": False}
    changes = {"optimizer": plain, "alpha0": 1.0, "inner_optimizer": plain, "inner_alpha0": 0.05}
    simulated(tmp_path / "run", DILOCO, **changes)

    def sgd(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        return torch.optim.SGD(model.parameters(), 0.05), None

    check_equal(weights(tmp_path / "run"), loop(sgd, lambda them: torch.optim.SGD(them, 1.0)))


def test_a_wrong_state_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if replay began each round with a new inner optimiser."""
    simulated(tmp_path / "run", DILOCO, epochs=DILOCO["epochs"] / 2)
    compute = InnerSteps.compute

    def anew(self: InnerSteps, seq: int) -> float:
        self._begin()
        return compute(self, seq)

    monkeypatch.setattr(InnerSteps, "compute", anew)
    assert not replay(tmp_path / "run").holds


def now_and_then_nan(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target) * (math.nan if int(target.sum()) % 11 == 0 else 1.0)


def test_after_what_is_not_finite_the_inner_optimiser_begins_anew(tmp_path: Path) -> None:
    """Else no round of that learner would ever be finite again."""
    user_objects = UserObjects(loss=now_and_then_nan)
    run = simulated(tmp_path / "run", DILOCO, user_objects, nonfinite="drop", epochs=0.5)
    lost = np.isnan(run.pushes["loss"])
    assert 0 < lost.sum() < len(lost) / 2
    for learner_id in np.unique(run.pushes["learner_id"][lost]):
        own = lost[run.pushes["learner_id"] == learner_id]
        assert not own[np.flatnonzero(own)[0] :].all(), "some came after it"
    assert np.isfinite(run.evaluations["loss"]).all()
    assert replay(tmp_path / "run", user_objects).holds


def test_a_round_takes_the_time_of_its_mini_batches(tmp_path: Path) -> None:
    once, often = (
        simulated(tmp_path / str(steps), SIZES, compute={"name": "constant", "mean_s": 0.5}, local_steps=steps) for steps in (1, 4)
    )
    assert often.pushes["compute_s"].tolist() == pytest.approx([2.0] * len(often.pushes))
    assert len(often.pushes) <= len(once.pushes) // 4 + often.lambda_
    assert set(often.pushes["samples"]) == {4 * once.pushes["samples"][0]}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"per_layer": True}, "local_steps = 5: expected 0 beside per_layer: own steps need all layers"),
        ({"protocol": "allreduce"}, "local_steps = 5: expected 0 beside protocol allreduce"),
        ({"protocol": {"name": "downpour", "n_push": 2}}, "local_steps = 5: expected 0 beside protocol.n_push"),
        ({"local_steps": 0}, "inner_alpha0 = 0.003: expected 0.0004 beside local_steps = 0"),
        ({"local_steps": -1}, "local_steps = -1: expected"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why.replace(".", r"\.")):
        simulated(tmp_path / "run", DILOCO, **changes)
    assert not (tmp_path / "run").exists()


def test_nobody_steps_alone_in_memory_of_a_team() -> None:
    class Shared(Travels):
        memory = Memory(np.zeros(3, np.float32), np.zeros(3, np.float32), shared=True)

        def compute(self, seq: int) -> float:
            return 0.0

    with pytest.raises(ProtocolError, match="would move the weights of the whole team"):
        InnerSteps(Shared(), 2, AdamwOptions(), lambda clock, place: 0.1, tell_nonfinite=False)


def test_teams_are_refused() -> None:
    config = merged(TENSORS, {"local_steps": 2, "aggregation": "node"})
    assert from_mapping(config).local_steps == 2, "alone, each is well"
    with pytest.raises(ConfigError, match="learners have weights in common, and none may step alone"):
        simulated(Path("never"), config)
