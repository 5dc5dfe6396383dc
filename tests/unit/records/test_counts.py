"""Sums over a shard's pushes and updates, however many rows are added at a time."""

from __future__ import annotations

import numpy as np
import pytest

from mpisgd.records.log import schema
from mpisgd.records.log.counts import Counts
from mpisgd.records.log.schema import Verdict


def pushes() -> np.ndarray:
    """Learner 0: applied, dropped, in flight; learner 1: rejected, then applied in the same update, late."""
    rows = np.zeros(6, schema.PUSHES)
    rows["learner_id"] = [0, 1, 0, 1, 0, 1]
    rows["seq"] = [0, 0, 1, 0, 2, 1]
    rows["verdict"] = [Verdict.APPLY, Verdict.REJECT, Verdict.DROP, Verdict.APPLY, Verdict.APPLY, Verdict.LATE]
    rows["clock"] = [4, 4, 4, 4, 5, 5]
    rows["staleness"] = [1, 0, 9, 3, 7, 0]
    rows["gradients"] = 2
    return rows


@pytest.mark.parametrize("at_once", [1, 2, 6])
def test_pushes_by_hand(at_once: int) -> None:
    found = Counts().pushes
    for start in range(0, 6, at_once):
        found.add(pushes()[start : start + at_once])
    assert found.books(5).tolist() == [[3, 1, 1, 0, 1], [3, 1, 0, 1, 1]]
    assert found.books(6).tolist() == [[3, 2, 1, 0, 0], [3, 1, 0, 1, 1]]
    assert found.applied(5).staleness.tolist() == [0, 1, 0, 1]
    assert found.applied(5).learners.tolist() == [1, 1]
    assert found.applied(6).gradients == 6
    assert found.next_seq.tolist() == [3, 2]


@pytest.mark.parametrize("at_once", [1, 3])
def test_updates_by_hand(at_once: int) -> None:
    rows = np.zeros(3, schema.UPDATES)
    rows["clock"], rows["samples"], rows["gradients"] = [5, 6, 7], [8, 16, 20], [2, 2, 1]
    rows["time_s"], rows["update_s"] = [0.5, 1.0, 1.5], 0.25
    found = Counts().updates
    for start in range(0, 3, at_once):
        found.add(rows[start : start + at_once])
    assert (found.rows, found.clock, found.samples, found.gradients) == (3, 7, 20, 5)
    assert (found.time_s, found.update_s) == (1.5, 0.75)
