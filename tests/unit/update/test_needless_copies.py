"""What a rank does not hold twice, counted in vectors: pages are for `python -m tests.bench pieces`."""

from __future__ import annotations

import math
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mpisgd import evaluator
from mpisgd.config import SgdOptions
from mpisgd.job.finish import blown_up
from mpisgd.models.in_pieces import InPieces
from mpisgd.update import optimizer, slice_update
from mpisgd.update.slice_update import SliceUpdate
from mpisgd.vectors.flat import FlatModel
from tests.unit.models.test_in_pieces import evaluated
from tests.unit.update.give import come, give


class Made(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.nbytes += made.nbytes if isinstance(made, torch.Tensor) else 0
        return made


def updates(checks_sums: bool) -> SliceUpdate:
    update = SliceUpdate(torch.ones(64), SgdOptions(momentum=0.0), learning_rate=0.5, schedule=lambda _: 1.0, train_samples=1)
    update.checks_sums = checks_sums
    return update


def made(update: SliceUpdate, *values: float) -> int:
    """An update of so many gradients; returns where the last was received."""
    for value in values:
        came = come(update, value)
        where = int(came.memory.ctypes.data)
        give(update, came)
    update.step()
    return where


@pytest.mark.parametrize("checks_sums", [False, True])
def test_large_gradients_that_are_updates_by_themselves_are_received_into_the_same_memory(
    checks_sums: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer, "CACHED_NBYTES", 0)
    monkeypatch.setattr(slice_update, "CACHED_NBYTES", 0)
    update = updates(checks_sums)
    assert not update.cached
    assert len({made(update, value) for value in (1.0, 2.0, 3.0)}) == 1
    assert update.weights.tolist() == [1.0 - 0.5 * 6.0] * 64
    assert update.sum_is_finite()
    made(update, 1.0, 1.0)
    assert update.weights.tolist() == [-2.5] * 64, "and the sum of two is not written over"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_but_not_where_the_sum_is_still_to_be_looked_at(bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slice_update, "CACHED_NBYTES", 0)
    update = updates(True)
    made(update, bad)
    come(update, 1.0)
    assert not update.sum_is_finite()


def test_a_sum_too_large_for_its_norm_is_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slice_update, "CACHED_NBYTES", 0)
    update = updates(True)
    made(update, 1e30)
    assert update.sum_is_finite()


@pytest.mark.parametrize(("value", "expected"), [(1.0, False), (math.nan, True), (-math.inf, True), (1e30, False)])
def test_last_weights_are_looked_at_without_a_copy(value: float, expected: bool) -> None:
    weights = torch.ones(10_000)
    weights[77] = value
    server: Any = SimpleNamespace(update=SimpleNamespace(weights=weights), finiteness=SimpleNamespace(diverged=False))
    with Made() as made:
        assert blown_up(server) is expected
    assert value != 1.0 or made.nbytes < 100


@pytest.mark.parametrize("vectors", [1, 2])
def test_a_stage_is_gone_before_the_next_is_made(vectors: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    had, met = weakref.WeakSet[FlatModel](), list[int]()

    class Counted(FlatModel):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            had.add(self)

    class Watched(evaluator.StagedEvaluator):
        def __init__(self, *arguments: Any, pieces: InPieces, **named: Any) -> None:
            made = pieces.make

            def make(place: int) -> Any:
                met.append(len(had))
                return made(place)

            pieces.make = make
            super().__init__(*arguments, pieces=pieces, **named)

    monkeypatch.setattr(evaluator, "FlatModel", Counted)
    monkeypatch.setattr("tests.unit.models.test_in_pieces.StagedEvaluator", Watched)
    evaluated(tmp_path / "weights.pt", True, vectors)
    assert len(met) > 4 and set(met) == {0}
