"""Logs that an earlier mpisgd bounded (`log.max_bytes`): rows may be missing, so each command refuses them, until 1.0."""

from __future__ import annotations

import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest

import mpisgd
from mpisgd import replay
from mpisgd.__main__ import main
from mpisgd.base.errors import DataError
from mpisgd.records.log import continuing, schema
from mpisgd.records.log.reader import Run
from tests.virtual.jobs import simulated

REFUSED = rf"{schema.shard_file(0)} is not read: log\.max_bytes, now gone, bounded the file.* version and commit in config\.toml"
UNBOUNDED = 1 << 62
"""Room of an attempt without a bound that went on from one with a bound."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated(tmp_path_factory.mktemp("log") / "run", epochs=0.1).path


@pytest.fixture(params=[{"room": 6144}, {"room": UNBOUNDED, "counts": True}, {"counts": True}], ids=str)
def bounded(request: pytest.FixtureRequest, whole: Path, tmp_path: Path) -> Path:
    """A copy of the run, with what such a log had besides."""
    shutil.copytree(whole, tmp_path / "run")
    with h5py.File(tmp_path / "run" / schema.shard_file(0), "r+") as file:
        if "room" in request.param:
            file.attrs["room"] = np.array([request.param["room"]] * 2, np.int64)
        for name in ("counts_0", "counts_1") if "counts" in request.param else ():
            file[name] = np.zeros(9, np.int64)
    return tmp_path / "run"


def test_whoever_reads_it_is_told(bounded: Path) -> None:
    for read in (
        lambda: Run(bounded).pushes,
        lambda: Run(bounded).books(),
        lambda: Run(bounded).summaries,
        lambda: mpisgd.open_run(bounded).balanced,
        lambda: replay.check(bounded),
        lambda: continuing.check_rows(bounded, 0, [[0, 1, 1, 0, 0]]),
    ):
        with pytest.raises(DataError, match=REFUSED):
            read()


@pytest.mark.parametrize("command", ["report", "replay", "timeline", "plan", "compare"])
def test_each_command_says_so(command: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(whole, tmp_path / "run")
    with h5py.File(tmp_path / "run" / schema.shard_file(0), "r+") as file:
        file.attrs["room"] = np.array([6144, 4096], np.int64)
    assert main([command, str(tmp_path / "run")]) == DataError.exit_status
    assert "log.max_bytes, now gone, bounded the file" in capsys.readouterr().err


def test_no_run_writes_what_they_had(whole: Path) -> None:
    with h5py.File(whole / schema.shard_file(0)) as file:
        assert set(file) == {*schema.TABLES, "committed", "sums", "closing", "summary"}
        assert set(file.attrs) == {"schema_version", "shard"}
