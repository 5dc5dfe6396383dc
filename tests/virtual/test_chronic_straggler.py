"""A learner that was late once, with backup: late for ever, unless it is told, or what is late is used.

Four learners that take 0.1 s, give or take 0.1 %; N = 3. Learner 3 has a pause in its first mini-batch and is then always behind:
when it has computed, the others have made the next update. It is not slower than they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpisgd import replay
from mpisgd.analysis import books
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Event, Verdict
from tests.effort import spread
from tests.virtual.jobs import SIZES, TENSORS, simulated

SCENE: dict[str, Any] = {
    "virtual": {"learners": 4},
    "compute": {"name": "normal", "mean_s": 0.1, "deviation_s": 0.0001},
    "network": {"bandwidth": 1e12},
    "epochs": 4,
}


def scene(out: Path, base: dict[str, Any] = SIZES, shards: int = 1, **protocol: Any) -> Run:
    """Learner 3's first mini-batch takes half as long again, whatever else it does then."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("mpisgd.gradient.straggler.Delays.of", late_once)
        return simulated(out, base, **SCENE, shards=shards, protocol={"name": "backup", "b": 1, **protocol})


def late_once(self: Any, number: int, compute_s: float) -> float:
    return 0.05 if self._learner_id == 3 and number == 0 else 0.0


def share_of_3(run: Run) -> float:
    """Of the applied gradients, on shard 0."""
    applied = run.pushes[books.applied_rows(run) & (run.pushes["shard"] == 0)]
    return float(np.mean(applied["learner_id"] == 3))


@pytest.mark.parametrize("shards", spread([2, 1], 2))
def test_plain_backup_never_uses_its_data(shards: int, tmp_path: Path) -> None:
    run = scene(tmp_path / "run", shards=shards)
    assert share_of_3(run) < 0.01
    assert books.never_counted(run) == [3]


@pytest.mark.parametrize("shards", spread([2, 1], 2))
def test_learners_that_are_told_begin_together_again(shards: int, tmp_path: Path) -> None:
    run = scene(tmp_path / "run", shards=shards, abort=True)
    assert share_of_3(run) == pytest.approx(0.25, abs=0.07)
    gave_up = run.events[run.events["kind"] == Event.GAVE_UP]
    assert len(gave_up) > 20
    assert not (run.pushes["verdict"] == Verdict.DROP).sum() > 0.1 * len(gave_up), "next to nothing is computed in vain to its end"
    assert books.never_counted(run) == []
    assert sum(covered.given_up for covered in books.coverage(run)) == np.count_nonzero(gave_up["shard"] == 0)
    assert replay.check(run.path) == ""


def test_late_gradients_that_are_applied_are_one_update_old(tmp_path: Path) -> None:
    run = scene(tmp_path / "run", late="apply")
    applied = run.pushes[books.applied_rows(run)]
    assert applied["staleness"].max() == 1
    assert share_of_3(run) == pytest.approx(0.25, abs=0.02)
    assert not (run.pushes["verdict"] == Verdict.DROP).any()


def test_what_was_given_up_is_computed_anew_to_the_same_weights(tmp_path: Path) -> None:
    """With gradients: the log proves them, though no push tells of what was given up."""
    run = scene(tmp_path / "run", TENSORS, abort=True)
    assert (run.events["kind"] == Event.GAVE_UP).sum() > 5
    assert replay.check(run.path) == ""
    seqs = run.pushes["seq"][run.pushes["learner_id"] == 3]
    assert np.array_equal(np.unique(seqs), np.arange(seqs[-1] + 1)), "no mini-batch is skipped"
