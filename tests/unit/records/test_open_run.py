"""`mpisgd.open_run`: tables, configuration and weights of runs, finished, unfinished and of an earlier commit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import mpisgd
from mpisgd.base.errors import CheckpointError, ConfigError, DataError
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from tests.unit.older_runs import NAMES, unpack
from tests.virtual.jobs import TENSORS, simulated


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("open") / "run"
    simulated(path, TENSORS, protocol={"name": "softsync", "n": 2}, averaging=0.9)
    return path


def test_tables_are_those_of_the_log(trained: Path) -> None:
    pytest.importorskip("pandas")
    opened, run = mpisgd.open_run(trained), Run(trained)
    for name in schema.TABLES:
        table, rows = getattr(opened, name), run.table(name)
        assert list(table.columns) == list(rows.dtype.names or ())
        assert len(table) == len(rows) > 0
        for column in set(table.columns) - {"verdict", "reason", "kind"}:
            np.testing.assert_array_equal(table[column].to_numpy(), rows[column])
    assert opened.pushes["verdict"].tolist() == [schema.Verdict(each).name for each in run.pushes["verdict"]]
    assert opened.events["kind"].tolist() == [schema.Event(each).name for each in run.events["kind"]]
    assert opened.pushes.groupby("learner_id")["staleness"].count().sum() == len(run.pushes)


def test_the_rest_needs_no_pandas(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    opened = mpisgd.open_run(str(trained))
    assert (opened.config.mu, opened.config.protocol.n) == (4, 2)  # type: ignore[attr-defined]
    assert opened.done is not None and opened.done["clock"] == Run(trained).done["clock"]  # type: ignore[index]
    assert opened.balanced
    assert opened.environment["learners"] == 4
    saved = torch.load(trained / "weights.pt", weights_only=True)
    for averaged, name in ((False, "theta"), (True, "thetabar")):
        found = opened.weights(averaged=averaged)
        assert list(found) == list(saved[name])
        assert all(torch.equal(found[key], saved[name][key]) for key in found)
    with pytest.raises(ConfigError, match=r"pandas': pip install pandas"):
        _ = opened.pushes


@pytest.mark.parametrize("name", NAMES)
def test_runs_of_an_earlier_commit(name: str, tmp_path: Path) -> None:
    opened = mpisgd.open_run(unpack(name, tmp_path))
    assert opened.balanced
    assert (opened.done is None) == (name == "hardsync")
    assert opened.config.out
    if opened.done is None:
        with pytest.raises(CheckpointError, match=r"has no weights\.pt: a run writes weights at the end"):
            opened.weights()
    else:
        assert sum(each.numel() for each in opened.weights().values()) >= opened.environment["parameters"]


def test_what_is_no_run_and_what_has_no_average(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is no run directory of mpisgd"):
        mpisgd.open_run(tmp_path)
    path = simulated(tmp_path / "run", TENSORS).path
    with pytest.raises(CheckpointError, match=r"has no averaged weights: the run had averaging = 0"):
        mpisgd.open_run(path).weights(averaged=True)
    with (path / "weights.pt").open("r+b") as file:
        file.write(b"other")
    with pytest.raises(DataError, match=r"weights\.pt is damaged"):
        mpisgd.open_run(path).weights()


def test_opening_imports_neither_torch_nor_mpi(trained: Path) -> None:
    code = f"import sys, mpisgd; mpisgd.open_run({str(trained)!r}).config; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300).stdout
    assert {"torch", "mpi4py", "pandas"}.isdisjoint(loaded.split())
