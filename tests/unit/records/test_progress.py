"""Progress: a line now and then in a batch log, none where it is off, the last always."""

from __future__ import annotations

import io
import itertools
import math
from typing import Any

import pytest

from mpisgd.records.log import progress
from mpisgd.records.log.progress import Progress, in_words


def test_plain_lines_come_every_so_many_seconds_and_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("plain", total_epochs=2.0, every_s=10.0)
    for clock in range(1, 41):
        progress.staleness(1)
        progress.staleness(2)
        progress.update(clock, clock / 20, 1.0 / clock, now_s=float(clock))
    progress.close()
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.splitlines() == [
        "epoch 0.50/2: loss 0.1000, 1.0 updates/s, mean staleness 1.50, 30 s left",
        "epoch 1.00/2: loss 0.0500, 1.0 updates/s, mean staleness 1.50, 20 s left",
        "epoch 1.50/2: loss 0.0333, 1.0 updates/s, mean staleness 1.50, 10 s left",
        "epoch 2.00/2: loss 0.0250, 1.0 updates/s, mean staleness 1.50, trained; evaluations follow",
    ]


def test_numbers_are_those_since_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("plain", 10.0, 1.0)
    progress.staleness(8)
    progress.update(4, 1.0, 0.5, now_s=2.0)
    progress.update(10, 2.0, 0.5, now_s=4.0)  # nothing was applied: no division by zero
    assert capsys.readouterr().err.splitlines() == [
        "epoch 1.00/10: loss 0.5000, 2.0 updates/s, mean staleness 8.00, 18 s left",
        "epoch 2.00/10: loss 0.5000, 3.0 updates/s, mean staleness 0.00, 16 s left",
    ]


@pytest.mark.parametrize(("mode", "lines"), [("off", 0), ("auto", 1)])
def test_off_is_silent_and_auto_is_plain_where_nobody_watches(
    mode: Any, lines: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    progress = Progress(mode, 1.0, 10.0)
    progress.update(1, 1.0, 0.5, now_s=1.0)
    progress.close()
    assert len(capsys.readouterr().err.splitlines()) == lines


def test_a_bar_is_drawn_where_somebody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr("mpisgd.records.log.progress.terminal", lambda: screen)
    progress = Progress("auto", 1.0, 10.0)
    progress.update(1, 1.0, 0.5, now_s=1.0)
    progress.close()
    assert "1.00/1 epochs" in screen.getvalue()


def test_what_an_evaluation_found_is_told_in_words() -> None:
    """Never a share of wrong classes that there is not."""
    both = {"loss": math.log(20), "error": 0.025, "accuracy": 0.5}
    none = {**both, "error": math.nan}
    assert in_words(both, "cross_entropy", ()) == "error 2.50 %"
    assert in_words(both, "", ["accuracy"]) == "error 2.50 %, accuracy 0.5"
    assert in_words(none, "cross_entropy", ()) == "loss 2.996, perplexity 20"
    assert in_words(none, "mse_loss", ["accuracy"]) == "loss 2.996, accuracy 0.5"
    assert in_words({**none, "loss": 1e4}, "cross_entropy", ()) == "loss 1e+04", "whose exponential is too large for a float"


def test_the_line_of_evaluations_tells_what_the_snapshot_before_came_to(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(progress, "say", said.append)
    seconds = itertools.count(0.0, 10.0)
    told = progress.Evaluations("plain", snapshots=3, batches=1, every_s=1.0, now_s=seconds.__next__)
    for number in range(2):
        told.begin(number)
        told.batch()
        told.found({"snapshot": number, "loss": 0.5, "error": math.nan, "accuracy": 0.25})
    told.found({"snapshot": 2, "loss": math.nan, "error": math.nan})
    told.batch()
    assert said[0] == "evaluating snapshot 1 of 3, batch 1 of 1"
    assert said[1] == "evaluating snapshot 2 of 3, batch 1 of 1; the snapshot before: test loss 0.5, accuracy 0.25"
    assert said[2].endswith("accuracy 0.25"), "without test data nothing is told"
