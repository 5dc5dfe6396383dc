"""Functions that are told how a run goes: by whom, of what, and what becomes of one that raises."""

from __future__ import annotations

import math
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import mpisgd
from mpisgd.base.errors import ConfigError
from mpisgd.config import Config, trust
from mpisgd.records.callbacks import NO_CALLBACKS, Callbacks, Evaluation, Update, UpdateTeller, given
from mpisgd.records.log.progress import Progress


def test_what_comes_while_a_call_lasts_is_told_in_one() -> None:
    told: list[Update] = []
    begun, goes_on = threading.Event(), threading.Event()

    def slow(update: Update) -> None:
        told.append(update)
        begun.set()
        assert goes_on.wait(60)

    progress = Progress("off", 2.0, 10.0)
    progress.on_update = UpdateTeller(slow)
    progress.update(1, 0.5, 4.0, 1.0)
    assert begun.wait(60)
    for clock, loss in ((2, 3.0), (3, 1.0)):  # nobody waits for the call
        progress.update(clock, 0.5 * clock, loss, float(clock))
    goes_on.set()
    progress.close()
    assert told == [Update(1, 1, 0.5, 4.0, 1.0), Update(3, 2, 1.5, 2.0, 3.0)]


def test_nothing_is_lost_at_the_end_and_closing_twice_is_no_harm() -> None:
    told: list[Update] = []
    progress = Progress("off", 2.0, 10.0)
    progress.on_update = UpdateTeller(told.append)
    for clock in range(1, 2001):
        progress.update(clock, 0.0, 1.0, 0.0)
    progress.close()
    progress.close()
    assert sum(each.updates for each in told) == told[-1].clock == 2000
    assert all(each.loss == 1.0 for each in told)


def test_one_that_raises_is_named_in_what_the_shard_raises() -> None:
    def wrong(update: Update) -> None:
        raise ValueError("no disk")

    teller = UpdateTeller(wrong)
    teller(1, 0.0, 0.0, 0.0)
    teller._thread.join(60)
    with pytest.raises(RuntimeError, match=r"^the callback on_update failed: ValueError: no disk$"):
        teller(2, 0.0, 0.0, 0.0)
    teller = UpdateTeller(wrong)
    teller(1, 0.0, 0.0, 0.0)
    with pytest.raises(RuntimeError, match="on_update failed"):
        teller.close()


def row(**changes: Any) -> dict[str, Any]:
    common = {"snapshot": 2, "clock_min": 3, "clock_max": 4, "samples": 50, "epochs": 0.5, "taken_s": 1.5, "evaluate_s": 0.1}
    return {**common, "averaged": 0, "train": 0, "loss": 0.25, "error": math.inf, **changes}


def test_each_row_of_an_evaluation_is_told_with_its_metrics() -> None:
    told: list[Evaluation] = []
    Callbacks(on_evaluation=told.append).tell_evaluation([row(bleu=7.0), row(bleu=8.0, averaged=1)], {}, last=True)
    assert [(each.averaged, each.train, each.last, each.loss, each.metrics) for each in told] == [
        (False, False, True, 0.25, {"bleu": 7.0}),
        (True, False, True, 0.25, {"bleu": 8.0}),
    ]
    with pytest.raises(AttributeError):
        told[0].loss = 3.0  # type: ignore[misc]


@pytest.mark.parametrize("name", ["on_update", "on_evaluation", "on_end"])
def test_what_cannot_be_called_is_refused_before_a_run_begins(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{name} = 'print': expected a function of one argument, or None"):
        mpisgd.train(config={"out": str(tmp_path / "run")}, **{name: "print"})
    assert not (tmp_path / "run").exists()


MODULE = """
class Told:
    def __init__(self):
        self.lines = []

    def on_update(self, update):
        self.lines.append(("update", update.clock))

    def on_end(self, end):
        self.lines.append(("end", end.clocks))

class Misspelt:
    def on_updates(self, update): pass
    def on_end(self, end): pass

class Empty:
    def update(self, update): pass

class NotCallable:
    on_end = 3

class Wants:
    def __init__(self, path): pass
    def on_end(self, end): pass

told = Told()
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "named_callbacks.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("named_callbacks", None)
    return "named_callbacks"


def test_a_class_that_is_named_is_told(module: str) -> None:
    own = Callbacks(on_end=print)
    assert given("", own) is own
    found = given(f"{module}:Told", NO_CALLBACKS)
    assert found.on_evaluation is None
    assert found.on_update is not None
    found.on_update(Update(3, 1, 0.5, 1.0, 2.0))
    assert found.on_update.__self__.lines == [("update", 3)]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "user_objects", "message"),
    [
        ("Told", Callbacks(on_end=print), r"'named_callbacks:Told': expected none beside on_end of mpisgd\.train"),
        ("Misspelt", NO_CALLBACKS, "found on_updates, expected some of on_update, on_evaluation, on_end"),
        ("Empty", NO_CALLBACKS, "found no method on_..., expected some of on_update"),
        ("NotCallable", NO_CALLBACKS, "on_end = 3: expected a function of one argument"),
        ("Wants", NO_CALLBACKS, "callbacks = 'named_callbacks:Wants': the parameters are"),
        ("told", NO_CALLBACKS, "callbacks = 'named_callbacks:told': found Told, expected a class"),
        ("Tolt", NO_CALLBACKS, "has no attribute 'Tolt'; did you mean 'Told'"),
    ],
)
def test_a_class_that_cannot_be_told_is_refused(module: str, name: str, user_objects: Callbacks, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        given(f"{module}:{name}", user_objects)


def test_what_a_run_names_is_imported_where_it_goes_on_alone(tmp_path: Path) -> None:
    """Replay, plan and export make no callbacks, and want no consent for them."""
    config = Config(callbacks="mine:Told")
    assert trust.names_of(config) == {}
    trust.check(tmp_path, config, {})
    with pytest.raises(ConfigError, match="callbacks = 'mine:Told', from module 'mine'"):
        trust.check(tmp_path, config, {}, training=True)
    assert trust.resume_line(tmp_path, config).endswith(" --callbacks mine:Told")
