"""A user's own script: model, loss and data as Python objects (DESIGN 7)."""

from __future__ import annotations

from pathlib import Path

import torch

from mpisgd.records.reader import Run

from .conftest import launch

# The rate is one that holds for stale gradients too: with momentum 0.9 and a gradient one update old, plain delayed SGD in torch
# stays below 0.03 at 0.005 on every seed, and at 0.02 ends anywhere from 0.5 to 800,000.
SCRIPT = """
import torch
from torch import nn
import mpisgd

def make_model():
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))

def make_data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(600, 5, generator=generator)
    y = x[:, :1] * 2 - x[:, 1:2]
    return (x[:500], y[:500]), (x[500:], y[500:])

outcome = mpisgd.train(
    model=make_model, loss=nn.functional.mse_loss, data=make_data,
    config={"epochs": 20, "alpha0": 0.005, "out": "mine", "protocol": {"name": "softsync", "n": 2}, "log": {"progress": "off"}},
)
assert not outcome.diverged
assert outcome.samples[0] >= 10_000
"""


def test_own_model_loss_and_data(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT)
    done = launch(3, "mine.py", cwd=tmp_path, timeout_s=180)
    assert done.status == 0, done.text
    run = Run(tmp_path / "mine")
    assert run.evaluations["loss"][-1] < 0.2 * run.evaluations["loss"][0]
    state = torch.load(tmp_path / "mine" / "weights.pt", weights_only=True)["theta"]
    model = torch.nn.Sequential(torch.nn.Linear(5, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    model.load_state_dict(state)


def test_a_users_script_fails_as_safely_as_the_command(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT.replace("y = x[:, :1] * 2", "y = x[:, :7].no_such_thing * 2"))
    done = launch(3, "mine.py", cwd=tmp_path, timeout_s=180)
    assert done.status != 0
    assert "no_such_thing" in done.text
