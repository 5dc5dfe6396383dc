"""Who is told how a run of sandblaster goes: callbacks of each evaluation, and people of its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpisgd.records.callbacks import Callbacks, Update
from mpisgd.records.log.reader import Run
from mpisgd.simulate.job import Job
from tests.virtual.test_sandblaster import NO_OBJECTS, job


def test_on_update_is_told_of_each_evaluation_by_shard_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told: list[Update] = []
    made = Job(job(tmp_path / "run", shards=2, threads=1, log={"progress": "plain"}, protocol={"iterations": 3}), NO_OBJECTS)
    made.world.callbacks = Callbacks(on_update=told.append)
    made.run()
    rows = Run(tmp_path / "run").updates
    rows = rows[rows["shard"] == 0]
    assert sum(each.updates for each in told) == told[-1].clock == len(rows) > 3
    assert told[-1].epochs == len(rows)
    assert sum(each.updates * each.loss for each in told) == pytest.approx(rows["mean_loss"].sum())
    assert f"mpisgd: finished: {len(rows)} evaluations in " in capsys.readouterr().err
