"""Groups of real ranks that are killed, and continued with other numbers of ranks in a group: stages are cut anew (DESIGN 6)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mpisgd import replay
from mpisgd.records.checkpoint import checkpoint as disk
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from mpisgd.report import single as report
from tests import cut_models
from tests.effort import REST

from .conftest import Shared
from .test_resume import COMMON, newest, together_until

pytestmark = pytest.mark.slow

SOME = {**COMMON, "model": {"name": "mlp", "hidden": [24, 16]}, "epochs": 1.0, "micro_batches": 2}
#: name -> what differs from SOME; then, for each attempt, ranks, and what it has: two learners always.
JOBS: dict[str, tuple[dict[str, Any], list[tuple[int, dict[str, Any]]]]] = {
    "hardsync": (
        {"optimizer": {"name": "adam"}, "alpha0": 0.002, "averaging": 0.9, "clip_norm": 5.0},
        [(6, {"shards": 2, "group_size": 2}), (3, {"shards": 1, "group_size": 1}), (7, {"shards": 3, "group_size": 2})],
    ),
    "softsync": (
        {"protocol": {"name": "softsync", "n": 2}, "nonfinite": "drop"},
        [(4, {"shards": 2, "group_size": 1}), (6, {"shards": 2, "group_size": 2, "pipeline": "1f1b"}), (6, {})],
    ),
    "traced": (  # by torch's splitter, at names
        {"model": {"name": f"{cut_models.__name__}:in_order"}},
        [
            (6, {"shards": 2, "group_size": 2, "stages": {"at": list(cut_models.AT[2])}}),
            (9, {"shards": 3, "group_size": 3, "stages": {"at": list(cut_models.AT[3])}}),
            (3, {"shards": 1, "group_size": 1, "stages": {"at": []}}),
        ],
    ),
}

if REST:
    del JOBS["traced"]


def begun(name: str, out: Path) -> dict[str, Any]:
    special, [(ranks, first), *_] = JOBS[name]
    return {"ranks": ranks, "config": {**SOME, **special, **first, "out": str(out)}}


def resumed(name: str, out: Path, attempt: int) -> dict[str, Any]:
    ranks, other = JOBS[name][1][attempt]
    return {"ranks": ranks, "resume": str(out), **other}


def killed(top: Path) -> None:
    directory = top / "send"
    together_until(directory, [begun(name, directory / name) for name in JOBS], dict.fromkeys(JOBS, 0))
    clocks = {name: newest(directory / name) for name in JOBS}
    together_until(directory, [resumed(name, directory / name, 1) for name in JOBS], clocks)


def job(directory: Path, name: str) -> dict[str, Any]:
    """The last attempt of a run that was killed, or all of one."""
    run, out = name.removeprefix("whole/"), directory / name
    return resumed(run, out, 2) if run == name else begun(run, out)


SHARED = Shared([("send", name) for name in (*JOBS, "whole/hardsync", "whole/softsync")], job, killed)


@pytest.fixture(scope="module")
def runs(launched: Callable[[str], Path]) -> Path:
    return launched(__name__) / "send"


@pytest.mark.parametrize("name", JOBS)
def test_all_attempts_are_proved_and_reported(runs: Path, name: str, tmp_path: Path) -> None:
    run = Run(runs / name)
    assert run.done is not None and run.done["books_balanced"] and all(each.balanced for each in run.books())
    assert [each["group_size"] for each in run.environment["attempts"]] == [
        size for size in {"hardsync": [2, 1, 2], "softsync": [1, 2, 2], "traced": [2, 3, 1]}[name]
    ]
    proof = replay.replay(run.path, trust=True)
    assert proof.reason == ""
    assert proof.lines()[-1].startswith("identical")
    assert report.report(run.path, tmp_path).exit_status == 0
    found = disk.newest(run.path)
    assert (found.learners, len(found.parts)) == (2, run.shards)


def test_stages_that_are_cut_anew_change_no_more_than_last_bits(runs: Path) -> None:
    """hardsync: as many learners have the same mini-batches, whoever holds which part of the model."""
    cut, whole = (torch.load(path / "hardsync" / schema.WEIGHTS, weights_only=True) for path in (runs, runs / "whole"))
    for kind, weights in cut.items():
        for key, value in weights.items():
            torch.testing.assert_close(value, whole[kind][key], rtol=1e-4, atol=1e-6)
    applied = [sorted(set(Run(path / "hardsync").pushes["seq"].tolist()))[-1] for path in (runs, runs / "whole")]
    assert applied[0] == applied[1]


def test_losses_go_on(runs: Path) -> None:
    rows = [Run(path / "softsync").evaluations["loss"] for path in (runs, runs / "whole")]
    assert np.isclose(rows[0][0], rows[1][0]) and rows[0][-1] < 0.7 * rows[0][0]
