"""Where both directions are full, bodies cross to other nodes in pieces: laws and replay, on real ranks that seem to be apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpisgd import replay
from mpisgd.comm import pieces
from mpisgd.config import config_file
from mpisgd.records.log.reader import Run

from . import laws
from .conftest import SWITCHES, launch

COMMON = {
    "protocol": {"name": "softsync", "n": 3},
    "model": {"name": "mlp", "hidden": [1200, 1200]},
    "shards": 2,
    "epochs": 0.2,
    "mu": 8,
    "log": {"progress": "off"},
    "evaluation": {"every_epochs": 0},
}
"""Slices of 3 MB: two chunks, of some fifty pieces."""
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "duplex": (2, {"exchange": "duplex"}),
    "gathered": (2, {"exchange": "duplex", "receive": "gathered"}),
    "prefetch": (3, {"exchange": "prefetch"}),
    "rounded": (2, {"exchange": "duplex", "push_format": "bfloat16", "pull_format": "bfloat16"}),
}
"""How old weights may be, and what differs."""


@pytest.mark.parametrize(
    ("name", "switch"),
    [
        ("duplex", "ssend"),
        pytest.param("gathered", "ssend", marks=pytest.mark.slow),
        pytest.param("gathered", "blocking", marks=pytest.mark.slow),
        pytest.param("prefetch", "send", marks=pytest.mark.slow),
        pytest.param("prefetch", "ssend", marks=pytest.mark.slow),
        pytest.param("rounded", "send", marks=pytest.mark.slow),
    ],
)
def test_laws_and_replay(name: str, switch: str, tmp_path: Path) -> None:
    ahead, changes = RUNS[name]
    config, out = tmp_path / "job.toml", tmp_path / "run"
    config.write_text(config_file.dumps(config_file.from_mapping({**COMMON, **changes, "out": str(out)})))
    env = {"MPISGD_WAIT": "polite", "MPISGD_MESSAGES": "1", **SWITCHES[switch]}
    done = launch(5, "-m", "tests.mpi.apart", "train", str(config), **env)
    assert done.status == 0, done.err
    piece = f"WEIGHTS {pieces.NBYTES / 1e6:.6g} MB"
    assert (done.text.count(piece) > 1000) == (name != "rounded"), "else this shows nothing"
    run = Run(out)
    assert len(set(run.environment["hosts"])) == 5
    laws.hold(run, ahead=ahead)
    proof = replay.replay(out)
    assert proof.reason == ""
    assert [each.elements for each in proof.differences] == [0]
