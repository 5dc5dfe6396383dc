"""Runs whose logs are bounded (`log.max_bytes`): what they count, keep and say, beside the same runs without a bound."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from rich.console import Console

from mpisgd import replay
from mpisgd.__main__ import main
from mpisgd.analysis import about, books, staleness, throughput, timeline
from mpisgd.base.errors import DataError
from mpisgd.config import LEAST_LOG_BYTES
from mpisgd.config.config_virtual import EmpiricalComputeOptions
from mpisgd.plan.costs.fit import fit
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from mpisgd.report import compare
from mpisgd.report.single import report
from mpisgd.simulate.compute import _measured
from tests.effort import spread
from tests.virtual.jobs import simulated

pytestmark = pytest.mark.timeout(300)

JOBS: dict[str, dict[str, Any]] = {
    "softsync": {"protocol": {"name": "softsync", "n": 4}, "shards": 2},
    "backup": {"protocol": {"name": "backup", "b": 1}, "compute": {"name": "heavy_tail"}},
    "versioned": {"protocol": "versioned"},
}
LONG = {"virtual": {"train_samples": 28_000}}
BOUND = {"log": {"max_bytes": LEAST_LOG_BYTES}}


@pytest.fixture(scope="module", params=spread(JOBS, 3))
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """The same run with all rows, and bounded."""
    path, job = tmp_path_factory.mktemp(request.param), {**LONG, **JOBS[request.param]}
    return simulated(path / "whole" / "run", **job), simulated(path / "bounded" / "run", **job, **BOUND)


@pytest.mark.slow
def test_all_counts_are_those_of_the_whole_run(both: tuple[Run, Run]) -> None:
    whole, bounded = both
    assert not whole.left_out
    assert "log.max_bytes" in bounded.left_out
    assert bounded.books() == whole.books()
    assert bounded.summaries.tolist() == whole.summaries.tolist()
    assert [vars(each) for each in books.learner_books(bounded)] == [vars(each) for each in books.learner_books(whole)]
    assert books.imbalances(bounded) == books.imbalances(whole) == []
    assert books.final_clocks(bounded).tolist() == books.final_clocks(whole).tolist()
    assert about.samples_applied(bounded) == about.samples_applied(whole)
    for ours, theirs in zip(books.coverage(bounded), books.coverage(whole), strict=True):
        assert (ours.sampled, ours.computed, ours.given_up) == (theirs.sampled, theirs.computed, theirs.given_up)
        assert ours.applied == (theirs.applied if whole.shards == 1 else None)
    assert staleness.histogram(bounded).tolist() == staleness.histogram(whole).tolist()
    ours, theirs = ([*staleness.by_shard(run), staleness.overall(run)] for run in (bounded, whole))
    for one, other in zip(ours, theirs, strict=True):
        assert vars(one) == pytest.approx(vars(other))
    for one, other in zip(staleness.by_learner(bounded), staleness.by_learner(whole), strict=True):
        assert (one.gradients, one.dropped) == (other.gradients, other.dropped)
        assert one.mean == pytest.approx(other.mean)
    for rate, same in zip(throughput.rates(bounded), throughput.rates(whole), strict=True):
        assert vars(rate) == pytest.approx(vars(same))
    assert bounded.done is not None
    assert {**bounded.done, "files": {}, "log": {}} == {**(whole.done or {}), "files": {}, "log": {}}, "fewer rows"


def test_kept_rows_are_some_of_those_of_the_whole_run(both: tuple[Run, Run]) -> None:
    whole, bounded = both
    for table in schema.THINNED:
        for shard in range(whole.shards):
            all_, kept = (run.table(table)[run.table(table)["shard"] == shard] for run in both)
            rule = bounded.parts_of(shard)[0].thinning(table)
            assert rule is not None
            assert kept.tobytes() == all_[rule.numbers(0, len(kept))].tobytes()
            assert len(kept) < len(all_) or len(all_) <= rule.whole
    assert bounded.events.tobytes() == whole.events.tobytes()
    assert bounded.evaluations.tobytes() == whole.evaluations.tobytes()
    assert max(path.stat().st_size for path in bounded.path.glob("shard-*.h5")) <= LEAST_LOG_BYTES


def test_the_joined_log_says_for_how_many_rows_each_stands(both: tuple[Run, Run]) -> None:
    whole, bounded = both
    with h5py.File(bounded.path / schema.LOG) as log:
        assert log["pushes"].shape == bounded.table("pushes").shape
        every = log["pushes_every"][:]
        spans = np.diff([*every[:, 0], len(log["pushes"])]) * every[:, 1]
        assert len(whole.pushes) <= spans.sum() < len(whole.pushes) + whole.shards * every[:, 1].max()
        for book in whole.books():
            mine = log["learners"][log["learners"]["shard"] == book.shard]
            for name in ("pushed", "applied", "dropped", "rejected", "in_flight"):
                assert mine[name].sum() == getattr(book, name)
        assert log["staleness"]["gradients"].sum() == staleness.overall(whole).gradients


def test_what_needs_every_row_refuses_by_name(both: tuple[Run, Run]) -> None:
    _, bounded = both
    for refused in (
        lambda: bounded.pushes,
        lambda: bounded.updates,
        lambda: replay.replay(bounded.path),
        lambda: fit(bounded),
        lambda: timeline.look(bounded),
        lambda: _measured(EmpiricalComputeOptions(run=str(bounded.path)), 4),
    ):
        with pytest.raises(DataError, match=r"the log keeps every k-th of the \w+ from clock [\d,]+ on, .*\(log\.max_bytes\)"):
            refused()
    for command in ("replay", "plan", "timeline"):
        assert main([command, str(bounded.path)]) == DataError.exit_status


@pytest.mark.slow
def test_report_and_compare_say_so(both: tuple[Run, Run], tmp_path: Path) -> None:
    whole, bounded = both
    sink = io.StringIO()
    found = report(bounded.path, tmp_path / "bounded", Console(file=sink, width=240))
    beside = report(whole.path, tmp_path / "whole", Console(file=io.StringIO(), width=240))
    assert found.problems == ()
    assert dict(found.table("run").rows)["log"].startswith(bounded.left_out)
    assert bounded.left_out in sink.getvalue()
    assert f"no figure timeline: {bounded.left_out}" in sink.getvalue()
    for key in ("books_shards", "staleness_histogram"):
        assert found.table(key) == beside.table(key)
    assert {drawing.key for drawing in found.drawings if drawing.figure is not None} == {"staleness_distribution"}
    assert not {"arrivals", "noise_scale", "learner_time"} & {table.key for table in found.tables}
    compared = compare.compare([whole.path, bounded.path], tmp_path / "compared", Console(file=io.StringIO()))
    one, other = (row[1:] for row in compared.table.rows)
    assert one == pytest.approx(other)


def test_a_bound_that_is_not_reached_changes_nothing(tmp_path: Path) -> None:
    whole, bounded = (simulated(tmp_path / name, **bound, epochs=0.2) for name, bound in (("whole", {}), ("bounded", BOUND)))
    assert bounded.left_out == ""
    assert [bounded.table(table).tobytes() for table in schema.TABLES] == [whole.table(table).tobytes() for table in schema.TABLES]
    assert replay.check(bounded.path) == ""


KILLED = """
import json, os, sys
from pathlib import Path
from mpisgd.records.log import bounded
from mpisgd.records.log.counts import Counts
from tests.virtual.jobs import simulated

class Killed(bounded.BoundedFile):
    def flush(self):
        rows = super().flush()
        if self._flushes == 20:
            told = self._counts
            said = [told.pushes.books(told.updates.clock).sum(axis=0).tolist(), told.updates.clock]
            Path(sys.argv[1] + ".json").write_text(json.dumps(said))
            append = self.append
            self.append = lambda name, row: os._exit(9) if self._filled["pushes"] > 100 else append(name, row)
        return rows

bounded.BoundedFile = Killed
simulated(Path(sys.argv[1]), **json.loads(sys.argv[2]))
"""


@pytest.mark.slow
def test_a_killed_run_has_the_counts_of_its_last_flush(tmp_path: Path) -> None:
    path, job = tmp_path / "run", {**LONG, "log": {**BOUND["log"], "flush_s": 1e9}}
    process = subprocess.run([sys.executable, "-c", KILLED, str(path), json.dumps(job)], env=os.environ, timeout=200, check=False)
    assert process.returncode == 9
    (pushed, *others), clock = json.loads(Path(f"{path}.json").read_text())
    run = Run(path)
    assert run.left_out
    assert books.final_clocks(run).tolist() == [clock]
    (book,) = run.books()
    assert [book.pushed, book.applied, book.dropped, book.rejected, book.in_flight] == [pushed, *others]
    assert book.balanced
    found = report(path, tmp_path / "report", Console(file=io.StringIO()))
    assert "UNFINISHED" in dict(found.table("run").rows)["status"]


def test_flipped_counts_are_found(both: tuple[Run, Run], tmp_path: Path) -> None:
    _, bounded = both
    shutil.copytree(bounded.path, tmp_path / "run")
    with h5py.File(tmp_path / "run" / schema.shard_file(0), "r+") as file:
        for name in ("counts_0", "counts_1"):
            file[name][12] += 1
    with pytest.raises(DataError, match="its counts do not have the checksum"):
        Run(tmp_path / "run").books()
