"""Real ranks whose log is bounded, killed in mid-run and continued: counts go on, whatever rows were left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import pytest

from mpisgd import replay
from mpisgd.analysis import books, staleness
from mpisgd.base.errors import DataError
from mpisgd.config import LEAST_LOG_BYTES
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from mpisgd.report.single import report

from .conftest import Shared
from .test_resume import newest, together_until

pytestmark = pytest.mark.slow

SAMPLES = 6000
JOB: dict[str, Any] = {
    "protocol": "hardsync",
    "model": "softmax",
    "data": {"name": "synthetic", "shape": [4], "classes": 2, "samples": SAMPLES, "test_samples": 10},
    "mu": 1,
    "epochs": 1.0,
    "threads": 1,
    "evaluation": {"every_epochs": 1.0},
    "log": {"progress": "off", "max_bytes": LEAST_LOG_BYTES},
    "checkpoint": {"every_updates": 200},
}
LEAST = 1700
"""Updates before the kill: more than twice as many pushes as are kept without gaps."""


def killed(top: Path) -> None:
    directory = top / "send"
    job = {"ranks": 3, "config": {**JOB, "out": str(directory / "run")}, "held": LEAST + 300}
    together_until(directory, [job], {"run": LEAST})
    run = Run(directory / "run")
    assert run.left_out
    assert run.attempt == 0
    assert all(book.balanced and book.pushed >= 2 * LEAST for book in run.books())
    assert newest(directory / "run") < SAMPLES // 2


SHARED = Shared([("send", "run")], lambda directory, name: {"ranks": 3, "resume": str(directory / name)}, killed)


@pytest.fixture(scope="module")
def run(launched: Callable[[str], Path]) -> Run:
    return Run(launched(__name__) / "send" / "run")


def test_counts_go_on(run: Run) -> None:
    assert run.attempt == 1
    assert run.done is not None
    assert run.left_out
    (book,) = run.books()
    assert (book.pushed, book.applied, book.dropped, book.in_flight) == (SAMPLES, SAMPLES, 0, 0)
    assert [each.applied for each in books.learner_books(run)] == [SAMPLES // 2] * 2
    assert staleness.histogram(run).tolist() == [SAMPLES]
    assert [each.share for each in books.coverage(run)] == [1.0, 1.0]
    assert books.imbalances(run) == []
    assert run.counts[0].updates.rows == run.done["clock"][0] == SAMPLES // 2


def test_rows_of_both_attempts_are_there(run: Run) -> None:
    clocks = run.table("updates")["clock"].tolist()
    assert clocks == sorted(set(clocks))
    assert len(clocks) < SAMPLES // 2
    with h5py.File(run.path / schema.LOG) as log:
        assert log["updates"]["clock"].tolist() == clocks
        assert log["learners"]["pushed"].tolist() == [SAMPLES // 2] * 2
    assert max(path.stat().st_size for path in run.path.glob("shard-*.h5")) <= LEAST_LOG_BYTES


def test_it_is_reported_and_not_proved(run: Run, tmp_path: Path) -> None:
    assert dict(report(run.path, tmp_path / "report").table("run").rows)["log"].startswith("the log keeps every k-th")
    with pytest.raises(DataError, match="nothing can be proved: the log keeps every k-th of the pushes from clock"):
        replay.check(run.path, trust=True)
