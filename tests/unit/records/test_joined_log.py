"""`log.h5`: the logs of all ranks in one file, which needs no other."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import h5py
import numpy as np
import pytest

from mpisgd.base.errors import DataError
from mpisgd.records import directory
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from tests.unit.fabricate import run_of

OPEN = h5py.File


def test_the_joined_log_is_the_concatenation_and_can_be_moved(tmp_path: Path) -> None:
    tables = run_of(tmp_path / "run")
    directory.join(Run(tmp_path / "run"))
    (tmp_path / "run").rename(tmp_path / "moved")
    with h5py.File(tmp_path / "moved" / schema.LOG, "r") as log:
        assert log.attrs["schema_version"] == schema.SCHEMA_VERSION
        for table, parts in tables.items():
            np.testing.assert_array_equal(log[table][:], np.concatenate(parts))
            assert log[table].attrs["rows"] == sum(map(len, parts))
    run = Run(tmp_path / "moved")
    for table in ("pushes", "updates", "events"):
        np.testing.assert_array_equal(run.table(table), np.concatenate(tables[table]))
    np.testing.assert_array_equal(run.evaluations, tables["evaluations"][-1])
    assert (run.shards, run.lambda_, run.name) == (3, 2, "moved")
    assert run.summaries["shard"].tolist() == [0, 1, 2]


def test_to_join_a_log_opens_each_file_some_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy file system to open a file takes longer than to read a short table: once for each table, and for what it says."""
    run_of(tmp_path / "run")
    opened: Counter[str] = Counter()
    monkeypatch.setattr(h5py, "File", Mock(side_effect=lambda *path, **how: opened.update([str(path[0])]) or OPEN(*path, **how)))
    directory.join(Run(tmp_path / "run"))
    logs = {name: count for name, count in opened.items() if ".attempt-" in name}
    assert len(logs) == 4 and max(logs.values()) <= len(schema.TABLES) + 5


def test_the_joined_log_needs_no_other_file(tmp_path: Path) -> None:
    """Virtual data sets would show zeros in the place of what is missing."""
    tables = run_of(tmp_path / "run")
    directory.join(Run(tmp_path / "run"))
    (tmp_path / "run" / schema.shard_file(1)).unlink()
    with h5py.File(tmp_path / "run" / schema.LOG) as log:
        for table, parts in tables.items():
            np.testing.assert_array_equal(log[table][:], np.concatenate(parts))
            assert log[table].fletcher32 or not len(log[table])


def test_a_damaged_log_is_not_joined(tmp_path: Path) -> None:
    run_of(tmp_path / "run")
    path = tmp_path / "run" / schema.shard_file(1)
    with h5py.File(path, "r+") as file:
        row = file["updates"][3]
        row["time_s"] += 1
        file["updates"][3] = row
    with pytest.raises(DataError, match=r"shard-001\.attempt-0\.h5: table updates: the checksum of the rows does not match"):
        directory.join(Run(tmp_path / "run"))
    assert not list((tmp_path / "run").glob("*log.h5*"))
