"""Torch's schedulers by name, beside a plain loop; the user's own function; and what neither may be."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from mpisgd.base.errors import ConfigError
from mpisgd.cli.options import parse
from mpisgd.config import ConstantOptions, CustomScheduleOptions, ScheduleOptions, TorchScheduleOptions, make_options
from mpisgd.config.config_file import dumps, from_mapping
from mpisgd.config.optimizers import TORCH_SCHEDULERS
from mpisgd.update import schedule
from tests.effort import spread

UPDATES, SAMPLES, TRAIN = 40, 12, 100

#: Scheduler -> its arguments here, and what a loop of PyTorch must say besides.
KWARGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ConstantLR": ({"factor": 0.25, "total_iters": 7}, {}),
    "CosineAnnealingLR": ({"eta_min": 0.125}, {"T_max": UPDATES}),
    "CosineAnnealingWarmRestarts": ({"T_0": 6, "T_mult": 2}, {}),
    "CyclicLR": ({"base_lr": 0.1, "max_lr": 1.0, "step_size_up": 5, "mode": "triangular2"}, {"cycle_momentum": False}),
    "ExponentialLR": ({"gamma": 0.9}, {}),
    "LinearLR": ({"start_factor": 0.1, "total_iters": 9}, {}),
    "MultiStepLR": ({"milestones": [4, 9, 30]}, {}),
    "OneCycleLR": ({"anneal_strategy": "linear"}, {"max_lr": 1.0, "total_steps": UPDATES, "cycle_momentum": False}),
    "PolynomialLR": ({"total_iters": 30, "power": 2.0}, {}),
    "StepLR": ({"step_size": 3}, {}),
}


def rates(options: ScheduleOptions, updates: int = UPDATES, samples: int = SAMPLES) -> list[float]:
    """Before each of so many updates of so many samples, in a run of `UPDATES` of `SAMPLES`."""
    factor = schedule.make(options, UPDATES * SAMPLES / TRAIN, SAMPLES / TRAIN, 1 / TRAIN)
    return [factor(update * samples / TRAIN) for update in range(updates)]


def torchs(name: str, **kwargs: Any) -> list[float]:
    """Those of a loop as anybody writes it."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, seen = getattr(lr_scheduler, name)(optimizer, **kwargs), []
    for _ in range(UPDATES):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


@pytest.mark.parametrize("name", spread(TORCH_SCHEDULERS, 4))
def test_each_update_has_the_rate_of_torchs_loop(name: str) -> None:
    given, said = KWARGS[name]
    found = rates(make_options("schedule", name, kwargs=given))
    assert found == torchs(name, **given, **said)
    assert len(set(found)) > 1


def test_all_of_torchs_that_are_functions_of_steps_and_numbers_are_known() -> None:
    kinds = {
        name for name, kind in vars(lr_scheduler).items() if inspect.isclass(kind) and issubclass(kind, lr_scheduler.LRScheduler)
    }
    others = {
        "LRScheduler",
        "_LRScheduler",
        "LambdaLR",
        "MultiplicativeLR",
        "SequentialLR",
        "ChainedScheduler",
        "ReduceLROnPlateau",
    }
    assert kinds - others == set(TORCH_SCHEDULERS) == set(KWARGS)


def test_samples_drive_it_not_updates() -> None:
    """Updates of a third of the samples, as of another protocol: three have the same rate."""
    whole = rates(TorchScheduleOptions())
    assert rates(TorchScheduleOptions(), 3 * UPDATES, SAMPLES // 3) == [rate for rate in whole for _ in range(3)]


def test_its_steps_may_be_epochs_or_samples() -> None:
    halved = {"step_size": 1, "gamma": 0.5}
    of_epochs = rates(TorchScheduleOptions("StepLR", halved, "epochs", 2.0))
    assert of_epochs == [0.5 ** (update * SAMPLES // (2 * TRAIN)) for update in range(UPDATES)]
    assert rates(TorchScheduleOptions("StepLR", halved, "samples", 2.0 * TRAIN)) == of_epochs
    assert of_epochs[-1] == 0.25


def test_beyond_the_run_the_last_rate_stays_and_going_back_gives_the_old_ones() -> None:
    """Updates that were under way at the end are applied, too; a replay begins anew."""
    factor = schedule.make(make_options("schedule", "OneCycleLR", kwargs={"anneal_strategy": "linear"}), 4.8, 0.12, 0.01)
    there = [factor(update * 0.12) for update in range(UPDATES + 5)]
    assert there[UPDATES - 1 :] == [there[UPDATES - 1]] * 6
    assert there[-1] > 0
    assert [factor(update * 0.12) for update in range(UPDATES)] == there[:UPDATES]


@pytest.mark.parametrize(
    "options", [ConstantOptions(warmup_updates=5), ConstantOptions(warmup_samples=60), ConstantOptions(warmup_epochs=0.6)], ids=str
)
def test_a_warm_up_is_as_long_in_updates_samples_and_epochs(options: ConstantOptions) -> None:
    assert rates(options)[:7] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0])


def test_any_schedule_may_warm_up() -> None:
    plain, warmed = rates(TorchScheduleOptions()), rates(TorchScheduleOptions(warmup_updates=4))
    assert warmed == pytest.approx([rate * min(1, (update + 1) / 4) for update, rate in enumerate(plain)])


OWN = """
import torch
def seen(at, power=1):
    return (1 + at) ** -power
def kind(at):
    return 1.0 if isinstance(at, int) else 0.5
def negative(at):
    return 1.0 - at
def text(at):
    return "fast"
def failing(at):
    return {0: 1.0}[at]
def scheduler(at):
    return torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0))
def hasty(at):
    return 1 / (at != 2)
number = 1.0
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rates.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_rates", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_ones_own_is_a_function_of_epochs_updates_or_samples(own: None) -> None:
    epochs = CustomScheduleOptions("own_rates:seen", {"power": 2})
    assert rates(epochs) == pytest.approx([(1 + update * 0.12) ** -2 for update in range(UPDATES)])
    updates, samples = (CustomScheduleOptions("own_rates:seen", {}, unit) for unit in ("updates", "samples"))
    assert rates(updates) == [1 / (1 + update) for update in range(UPDATES)]
    assert rates(samples) == [1 / (1 + update * SAMPLES) for update in range(UPDATES)]
    kinds = [CustomScheduleOptions("own_rates:kind", {}, unit) for unit in ("epochs", "updates", "samples")]
    assert [rates(each)[3] for each in kinds] == [0.5, 1.0, 1.0]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (TorchScheduleOptions("StepLR"), "schedule.kwargs = {}: StepLR refuses these arguments: TypeError: .*step_size"),
        (TorchScheduleOptions("StepLR", {"step_size": 0}), "StepLR refuses these arguments: ZeroDivisionError"),
        (TorchScheduleOptions("CosineAnnealingLR", {"eta": 1}), "CosineAnnealingLR refuses these arguments: TypeError: .*'eta'"),
        (TorchScheduleOptions("OneCycleLR", {"total_steps": 39}), "OneCycleLR of 39 steps: expected at least the run's 40"),
        (TorchScheduleOptions("LinearLR", {"start_factor": 2}), "LinearLR refuses these arguments: ValueError"),
        (
            TorchScheduleOptions("StepLR", {"step_size": 3}, "samples", 2e-5),
            r"schedule.every = 2e-05: 24,000,000 steps of StepLR; expected a number >= 4.8e-05, for at most 10,000,000 steps",
        ),
        (
            TorchScheduleOptions("ExponentialLR", {"gamma": -0.5}),
            "ExponentialLR': factor -0.5 at step 1; expected a finite",
        ),
        (CustomScheduleOptions("nowhere_at_all:rate"), "schedule.factory = 'nowhere_at_all:rate': there is no module"),
        (CustomScheduleOptions("own_rates:none"), "schedule.factory = 'own_rates:none': .* has no attribute 'none'"),
        (
            CustomScheduleOptions("own_rates:seen", {"powers": 1}),
            r"called with \(0.0, \*\*{'powers': 1}\) the function raised TypeError: .*powers",
        ),
        (CustomScheduleOptions("own_rates:number"), r"own_rates:number': called with .* TypeError: 'float' object is not callable"),
        (
            CustomScheduleOptions("own_rates:failing"),
            r"schedule.factory = 'own_rates:failing': called with \(4.8, \*\*{}\) the function raised KeyError: 4.8",
        ),
        (
            CustomScheduleOptions("own_rates:scheduler"),
            "own_rates:scheduler': factor <torch.*ConstantLR object .*> at 0.0 epochs; expected",
        ),
        (CustomScheduleOptions("own_rates:negative"), "own_rates:negative': factor -3.8 at 4.8 epochs; expected a finite number"),
        (CustomScheduleOptions("own_rates:text"), "own_rates:text': factor 'fast' at 0.0 epochs; expected a finite number >= 0"),
    ],
    ids=str,
)
def test_what_is_no_schedule_is_refused_before_the_first_update(options: ScheduleOptions, told: str, own: None) -> None:
    with pytest.raises(ConfigError, match=told):
        schedule.make(options, 4.8, 0.12, 0.01)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: TorchScheduleOptions("LambdaLR"), "schedule.scheduler = 'LambdaLR': expected one of ConstantLR, "),
        (lambda: TorchScheduleOptions(every=0.0), "schedule.every = 0.0: expected a finite number >= 1e-09"),
        (
            lambda: ConstantOptions(warmup_epochs=1.0, warmup_samples=9),
            "schedule.warmup_samples = 9: expected 0 beside schedule.warmup_epochs: a warm-up has one length",
        ),
    ],
)
def test_options_that_cannot_be(make: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        make()


def test_an_own_function_that_fails_later_is_named_too(own: None) -> None:
    """Not only its traceback: the run ends by what the user has to mend."""
    factor = schedule.make(CustomScheduleOptions("own_rates:hasty"), 4.8)
    assert factor(1.0) == 1.0
    with pytest.raises(ConfigError, match=r"own_rates:hasty': called with \(2.0, \*\*{}\) the function raised ZeroDivisionError"):
        factor(2.0)


def test_one_cycle_may_be_told_its_length_in_epochs() -> None:
    given = {"epochs": 5, "steps_per_epoch": 10, "max_lr": 2.0}
    assert rates(TorchScheduleOptions("OneCycleLR", given)) == torchs("OneCycleLR", **given, cycle_momentum=False)


def test_it_is_named_on_the_command_line_and_in_a_file() -> None:
    one_cycle = TorchScheduleOptions("OneCycleLR", {"pct_start": 0.1})
    config = from_mapping({"schedule": {"name": "OneCycleLR", "kwargs": {"pct_start": 0.1}}})
    assert config.schedule == one_cycle
    assert from_mapping({"schedule": {"name": "torch", "scheduler": "OneCycleLR", "kwargs": {"pct_start": 0.1}}}) == config
    assert 'scheduler = "OneCycleLR"' in dumps(config)

    def said(*words: str) -> ScheduleOptions:
        return parse(list(words), "mpisgd train", config)[0].schedule

    assert said("--schedule", "OneCycleLR") == one_cycle
    assert said("--schedule", "CosineAnnealingLR", "--schedule.unit", "epochs") == TorchScheduleOptions(unit="epochs")
    assert said("--schedule=mine:rate", "--schedule.unit", "samples") == CustomScheduleOptions("mine:rate", unit="samples")


def test_the_help_tells_of_torchs_and_which_is_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--schedule", "StepLR", "--help"], "mpisgd train")
    told = " ".join(capsys.readouterr().out.split())
    assert "exponential, linear, torch's (OneCycleLR ...), your own a.b:factory (StepLR)" in told
