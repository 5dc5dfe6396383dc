"""Teams of real ranks in shared memory, every way to send and wait: the laws, replay, the bits of hardsync, and fewer bytes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mpisgd import replay
from mpisgd.job.parts import UserObjects
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Verdict

from . import laws
from .conftest import Shared, dealt, launch, only

STRAGGLERS = {"delay": "exponential", "delay_mean_s": 0.003}
LATE = {"delay": "exponential", "delay_mean_s": 0.01}
LAST_LATE = {"delay": "constant", "delay_mean_s": 0.01, "slowdown": {"4": 3.0}}
"""A team is late, however the ranks come to a core: any of them; that of learner 4 alone."""
#: name -> (ranks, sizes of the teams that come out; none = each learner alone, what differs from COMMON)
RUNS: dict[str, tuple[int, list[int], dict[str, Any]]] = {
    "alone-S2": (6, [], {"shards": 2, "model": "small_cnn", "averaging": 0.9, "evaluation": {"every_epochs": 0.2}}),
    "one-S2": (6, [4], {"shards": 2, "model": "small_cnn", "averaging": 0.9, "evaluation": {"every_epochs": 0.2}}),
    "two-S2": (6, [2, 2], {"team_size": 2, "shards": 2, "linear_scaling": True, "alpha0": 0.005}),
    "uneven": (6, [3, 2], {"team_size": 3, "optimizer": "adam", "alpha0": 0.002}),
    "evaluator": (7, [2, 2, 1], {"team_size": 2, "evaluator": True, "evaluation": {"every_epochs": 0.2, "train": True}}),
    "backup": (8, [2, 2, 2], {"team_size": 2, "shards": 2, "protocol": {"name": "backup", "b": 1}, "straggler": LATE}),
    "backup-late": (
        6,
        [2, 2, 1],
        {"team_size": 2, "protocol": {"name": "backup", "b": 1}, "nonfinite": "drop", "straggler": LAST_LATE},
    ),
    "timeout": (6, [2, 2, 1], {"team_size": 2, "protocol": {"name": "timeout", "timeout_s": 0.002}}),
    "large": (4, [3], {"team_size": 0, "model": {"name": "mlp", "hidden": [1200, 1200]}, "epochs": 0.05}),
}
TEAMS = [name for name in RUNS if RUNS[name][1]]
COMMON = {"epochs": 0.5, "mu": 8, "threads": 1, "evaluation": {"every_epochs": 0.0}, "log": {"progress": "off"}}


def job(directory: Path, name: str) -> dict:
    ranks, sizes, special = RUNS[name]
    config = {**COMMON, "protocol": "hardsync", **special, "out": str(directory / name)}
    return {"ranks": ranks, "config": {**config, "aggregation": "node"} if sizes else config}


CASES = dealt(RUNS, once=("alone-S2",), always=("alone-S2", "one-S2", "backup-late"))
SHARED = Shared(CASES, job)


@pytest.mark.deeper
@pytest.mark.parametrize(("switch", "name"), CASES)
def test_laws_and_replay(runs: Path, switch: str, name: str) -> None:
    run = Run(runs / switch / name)
    laws.hold(run)
    assert run.summaries["samples"].max() >= COMMON["epochs"] * 1437 or name == "large"
    assert not run.pushes["staleness"][run.pushes["verdict"] == Verdict.APPLY].any()
    assert replay.check(run.path, trust=True) == ""


@pytest.mark.deeper
@pytest.mark.parametrize(("switch", "name"), [(switch, name) for switch, name in CASES if name in TEAMS])
def test_pushes_count_the_ranks_of_their_teams(runs: Path, switch: str, name: str) -> None:
    run, (ranks, sizes, special) = Run(runs / switch / name), RUNS[name]
    assert [len(team) for team in run.teams] == sizes
    shards = special.get("shards", 1)
    assert [rank for team in run.teams for rank in team] == list(range(shards, ranks - special.get("evaluator", False)))
    assert run.lambda_ == len(sizes)
    assert np.array_equal(run.pushes["gradients"], np.array(sizes)[run.pushes["learner_id"]])
    assert np.array_equal(run.pushes["samples"], 8 * run.pushes["gradients"])
    if run.config["protocol"]["name"] == "hardsync":
        assert (run.updates["gradients"] == sum(sizes)).all()
        expected = special.get("alpha0", 0.05) * (sum(sizes) if special.get("linear_scaling") else 1)
        assert run.updates["learning_rate"] == pytest.approx(expected, rel=1e-15)


@pytest.mark.deeper
@pytest.mark.parametrize(("switch", "name"), only(CASES, "one"))
def test_one_team_has_the_bits_of_hardsync(runs: Path, switch: str, name: str) -> None:
    team, alone = runs / switch / name, runs / "ssend" / name.replace("one", "alone")
    ours, theirs = (torch.load(path / schema.WEIGHTS, weights_only=True) for path in (team, alone))
    assert list(ours) == list(theirs)
    for vector, state in ours.items():
        for key, value in state.items():
            assert value.numpy().tobytes() == theirs[vector][key].numpy().tobytes()
    columns = ["clock_min", "averaged", "train", "loss", "error"]
    assert Run(team).evaluations[columns].tolist() == Run(alone).evaluations[columns].tolist()


@pytest.mark.deeper
@pytest.mark.parametrize(("switch", "name"), only(CASES, "backup"))
def test_nobody_waits_for_the_slowest_team(runs: Path, switch: str, name: str) -> None:
    """Else backup shows nothing: N = 2 of 3 teams make an update."""
    run = Run(runs / switch / name)
    assert (run.pushes["verdict"] == Verdict.DROP).any()
    made = set(run.updates["gradients"].tolist())
    assert made == {4} if name == "backup" else made <= {3, 4}


# ------------------------------------------------------------------------------------- what crosses the wire, and the user's model

MINE = """\
import contextlib, socket, sys
from mpi4py import MPI
import torch, mpisgd
rank = MPI.COMM_WORLD.rank
socket.gethostname = lambda: "even" if rank % 2 == 0 else "odd"
def model():
    made.append(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)))
    return made[-1]
for name in ("none", "node"):
    made = []
    config = {"epochs": 0.2, "mu": 8, "threads": 1, "log": {"progress": "off"}, "out": name, "aggregation": name}
    with open(f"{name}-{rank}", "w") as said, contextlib.redirect_stderr(said):
        mpisgd.train(model=model, data=None, loss=None, config={**config, "evaluation": {"every_epochs": 0}})
    total = sum(float(parameter.detach().double().sum()) for parameter in made[-1].parameters())
    if rank == 1:
        saved = torch.load(name + "/weights.pt", weights_only=True)["theta"].values()
        print("the same" if total == sum(float(value.double().sum()) for value in saved) else "another")
"""


def crossed(text: str, tag: str) -> int:
    """Bytes of the slices that a run said it sent under a tag."""
    return round(sum(float(size) for size in re.findall(rf"r\d+ -> \d+ {tag} ([\d.e+-]+) MB", text)) * 1e6)


@pytest.mark.slow
def test_the_wire_carries_a_vector_for_each_team_and_the_users_model_is_whole_afterwards(tmp_path: Path) -> None:
    """Six ranks on hosts that take turns: five that compute are teams (1, 3, 5) and (2, 4)."""
    done = launch(6, "-c", MINE, cwd=tmp_path, MPISGD_MESSAGES="1")
    assert done.status == 0, done.text
    assert done.out == "the same\n" * 2, done.text
    sent = []
    for name in ("none", "node"):
        assert replay.check(tmp_path / name, UserObjects(model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))) == ""
        said = "".join((tmp_path / f"{name}-{rank}").read_text() for rank in range(6))
        sent.append([crossed(said, tag) for tag in ("PUSH", "ANSWER")])
    run = Run(tmp_path / "node")
    assert run.teams == [[1, 3, 5], [2, 4]]
    updates, nbytes = len(run.updates), 4 * 650
    assert sent[0] == [5 * updates * nbytes, 5 * updates * nbytes]
    assert sent[1] == [2 * updates * nbytes, 2 * updates * nbytes]


FAILING = """\
import sys
from mpi4py import MPI
import torch, mpisgd
from mpisgd.liveness import guard
if "MPICH" in MPI.Get_library_version():  # its launcher, where others need the core, reads the last lines late
    guard.FORWARD_S = 3.0
computed = 0
def loss(output, target):
    global computed
    computed += 1
    if MPI.COMM_WORLD.rank == int(sys.argv[2]) and computed == 5:
        raise RuntimeError("a fault put in on purpose")
    return torch.nn.functional.cross_entropy(output, target)
mpisgd.train(loss=loss, config={"out": sys.argv[1], "threads": 1, "aggregation": "node", "log": {"progress": "off"}})
"""


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "who"), [pytest.param(1, "learner 0", marks=pytest.mark.rare), (2, "member 1 of learner 0")])
def test_a_rank_that_fails_ends_the_job_by_name(rank: int, who: str, tmp_path: Path) -> None:
    done = launch(3, "-c", FAILING, str(tmp_path / "run"), str(rank), timeout_s=180)
    assert done.status != 0
    assert f"rank {rank} ({who})" in done.err, done.text
    assert "a fault put in on purpose" in done.err
    assert not (tmp_path / "run" / "DONE").exists()
