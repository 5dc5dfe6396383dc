"""Real ranks, killed in mid-run, some twice, and continued each time (DESIGN 4, laws 4, 6; DESIGN 6)."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from mpisgd import replay
from mpisgd.analysis import about
from mpisgd.comm.mpi.launch import environment, mpirun
from mpisgd.records.checkpoint import checkpoint as disk
from mpisgd.records.lock import Lock
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Event
from tests import travel
from tests.effort import EVERYTHING, PATTERNS, REST
from tests.forge import unsealed

from . import laws
from .conftest import DRIVE, Launched, Shared, execute

EVERY = 8
COMMON: dict[str, Any] = {
    "epochs": 2.0,
    "threads": 1,
    "log": {"progress": "off"},
    "straggler": {"delay": "constant", "delay_mean_s": 0.005},
    "checkpoint": {"every_updates": EVERY, "keep": 2},
}
HELD = 3 * EVERY
"""Mini-batches of each learner in a job that is killed: there is a checkpoint among the updates made with them."""
#: name -> (ranks, what differs from COMMON)
JOBS: dict[str, tuple[int, dict[str, Any]]] = {
    "hardsync-S2": (
        4,
        {
            "model": {"name": "mlp", "hidden": [32], "batch_norm": True},
            "shards": 2,
            "optimizer": {"name": "adam"},
            "alpha0": 0.002,
            "averaging": 0.9,
        },
    ),
    "allreduce-node": (2, {"protocol": "allreduce"}),
    "backup": (3, {"protocol": {"name": "backup", "b": 0}, "model": "softmax", "optimizer": "adagrad"}),
    "softsync-S2": (4, {"protocol": {"name": "softsync", "n": 2}, "shards": 2}),
    "async": (4, {"protocol": "async", "evaluator": True, "compensation": 0.1, "compensation_memory": 0.9}),
    "layers-S2": (
        4,
        {"protocol": "async", "shards": 2, "per_layer": True, "alpha0": 0.01, "clip_norm": 0.5, "push_format": "bfloat16"},
    ),
    "bfloat16-S2": (4, {"protocol": "hardsync", "shards": 2, "push_format": "bfloat16", "pull_format": "bfloat16"}),
    "topk-S2": (4, {"protocol": {"name": "softsync", "n": 2}, "shards": 2, "push_format": "topk", "topk_share": 0.1}),
    "pulls-S2": (4, {"protocol": "async", "shards": 2, "alpha0": 0.01, "pull_format": "bfloat16"}),
    "duplex-S2": (4, {"protocol": {"name": "softsync", "n": 2}, "shards": 2, "ahead": 1}),
    "streamed-S2": (4, {"protocol": "hardsync", "shards": 2, "way": "streamed"}),
    "prefetch-S2": (4, {"protocol": "async", "shards": 2, "ahead": 2}),
    "local-S2": (4, {"protocol": "hardsync", "shards": 2, "local_steps": 2, "inner_alpha0": 0.001, "alpha0": 0.7}),
    "teams": (5, {"protocol": "hardsync", "aggregation": "node", "team_size": 2}),
}
if REST:
    JOBS = {name: JOBS[name] for name in ("allreduce-node", "backup", "softsync-S2", "layers-S2", "duplex-S2", "teams")}
elif not EVERYTHING:
    JOBS = {name: JOBS[name] for name in ("hardsync-S2", "async", *(["backup"] if PATTERNS else []))}
SYNCHRONOUS = [name for name in JOBS if name in ("hardsync-S2", "allreduce-node", "backup", "teams")]
"""Of which a run has the same bits each time; backup, because it waits for both of two learners."""


TWICE = [name for name in JOBS if name in ("allreduce-node", "softsync-S2", "async")]
"""Which are killed once more after they have gone on."""


def kills(name: str) -> int:
    return 1 + (name in TWICE)


def config(name: str, out: Path) -> dict[str, Any]:
    return {**COMMON, **JOBS[name][1], "out": str(out)}


def newest(path: Path) -> int:
    """The clock of the newest checkpoint that has a manifest."""
    return max((int(each.name[6:]) for each in disk.directories(path) if (each / disk.MANIFEST).is_file()), default=0)


def descendants(pid: int) -> list[int]:
    """The processes that this one started, and those that they did: MPICH has a proxy between the launcher and its ranks."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found[1:]


def together_until(directory: Path, jobs: list[dict[str, Any]], least: dict[str, int]) -> None:
    """Run all jobs at once, and kill all their ranks when each has a newer checkpoint than `least`.

    Jobs that have one stand still while they wait for the others. None comes to its end, however late checkpoints come and this
    process is.
    """
    listing = directory / "together.json"
    listing.write_text(json.dumps([{**job, "held": HELD} for job in jobs]))
    Path(f"{listing}.pids").unlink(missing_ok=True)
    command = [*mpirun(sum(job["ranks"] for job in jobs)), sys.executable, str(DRIVE), str(listing), "together"]
    process = subprocess.Popen(command, env=environment(), start_new_session=True, stderr=subprocess.PIPE, text=True)
    deadline_s = time.monotonic() + 600
    try:
        behind = dict(least)
        while time.monotonic() < deadline_s and behind:
            assert process.poll() is None, process.communicate()[1]
            for name in [name for name, clock in behind.items() if newest(directory / name) > clock]:
                del behind[name]
                for pid in json.loads(Path(f"{listing}.pids").read_text())[list(least).index(name)]:
                    os.kill(pid, signal.SIGSTOP)
            time.sleep(0.01)
    finally:
        ranks = descendants(process.pid)
        for pid in (*reversed(ranks), process.pid):  # the launcher alone would leave its ranks a moment to go on
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
    gone_s = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in ranks) and time.monotonic() < gone_s:
        time.sleep(0.01)
    assert all(newest(directory / name) > clock for name, clock in least.items()), "checkpoints come"
    assert not any((directory / name / schema.DONE).exists() for name in least), "killed in the middle"


def killed(top: Path) -> None:
    directory = top / "send"
    begun = [{"ranks": ranks, "config": config(name, directory / name)} for name, (ranks, _) in JOBS.items()]
    together_until(directory, begun, dict.fromkeys(JOBS, 0))
    for name in JOBS:
        shutil.copytree(directory / name, directory / "killed" / name)
    together_until(directory, [job(directory, name) for name in TWICE], {name: newest(directory / name) for name in TWICE})


def job(directory: Path, name: str) -> dict[str, Any]:
    """The last attempt of a run that was killed, or all of one."""
    run = name.removeprefix("whole/")
    made = config(run, directory / name)
    return {"ranks": JOBS[run][0]} | (
        {"resume": str(directory / name), "env": travel.launched(made)[1]} if run == name else {"config": made}
    )


SHARED = Shared([("send", name) for name in (*JOBS, *(f"whole/{name}" for name in SYNCHRONOUS))], job, killed)


@pytest.fixture(scope="module")
def runs(launched: Callable[[str], Path]) -> Path:
    return launched(__name__) / "send"


@pytest.mark.deeper
@pytest.mark.parametrize("name", JOBS)
def test_one_log_without_a_seam(runs: Path, name: str) -> None:
    run = Run(runs / name)
    assert run.attempt == kills(name)
    assert run.done is not None
    assert all(books.balanced for books in run.books())
    for shard, summary in enumerate(run.summaries):
        updates = run.updates[run.updates["shard"] == shard]
        assert updates["clock"].tolist() == list(range(1, summary["final_clock"] + 1)), "no row lost, none doubled"
        assert (np.diff(updates["time_s"]) >= 0).all(), "seconds go on"
        pushes = run.pushes[run.pushes["shard"] == shard]
        assert len(pushes) == summary["received"] == summary["pushed"]
        for learner_id in range(run.lambda_):
            seqs = pushes["seq"][(pushes["learner_id"] == learner_id) & (pushes["reason"] != schema.Reason.REPEATED)]
            assert seqs.tolist() == list(range(len(seqs)))
        events = run.events[run.events["shard"] == shard]
        resumed = events[events["kind"] == Event.RESUMED]
        assert len(resumed) == kills(name)
        assert np.count_nonzero(events["kind"] == Event.STARTED) == 1
        assert resumed["clock"].tolist() == [each["clock"] for each in run.environment["attempts"][1:]]
    with h5py.File(runs / name / schema.LOG) as joined:
        for table in schema.TABLES:
            assert len(joined[table]) == len(run.table(table))
        assert joined["updates"]["clock"].tolist() == run.updates["clock"].tolist()


@pytest.mark.deeper
@pytest.mark.parametrize("name", JOBS)
def test_replay_proves_all_attempts(runs: Path, name: str) -> None:
    proof = replay.replay(runs / name, trust=True)
    assert proof.reason == ""
    assert proof.lines()[-1].startswith("identical")
    assert len(proof.seams) == kills(name) * Run(runs / name).shards
    if name in SYNCHRONOUS or "S2" not in name:
        assert not [line for line in proof.seams if "slice of the checkpoint" in line], "the log alone gives all of it"


@pytest.mark.deeper
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_the_bits_of_a_run_without_interruption(runs: Path, name: str) -> None:
    kinds = laws.same_bits(runs / name, runs / "whole" / name)
    assert kinds == ({"theta", "thetabar"} if "averaging" in JOBS[name][1] else {"theta"})


@pytest.mark.deeper
@pytest.mark.parametrize("name", JOBS)
def test_evaluations_go_on(runs: Path, name: str) -> None:
    rows = Run(runs / name).evaluations
    kinds = 1 + ("averaging" in JOBS[name][1])
    assert rows["snapshot"].tolist() == sorted([*range(len(rows) // kinds)] * kinds)
    assert len(rows) == 3 * kinds
    assert not list((runs / name).glob(".*")), "no scratch is left"
    complete = [path for path in disk.directories(runs / name) if (path / disk.MANIFEST).is_file()]
    assert len(complete) <= COMMON["checkpoint"]["keep"] + 2, "with those that it was continued from"


def test_the_report_tells(runs: Path) -> None:
    run = Run(runs / "async")
    clocks = ", ".join(str(each["clock"]) for each in run.environment["attempts"][1:])
    lines = dict(about.header(run, about.status(run), "").rows)
    assert lines["continued"] == f"from the checkpoints of clock {clocks}"


@pytest.mark.deeper
def test_a_killed_run_reads_well_in_between(runs: Path) -> None:
    for name in JOBS:
        run = Run(runs / "killed" / name)
        assert run.done is None
        assert all(books.balanced for books in run.books())
        assert replay.check(runs / "killed" / name, trust=True) == ""


def spoil_tensor(path: Path) -> None:
    """One weight of the checkpoint that attempt 1 began with, and all sums made to fit."""
    there = disk.directory_of(path, Run(path).environment["attempts"][1]["clock"])
    with h5py.File(there / disk.part_file(0), "r+") as file:
        file["weights"][7] += np.float32(1e-6)
    content = (there / disk.part_file(0)).read_bytes()
    table = disk.read_json(there / disk.MANIFEST)
    table["parts"][0]["crc32"] = zlib.crc32(content)
    disk.write_json(there / disk.MANIFEST, table)


@pytest.mark.parametrize("name", [name for name in JOBS if name.endswith("-S2")])
def test_replay_stops_on_both_sides_of_a_seam(runs: Path, name: str) -> None:
    """Where the run went on, a slice is that of the checkpoint."""
    entry = Run(runs / name).environment["attempts"][-1]
    seam, last = entry["clock"], int(Run(runs / name).updates["clock"].max())
    kept = disk.read(disk.directory_of(runs / name, seam))
    for until in (seam - 1, seam, seam + 1, last):
        proof = replay.replay(runs / name, until=until, trust=True)
        assert proof.holds, proof.reason
        there = [point.shard for point in proof.waypoints]
        assert there == [0, 1] or (until < seam and name not in SYNCHRONOUS), "the logs of killed shards may end before"
        assert {point.clock for point in proof.waypoints} <= {until}
        if until == seam:
            assert [point.crc32 for point in proof.waypoints] == [zlib.crc32(kept.tensors(shard)["weights"]) for shard in there]


def spoil_rows(path: Path) -> None:
    """Attempt 2 says that fewer pushes came before it."""
    with h5py.File(path / schema.shard_file(0, 2), "r+") as file:  # attributes have HDF5's own checksums, which it renews
        rows = file.attrs["continues"]
        rows[-1, 1] -= 1
        file.attrs["continues"] = rows


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (spoil_tensor, "attempt 1 begins with weights of the checkpoint: the log before gives other values"),
        (spoil_rows, "attempt 2 continues "),
    ],
)
def test_a_seam_that_is_not_true(runs: Path, tmp_path: Path, spoil: Callable[[Path], None], why: str) -> None:
    shutil.copytree(runs / "async", tmp_path / "run")
    spoil(tmp_path / "run")
    assert why in replay.check(tmp_path / "run", trust=True)


@pytest.fixture(scope="module")
def refused(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Launched]:
    if "backup" not in JOBS:
        pytest.skip("MPISGD_TESTS=rest and all launch the run that is refused")
    directory = tmp_path_factory.mktemp("refused")
    for name in ("bare", "other", "held", "model", "newest"):
        shutil.copytree(runs / "killed" / "backup", directory / name)
        (directory / name / schema.LOCK).unlink()
    shutil.rmtree(directory / "bare" / schema.CHECKPOINTS)
    Lock(directory / "held")
    config_toml = directory / "model" / schema.CONFIG
    config_toml.write_text(unsealed(config_toml.read_text()).replace('name = "softmax"', 'name = "mlp"\nhidden = [7]'))
    clock = newest(directory / "newest")
    os.truncate(disk.directory_of(directory / "newest", clock) / disk.part_file(0), 99)
    done = str(runs / "backup")
    commands = {
        "done": (3, ("--resume", done)),
        "bare": (3, ("--resume", "bare")),
        "other": (3, ("--resume=other", "--alpha0", "0.7")),
        "held": (3, ("--resume", "held")),
        "model": (3, ("--resume", "model")),
        "nowhere": (3, ("--resume", "nowhere")),
        "nothing": (3, ("--resume",)),
    }
    ended = execute(directory, [(n, directory, ("train", *words)) for n, words in commands.values()], ranks=3)
    return dict(zip(commands, ended, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "status", "said"),
    [
        ("done", 0, "backup is done: there is nothing to continue"),
        ("bare", 2, "CheckpointError: bare has no complete checkpoint"),
        ("other", 2, "alpha0 = 0.7: the run to be continued has 0.05; may change: epochs"),
        ("held", 2, "held is being written by another job, process"),
        ("model", 2, "is of another model: parameters of the checkpoint 650 ("),
        ("nowhere", 2, "--resume nowhere: no run directory of mpisgd, config.toml is missing"),
        ("nothing", 2, "--resume: expected the directory of a run after --resume"),
    ],
)
def test_what_cannot_be_continued_says_why(refused: dict[str, Launched], name: str, status: int, said: str) -> None:
    assert said in refused[name].text
    assert refused[name].status == status
