"""A user's own script: model, loss and data as Python objects (DESIGN 7)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mpisgd.comm.mpi.launch import environment
from mpisgd.records.log.reader import Run

from .conftest import launch

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
    config={"epochs": 10, "alpha0": 0.005, "out": "mine", "protocol": {"name": "softsync", "n": 1}, "log": {"progress": "off"}},
)
assert not outcome.diverged
assert outcome.samples[0] >= 5_000
"""


@pytest.mark.slow
def test_a_users_script_fails_as_safely_as_the_command(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT.replace("y = x[:, :1] * 2", "y = x[:, :7].no_such_thing * 2"))
    done = launch(2, "mine.py", cwd=tmp_path, timeout_s=180)
    assert done.status != 0
    assert "no_such_thing" in done.text


GUARDED = SCRIPT.replace("outcome = ", 'if __name__ == "__main__":\n  outcome = ').replace("\nassert", "\n  assert")


DECAYED = """
import sys
import torch
from torch import nn
import mpisgd

def plain():
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))

def hooked():
    model = plain()
    for each in model.parameters():
        each.register_hook(lambda gradient, weights=each: gradient.add(weights, alpha=0.05))
    return model

def make_data():
    x = torch.randn(240, 5, generator=torch.Generator().manual_seed(0))
    return (x[:200], (x[:200, 0] > 0).long()), (x[200:], (x[200:, 0] > 0).long())

def run(out, model, decay, **protocol):
    config = {"epochs": 4, "mu": 4, "alpha0": 0.05, "optimizer": {"name": "sgd", "momentum": 0.9, "weight_decay": decay}}
    config |= {"seed": 7, "out": out, "protocol": protocol, "log": {"progress": "off"}}
    mpisgd.train(model=model, data=make_data, config=config)

if __name__ == "__main__":
    run("stale", plain, 0.05, name="softsync", n=2)
    print("-- from here on", file=sys.stderr, flush=True)
    run("hooked", hooked, 0.0, name="softsync", n=2)
    run("sync", plain, 0.05, name="hardsync")
    run("hooked-sync", hooked, 0.0, name="hardsync")
"""


@pytest.mark.slow
def test_decay_is_warned_of_once_and_may_be_part_of_the_gradients(tmp_path: Path) -> None:
    (tmp_path / "decayed.py").write_text(DECAYED)
    done = launch(4, "decayed.py", cwd=tmp_path, timeout_s=180)
    assert done.status == 0, done.text
    assert done.text.count("staleness weights gradients, and not weight decay") == 1, done.text
    sync, hooked = (torch.load(tmp_path / name / "weights.pt", weights_only=True)["theta"] for name in ("sync", "hooked-sync"))
    for name, tensor in sync.items():
        torch.testing.assert_close(hooked[name], tensor, rtol=1e-4, atol=1e-6)
    words = [sys.executable, "-m", "mpisgd", "replay", "hooked", "--trust"]
    again = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "not weight decay" not in again.stderr


@pytest.mark.slow
def test_own_model_loss_and_data_and_how_replay_is_brought_them(tmp_path: Path) -> None:
    """Replay says it in a line that works, and from anywhere."""
    (tmp_path / "mine.py").write_text(GUARDED)
    done = launch(2, "mine.py", cwd=tmp_path, timeout_s=180)
    assert done.status == 0, done.text
    run = Run(tmp_path / "mine")
    assert run.evaluations["loss"][-1] < 0.2 * run.evaluations["loss"][0]
    state = torch.load(tmp_path / "mine" / "weights.pt", weights_only=True)["theta"]
    model = torch.nn.Sequential(torch.nn.Linear(5, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    model.load_state_dict(state)
    assert run.config["model"] == {"name": "custom", "factory": "mine:make_model", "kwargs": {}}
    assert run.config["data"]["factory"] == "mine:make_data"
    assert run.config["loss"] == "mse_loss"
    assert run.environment["brought"]["data"]["file"] == str(tmp_path / "mine.py")
    (tmp_path / "elsewhere").mkdir()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

    def shell(command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            shell=True,
            cwd=tmp_path / "elsewhere",
            env=environment() | {"PATH": path},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    refused = shell(f"mpisgd replay {run.path}")
    assert refused.returncode == 2, refused.stdout
    said = [line for line in refused.stderr.splitlines() if "mpisgd replay /" in line]
    assert len(said) == 1, refused.stderr
    proven = shell(said[0])
    assert "identical: theta, 113 parameters, bit for bit" in proven.stdout, proven.stdout + proven.stderr


NOTEBOOK = """
import mpisgd
from torch import nn

calls = 0

def loss(output, target):
    global calls
    calls += 1
    if calls == 5:
        raise KeyError("mine")
    return nn.functional.cross_entropy(output, target)

def nothing():
    raise ZeroDivisionError

config = {"epochs": 0.5, "out": "run", "overwrite": True, "model": "softmax", "protocol": "allreduce", "log": {"progress": "off"}}
for objects in ({"data": nothing}, {"loss": loss}, {"model": nn.ReLU}):
    try:
        mpisgd.train(**objects, config=config)
    except Exception as error:
        print("caught", type(error).__name__)
print("then diverged:", mpisgd.train(loss=loss, config=config).diverged)
"""


def test_a_process_by_itself_outlives_its_users_errors(tmp_path: Path) -> None:
    """A notebook: what is wrong before the start, in the middle of a run, and what is refused; then a run in the same directory."""
    (tmp_path / "notebook.py").write_text(NOTEBOOK)
    command = [sys.executable, "notebook.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["caught ZeroDivisionError", "caught KeyError", "caught AgreedError", "then diverged: False"]
