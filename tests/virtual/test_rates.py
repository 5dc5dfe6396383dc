"""Learning rates and averaged weights of whole runs, whatever the protocol makes updates of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.effort import spread
from tests.virtual.jobs import SIZES, TENSORS, simulated

#: Protocol -> samples of one update of four learners, with mini-batches of four.
UPDATES: dict[str, tuple[dict[str, Any], int]] = {
    "hardsync": ({"name": "hardsync"}, 16),
    "backup": ({"name": "backup", "b": 1}, 12),
    "softsync": ({"name": "softsync", "n": 2}, 8),
    "async": ({"name": "async"}, 4),
    "downpour": ({"name": "downpour", "n_push": 2}, 8),
    "allreduce": ({"name": "allreduce"}, 16),
}


@pytest.mark.parametrize(
    ("name", "base"), [*((name, SIZES) for name in UPDATES), *spread([(name, TENSORS) for name in UPDATES], 6, unpack=True)]
)
def test_a_warm_up_of_k_updates_begins_with_one_kth_of_the_rate(name: str, base: dict[str, Any], tmp_path: Path) -> None:
    """The first update has a rate, too, and the k-th the whole one."""
    protocol, samples = UPDATES[name]
    size = base["virtual"].get("train_samples") or base["data"]["samples"]
    schedule = {"name": "constant", "warmup_epochs": 5 * samples / size}
    run = simulated(tmp_path / "run", base, protocol=protocol, schedule=schedule, alpha0=0.1)
    rates = run.updates["learning_rate"][run.updates["shard"] == 0]
    assert rates[:7] == pytest.approx([0.02, 0.04, 0.06, 0.08, 0.1, 0.1, 0.1])


@pytest.mark.parametrize(("corrected", "averaging"), [(False, 0.999), (True, 0.999), (False, 0.5)])
def test_thetabar_of_a_short_run_is_of_its_updates_or_the_run_says_that_it_is_not(
    corrected: bool, averaging: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """15 updates of 16 samples: at a = 0.999, 98.5 % of thetabar is what training began with."""
    log = {"progress": "plain"}
    run = simulated(tmp_path / "run", TENSORS, averaging=averaging, averaging_bias_correction=corrected, alpha0=0.02, log=log)
    assert len(run.updates) == 15
    said = "thetabar ends as 99 % the initial weights (averaging_bias_correction leaves this part out)"
    assert (said in capsys.readouterr().err) == (averaging == 0.999 and not corrected)
    rows = run.evaluations
    initial = rows["loss"][(rows["averaged"] == 1) & (rows["clock_max"] == 0)].item()
    theta, thetabar = (rows["loss"][(rows["averaged"] == averaged) & (rows["clock_max"] == 15)][-1] for averaged in (0, 1))
    moved = (initial - thetabar) / (initial - theta)
    assert moved < 0.1 if averaging == 0.999 and not corrected else moved > 0.4
    saved = torch.load(run.path / "weights.pt", weights_only=True)
    assert set(saved) == {"theta", "thetabar"}


@pytest.mark.parametrize(("eps", "learns"), [(None, True), pytest.param(1.0, False, marks=pytest.mark.slow)])
def test_rmsprop_learns_at_its_usual_rates(eps: float | None, learns: bool, tmp_path: Path) -> None:
    """0.001, say, with torch's eps, which is the default; with 1.0 it hardly moves."""
    optimizer = {"name": "rmsprop"} if eps is None else {"name": "rmsprop", "eps": eps}
    data = {"name": "synthetic", "shape": [20], "classes": 3, "samples": 480, "test_samples": 120}
    run = simulated(tmp_path / "run", TENSORS, optimizer=optimizer, alpha0=0.001, data=data, epochs=5)
    loss = run.evaluations["loss"]
    assert loss[-1] < 0.7 * loss[0] if learns else loss[-1] > 0.9 * loss[0]
