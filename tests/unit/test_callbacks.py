"""Functions that are told how a run goes: by whom, of what, and what becomes of one that raises."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import pytest

import mpisgd
from mpisgd.base.errors import ConfigError
from mpisgd.records.callbacks import Callbacks, Evaluation, Update, UpdateTeller
from mpisgd.records.log.progress import Progress


def test_what_comes_while_a_call_lasts_is_told_in_one() -> None:
    told: list[Update] = []
    begun, goes_on = threading.Event(), threading.Event()

    def slow(update: Update) -> None:
        told.append(update)
        begun.set()
        assert goes_on.wait(60)

    progress = Progress("off", 2.0, 10.0)
    progress.hear = UpdateTeller(slow)
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
    progress.hear = UpdateTeller(told.append)
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
