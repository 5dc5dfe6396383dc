"""Evaluations count what a torch loop counts: batches of the test DataLoader, targets that are not ignored, sums by the sample."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from mpisgd.base.errors import DivergenceError, in_words
from mpisgd.job.parts import UserObjects
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from mpisgd.simulate import simulate
from tests.torch_law.data import Batches, whole
from tests.torch_law.habits import FrozenStatistics
from tests.torch_law.law import Idiom, vectors
from tests.torch_law.losses import with_ignored


def net() -> nn.Module:
    return nn.Linear(8, 2)


def evaluated(idiom: Idiom, out: Path, **changes: Any) -> tuple[Any, nn.Module]:
    """The last row of `evaluations`, and the model of the end."""
    config = Idiom(idiom.model, config={**idiom.config, **changes}).made(out)
    simulate(config, idiom.user_objects)
    model = idiom.model()
    model.load_state_dict(torch.load(out / schema.WEIGHTS, weights_only=True)["theta"])
    return Run(out).evaluations[-1], model.eval()


@pytest.mark.parametrize("batch", [5, 500])
def test_ignored_targets_do_not_count(batch: int, tmp_path: Path) -> None:
    (x, y), _ = vectors()
    ignored = y.clone()
    ignored[::3] = -100
    ignored[:5] = -100  # a whole batch of 5
    idiom = Idiom(net, data=lambda: (with_ignored()[0], (x, ignored)))
    row, model = evaluated(idiom, tmp_path / "run", evaluation={"batch": batch})
    counts = ignored != -100
    assert row["error"] == pytest.approx(float((model(x).argmax(1) != y)[counts].float().mean()))
    assert row["loss"] == pytest.approx(float(functional.cross_entropy(model(x), ignored)), rel=1e-5)


@pytest.mark.parametrize("batch", [5, 500])
@pytest.mark.parametrize("by_step", [False, True])
def test_a_summed_loss_is_shown_by_the_sample(by_step: bool, batch: int, tmp_path: Path) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target, reduction="sum")

    how: dict[str, Any] = {"step": lambda model, each: loss(model(each[0]), each[1])} if by_step else {"loss": loss}
    row, model = evaluated(Idiom(net, **how), tmp_path / "run", evaluation={"batch": batch}, alpha0=0.01)
    x, y = vectors()[1]
    assert row["loss"] == pytest.approx(float(loss(model(x), y)) / len(x), rel=1e-5)


def test_a_dataset_of_whole_batches_is_evaluated_whole(tmp_path: Path) -> None:
    data = tuple(DataLoader(Batches(n), batch_size=1, collate_fn=whole) for n in (20, 7))
    idiom = Idiom(net, data=data, step=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]), config={"mu": 1})
    row, model = evaluated(idiom, tmp_path / "run")
    losses = [functional.cross_entropy(model(x), y) for x, y in map(Batches(7).__getitem__, range(7))]
    assert row["loss"] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-5)


@pytest.mark.parametrize("buffers", ["recalibrate", "initial"])
def test_frozen_statistics_are_those_that_it_was_trained_with(buffers: str, tmp_path: Path) -> None:
    row, model = evaluated(Idiom(FrozenStatistics), tmp_path / "run", evaluation={"buffers": buffers})
    x, y = vectors()[1]
    assert torch.equal(model.norm.running_mean, FrozenStatistics().norm.running_mean)
    assert row["loss"] == pytest.approx(float(functional.cross_entropy(model(x), y)), rel=1e-5)


def test_a_mini_batch_of_ignored_targets_is_told_apart_from_divergence(tmp_path: Path) -> None:
    (x, y), test = vectors()
    config = Idiom(net).made(tmp_path / "run")
    some = torch.arange(64) < 12  # no mini-batch of 8 but some has none of these
    data = lambda: ((x, torch.where(some, y, torch.full_like(y, -100))), test)  # noqa: E731
    with pytest.raises(DivergenceError, match="the loss is not finite, the gradient is: are all targets"):
        simulate(config, UserObjects(model=net, data=data))


class FailsAtLast(Dataset[Any]):
    """Whose last sample cannot be read, by now."""

    def __init__(self) -> None:
        (self.x, self.y), _ = vectors(16)

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        if index == 15:
            raise OSError("the disk of sample 15 is gone")
        return self.x[index], self.y[index]


def test_an_evaluation_that_fails_loses_no_weights(tmp_path: Path) -> None:
    idiom = Idiom(net, data=lambda: (vectors()[0], FailsAtLast()))
    with pytest.raises(OSError, match="sample 15") as failed:
        simulate(idiom.made(tmp_path / "run"), idiom.user_objects)
    assert "the last parameters are in" in "".join(failed.value.__notes__)
    saved = torch.load(tmp_path / "run" / schema.WEIGHTS, weights_only=True)["theta"]
    assert set(saved) == {"weight", "bias"}
    assert not torch.equal(saved["weight"], torch.zeros(2, 8))


def test_a_factory_that_changes_the_directory_moves_no_path_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)

    def data() -> Any:
        os.chdir("elsewhere")
        return vectors()

    simulate(Idiom(lambda: nn.Linear(8, 2)).made(Path("run")), UserObjects(model=lambda: nn.Linear(8, 2), data=data))
    assert (tmp_path / "run" / schema.DONE).exists()
    told = capfd.readouterr().err
    assert f"data: the factory changed the current directory to {tmp_path / 'elsewhere'}; mpisgd went back to {tmp_path}, " in told


def test_an_error_that_says_nothing_is_told_by_its_line() -> None:
    try:
        next(iter(()))
    except StopIteration as error:
        assert re.fullmatch(r"StopIteration at .*test_numbers_shown.py:\d+, `next\(iter\(\(\)\)\)`", in_words(error))
    assert in_words(ValueError("no")) == "ValueError: no"
