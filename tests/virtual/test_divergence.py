"""What a run says of itself at its end, in DONE, in its last line and in its report: diverged, or only not better."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from mpisgd import replay
from mpisgd.analysis import about
from mpisgd.job.parts import NO_OBJECTS, UserObjects
from mpisgd.records.log.reader import Run
from mpisgd.simulate import simulate
from tests.virtual.jobs import config, simulated

JOB = {
    "virtual": {"learners": 4},
    "model": {"name": "mlp", "hidden": [32]},
    "mu": 8,
    "epochs": 2,
    "threads": 1,
    "log": {"progress": "plain"},
}


def ended(
    path: Path, capsys: pytest.CaptureFixture[str], user_objects: UserObjects = NO_OBJECTS, **changes: object
) -> tuple[Run, bool]:
    """A run, and whether it says that it has diverged, everywhere alike."""
    run = simulated(path, JOB, user_objects, **changes)
    assert run.done is not None
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("mpisgd: diverged" if run.done["diverged"] else "mpisgd: finished")
    assert about.status(run).diverged == run.done["diverged"]
    return run, run.done["diverged"]


def test_last_weights_that_are_not_finite_have_diverged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As those of real ranks: all gradients and losses were finite, and the one update was not."""
    user_objects = UserObjects(loss=lambda output, target: 1e3 * nn.functional.cross_entropy(output, target))
    run, diverged = ended(tmp_path / "run", capsys, user_objects, alpha0=1e38, epochs=0.01)
    assert np.isfinite(run.pushes["loss"]).all()
    assert len(run.updates) == 1
    assert not run.summaries["diverged"].any()
    assert diverged
    assert replay.check(run.path, user_objects) == ""


def test_a_loss_that_falls_by_little_has_not_diverged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, diverged = ended(tmp_path / "run", capsys, alpha0=1e-5)
    loss = run.evaluations["loss"]
    assert 0.99 * loss[0] < loss[2] < loss[1] < loss[0], "every epoch, by less than 1 % in all"
    assert not diverged


@pytest.mark.slow
def test_a_fine_tune_that_doubles_the_error_has_not_diverged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained, _ = ended(tmp_path / "trained", capsys, epochs=15, alpha0=0.05)
    state = torch.load(trained.path / "weights.pt", weights_only=True)["theta"]

    def made() -> nn.Module:
        module = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        module.load_state_dict(dict(zip(module.state_dict(), copy.deepcopy(state).values(), strict=True)))
        return module

    run, diverged = ended(tmp_path / "run", capsys, UserObjects(model=made), alpha0=0.5, seed=3)
    rows = run.evaluations
    assert 2 * rows["error"][0] < rows["error"][-1] < 0.2
    assert rows["loss"][-1] > rows["loss"][0]
    assert not diverged


def test_negative_losses_are_fine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A score that is to grow: the more, the more negative the loss."""
    user_objects = UserObjects(loss=lambda output, target: -torch.tanh(output.gather(1, target[:, None])).mean())
    run, diverged = ended(tmp_path / "run", capsys, user_objects, epochs=0.5)
    assert run.evaluations["loss"][-1] < run.evaluations["loss"][0] < 0.1
    assert not diverged


@pytest.mark.parametrize(("alpha0", "finite"), [(2.0, True), (1e30, False)])
def test_a_run_that_blows_up_has_diverged(alpha0: float, finite: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, diverged = ended(tmp_path / "run", capsys, protocol="async", alpha0=alpha0, nonfinite="continue", epochs=0.5)
    assert bool(torch.tensor(run.pushes["loss"]).isfinite().all()) == finite
    assert diverged


def test_without_a_log_only_what_is_not_finite_is_seen(tmp_path: Path) -> None:
    job = {"protocol": "async", "nonfinite": "continue", "log": {"enabled": False, "progress": "off"}, "epochs": 0.5}
    assert not simulate(config(tmp_path / "finite", JOB, **job, alpha0=2.0)).diverged
    assert simulate(config(tmp_path / "not", JOB, **job, alpha0=1e30)).diverged
