"""Where both directions are full, bodies cross to other nodes in pieces: laws and replay, on real ranks that seem to be apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpisgd import replay
from mpisgd.comm import pieces
from mpisgd.records.log.reader import Run

from . import laws
from .conftest import Shared, dealt

COMMON = {
    "protocol": {"name": "softsync", "n": 3},
    "model": {"name": "mlp", "hidden": [1200, 1200]},
    "shards": 2,
    "epochs": 0.05,
    "mu": 8,
    "log": {"progress": "off"},
    "evaluation": {"every_epochs": 0},
}
"""Slices of 3 MB: two chunks, of some fifty pieces; a run has 1,176 of them or more."""
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "duplex": (2, {"ahead": 1}),
    "gathered": (2, {"ahead": 1, "way": "gathered"}),
    "prefetch": (3, {"ahead": 2}),
    "rounded": (2, {"ahead": 1, "push_format": "bfloat16", "pull_format": "bfloat16"}),
}
"""How old weights may be, and what differs."""


def job(directory: Path, name: str) -> dict[str, Any]:
    out = str(directory / name)
    env = {"MPISGD_WAIT": "polite", "MPISGD_MESSAGES": "1"}
    return {"ranks": 5, "config": {**COMMON, **RUNS[name][1], "out": out}, "apart": f"{out}-said", "env": env}


CASES = dealt(RUNS, always=("duplex",))
SHARED = Shared(CASES, job)


@pytest.mark.deeper
@pytest.mark.parametrize(("switch", "name"), CASES)
def test_laws_and_replay(runs: Path, switch: str, name: str) -> None:
    said = "".join((runs / switch / f"{name}-said-{rank}").read_text() for rank in range(5))
    piece = f"WEIGHTS {pieces.NBYTES / 1e6:.6g} MB"
    assert (said.count(piece) > 1000) == (name != "rounded"), "else this shows nothing"
    run = Run(runs / switch / name)
    assert len(set(run.environment["hosts"])) == 5
    laws.hold(run, ahead=RUNS[name][0])
    proof = replay.replay(run.path)
    assert proof.reason == ""
    assert [each.elements for each in proof.differences] == [0]
