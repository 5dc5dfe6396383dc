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
from tests.effort import spread
from tests.virtual.jobs import recording, simulated

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


def serial(make: Callable[[nn.Module], tuple[Any, Any]], hidden: tuple[int, ...] = (24,)) -> tuple[Weights, Weights]:
    """The first and the last weights of a loop as anybody writes it; `make` gives its optimiser, and a scheduler or None."""
    digits = data.load(DigitsOptions(), seed=SEED)
    model = models.make(MlpOptions(hidden=hidden), input_shape=digits.input_shape, classes=digits.classes, seed=SEED)
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


def accumulated(model: nn.Module, parts: int, updates: int) -> None:
    """Train `model` by a loop that accumulates over micro-batches, of as many learners, in plain torch."""
    digits = data.load(DigitsOptions(), seed=SEED)
    optimizer = torch.optim.SGD(model.parameters(), ALPHA0, momentum=0.9)
    sampling = EpochSampling(len(digits.train), MU, LEARNERS, SEED)
    for seq in range(updates):
        optimizer.zero_grad()
        for learner_id in range(LEARNERS):
            inputs, targets = digits.train.batch(sampling.indices(learner_id, seq))
            for part, wanted in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
                (nn.functional.cross_entropy(model(part), wanted) / parts / LEARNERS).backward()
        optimizer.step()


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


@pytest.mark.slow
def test_adamw_is_torchs(tmp_path: Path) -> None:
    simulated(tmp_path / "run", JOB, optimizer={"name": "adamw", "weight_decay": 0.5, "eps": 1e-3}, shards=3)
    options = {"lr": ALPHA0, "weight_decay": 0.5, "eps": 1e-3}
    check_equal(weights(tmp_path / "run"), serial(lambda model: (torch.optim.AdamW(model.parameters(), **options), None)))


#: Schedule -> as a configuration has it, and as a loop does.
SCHEDULES: dict[str, tuple[Any, Callable[[torch.optim.Optimizer], Any]]] = {
    "cosine": ("CosineAnnealingLR", lambda them: torch.optim.lr_scheduler.CosineAnnealingLR(them, UPDATES)),
    "one-cycle": (
        {"name": "OneCycleLR", "kwargs": {"max_lr": 3.0, "pct_start": 0.5}},
        lambda them: torch.optim.lr_scheduler.OneCycleLR(them, 3 * ALPHA0, UPDATES, pct_start=0.5),
    ),
    "warm-up": (
        {"name": "constant", "warmup_updates": 6},
        lambda them: torch.optim.lr_scheduler.LambdaLR(them, lambda update: min(1.0, (update + 1) / 6)),
    ),
}


@pytest.mark.parametrize(("name", "shards"), spread([("warm-up", 2), ("one-cycle", 1), ("cosine", 3)], 3, unpack=True))
def test_a_schedule_is_that_of_torchs_loop(name: str, shards: int, tmp_path: Path) -> None:
    schedule, make = SCHEDULES[name]
    run = simulated(tmp_path / "run", JOB, schedule=schedule, shards=shards)

    def loop(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD(model.parameters(), ALPHA0, momentum=0.9)
        return optimizer, make(optimizer)

    check_equal(weights(tmp_path / "run"), serial(loop))
    assert len(np.unique(run.updates["learning_rate"])) > 5


OWN = """
def halved(samples, every):
    return 0.5 ** (samples // every)
"""


def test_ones_own_schedule_is_a_name_and_replay_has_it_by_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "halving.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    own = {"name": "halving:halved", "unit": "samples", "kwargs": {"every": 4 * LEARNERS * MU}}
    run = simulated(tmp_path / "run", JOB, schedule=own, evaluation={"every_epochs": 0}, epochs=8.5 * LEARNERS * MU / 1437)
    assert run.updates["learning_rate"].tolist() == [ALPHA0 * 0.5 ** (update // 4) for update in range(9)]
    assert run.environment["brought"]["schedule"]["object"] == "halving:halved"
    with pytest.raises(ConfigError, match=r"(?s)schedule\.factory = 'halving:halved' called with .*--schedule halving:halved"):
        replay("run")
    assert replay("run", named={"schedule": "halving:halved"}).holds


@pytest.mark.parametrize("gradients", [True, False])
def test_a_schedule_that_cannot_be_is_refused_before_anything_is_written(gradients: bool, tmp_path: Path) -> None:
    virtual = {"learners": LEARNERS, "gradients": gradients, "parameters": 0 if gradients else 100}
    with pytest.raises(ConfigError, match="StepLR refuses these arguments"):
        simulated(tmp_path / "run", JOB, schedule="StepLR", virtual=virtual)
    assert not (tmp_path / "run").exists()


# -------------------------------------------------------------------------------------------------------- groups of parameters

#: With two and three shards, slices begin within the layer 1, which has most of the parameters.
GROUPS = {"weight_decay": {"*.bias": 0.0}, "rate": {"3.*": 0.25, "1.bias": 0.0}}


def grouped(make: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[[nn.Module], tuple[torch.optim.Optimizer, Any]]:
    """The same groups as a loop has them, under a cosine."""

    def loop(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        of = dict(model.named_parameters())
        groups = [
            {"params": [of["1.weight"]]},
            {"params": [of["1.bias"]], "weight_decay": 0.0, "lr": 0.0},
            {"params": [of["3.weight"]], "lr": 0.25 * ALPHA0},
            {"params": [of["3.bias"]], "weight_decay": 0.0, "lr": 0.25 * ALPHA0},
        ]
        optimizer = make(groups, lr=ALPHA0, **options)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, UPDATES)

    return loop


@pytest.mark.parametrize(
    ("name", "make", "shards"),
    spread([("sgd", torch.optim.SGD, 1), ("rmsprop", torch.optim.RMSprop, 2), ("adamw", torch.optim.AdamW, 3)], 2, unpack=True),
)
def test_groups_are_torchs_param_groups(name: str, make: Callable[..., torch.optim.Optimizer], shards: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"weight_decay": 0.3} | ({"momentum": 0.9} if name != "adamw" else {})
    options |= {} if name == "sgd" else {"eps": 1e-2}
    changes = {"optimizer": {"name": name, **options}, "groups": GROUPS, "schedule": "CosineAnnealingLR"}
    simulated(tmp_path / "run", JOB, **changes, shards=shards)
    check_equal(weights(tmp_path / "run"), serial(grouped(make, **options)), still=["1.bias"])


@pytest.fixture(scope="module")
def first() -> Weights:
    return serial(grouped(torch.optim.SGD))[0]


def test_groups_of_sgd_have_the_same_bits_on_any_number_of_shards(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"optimizer": {"name": "sgd", "weight_decay": 0.1}, "groups": GROUPS}
    found = []
    for shards in (1, 3):
        simulated(tmp_path / f"run-{shards}", JOB, **changes, shards=shards)
        found.append(weights(tmp_path / f"run-{shards}"))
    simulated(tmp_path / "layers", JOB, **changes, shards=2, per_layer=True)
    found.append(weights(tmp_path / "layers"))
    for name, tensor in found[0].items():
        assert all(torch.equal(tensor, other[name]) for other in found[1:]), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    spread(
        [
            {"protocol": {"name": "async"}, "compensation": 0.04, "averaging": 0.9},
            {"optimizer": "adamw", "alpha0": 0.002},
            {"protocol": "allreduce", "shards": 1, "push_format": "float32"},
            {"protocol": {"name": "backup", "b": 1}, "optimizer": "adagrad", "shards": 2, "per_layer": True},
            {"protocol": {"name": "ssp", "get_model_frequency": 3}, "alpha0": 0.005},
            {"protocol": {"name": "downpour", "n_push": 2, "n_fetch": 4}, "alpha0": 0.005, "push_format": "bfloat16"},
        ],
        3,
    ),
    ids=lambda changes: str(next(iter(changes.values()))),
)
def test_groups_in_any_protocol_are_proved(changes: dict[str, Any], first: Weights, tmp_path: Path) -> None:
    simulated(tmp_path / "run", JOB, **{"protocol": {"name": "softsync", "n": LEARNERS}, "shards": 3, "groups": GROUPS, **changes})
    assert replay(tmp_path / "run").holds
    assert torch.equal(weights(tmp_path / "run")["1.bias"], first["1.bias"]), "its rate is 0"


@pytest.mark.parametrize("count", [1, 3])
def test_own_steps_leave_a_group_of_rate_0_where_it_is(count: int, tmp_path: Path) -> None:
    """A learner never computes at weights that the shards could not have."""
    seen: list[np.ndarray] = []
    protocol = {"name": "downpour", "n_push": count, "n_fetch": 3}
    simulated(tmp_path / "run", JOB, recording(seen, SEED), protocol=protocol, groups={"rate": {"1.*": 0.0}}, alpha0=0.005)
    layer_1, layer_3 = (np.stack(seen)[:, part] for part in (slice(0, 1560), slice(1560, None)))
    assert (layer_1 == layer_1[0]).all()
    assert not (layer_3 == layer_3[0]).all()


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("field", ["rate", "weight_decay"])
def test_a_group_that_matches_nothing_is_refused_before_anything_is_written(field: str, gradients: bool, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=rf"groups\.{field}\['\*\.biass'\] = 0\.0: .* none of 1\.weight, 1\.bias, 3\.weight, 3\.bias$"
    ):
        simulated(tmp_path / "run", JOB, groups={field: {"*.biass": 0.0}}, virtual={"learners": LEARNERS, "gradients": gradients})
    assert not (tmp_path / "run").exists()
