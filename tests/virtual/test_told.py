"""What a run says of itself when it starts, and its report afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpisgd.analysis import about
from mpisgd.records.log.reader import Run
from tests.virtual.jobs import TENSORS, simulated

SPOKEN = {"epochs": 0.2, "log": {"progress": "plain"}}


def reported(path: Path) -> dict[Any, Any]:
    """The first lines of the report."""
    run = Run(path)
    table = about.header(run, about.status(run), "")
    return dict(zip(table.cells("what"), table.cells("value"), strict=True))


def test_delay_compensation_tells_its_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four copies of 150,002 float32: 2,400,032 bytes."""
    wide = {"model": {"name": "mlp", "hidden": [30000]}, "shards": 2}  # 300,003 parameters
    simulated(tmp_path / "run", TENSORS, **SPOKEN, **wide, protocol="async", compensation=0.04)
    cost = "up to 4 copies of the slice on each shard, 2.3 MiB"
    assert f"300,003 parameters, 120 training samples, delay compensation: {cost}," in capsys.readouterr().err
    assert reported(tmp_path / "run")["delay compensation"] == f"0.04: {cost}"


def test_who_compensates_nothing_keeps_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    simulated(tmp_path / "run", TENSORS, **SPOKEN, protocol="async")
    assert "compensation" not in capsys.readouterr().err
    assert "delay compensation" not in reported(tmp_path / "run")
