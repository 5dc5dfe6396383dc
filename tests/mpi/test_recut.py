"""Real ranks, killed, and continued with other numbers of learners and shards, twice (DESIGN 4, laws 4, 6; DESIGN 6)."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from mpisgd import replay
from mpisgd.analysis import about, books, throughput
from mpisgd.base.errors import ProtocolError
from mpisgd.job.finish import check_layouts
from mpisgd.records.checkpoint import checkpoint as disk
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from mpisgd.report import single as report

from .conftest import Shared
from .test_resume import COMMON, newest, together_until

pytestmark = pytest.mark.slow

#: name -> what differs from COMMON; then, for each attempt, ranks, shards and learners.
JOBS: dict[str, tuple[dict[str, Any], list[tuple[int, int, int]]]] = {
    "hardsync": (
        {
            "optimizer": {"name": "adamw"},
            "groups": {"weight_decay": {"*.bias": 0.0}, "rate": {"1.*": 0.5}},
            "schedule": {"name": "CosineAnnealingLR", "warmup_updates": 4},
            "alpha0": 0.01,
        },
        [(4, 2, 2), (4, 1, 3), (5, 3, 2)],
    ),
    "softsync": (
        {"protocol": {"name": "softsync", "n": 2}, "sampling": "own", "modulate": "rate", "optimizer": "lamb", "alpha0": 0.01},
        [(4, 2, 2), (3, 1, 2), (5, 2, 3)],
    ),
    "allreduce": ({"protocol": "allreduce", "averaging": 0.9}, [(3, 3, 3), (2, 2, 2), (2, 2, 2)]),
    "shards": ({"protocol": "hardsync", "evaluator": True, "averaging": 0.9}, [(4, 1, 2), (5, 2, 2), (6, 3, 2)]),
}


def begun(name: str, out: Path) -> dict[str, Any]:
    special, sizes = JOBS[name]
    ranks, shards, _ = sizes[0]
    return {"ranks": ranks, "config": {**COMMON, **special, "shards": 1 if name == "allreduce" else shards, "out": str(out)}}


def resumed(name: str, out: Path, attempt: int) -> dict[str, Any]:
    ranks, shards, _ = JOBS[name][1][attempt]
    return {"ranks": ranks, "resume": str(out)} | ({} if name == "allreduce" else {"shards": shards})


def killed(top: Path) -> None:
    directory = top / "send"
    together_until(directory, [begun(name, directory / name) for name in JOBS], dict.fromkeys(JOBS, 0))
    clocks = {name: newest(directory / name) for name in JOBS}
    together_until(directory, [resumed(name, directory / name, 1) for name in JOBS], clocks)
    for name in JOBS:
        shutil.copytree(directory / name, directory / "killed" / name)


def job(directory: Path, name: str) -> dict[str, Any]:
    """The last attempt of a run that was killed, or all of one."""
    run, out = name.removeprefix("whole/"), directory / name
    return resumed(run, out, 2) if run == name else begun(run, out)


SHARED = Shared([("send", where + name) for where in ("", "whole/") for name in JOBS], job, killed)


@pytest.fixture(scope="module")
def runs(launched: Callable[[str], Path]) -> Path:
    return launched(__name__) / "send"


@pytest.mark.parametrize("name", JOBS)
def test_the_log_of_every_layout(runs: Path, name: str) -> None:
    run, sizes = Run(runs / name), JOBS[name][1]
    layouts = [size for number, size in enumerate(sizes) if number == 0 or size != sizes[number - 1]]
    *earlier, (_, shards, learners) = layouts
    assert (run.shards, run.lambda_, run.attempt) == (shards, learners, 2)
    assert [(each.shards, each.learners) for each in run.earlier] == [(shards, learners) for _, shards, learners in earlier]
    attempts = run.environment["attempts"]
    cuts = [attempts[number]["clock"] for number in range(1, 3) if sizes[number] != sizes[number - 1]]
    assert [each.last_clock for each in run.earlier] == cuts
    assert [each.first_clock for each in run.earlier] == [0, *cuts][: len(cuts)]
    assert run.begins.clock == cuts[-1]
    for summary in run.summaries:
        updates = run.updates[run.updates["shard"] == summary["shard"]]
        assert updates["clock"].tolist() == list(range(cuts[-1] + 1, summary["final_clock"] + 1))
        assert updates["samples"][0] > run.begins.samples > 0
        assert updates["time_s"][0] > run.begins.time_s > 0
    with h5py.File(runs / name / schema.LOG) as joined:
        assert len(joined["pushes"]) == len(run.pushes)
        assert len(joined["evaluations"]) == len(run.evaluations) == 3 * (1 + ("averaging" in JOBS[name][0]))
        for number, layout in enumerate(run.earlier):
            group = joined[f"layouts/{number}"]
            assert (group.attrs["learners"], group.attrs["shards"]) == (layout.learners, layout.shards)
            for shard in range(layout.shards):
                clocks = group["updates"]["clock"][group["updates"]["shard"] == shard]
                assert clocks.tolist() == list(range(layout.first_clock + 1, layout.last_clock + 1))
    assert not list((runs / name).glob(".*")), "no scratch is left"


@pytest.mark.parametrize("name", JOBS)
def test_books_balance(runs: Path, name: str) -> None:
    run = Run(runs / name)
    assert run.done is not None
    assert run.done["books_balanced"]
    assert all(each.balanced for each in run.books())
    assert books.imbalances(run) == []
    assert all(each.computed > 0 and each.applied >= each.sampled - 2 for each in books.coverage(run)), "but for those in flight"
    assert [rate.samples for rate in throughput.rates(run)] == (np.array(run.done["samples"]) - run.begins.samples).tolist()


def test_a_layout_that_lacks_updates_does_not_balance(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "hardsync", tmp_path / "run")
    run = Run(tmp_path / "run")
    check_layouts(run)
    with h5py.File(tmp_path / "run" / schema.shard_file(0, 2), "r+") as file:
        before = file.attrs["before"]
        before[0, 3] -= 1
        file.attrs["before"] = before
    with pytest.raises(ProtocolError, match="shard 0 of 1, before slices were cut anew at clock"):
        check_layouts(Run(tmp_path / "run"))


@pytest.mark.parametrize("name", JOBS)
def test_replay_proves_all_layouts(runs: Path, name: str) -> None:
    proof = replay.replay(runs / name, trust=True)
    assert proof.reason == ""
    assert proof.lines()[-1].startswith("identical")
    sizes = JOBS[name][1]
    said = [line for line in proof.seams if line.endswith("from here on")]
    assert len(said) == sum(sizes[number] != sizes[number - 1] for number in (1, 2))
    assert replay.check(runs / "killed" / name, trust=True) == ""


def test_the_report_tells(runs: Path) -> None:
    run = Run(runs / "hardsync")
    lines = dict(about.header(run, about.status(run), "").rows)
    first, second = (each["clock"] for each in run.environment["attempts"][1:])
    assert lines["continued"] == f"from the checkpoints of clock {first}, {second}"
    assert f"2 learners and 2 shards until clock {first}; 3 learners and 1 shard until clock {second}: below" in lines["before"]


@pytest.mark.parametrize("where", ["hardsync", "killed/hardsync", "softsync"])
def test_reports_of_killed_and_done(runs: Path, where: str, tmp_path: Path) -> None:
    assert report.report(runs / where, tmp_path).exit_status == 0


def losses(path: Path) -> np.ndarray:
    rows = Run(path).evaluations
    return np.asarray(rows["loss"][rows["averaged"] == 0])


@pytest.mark.parametrize("name", JOBS)
def test_it_learns_as_without_interruption(runs: Path, name: str) -> None:
    cut, whole = losses(runs / name), losses(runs / "whole" / name)
    assert cut[0] == whole[0]
    assert cut[-1] < cut[0] / 2
    if name != "softsync":  # whose staleness, and with it what was learned, is another in each run
        assert abs(cut[-1] - whole[-1]) < 0.15 * cut[0]


def test_other_shards_alone_change_no_more_than_last_bits(runs: Path) -> None:
    cut, whole = (torch.load(path / "shards" / schema.WEIGHTS, weights_only=True) for path in (runs, runs / "whole"))
    assert set(cut) == {"theta", "thetabar"}
    for kind, weights in cut.items():
        for key, value in weights.items():
            torch.testing.assert_close(value, whole[kind][key], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(losses(runs / "shards"), losses(runs / "whole" / "shards"), rtol=1e-4)


def test_every_sample_once_per_epoch(runs: Path) -> None:
    """hardsync: the mini-batches that all layouts were dealt are those of one sequence, none twice and none left out."""
    run, mu = Run(runs / "hardsync"), 16
    dealt: list[int] = []
    for learners, pushes in [*((each.learners, each.table("pushes")) for each in run.earlier), (run.lambda_, run.pushes)]:
        mine = pushes[(pushes["shard"] == 0) & (pushes["verdict"] == schema.Verdict.APPLY)]
        assert (mine["samples"] == mu).all()
        dealt += (mine["seq"] * learners + mine["learner_id"]).tolist()
    in_flight = max(learners for _, _, learners in JOBS["hardsync"][1])
    assert sorted(dealt)[: -3 * in_flight] == list(range(len(dealt) - 3 * in_flight))
    assert len(set(dealt)) == len(dealt)


def test_checkpoints_are_of_the_new_layout(runs: Path) -> None:
    for name, (_, sizes) in JOBS.items():
        found = disk.newest(runs / name)
        assert (found.learners, len(found.parts)) == (sizes[2][2], sizes[2][1])
