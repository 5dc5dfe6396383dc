"""Loggers of others: what they are told, by fake modules of theirs; and one that is not installed is refused."""

from __future__ import annotations

import math
import os
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from mpisgd.base.errors import ConfigError
from mpisgd.cli.options import parse
from mpisgd.config import Config, config_file
from mpisgd.records import loggers
from mpisgd.records.callbacks import NO_CALLBACKS, Callbacks, Evaluation, Update
from mpisgd.records.loggers import KINDS, Loggers

UPDATE = Update(clock=8, updates=4, epochs=0.5, loss=0.25, now_s=3.0)


def evaluation(**changes: Any) -> Evaluation:
    common: dict[str, Any] = {"snapshot": 1, "clock_min": 7, "clock_max": 8, "samples": 64, "epochs": 0.5, "taken_s": 1.0}
    rest: dict[str, Any] = {"averaged": False, "train": False, "loss": 0.5, "error": 0.1, "evaluate_s": 0.1, "last": False}
    return Evaluation(**{**common, **rest, **changes})


class Recorded:
    """Stands for every object of a fake module: it keeps the calls, in their order."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def called(*arguments: Any, **named: Any) -> Any:
            self.calls.append((name, *arguments, *([named] if named else [])))
            return self

        return called

    @property
    def info(self) -> Any:
        return types.SimpleNamespace(run_id="r1")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """The modules of all three."""
    recorded = Recorded()
    for name in ("tensorboard", "torch.utils.tensorboard", "wandb", "mlflow", "mlflow.tracking"):
        module: Any = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    modules: Any = sys.modules
    modules["torch.utils.tensorboard"].SummaryWriter = recorded.writer
    modules["wandb"].init = recorded.init
    modules["wandb"].Settings = lambda **fields: fields
    modules["mlflow.tracking"].MlflowClient = recorded.client
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return recorded


def test_tensorboard_is_told_of_updates(fake: Recorded, tmp_path: Path) -> None:
    logger = Loggers(["tensorboard"], tmp_path)
    assert fake.calls == [], "nothing is opened before something is told"
    logger.on_update(UPDATE)
    logger.close()
    assert fake.calls == [
        ("writer", tmp_path / "tensorboard" / "updates"),
        ("add_scalar", "updates/loss", 0.25, 8),
        ("add_scalar", "updates/epochs", 0.5, 8),
        ("add_scalar", "updates/seconds", 3.0, 8),
        ("flush",),
        ("close",),
    ]


def test_wandb_is_offline_whatever_the_environment_says(fake: Recorded, tmp_path: Path) -> None:
    os.environ["WANDB_MODE"] = "online"
    logger = Loggers(["wandb"], tmp_path / "run")
    logger.on_evaluation(evaluation(metrics={"bleu": 7.0}))
    logger.close()
    (_, begun), *_, logged, finished = fake.calls
    assert begun["settings"]["mode"] == os.environ["WANDB_MODE"] == "offline"
    assert os.environ["WANDB_ERROR_REPORTING"] == "false"
    assert (begun["dir"], begun["name"]) == (str(tmp_path), "run evaluations")
    assert logged == ("log", {"test/loss": 0.5, "test/error": 0.1, "test/epochs": 0.5, "test/bleu": 7.0, "clock": 8})
    assert finished == ("finish",)


def test_mlflow_writes_into_a_file_store(fake: Recorded, tmp_path: Path) -> None:
    logger = Loggers(["mlflow"], tmp_path)
    logger.on_evaluation(evaluation(train=True, averaged=True, error=math.inf))
    logger.close()
    begun, _, *metrics, ended = fake.calls
    assert begun == ("client", (tmp_path / "mlflow" / "evaluations").as_uri())
    assert metrics[1] == ("log_metric", "r1", "train_averaged/error", math.inf, {"step": 8})
    assert len(metrics) == 3
    assert ended == ("set_terminated", "r1")
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"


def test_where_targets_are_no_classes_there_is_no_error(fake: Recorded, tmp_path: Path) -> None:
    """And no curve of nan; a loss that is nan is told."""
    logger = Loggers(["wandb"], tmp_path)
    logger.on_evaluation(evaluation(error=math.nan, loss=math.nan, metrics={"bleu": 7.0}))
    (logged,) = [call[1] for call in fake.calls if call[0] == "log"]
    assert list(logged) == ["test/loss", "test/epochs", "test/bleu", "clock"]


def test_one_rank_that_is_told_both_has_one_writer_of_each(fake: Recorded, tmp_path: Path) -> None:
    logger = Loggers(["tensorboard", "mlflow"], tmp_path)
    logger.on_update(UPDATE)
    logger.on_evaluation(evaluation())
    logger.close()
    logger.close()
    names = [call[0] for call in fake.calls]
    assert [names.count(name) for name in ("writer", "close", "client", "set_terminated")] == [1, 1, 1, 1]


def test_callbacks_of_the_user_come_after(fake: Recorded, tmp_path: Path) -> None:
    told: list[object] = []

    def tell(record: object) -> None:
        assert fake.calls, "the loggers were told before"
        told.append(record)

    logger = Loggers(["tensorboard"], tmp_path)
    joined = logger.with_own(Callbacks(on_update=tell, on_end=told.append))
    assert joined.on_update is not None and joined.on_evaluation is not None
    joined.on_update(UPDATE)
    joined.on_evaluation(evaluation())
    assert told == [UPDATE]
    assert joined.on_end == told.append
    assert Loggers([], tmp_path).with_own(NO_CALLBACKS) is NO_CALLBACKS


@pytest.mark.parametrize("name", KINDS)
def test_one_that_is_not_installed_is_refused_with_the_command_that_does_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    with pytest.raises(
        ConfigError, match=rf"^loggers: {name} is not installed: pip install 'mpisgd\[{name}\]', or pip install {name}$"
    ):
        loggers.check([name], used=False)
    loggers.check([], used=True)


def test_one_that_cannot_be_imported_is_refused_where_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb.py").write_text("raise ImportError('no libc of ours')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    loggers.check(["wandb"], used=False)
    with pytest.raises(ConfigError, match=r"^loggers: wandb cannot be imported: no libc of ours$"):
        loggers.check(["wandb"], used=True)


def test_they_are_named_on_the_command_line_and_in_files(capsys: pytest.CaptureFixture[str]) -> None:
    config, _ = parse(["--loggers", "tensorboard", "mlflow"], "mpisgd train")
    assert config.loggers == ("tensorboard", "mlflow")
    assert config_file.from_mapping({"loggers": ["wandb"]}).loggers == ("wandb",)
    assert Config().loggers == ()
    with pytest.raises(ConfigError, match="loggers"):
        config_file.from_mapping({"loggers": ["tensorbord"]})
    with pytest.raises((ConfigError, SystemExit)):
        parse(["--loggers", "tensorbord"], "mpisgd train")


def test_each_has_an_extra() -> None:
    text = (Path(__file__).parents[3] / "setup.cfg").read_text()
    assert all(f"\n{name} =\n    {name}>=" in text for name in KINDS)
