"""The evaluator's loop: pull snapshots one after the other, measure, record; nobody ever waits for it (law 7).

It runs on a rank of its own, or, where there is none, on learner 0 after its goodbye.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpisgd.base import durable
from mpisgd.base.storage import writing
from mpisgd.comm.messages import FINAL
from mpisgd.config import EvaluationOptions
from mpisgd.exchange.base import Interrupted
from mpisgd.exchange.evaluator_channel import EvaluatorChannel, Snapshot
from mpisgd.gradient.measure import Measure, Unmeasured
from mpisgd.records.log.progress import Evaluations
from mpisgd.records.log.writer import EvaluatorLog
from mpisgd.records.patience import Patience
from mpisgd.vectors.flat import FlatModel

Hearer = Callable[[list[dict[str, Any]], dict[str, dict[str, Tensor]], bool], None]
"""Is told of an evaluation: its rows in the log, the weights by their names (`theta`, and perhaps `thetabar`), and whether these
are the last ones of the run."""


class EarlyStopping:
    """Hears evaluations, and lets the shards know when they have been no better for too long (`Patience`).

    Args:
        before: rows of `evaluations` before the first that is heard of, where the run goes on after an interruption.
    """

    def __init__(self, options: EvaluationOptions, before: np.ndarray, channel: EvaluatorChannel, told: Evaluations) -> None:
        self._options = options
        self._channel = channel
        self._told = told
        self._patience = Patience(options).note_all(before)
        if self._patience.over_at >= 0:
            channel.end_training(self._patience.over_at)

    def __call__(self, rows: list[dict[str, Any]], states: object, last: bool) -> None:
        if not last and self._patience.note(rows):
            number, options = self._patience.over_at, self._options
            self._channel.end_training(number)
            self._told.say(f"snapshot {number}: {options.best} no better for {options.patience} evaluations: training ends")


class Evaluator:
    """Evaluates every snapshot of theta and, where there is one, of thetabar.

    Args:
        model: its weights are replaced by the snapshot's.
        pulled: (parameters,) float32 host tensors that `channel` receives theta (and thetabar) into.
        train: whether to measure on the training data as well.
        train_samples: samples of one epoch.
        told: is told of each snapshot and batch, for people.
    """

    def __init__(
        self,
        channel: EvaluatorChannel,
        model: FlatModel,
        pulled: list[Tensor],
        measure: Measure | Unmeasured,
        log: EvaluatorLog,
        *,
        train: bool,
        train_samples: int,
        told: Evaluations,
    ) -> None:
        self._channel = channel
        self._model = model
        self._pulled = pulled
        self._measure = measure
        self._log = log
        self._splits = (False, True) if train else (False,)
        self._train_samples = train_samples
        self._told = told
        self._hearers: Sequence[Hearer] = ()

    def evaluate_all(self, weights_file: Path, first: int = 0, hearers: Sequence[Hearer] = ()) -> None:
        """Every snapshot from number `first` until the run is over, then the last weights, which are also saved.

        Of a run that a signal has interrupted, no more: what was not evaluated is when it goes on.

        `weights_file` becomes a torch file of {"theta": state_dict[, "thetabar": state_dict]} that
        `torch.load(..., weights_only=True)` reads. `hearers` are told of each evaluation, once it is in the log.
        """
        self._hearers = hearers
        number = first
        checked = True
        snapshot = self._channel.pull(number)
        self._log.begin()  # who was given up meanwhile is not answered, and leaves the log to whoever evaluates in its place
        while snapshot is not None:
            self._measure.interrupt_by(self._before_batch if checked else self._told.batch)
            try:
                self._evaluate(snapshot)
                number += 1
            except (
                Interrupted
            ):  # by a signal: shards that are interrupted have no snapshot any more, and a run that is over goes on
                checked = False
            snapshot = self._channel.pull(number)
        self._measure.interrupt_by(self._told.batch)
        final = self._channel.pull(FINAL)
        if final is not None:
            states = self._evaluate(Snapshot(number, final.clocks, final.samples, final.taken_s), last=True)
            _save(states, weights_file)
        self._channel.goodbye()

    def _before_batch(self) -> None:
        self._told.batch()
        self._channel.check()

    def _evaluate(self, snapshot: Snapshot, *, last: bool = False) -> dict[str, dict[str, Tensor]]:
        states, rows = {}, list[dict[str, Any]]()
        self._told.begin(snapshot.number)
        for averaged, (name, vector) in enumerate(zip(("theta", "thetabar"), self._pulled, strict=False)):
            self._model.weights.copy_(vector)
            self._measure.prepare()
            for train in self._splits:
                start_s = self._channel.now_s()
                found = self._measure.of(train=train)
                rows.append(
                    {
                        "snapshot": snapshot.number,
                        "clock_min": min(snapshot.clocks),
                        "clock_max": max(snapshot.clocks),
                        "samples": snapshot.samples,
                        "epochs": snapshot.samples / self._train_samples,
                        "taken_s": snapshot.taken_s,
                        "averaged": averaged,
                        "train": train,
                        "loss": found.loss,
                        "error": found.error,
                        "evaluate_s": self._channel.now_s() - start_s,
                        **found.metrics,
                    }
                )
            states[name] = self._model.state()
        self._told.found(rows[0])
        for row in rows:  # of a whole snapshot: an evaluation that is interrupted has left none
            self._log.evaluation(**row)
        for hear in self._hearers:
            hear(rows, states, last)
        return states


def _save(states: dict[str, dict[str, Tensor]], path: Path) -> None:
    """Whole, or not at all, and there to stay. Raises StorageError where it cannot be written."""
    with writing(path):
        with durable.made_aside(path) as aside:
            torch.save(states, aside)
        durable.sync_directory(path.parent)
