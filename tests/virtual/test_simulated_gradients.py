"""A simulated run computes real gradients: serial SGD where it must be, it learns, one by one and batched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mpisgd import data, models, replay
from mpisgd.base.errors import ConfigError, DivergenceError
from mpisgd.config import DigitsOptions, MlpOptions
from mpisgd.data.sampling import EpochSampling
from mpisgd.job.parts import UserObjects
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from mpisgd.simulate import simulate
from tests.effort import spread
from tests.virtual.jobs import TENSORS, bits, config, flat, merged, recording, simulated, tables

pytestmark = pytest.mark.timeout(300)  # a virtual job may also go on for ever


# ------------------------------------------------------------------------------------------------------- the oracle

MU, ALPHA0, SEED = 8, 0.02, 3
ORACLE = {
    "protocol": "hardsync",
    "virtual": {"learners": 4},
    "model": {"name": "mlp", "hidden": [24]},
    "mu": MU,
    "alpha0": ALPHA0,
    "seed": SEED,
    "epochs": 0.4,
    "threads": 1,
    "memory_format": "contiguous",
    "log": {"progress": "off"},
}
OPTIMIZERS: dict[str, tuple[dict[str, Any], Callable[..., torch.optim.Optimizer]]] = {
    "sgd": ({"name": "sgd", "momentum": 0.9}, lambda p: torch.optim.SGD(p, lr=ALPHA0, momentum=0.9)),
    "adagrad": ({"name": "adagrad", "eps": 1e-3}, lambda p: torch.optim.Adagrad(p, lr=ALPHA0, eps=1e-3)),
}


def serial(batch: int, updates: int, optimizer: str) -> np.ndarray:
    """Weights before each update and after the last, (updates + 1, parameters), of torch.optim with `batch` samples each."""
    digits = data.load(DigitsOptions(), seed=SEED)
    model = models.make(MlpOptions(hidden=(24,)), input_shape=digits.input_shape, classes=digits.classes, seed=SEED)
    steps = OPTIMIZERS[optimizer][1](model.parameters())
    sampling = EpochSampling(len(digits.train), batch, 1, SEED)
    seen = []
    for seq in range(updates + 1):
        seen.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy().copy())
        inputs, targets = digits.train.batch(sampling.indices(0, seq))
        steps.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        steps.step()
    return np.array(seen)


@pytest.mark.parametrize(
    ("optimizer", "learners", "shards"), spread([("sgd", 3, 2), ("sgd", 4, 1), ("adagrad", 4, 3), ("sgd", 1, 1)], 2, unpack=True)
)
def test_hardsync_is_serial_sgd_with_lambda_mu_samples(optimizer: str, learners: int, shards: int, tmp_path: Path) -> None:
    seen: list[np.ndarray] = []
    changes = {"optimizer": OPTIMIZERS[optimizer][0], "shards": shards, "virtual": {"learners": learners}, "averaging": 0.75}
    run = simulated(tmp_path / "run", ORACLE, recording(seen, SEED), **changes)
    updates = -(-int(0.4 * 1437 + 0.999) // (learners * MU))
    assert run.summaries["final_clock"].tolist() == [updates] * shards
    expected = serial(learners * MU, updates, optimizer)
    moved = np.abs(expected[-1] - expected[0]).max()
    assert moved > 0.01, "the serial run must have gone somewhere"
    recorded = np.array(seen).reshape(updates, learners, -1)
    assert (recorded == recorded[:, :1]).all(), "all learners compute at the same weights"
    assert np.abs(recorded[:, 0] - expected[:-1]).max() < 2e-4 * moved
    assert np.abs(flat(run) - expected[-1]).max() < 2e-4 * moved
    averaged = expected[0]
    for theta in expected[1:]:
        averaged = 0.75 * averaged + 0.25 * theta
    assert np.abs(flat(run, "thetabar") - averaged).max() < 2e-4 * moved


SCHEDULES: dict[str, dict[str, Any]] = {
    "constant": {"compute": "constant"},
    "normal": {"compute": {"name": "normal", "deviation_s": 0.1}},
    "heavy tail": {"compute": {"name": "heavy_tail", "tail_probability": 0.5}, "evaluator": True},
    "slow": {"virtual": {"slow_nodes": {"2": 20.0}, "pause_mean_s": 1.0, "pause_every_s": 0.5}},
    "queues": {"network": {"latency_s": 0.5, "bandwidth": 1e5}, "service": {"update_s": 0.5}, "virtual": {"ranks_per_node": 3}},
    "nothing takes time": {"compute": {"name": "constant", "mean_s": 0.0}, "network": {"latency_s": 0.0, "overhead_s": 0.0}},
}


@pytest.mark.slow
def test_the_schedule_does_not_matter_to_hardsync(tmp_path: Path) -> None:
    """Not one bit, on two shards; whoever comes first, and however long it takes."""
    runs = {name: simulated(tmp_path / name, ORACLE, **changes, shards=2) for name, changes in SCHEDULES.items()}
    assert len({tuple(bits(run).values()) for run in runs.values()}) == 1
    assert len({tables(run)["pushes"] for run in runs.values()}) == len(runs)


def test_it_does_matter_to_softsync(tmp_path: Path) -> None:
    runs = [
        simulated(tmp_path / name, ORACLE, **SCHEDULES[name], protocol={"name": "softsync", "n": 4}) for name in ("normal", "slow")
    ]
    assert bits(runs[0]) != bits(runs[1])


# ------------------------------------------------------------------------------------------------------------ training


def test_it_learns_and_is_evaluated_as_a_real_run_is(tmp_path: Path) -> None:
    """Snapshots by epochs, each of theta and thetabar, on test and training data; with a rank for it, and without."""
    for evaluator in (True, False):
        changes: dict[str, Any] = {"evaluation": {"train": True}, "evaluator": evaluator, "averaging": 0.5, "alpha0": 0.2}
        run = simulated(tmp_path / str(evaluator), TENSORS, **changes, protocol="softsync", shards=2, epochs=4)
        rows = run.evaluations
        assert rows["snapshot"].tolist() == [number for number in range(5) for _ in range(4)]
        assert set(zip(rows["averaged"].tolist(), rows["train"].tolist(), strict=True)) == {(0, 0), (0, 1), (1, 0), (1, 1)}
        losses = rows["loss"][(rows["averaged"] == 0) & (rows["train"] == 1)]
        assert losses[-1] < 0.7 * losses[0]
        assert (np.diff(rows["taken_s"]) >= 0).all()
        assert run.summaries["diverged"].tolist() == [0, 0]


def test_batch_norm_and_dropout_work_one_by_one(tmp_path: Path) -> None:
    run = simulated(tmp_path / "run", TENSORS, model={"name": "mlp", "hidden": [8], "batch_norm": True})
    assert run.environment["batch_norm_policy"] == "learner 0's (1 layer)"


def test_a_gradient_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(DivergenceError, match="not finite; lower alpha0"):
        simulate(config(tmp_path / "run", TENSORS, protocol="softsync", alpha0=1e30, optimizer={"name": "sgd", "momentum": 0.0}))
    assert not (tmp_path / "run" / schema.DONE).exists()
    assert len(Run(tmp_path / "run").pushes), "the last rows are what one wants to see then"


# ------------------------------------------------------------------------------------------------------------- batched

BATCHED = {**ORACLE, "virtual": {"learners": 8}, "epochs": 1.0, "clip_norm": 0.5}


BATCHED_COLUMNS = ["learner_id", "seq", "clock", "timestamp", "arrival_s", "samples", "weight"]


def one_by_one_and_batched(directory: Path, **changes: Any) -> tuple[Run, Run]:
    one, together = (
        simulated(directory / str(batched), merged(BATCHED, {"virtual": {"batched": batched}}), **changes)
        for batched in (False, True)
    )
    return one, together


@pytest.mark.parametrize(
    "protocol", spread([{"name": "softsync", "n": 8}, "hardsync", "softsync"], 3), ids=["n=8", "hardsync", "n=1"]
)
def test_batched_gradients_are_those_computed_one_by_one(protocol: Any, tmp_path: Path) -> None:
    one, together = one_by_one_and_batched(tmp_path, protocol=protocol, compute="lognormal")
    assert one.pushes[BATCHED_COLUMNS].tolist() == together.pushes[BATCHED_COLUMNS].tolist(), "the schedule is the same"
    first, second = flat(one), flat(together)
    moved = np.abs(first - flat_start()).max()
    assert moved > 0.02
    assert np.abs(first - second).max() < 1e-4 * moved
    assert one.pushes["loss"] == pytest.approx(together.pushes["loss"], abs=1e-4)


def test_learners_that_give_up_are_batched(tmp_path: Path) -> None:
    """What they had begun is forgotten: each gradient is of the weights that they pulled then, as one by one."""
    changes = {"protocol": {"name": "backup", "b": 3, "abort": True}, "compute": {"name": "lognormal", "sigma": 0.7}, "epochs": 0.4}
    one, together = one_by_one_and_batched(tmp_path, **changes)
    assert len(one.table("events")[one.table("events")["kind"] == schema.Event.GAVE_UP]) > 10
    assert one.pushes[BATCHED_COLUMNS].tolist() == together.pushes[BATCHED_COLUMNS].tolist()
    assert one.pushes["loss"] == pytest.approx(together.pushes["loss"], abs=1e-4)
    assert replay.check(together.path) == ""


# Where nothing is drawn, messages arrive at the very same nanosecond; the order must not follow that in which the ranks' code
# happened to run, which batching changes.
def test_batched_keeps_the_schedule_also_where_messages_tie(tmp_path: Path) -> None:
    one, together = one_by_one_and_batched(tmp_path, protocol="softsync", compute="constant", epochs=0.4)
    assert one.pushes[BATCHED_COLUMNS].tolist() == together.pushes[BATCHED_COLUMNS].tolist()


def flat_start() -> np.ndarray:
    start: np.ndarray = serial(1, 0, "sgd")[0]
    return start


class Dropping(nn.Sequential):
    """Its mini-batches draw random numbers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))


def test_models_that_cannot_be_batched_are_refused(tmp_path: Path) -> None:
    norm = config(tmp_path / "run", TENSORS, model={"name": "mlp", "batch_norm": True}, virtual={"batched": True})
    with pytest.raises(ConfigError, match=r"virtual\.batched = True: torch\.func\.vmap refuses this model"):
        simulate(norm)
    with pytest.raises(ConfigError, match=r"virtual\.batched = True: .*random"):
        simulate(config(tmp_path / "run", TENSORS, virtual={"batched": True}), UserObjects(Dropping))
    simulate(config(tmp_path / "run", TENSORS), UserObjects(Dropping))
