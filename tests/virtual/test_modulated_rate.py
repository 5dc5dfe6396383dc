"""`modulate = "rate"`: what the log says of it is what was done, and is proved; sizes alone have the same rates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpisgd.analysis.about import protocol_label
from mpisgd.base.errors import ConfigError
from mpisgd.records.log.reader import Run
from mpisgd.replay import replay
from tests.effort import spread
from tests.virtual.jobs import simulated
from tests.virtual.test_optimisers import JOB, LEARNERS, weights

STALE: dict[str, Any] = {"protocol": {"name": "softsync", "n": 2}, "virtual": {"learners": 5}, "shards": 2, "modulate": "rate"}


def check_rates(run: Run, alpha0: float) -> None:
    """Each update's rate is alpha0 times the mean of its gradients' weights, which are 1/tau."""
    applied = run.pushes[run.pushes["verdict"] == 0]
    assert len(np.unique(applied["weight"])) > 2
    assert (applied["weight"] == 1 / np.maximum(1, applied["staleness"])).all()
    assert (applied["learning_rate"] == alpha0).all(), "before any weight"
    for update in run.updates:
        mine = applied[(applied["shard"] == update["shard"]) & (applied["clock"] == update["clock"] - 1)]
        assert len(mine) == update["gradients"] > 1
        assert update["learning_rate"] == pytest.approx(alpha0 * mine["weight"].mean(), rel=1e-12)
    assert len(np.unique(run.updates["learning_rate"])) > 3


@pytest.mark.parametrize("optimizer", spread(["sgd", "adamw", "adagrad", "lars"], 4))
def test_the_log_has_the_rates_and_replay_proves_them(optimizer: str, tmp_path: Path) -> None:
    run = simulated(tmp_path / "run", JOB, **STALE, optimizer=optimizer, alpha0=0.004, compute={"sigma": 0.5})
    check_rates(run, 0.004)
    assert protocol_label(run) == "softsync n=2 modulation=inverse modulate=rate"
    assert replay(tmp_path / "run").holds


def test_sizes_alone_have_the_same_rates(tmp_path: Path) -> None:
    sizes = {"learners": 5, "gradients": False, "parameters": 1000, "train_samples": 1437}
    run = simulated(tmp_path / "run", JOB, **{**STALE, "virtual": sizes}, compute={"sigma": 0.5})
    check_rates(run, JOB["alpha0"])
    assert replay(tmp_path / "run").holds


def test_of_one_gradient_plain_sgd_goes_the_same_way(tmp_path: Path) -> None:
    """rate * weight * g is rate * (weight * g), but for rounding; momentum is where they differ."""
    found = {}
    for momentum in (0.0, 0.9):
        for of in ("gradient", "rate"):
            out = tmp_path / f"{of}-{momentum}"
            protocol = {"name": "softsync", "n": LEARNERS}
            simulated(out, JOB, protocol=protocol, modulate=of, optimizer={"name": "sgd", "momentum": momentum})
            found[of, momentum] = weights(out)["1.weight"]
    apart = {momentum: float((found["gradient", momentum] - found["rate", momentum]).abs().max()) for momentum in (0.0, 0.9)}
    assert apart[0.0] < 1e-5
    assert apart[0.9] > 1e-3


@pytest.mark.parametrize(
    ("protocol", "told"),
    [
        ("hardsync", r"beside protocol hardsync \(applies no stale gradients\): a fresh gradient has the weight 1"),
        ("async", r"beside protocol\.modulation = 'none': 'none' makes all weights 1; choose a modulation"),
    ],
)
def test_where_all_weights_are_1_it_is_refused(protocol: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"modulate = 'rate': expected 'gradient' {told}"):
        simulated(tmp_path / "run", JOB, protocol=protocol, modulate="rate")
    assert not (tmp_path / "run").exists()
