"""hardsync on a virtual cluster is a plain loop of PyTorch, whatever the optimiser; and `replay` proves stale runs of it, too."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
from mpisgd.replay import replay
from tests.virtual.jobs import simulated

ALPHA0, LEARNERS, MU, SEED = 0.02, 3, 8, 3
UPDATES = 24
JOB: dict[str, Any] = {
    "protocol": "hardsync",
    "virtual": {"learners": LEARNERS},
    "compute": {"name": "lognormal"},
    "model": {"name": "mlp", "hidden": [24]},
    "mu": MU,
    "alpha0": ALPHA0,
    "seed": SEED,
    "epochs": UPDATES * LEARNERS * MU / 1437,
    "threads": 1,
    "memory_format": "contiguous",
    "log": {"progress": "off"},
}
Weights = dict[str, torch.Tensor]


def serial(make: Callable[[nn.Module], tuple[torch.optim.Optimizer, Any]]) -> tuple[Weights, Weights]:
    """The first and the last weights of a loop as anybody writes it; `make` gives its optimiser, and a scheduler or None."""
    digits = data.load(DigitsOptions(), seed=SEED)
    model = models.make(MlpOptions(hidden=(24,)), input_shape=digits.input_shape, classes=digits.classes, seed=SEED)
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    optimizer, scheduler = make(model)
    sampling = EpochSampling(len(digits.train), LEARNERS * MU, 1, SEED)
    for seq in range(UPDATES):
        inputs, targets = digits.train.batch(sampling.indices(0, seq))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return before, {name: each.detach() for name, each in model.named_parameters()}


def weights(path: Path) -> Weights:
    found: Weights = torch.load(path / "weights.pt", weights_only=True)["theta"]
    return found


def check_equal(found: Weights, serial: tuple[Weights, Weights], still: Iterable[str] = ()) -> None:
    """Every parameter, near the loop's; all of them have moved but those that are to stand `still`."""
    before, expected = serial
    for name, value in expected.items():
        moved = float((value - before[name]).abs().max())
        assert (moved == 0) == (name in still), name
        assert float((found[name] - value).abs().max()) <= 2e-4 * moved, name


def check_proved(out: Path, **changes: Any) -> None:
    """A run of it under softsync, on two shards, is computed again to the bit."""
    simulated(out, JOB, **{"protocol": {"name": "softsync", "n": LEARNERS}, "shards": 2, **changes})
    assert replay(out).holds


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_adamw_is_torchs(shards: int, tmp_path: Path) -> None:
    simulated(tmp_path / "run", JOB, optimizer={"name": "adamw", "weight_decay": 0.5, "eps": 1e-3}, shards=shards)
    options = {"lr": ALPHA0, "weight_decay": 0.5, "eps": 1e-3}
    check_equal(weights(tmp_path / "run"), serial(lambda model: (torch.optim.AdamW(model.parameters(), **options), None)))
    assert replay(tmp_path / "run").holds


def test_adamw_of_stale_gradients_is_proved(tmp_path: Path) -> None:
    check_proved(tmp_path / "run", optimizer="adamw", alpha0=0.002)


#: Schedule -> as a configuration has it, and as a loop does.
SCHEDULES: dict[str, tuple[Any, Callable[[torch.optim.Optimizer], Any]]] = {
    "cosine": ("CosineAnnealingLR", lambda them: torch.optim.lr_scheduler.CosineAnnealingLR(them, UPDATES)),
    "one-cycle": (
        {"name": "OneCycleLR", "kwargs": {"max_lr": 3.0, "pct_start": 0.5}},
        lambda them: torch.optim.lr_scheduler.OneCycleLR(them, 3 * ALPHA0, UPDATES, pct_start=0.5, cycle_momentum=False),
    ),
    "warm-up": (
        {"name": "constant", "warmup_updates": 6},
        lambda them: torch.optim.lr_scheduler.LambdaLR(them, lambda update: min(1.0, (update + 1) / 6)),
    ),
}


@pytest.mark.parametrize(("name", "shards"), [("cosine", 1), ("cosine", 3), ("one-cycle", 2), ("warm-up", 2)])
def test_a_schedule_is_that_of_torchs_loop(name: str, shards: int, tmp_path: Path) -> None:
    schedule, make = SCHEDULES[name]
    run = simulated(tmp_path / "run", JOB, schedule=schedule, shards=shards)

    def loop(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD(model.parameters(), ALPHA0, momentum=0.9)
        return optimizer, make(optimizer)

    check_equal(weights(tmp_path / "run"), serial(loop))
    assert len(np.unique(run.updates["learning_rate"])) > 5
    assert replay(tmp_path / "run").holds


@pytest.mark.parametrize(
    "protocol", [{"name": "softsync", "n": LEARNERS}, {"name": "downpour", "n_push": 2, "n_fetch": 4}], ids=str
)
def test_torchs_schedule_of_stale_gradients_and_own_steps_is_proved(protocol: dict[str, Any], tmp_path: Path) -> None:
    check_proved(tmp_path / "run", protocol=protocol, schedule={"name": "OneCycleLR", "warmup_samples": 100}, alpha0=0.005)


OWN = """
def halved(samples, every):
    return 0.5 ** (samples // every)
"""


def test_ones_own_schedule_is_a_name_and_replay_has_it_by_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "halving.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    own = {"name": "halving:halved", "unit": "samples", "kwargs": {"every": 4 * LEARNERS * MU}}
    run = simulated(tmp_path / "run", JOB, schedule=own, evaluation={"every_epochs": 0})
    assert run.updates["learning_rate"].tolist() == [ALPHA0 * 0.5 ** (update // 4) for update in range(UPDATES)]
    assert run.environment["brought"]["schedule"]["object"] == "halving:halved"
    with pytest.raises(ConfigError, match=r"(?s)schedule\.factory = 'halving:halved' called with .*--schedule halving:halved"):
        replay("run")
    assert replay("run", named={"schedule": "halving:halved"}).holds
    assert replay("run", trust=True).holds


@pytest.mark.parametrize("gradients", [True, False])
def test_a_schedule_that_cannot_be_is_refused_before_anything_is_written(gradients: bool, tmp_path: Path) -> None:
    virtual = {"learners": LEARNERS, "gradients": gradients, "parameters": 0 if gradients else 100}
    with pytest.raises(ConfigError, match="StepLR refuses them"):
        simulated(tmp_path / "run", JOB, schedule="StepLR", virtual=virtual)
    assert not (tmp_path / "run").exists()
