"""Groups of real ranks, one for each stage of the model, every way to send and wait: the laws, replay, and the bits of one rank."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mpisgd import replay
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Event, Reason, Verdict

from . import laws
from .conftest import Shared, dealt, jobs_of, launch, only


class Block(nn.Module):
    """A skip connection across the border of two stages, batch norm, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Dropout(0.2)

    def forward(self, passed: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, before = passed
        return self.drop(torch.relu(self.norm(self.layer(inputs)))) + before, inputs


class Plain(nn.Module):
    """As a block, without batch norm, which has to be measured through all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(32, 32), nn.Dropout(0.2)

    def forward(self, passed: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, before = passed
        return self.drop(torch.relu(self.layer(inputs))) + before, inputs


class Begin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 32)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = self.layer(images.flatten(1))
        return output, output


class End(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 10)

    def forward(self, passed: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        output: torch.Tensor = self.layer(passed[0])
        return output


def blocks() -> list[nn.Module]:
    return [Begin(), Block(), Block(), End()]


def factories() -> list[Any]:
    """Of its pieces, each rank makes those of its stage."""
    return [Begin, *[lambda: nn.Sequential(Plain(), Plain())] * 2, End]


class Odd(nn.Module):
    """Whose backward pass gives a gradient that is not finite to its own weights alone, now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 32)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(images.flatten(1))
        if output.requires_grad and torch.rand(()) < 0.1:
            output.register_hook(lambda gradient: gradient * torch.inf)
        return output


def sometimes_infinite() -> list[nn.Module]:
    return [Odd(), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)]


OWN = {"model": {"name": f"{__name__}:blocks"}}
LATE = {"delay": "exponential", "delay_mean_s": 0.003}
CNN = {"model": "small_cnn", "evaluation": {"every_epochs": 0.2}, "averaging": 0.9}
#: name -> (ranks, what differs from COMMON)
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone-cnn": (2, {**CNN, "protocol": "hardsync"}),
    "two-cnn": (5, {**CNN, "protocol": "hardsync", "group_size": 2, "shards": 2, "evaluator": True}),
    "alone-parts": (3, {**CNN, "protocol": "hardsync", "micro_batches": 4}),
    "two-parts": (8, {**CNN, "protocol": "hardsync", "group_size": 2, "shards": 4, "micro_batches": 4}),
    "own-softsync": (
        8,
        {**OWN, "protocol": {"name": "softsync", "n": 1}, "group_size": 2, "shards": 4, "micro_batches": 2} | {"pipeline": "1f1b"},
    ),
    "own-versioned": (
        6,
        {**OWN, "protocol": {"name": "versioned", "grads_to_wait": 1}, "group_size": 2, "shards": 2, "epochs": 0.3}
        | {"straggler": LATE, "micro_batches": 4},
    ),
    "factories": (
        8,
        {"model": {"name": f"{__name__}:factories"}, "protocol": "hardsync", "group_size": 2, "shards": 4, "micro_batches": 2}
        | {"evaluation": {"every_epochs": 0.2, "train": True}, "averaging": 0.9},
    ),
    "backup": (8, {"protocol": {"name": "backup", "b": 1}, "group_size": 2, "shards": 2, "straggler": LATE}),
    "downpour": (6, {"protocol": {"name": "downpour", "n_push": 2, "n_fetch": 4}, "group_size": 2, "shards": 2, "alpha0": 0.01}),
    "agreed": (
        8,
        {"model": {"name": f"{__name__}:sometimes_infinite"}, "protocol": {"name": "softsync", "n": 2}, "group_size": 2}
        | {"shards": 4, "micro_batches": 2, "clip_norm": 0.5, "nonfinite": "drop", "push_format": "bfloat16"}
        | {"pull_format": "bfloat16"},
    ),
    "given-up": (
        6,
        {"protocol": {"name": "backup", "b": 1, "abort": True}, "group_size": 2, "shards": 2, "push_format": "bfloat16"}
        | {"straggler": {"delay": "exponential", "delay_mean_s": 0.02}, "micro_batches": 4, "pipeline": "1f1b"},
    ),
    "own-steps": (6, {"protocol": "hardsync", "local_steps": 2, "group_size": 2, "shards": 2, "alpha0": 0.7, "clip_norm": 1.0}),
    "large-async-autocast": (
        4,
        {"model": {"name": "mlp", "hidden": [1200, 1200]}, "protocol": "async", "group_size": 2, "shards": 2, "epochs": 0.1}
        | {"micro_batches": 2, "autocast": "bfloat16", "alpha0": 0.01},
    ),
}
COMMON = {"epochs": 0.3, "mu": 8, "threads": 1, "evaluation": {"every_epochs": 0.0}, "log": {"progress": "off"}}
CASES = dealt(RUNS, once=("alone-cnn", "alone-parts"), always=("alone-cnn", "two-cnn", "own-versioned", "given-up"))
SHARED = Shared(CASES, jobs_of(RUNS, COMMON))


@pytest.mark.deeper
@pytest.mark.parametrize(("switch", "name"), CASES)
def test_laws_and_replay(runs: Path, switch: str, name: str) -> None:
    run = Run(runs / switch / name)
    laws.hold(run, again="versioned" in name, own_steps=name == "downpour")
    assert replay.check(run.path, trust=True) == ""
    size = RUNS[name][1].get("group_size", 1)
    groups = run.environment.get("groups", [])
    assert [len(group) for group in groups] == [size] * (run.lambda_ if size > 1 else 0)
    ranks = [*run.environment["shard_ranks"], *(rank for group in groups for rank in group)]
    assert size == 1 or sorted(ranks) == list(range(RUNS[name][0] - (run.environment["evaluator_rank"] >= 0)))


@pytest.mark.deeper
@pytest.mark.parametrize(("switch", "name"), only(CASES, "agreed"))
def test_a_part_that_is_not_finite_is_dropped_by_the_shards_of_all_stages(runs: Path, switch: str, name: str) -> None:
    run = Run(runs / switch / name)
    bad = run.pushes[run.pushes["reason"] == Reason.NONFINITE]
    assert len(bad)
    assert np.isnan(bad["loss"]).all()
    for learner_id, seq in set(bad[["learner_id", "seq"]].tolist()):
        rows = run.pushes[(run.pushes["learner_id"] == learner_id) & (run.pushes["seq"] == seq)]
        assert sorted(rows["shard"]) == [0, 1, 2, 3]
        # a push that comes after a shard's own last update is late there, finite or not
        assert set(rows[["verdict", "reason"]].tolist()) <= {(Verdict.DROP, Reason.NONFINITE), (Verdict.LATE, Reason.FINISHED)}


@pytest.mark.deeper
@pytest.mark.parametrize(("switch", "name"), only(CASES, "given-up"))
def test_a_group_gives_up_as_one(runs: Path, switch: str, name: str) -> None:
    events = Run(runs / switch / name).events
    given_up = events[events["kind"] == Event.GAVE_UP]
    told = [given_up[given_up["shard"] == shard][["learner_id", "value"]].tolist() for shard in range(2)]
    assert len(told[0])
    assert sorted(told[0]) == sorted(told[1])


@pytest.mark.deeper
@pytest.mark.parametrize(("switch", "name"), only(CASES, "two"))
def test_two_stages_have_the_bits_of_one_rank(runs: Path, switch: str, name: str) -> None:
    ours, theirs = (runs / where for where in (f"{switch}/{name}", f"ssend/{name.replace('two', 'alone')}"))
    states = [torch.load(path / schema.WEIGHTS, weights_only=True) for path in (ours, theirs)]
    for vector, state in states[0].items():
        for key, value in state.items():
            assert value.numpy().tobytes() == states[1][vector][key].numpy().tobytes()
    columns = ["clock_min", "averaged", "train", "loss", "error"]
    assert Run(ours).evaluations[columns].tolist() == Run(theirs).evaluations[columns].tolist()


MINE = """\
import sys
from mpi4py import MPI
import torch, mpisgd
class Odd(torch.nn.Module):
    "Passes on another type from its third mini-batch on, which no stage can be sent."
    def __init__(self):
        super().__init__()
        self.layer, self.calls = torch.nn.Linear(64, 8), 0
    def forward(self, inputs):
        self.calls += 1
        output = self.layer(inputs.flatten(1))
        return output if self.calls < 4 else {"output": output}
config = {"epochs": 1.0, "mu": 8, "threads": 1, "shards": 2, "group_size": int(sys.argv[1]), "out": "run"}
mpisgd.train(model=lambda: [Odd(), torch.nn.Linear(8, 10)], config={**config, "log": {"progress": "off"}})
"""


@pytest.mark.parametrize(
    ("ranks", "size", "refused"),
    [
        (4, 2, "ConfigError: stage 0 of the model returned dict, expected a tensor or a tuple of tensors"),
        pytest.param(
            *(5, 2, "ConfigError: group_size = 2: 3 computing ranks do not divide into groups of 2: expected 2 or 4 ranks"),
            marks=pytest.mark.rare,
        ),
        pytest.param(
            *(6, 3, "ConfigError: shards = 2: expected at least group_size = 3, one for each stage of the model"),
            marks=pytest.mark.rare,
        ),
    ],
)
@pytest.mark.slow
def test_a_job_that_cannot_be_ends_on_all_ranks(ranks: int, size: int, refused: str, tmp_path: Path) -> None:
    done = launch(ranks, "-c", MINE, str(size), cwd=tmp_path)
    assert done.status != 0
    assert re.search(re.escape(refused), done.text), done.text
