"""The evaluator's loop: every snapshot in its turn, then the last weights, which are saved; then goodbye."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mpisgd.comm.messages import FINAL
from mpisgd.config import Part
from mpisgd.evaluator import Evaluator
from mpisgd.exchange.evaluator_channel import Snapshot
from mpisgd.exchange.exchange import Interrupted
from mpisgd.gradient.measure import Measured
from mpisgd.records.log.progress import Evaluations
from mpisgd.records.log.rank_file import read_table
from mpisgd.records.log.writer import EvaluatorLog, TableFile
from mpisgd.vectors.flat import FlatModel
from mpisgd.vectors.memory import host_vector

QUIET = Evaluations("off", 0, 0, 0.0)


class Told:
    """A channel that gives snapshots of rising weights, and a measure that says which weights it saw."""

    def __init__(self, pulled: list[Tensor], snapshots: int, final: bool = True) -> None:
        self.pulled = pulled
        self.snapshots = snapshots
        self.final = final
        self.calls: list[object] = []
        self.seconds = 0.0
        self.model: FlatModel | None = None
        self.check_signal: Callable[[], None] = lambda: None
        self.asks: Callable[[], None] | None = None

    def now_s(self) -> float:
        self.seconds += 0.5
        return self.seconds

    def check(self) -> None:
        self.check_signal()

    def pull(self, number: int) -> Snapshot | None:
        self.calls.append(number)
        if number == FINAL and self.final:
            number = 9
        elif not 0 <= number < self.snapshots:
            return None
        for kind, vector in enumerate(self.pulled):
            vector.fill_(number + 100 * kind)
        return Snapshot(FINAL if number == 9 else number, (3 + number, 2 + number), 10 * number, number / 4)

    def goodbye(self) -> None:
        self.calls.append("goodbye")

    def prepare(self) -> None:
        self.calls.append("prepare")

    def interrupt_by(self, check: Callable[[], None] | None) -> None:
        self.asks = check

    def of(self, part: Part) -> Measured:
        assert self.model is not None
        if self.asks is not None:
            self.asks()
        return Measured(self.model.weights[0].item() + 0.5 * part, 0.25, {})


@pytest.mark.parametrize(("averaged", "train"), [(False, False), (True, False), (False, True), (True, True)])
def test_every_snapshot_then_the_last_weights(averaged: bool, train: bool, tmp_path: Path) -> None:
    model = FlatModel(nn.Conv2d(2, 2, 3, bias=False), "channels_last")
    pulled = [host_vector(model.size) for _ in range(1 + averaged)]
    told = Told(pulled, snapshots=2)
    told.model = model
    log = EvaluatorLog(lambda: TableFile(tmp_path / "log.h5", shard=-1, flush_rows=10, flush_s=1e9))
    evaluated = (Part.TEST, Part.TRAINING)[: 1 + train]
    evaluator = Evaluator(told, model, pulled, told, log, evaluated=evaluated, train_samples=20, progress=QUIET)  # type: ignore[arg-type]
    evaluator.evaluate_all(tmp_path / "weights.pt")
    log.close()
    kinds = 1 + averaged
    turn = ["prepare"] * kinds
    assert told.calls == [0, *turn, 1, *turn, 2, FINAL, *turn, "goodbye"]
    columns = ["snapshot", "clock_min", "clock_max", "samples", "epochs", "taken_s", "averaged", "train", "loss", "error"]
    assert read_table(tmp_path / "log.h5", "evaluations")[columns].tolist() == [
        (number, 2 + value, 3 + value, 10 * value, value / 2, value / 4, kind, data, value + 100 * kind + 0.5 * data, 0.25)
        for number, value in enumerate((0, 1, 9))
        for kind in range(kinds)
        for data in range(1 + train)
    ]
    assert (read_table(tmp_path / "log.h5", "evaluations")["evaluate_s"] == 0.5).all()
    saved = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert list(saved) == ["theta", "thetabar"][:kinds]
    for kind, state in enumerate(saved.values()):
        assert state["weight"].is_contiguous()
        np.testing.assert_array_equal(state["weight"], 9 + 100 * kind)
        nn.Conv2d(2, 2, 3, bias=False).load_state_dict(state)


@pytest.mark.parametrize("over", [False, True])
def test_a_signal_ends_an_evaluation_unless_the_run_is_over(tmp_path: Path, over: bool) -> None:
    """The evaluator asks again: shards that are interrupted have no snapshot any more; of a run that is over all are evaluated."""
    model = FlatModel(nn.Linear(2, 2))
    pulled = [host_vector(model.size) for _ in range(2)]
    told = Told(pulled, snapshots=3, final=over)
    told.model = model
    measured: list[float] = []

    def check() -> None:
        measured.append(model.weights[0].item())
        if model.weights[0].item() >= 101:  # in the middle of snapshot 1, whose first half has been measured
            told.snapshots = 3 if over else 0
            raise Interrupted

    told.check_signal = check
    log = EvaluatorLog(lambda: TableFile(tmp_path / "log.h5", shard=-1, flush_rows=10, flush_s=1e9))
    evaluator = Evaluator(told, model, pulled, told, log, evaluated=(Part.TEST,), train_samples=1, progress=QUIET)  # type: ignore[arg-type]
    evaluator.evaluate_all(tmp_path / "weights.pt")
    log.close()
    assert measured == [0, 100, 1, 101], "none is asked about after that"
    evaluated = read_table(tmp_path / "log.h5", "evaluations")["snapshot"].tolist()
    assert evaluated == ([0, 0, 1, 1, 2, 2, 3, 3] if over else [0, 0]), "whole snapshots only, none twice"
    assert told.calls[-1] == "goodbye"
    assert (tmp_path / "weights.pt").exists() == over


def test_a_run_that_left_no_weights_still_ends_in_order(tmp_path: Path) -> None:
    model = FlatModel(nn.Linear(2, 2))
    pulled = [host_vector(model.size)]
    told = Told(pulled, snapshots=0, final=False)
    log = EvaluatorLog(lambda: TableFile(None, shard=-1, flush_rows=1, flush_s=1))
    evaluator = Evaluator(told, model, pulled, told, log, evaluated=(Part.TEST,), train_samples=1, progress=QUIET)  # type: ignore[arg-type]
    evaluator.evaluate_all(tmp_path / "weights.pt")
    assert told.calls == [0, FINAL, "goodbye"]
    assert not (tmp_path / "weights.pt").exists()


def test_it_tells_which_snapshot_and_batch_it_evaluates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Training is over, and the last line of it says that evaluations follow: then nothing was said for minutes."""
    model = FlatModel(nn.Linear(2, 1), "contiguous")
    pulled = [host_vector(model.size)]
    told = Told(pulled, snapshots=2)
    told.model = model
    log = EvaluatorLog(lambda: TableFile(tmp_path / "log.h5", shard=-1, flush_rows=10, flush_s=1e9))
    seconds = iter(range(0, 100, 4))  # one look when it begins, one for each batch
    progress = Evaluations("plain", snapshots=3, batches=2, every_s=8.0, now_s=lambda: float(next(seconds)))
    evaluator = Evaluator(told, model, pulled, told, log, evaluated=(Part.TEST, Part.TRAINING), train_samples=1, progress=progress)  # type: ignore[arg-type]
    evaluator.evaluate_all(tmp_path / "weights.pt")
    log.close()
    assert capsys.readouterr().err.splitlines() == [
        "evaluating snapshot 1 of 3, batch 1 of 2",
        "evaluating snapshot 2 of 3, batch 1 of 2; the snapshot before: test error 25.00 %",
        "evaluating snapshot 3 of 3, batch 1 of 2; the snapshot before: test error 25.00 %",
    ]
