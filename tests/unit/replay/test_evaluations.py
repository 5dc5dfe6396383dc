"""Evaluations of a run made again (`replay/rerun/evaluations.py`)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mpisgd.evaluator import Evaluator
from mpisgd.exchange.evaluator_channel import Snapshot
from mpisgd.replay.rerun.evaluations import EvaluatorByLog
from mpisgd.vectors.flat import FlatModel


def test_the_weights_that_learners_pulled_outlast_an_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner that computes late may have pulled some of its slices into the model when a snapshot is evaluated there."""
    model = FlatModel(nn.Linear(3, 2))
    evaluator = EvaluatorByLog.__new__(EvaluatorByLog)
    evaluator._model = model

    def evaluated(self: Evaluator, snapshot: Snapshot, *, last: bool) -> bool:
        self._model.weights.fill_(7.0)
        if last:
            raise KeyError(snapshot.number)
        return last

    monkeypatch.setattr(Evaluator, "_evaluate", evaluated)
    pulled, snapshot = model.weights.clone(), Snapshot(1, (5,), 10, 0.5)
    assert evaluator._evaluate(snapshot) is False
    assert torch.equal(model.weights, pulled)
    with pytest.raises(KeyError):
        evaluator._evaluate(snapshot, last=True)
    assert torch.equal(model.weights, pulled)
