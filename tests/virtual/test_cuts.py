"""One model cut in each way: the bits of one rank, of a loop over micro-batches, replay, and what the run's config.toml says."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mpisgd import replay
from mpisgd.base.draws import seeded, seeds_of
from mpisgd.base.errors import ConfigError
from mpisgd.base.streams import Domain
from mpisgd.config import config_file
from mpisgd.job.parts import UserObjects
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from mpisgd.simulate import simulate
from tests import cut_models
from tests.effort import spread
from tests.virtual.jobs import config, simulated
from tests.virtual.test_optimisers import JOB, LEARNERS, MU, SEED, accumulated

UPDATES = 4
SOME = {**JOB, "epochs": UPDATES * LEARNERS * MU / 1437, "evaluation": {**JOB.get("evaluation", {}), "buffers": "recalibrate"}}
WAYS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "by parameters": (cut_models.sequential, {"group_size": 3, "shards": 4}),
    "by seconds": (cut_models.sequential, {"group_size": 2, "shards": 2, "stages": {"balance": "seconds"}}),
    "by children": (cut_models.sequential, {"group_size": 3, "shards": 3, "stages": {"at": ["1", "3"]}}),
    "a list": (cut_models.listed, {"group_size": 4, "shards": 4}),
    "a list by seconds": (cut_models.listed, {"group_size": 3, "shards": 5, "stages": {"balance": "seconds"}}),
    "names": (cut_models.whole, {"group_size": 2, "shards": 3, "stages": {"at": list(cut_models.AT[2])}}),
    "names, over stages": (cut_models.whole, {"group_size": 4, "shards": 4, "stages": {"at": list(cut_models.AT[4])}}),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, bytes]]:
    """The last weights of a run in which each learner is one rank, in so many micro-batches."""
    found: dict[int, dict[str, bytes]] = {}

    def of(parts: int) -> dict[str, bytes]:
        if parts not in found:
            path = tmp_path_factory.mktemp("alone") / "run"
            simulated(path, SOME, UserObjects(model=cut_models.whole), shards=2, micro_batches=parts)
            found[parts] = cut_models.state_of(path / schema.WEIGHTS)
        return found[parts]

    return of


@pytest.mark.parametrize(("parts", "way"), spread(itertools.product([2, 1], reversed(WAYS)), 14, unpack=True))
def test_each_cut_has_the_bits_of_one_rank(way: str, parts: int, alone: Any, tmp_path: Path) -> None:
    model, changes = WAYS[way]
    simulated(tmp_path / "run", SOME, UserObjects(model=model), **changes, micro_batches=parts)
    assert cut_models.state_of(tmp_path / "run" / schema.WEIGHTS) == alone(parts)
    assert replay.replay(tmp_path / "run", UserObjects(model=model)).holds


def test_one_rank_is_a_loop_over_micro_batches(alone: Any) -> None:
    """In plain torch: so all of the above are."""
    parts = 2
    with seeded(seeds_of(Domain.MODEL, SEED)._replace(torch=SEED)):
        model = cut_models.whole()
    accumulated(model, parts, UPDATES)
    for name, parameter in model.named_parameters():
        found = torch.frombuffer(bytearray(alone(parts)[name]), dtype=torch.float32).view_as(parameter)
        torch.testing.assert_close(found, parameter.detach(), rtol=2e-5, atol=2e-6)


def test_a_measured_cut_is_in_the_record(alone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that whatever reads it cuts alike, and measures nothing; the bits are those of one rank, too."""
    monkeypatch.setattr("mpisgd.pipeline.balance._seconds", lambda *_: [1.0, 1.0, 1.0, 5.0])
    changes: dict[str, Any] = {"group_size": 2, "shards": 3, "stages": {"balance": "seconds"}, "micro_batches": 2}
    run = simulated(tmp_path / "run", SOME, UserObjects(model=cut_models.sequential), **changes)
    assert cut_models.state_of(run.path / schema.WEIGHTS) == alone(2)
    assert (run.config["stages"]["at"], run.config["stages"]["balance"]) == (["3"], "seconds")
    monkeypatch.setattr("mpisgd.pipeline.balance._seconds", lambda *_: [5.0, 1.0, 1.0, 1.0])
    assert replay.replay(tmp_path / "run", UserObjects(model=cut_models.sequential)).holds
    again = config_file.read(tmp_path / "run" / schema.CONFIG)
    assert again.stages.at == ("3",)


def test_sizes_alone_are_cut_alike(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"group_size": 2, "shards": 2, "stages": {"at": ["blocks.1"]}, "virtual": {"gradients": False}}
    run = simulated(tmp_path / "run", SOME, UserObjects(model=cut_models.whole), **changes)
    assert Run(run.path).environment["stages"] == [[0], [1]]


@pytest.mark.parametrize(
    ("model", "changes", "refused"),
    [
        (cut_models.Fickle, {"at": ["second"]}, "torch's splitter cannot trace the Fickle.* or let the factory return a list"),
        (cut_models.whole, {"at": ["blocks.0", "blocks.1"]}, "expected 1 names for group_size = 2"),
        (cut_models.whole, {}, "the model is a Whole: expected .*; or stages.at"),
        (cut_models.whole, {"balance": "seconds"}, "the model is a Whole: expected .*; or stages.at"),
        (lambda: [nn.Flatten, lambda: nn.Linear(64, 8), lambda: nn.Linear(8, 10)], {"at": ["1.0"]}, "the model has no child '1.0'"),
    ],
)
def test_cuts_that_cannot_be_are_refused(model: Any, changes: dict[str, Any], refused: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=refused):
        simulate(config(tmp_path / "run", SOME, group_size=2, shards=2, stages=changes), UserObjects(model=model))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("stages", [{"at": ["1"]}, {"balance": "seconds"}])
def test_one_rank_is_not_cut(stages: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="beside group_size = 1: one rank alone has the whole model"):
        simulate(config(tmp_path / "run", SOME, stages=stages), UserObjects(model=cut_models.sequential))
