"""Groups of real ranks that are all at work on the same layer, every way to send and wait: laws, replay, and what ends a job."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mpisgd import replay
from mpisgd.config import Part, config_file
from mpisgd.job import parts
from mpisgd.job.parts import NO_OBJECTS
from mpisgd.models.partition import Partition
from mpisgd.records.log.reader import Run

from . import laws
from .conftest import Shared, dealt, jobs_of, launch


class Own(nn.Module):
    """Columns that are gathered, rows that are summed; batch norm and dropout of own units."""

    def __init__(self, partition: Partition) -> None:
        super().__init__()
        self.partition, units = partition, len(partition.share(24))
        self.first = nn.Sequential(nn.Linear(64, units), nn.BatchNorm1d(units), nn.ReLU(), nn.Dropout(0.2))
        self.second = nn.Linear(24, units)
        self.last = nn.Linear(units, 10, bias=partition.place == 0)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        gathered = self.partition.gather(self.first(images.flatten(1)))
        return self.partition.sum(self.last(torch.relu(self.second(gathered))))


LOCAL = {"model": {"name": "local", "channels": [2, 3]}, "group_form": "partition"}
SPEECH = {"model": {"name": "speech", "hidden": [20, 16, 18]}, "group_form": "partition"}
OWN = {"model": {"name": f"{__name__}:Own"}, "group_form": "partition"}
#: name -> (ranks, what differs from COMMON)
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "local-hardsync": (6, {**LOCAL, "protocol": "hardsync", "group_size": 3, "shards": 3, "epochs": 0.1, "local_steps": 2}),
    "own-softsync": (6, {**OWN, "protocol": {"name": "softsync", "n": 1}, "group_size": 2, "shards": 2, "micro_batches": 2}),
    "own-averaged": (
        5,
        {
            **OWN,
            "protocol": "hardsync",
            "group_size": 2,
            "shards": 2,
            "averaging": 0.9,
            "evaluator": True,
            "evaluation": {"every_epochs": 0.1, "train": True},
        },
    ),
    "speech-backup": (
        8,
        {**SPEECH, "protocol": {"name": "backup", "b": 1}, "group_size": 2, "shards": 2}
        | {"straggler": {"delay": "exponential", "delay_mean_s": 0.003}},
    ),
    "speech-versioned": (8, {**SPEECH, "protocol": {"name": "versioned", "grads_to_wait": 1}, "group_size": 4, "shards": 4}),
    "large-async-autocast": (
        6,
        {"model": {"name": "speech", "hidden": [700, 700]}, "group_form": "partition", "protocol": "async", "group_size": 3}
        | {"shards": 3, "epochs": 0.05, "mu": 32, "autocast": "bfloat16", "alpha0": 0.01},
    ),
}
COMMON = {"epochs": 0.2, "mu": 8, "threads": 1, "evaluation": {"every_epochs": 0.0}, "log": {"progress": "off"}}
CASES = dealt(RUNS, always=("local-hardsync", "own-softsync", "own-averaged"))
SHARED = Shared(CASES, jobs_of(RUNS, COMMON))


@pytest.mark.deeper
@pytest.mark.parametrize(("switch", "name"), CASES)
def test_laws_and_replay(runs: Path, switch: str, name: str) -> None:
    run = Run(runs / switch / name)
    laws.hold(run, again="versioned" in name)
    assert replay.check(run.path, trust=True) == ""
    assert [len(group) for group in run.environment["groups"]] == [RUNS[name][1]["group_size"]] * run.lambda_
    assert (run.pushes["neighbour_s"] > 0).all()


@pytest.mark.deeper
@pytest.mark.parametrize(("switch", "name"), CASES)
def test_a_group_evaluates_to_the_bits_of_the_whole_model(runs: Path, switch: str, name: str) -> None:
    """Weights and statistics of all pieces are in one file; with them one process comes to the last evaluation of the log."""
    run = Run(runs / switch / name)
    config = config_file.of_run(run.path)
    data = parts.load_data(config, NO_OBJECTS)
    meta, loss = parts.meta_of(data), parts.load_loss(config, NO_OBJECTS)
    model = parts.build_model(config, meta, NO_OBJECTS)
    measure, rows = parts.make_measure(config, model, loss, data), run.evaluations
    states = torch.load(run.path / "weights.pt", weights_only=True)
    assert list(states) == ["theta", "thetabar"][: 1 + ("averaged" in name)]
    for averaged, state in enumerate(states.values()):
        assert set(state) == set(model.module.state_dict())
        model.module.load_state_dict(state)
        for train in (False, True)[: 1 + bool(rows["train"].any())]:
            last = rows[(rows["averaged"] == averaged) & (rows["train"] == train)][-1]
            found = measure.of(Part(train))
            assert (found.loss, found.error) == (last["loss"], last["error"])


MINE = """\
import sys
import torch, mpisgd
class Odd(torch.nn.Module):
    "From its third training pass on, one piece makes a call more than the other."
    def __init__(self, partition):
        super().__init__()
        self.layer, self.partition, self.calls = torch.nn.Linear(64, 10), partition, 0
    def forward(self, inputs):
        self.calls += self.training and torch.is_grad_enabled()
        output = self.layer(inputs.flatten(1))
        odd = self.calls > 2 and self.partition.place == 1
        output = self.partition.sum(output)
        return self.partition.sum(output) if odd and sys.argv[1] == "calls" else output
config = {"epochs": 1.0, "mu": 8, "threads": 1, "shards": 2, "group_size": 2, "group_form": "partition", "out": "run"}
mpisgd.train(model=Odd, config={**config, "log": {"progress": "off"}})
"""


@pytest.mark.slow
def test_pieces_that_go_apart_end_the_job_on_all_ranks(tmp_path: Path) -> None:
    done = launch(4, "-c", MINE, "calls", cwd=tmp_path)
    assert done.status != 0
    wanted = (
        r"PeerError: rank \d is at call \d of its partition, \w+, in .* of mini-batch 2, expected .*: all pieces of a model make"
    )
    assert re.search(wanted, done.text), done.text
