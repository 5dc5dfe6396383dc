"""Malformed messages on real ranks: some of the cases of the whole campaign, `tests.faults.fuzz`."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from mpisgd.comm.mpi.launch import mpirun
from tests.faults import fuzz
from tests.faults.fuzz import Case

pytestmark = pytest.mark.slow


def needs_ulfm(case: Case) -> None:
    version = subprocess.run([mpirun(1)[0], "--version"], capture_output=True, text=True, check=False).stdout
    if case.tolerant and "Open MPI" not in version:
        pytest.skip("this MPI does not tell of failures (ULFM)")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("at shards", "learner", "shard", 1, False), marks=pytest.mark.rare),
        Case("at shards", "learner", "shard", 2, False, way="gathered"),
        Case("at shards", "evaluator", "shard", 2, True),
    ],
    ids=["learner", "gathered", "evaluator"],
)
def test_four_hundred_at_shards(case: Case, tmp_path: Path) -> None:
    needs_ulfm(case)
    found = fuzz.look(case, 2, 400, tmp_path)
    assert found.failures == []
    assert found.totals["refused"] >= 330
    fired = sum(name.startswith("fired: ") for name in found.totals)
    assert fired == len(fuzz.Gun(random.Random(1), 4, case.sender, case.tolerant).kinds), "each kind was fired"


@pytest.mark.parametrize(
    "case",
    [
        Case("answers", "shard", "learner", 1, False, "longer header"),
        pytest.param(Case("answers", "shard", "learner", 1, False, "ending"), marks=pytest.mark.rare),
        Case("answers", "shard", "evaluator", 2, True, "longer body"),
    ],
    ids=["header", "ending", "body"],
)
def test_an_answer_that_cannot_be_ends_the_job(case: Case, tmp_path: Path) -> None:
    needs_ulfm(case)
    assert fuzz.look(case, 2, 0, tmp_path).failures == []
