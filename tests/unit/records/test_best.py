"""The best weights by an evaluation: which they are, how they are kept, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mpisgd import open_run
from mpisgd.__main__ import main
from mpisgd.base.errors import CheckpointError, ConfigError, DataError
from mpisgd.config import EvaluationOptions, Part
from mpisgd.job import parts
from mpisgd.job.parts import NO_OBJECTS, UserObjects
from mpisgd.records import weights
from mpisgd.records.best import Best, is_better
from mpisgd.simulate import simulate
from tests.virtual.jobs import SIZES, TENSORS, config, simulated

LOSS = EvaluationOptions(best="loss")
#: The last evaluation is not the best: the rate is far too large.
WILD = {**TENSORS, "alpha0": 0.9, "epochs": 5}


def row(loss: float, *, snapshot: int = 0, averaged: int = 0, train: int = 0) -> dict[str, Any]:
    return {"snapshot": snapshot, "averaged": averaged, "train": train, "loss": loss}


def state(number: float) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor([number])}


@pytest.mark.parametrize(
    ("options", "value", "than", "by", "better"),
    [
        (LOSS, 1.0, 2.0, 0.0, True), (LOSS, 2.0, 2.0, 0.0, False), (LOSS, 3.0, 2.0, 0.0, False), (LOSS, 1.5, 2.0, 0.5, False),
        (LOSS, 1.25, 2.0, 0.5, True), (LOSS, math.nan, 2.0, 0.0, False), (LOSS, math.nan, math.nan, 0.0, False),
        (LOSS, 9.0, math.nan, 0.5, True), (EvaluationOptions(best="loss", higher=True), 3.0, 2.0, 0.5, True),
        (EvaluationOptions(best="loss", higher=True), 1.0, 2.0, 0.0, False),
    ],
)  # fmt: skip
def test_what_is_better(options: EvaluationOptions, value: float, than: float, by: float, better: bool) -> None:
    assert is_better(options, value, than, by) == better


def test_the_best_on_test_data_of_weights_or_average_is_kept_and_a_later_one_betters_it(tmp_path: Path) -> None:
    path = tmp_path / "best.pt"

    def kept() -> tuple[float, int, int]:
        found = weights.read_best(path)
        assert found["evaluation"]["by"] == "loss"
        return found["weights"]["w"].item(), found["evaluation"]["snapshot"], found["evaluation"]["averaged"]

    both = {"theta": state(1), "thetabar": state(2)}
    best = Best(LOSS, path)
    best.offer([row(math.nan)], both)
    assert not path.exists(), "of nothing that has a value"
    best.offer([row(0.1, train=1), row(3.0), row(2.0, averaged=1)], both)
    assert kept() == (2, 0, 1)
    best.offer([row(2.0, snapshot=1)], {"theta": state(3)})
    assert kept() == (2, 0, 1), "not better: the first of equals"
    again = Best(LOSS, path)  # of a run that goes on
    again.offer([row(2.5, snapshot=1)], {"theta": state(4)})
    assert kept() == (2, 0, 1)
    again.offer([row(1.0, snapshot=2)], {"theta": state(5)})
    assert kept() == (5, 2, 0)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["best.pt"], "nothing is left aside"


def test_a_file_that_is_none_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "best.pt"
    torch.save({"w": torch.zeros(1)}, path)
    with pytest.raises(CheckpointError, match="no file of best weights: expected weights and evaluation, found w"):
        Best(LOSS, path)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("best") / "run"
    return simulated(path, WILD, evaluation={"best": "loss", "every_epochs": 0.5}).path


def test_a_run_keeps_the_weights_that_its_log_says_were_best(run: Path, tmp_path: Path) -> None:
    """Exported, and evaluated again, they come to the loss of the best row, which is not the last one."""
    rows = open_run(run)._run.evaluations
    assert rows["loss"].min() < rows["loss"][-1]
    out = tmp_path / "best.pt"
    assert main(["export", str(run), str(out), "--best"]) == 0
    made = config(tmp_path / "unused", WILD, init_from=str(out))
    data, loss = parts.load_data(made, NO_OBJECTS), parts.load_loss(made, NO_OBJECTS)
    model = parts.build_model(made, parts.meta_of(data), NO_OBJECTS)
    assert parts.make_measure(made, model, loss, data).of(Part.TEST).loss == rows["loss"].min()
    told = weights.read_best(run / "best.pt")["evaluation"]
    assert told["snapshot"] == rows["snapshot"][rows["loss"].argmin()]
    for found in (open_run(run).weights(best=True), weights.read(run / "best.pt")):
        assert torch.equal(torch.cat([each.flatten() for each in found.values()]), model.weights)


def test_a_flipped_bit_is_told_of(run: Path, tmp_path: Path) -> None:
    """DONE has the sum."""
    original = (run / "best.pt").read_bytes()
    try:
        (run / "best.pt").write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
        with pytest.raises(DataError, match=r"best\.pt is damaged"):
            open_run(run).weights(best=True)
    finally:
        (run / "best.pt").write_bytes(original)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--best", "--averaged"), "--best beside --averaged: expected only one option"),
        (("--best", "--clock", "3"), "--best beside --clock 3: expected only one option"),
    ],
)
def test_what_export_refuses(words: tuple[str, ...], said: str, run: Path, tmp_path: Path, capsys: Any) -> None:
    assert main(["export", str(run), str(tmp_path / "w.pt"), *words]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "w.pt").exists()


def test_a_run_that_kept_none(tmp_path: Path) -> None:
    other = simulated(tmp_path / "run", TENSORS).path
    with pytest.raises(CheckpointError, match=r"has no best.pt: a run keeps the best weights with --evaluation.best error"):
        open_run(other).weights(best=True)


def regression() -> tuple[Any, Any]:
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    return (x, x[:, :3]), (x[:8], x[:8, :3])


def without_test_data() -> tuple[Any, Any]:
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    y = x[:, :3].argmax(dim=1)
    return (x, y), (x[:0], y[:0])


@pytest.mark.parametrize(
    ("user_objects", "changes", "said"),
    [
        (
            NO_OBJECTS,
            {"evaluation": {"best": "accuracy"}},
            "evaluation.best = 'accuracy': expected a metric .*: loss, error$",
        ),
        (
            UserObjects(data=regression, model=lambda: torch.nn.Linear(6, 3), loss=torch.nn.functional.mse_loss),
            {"evaluation": {"best": "error"}},
            "evaluation.best = 'error': expected a metric .*: loss$",
        ),
        (
            UserObjects(data=without_test_data, model=lambda: torch.nn.Linear(6, 3)),
            {"evaluation": {"best": "loss"}},
            "evaluation.best = 'loss': expected '' for data without test samples",
        ),
        (
            NO_OBJECTS,
            {**SIZES, "evaluation": {"best": "loss"}},
            "beside virtual.gradients = false, where nothing is evaluated",
        ),
    ],
)
def test_what_no_evaluation_finds_is_refused_before_a_run_begins(
    user_objects: UserObjects, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        simulate(config(tmp_path / "run", TENSORS, **changes), user_objects)
    assert not (tmp_path / "run").exists()
