"""Real ranks that are sent signals: all leave with status 85 and a checkpoint, and the run goes on (DESIGN 4, laws 4, 6, 8)."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mpisgd import replay
from mpisgd.base.errors import EXIT_INTERRUPTED, DataError
from mpisgd.comm.mpi.launch import environment, mpirun, words
from mpisgd.job import interruption
from mpisgd.records.checkpoint.checkpoint import newest
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Event
from tests.effort import REST

from . import laws
from .conftest import DRIVE

COMMON: dict[str, Any] = {
    "epochs": 2.0,
    "threads": 1,
    "model": "softmax",
    "log": {"progress": "off", "flush_s": 0.1},
    "straggler": {"delay": "constant", "delay_mean_s": 0.06},
}
#: name -> (ranks, what differs from COMMON, the rank that is sent SIGTERM the second time: a shard, a learner, the evaluator, ...)
JOBS: dict[str, tuple[int, dict[str, Any], int]] = {
    "hardsync-S2": (4, {"shards": 2, "optimizer": {"name": "adam"}, "alpha0": 0.002, "averaging": 0.9}, 1),
    "allreduce": (2, {"protocol": "allreduce", "way": "whole", "optimizer": {"name": "sgd", "momentum": 0.9}}, 1),
    "allreduce-node": (2, {"protocol": "allreduce"}, 0),
    "teams": (4, {"protocol": "hardsync", "aggregation": "node", "team_size": 2}, 2),
    "groups-S2": (6, {"shards": 2, "group_size": 2, "micro_batches": 2, "model": {"name": "mlp", "hidden": [16]}}, 5),
    "softsync-S2": (
        4,
        {"protocol": {"name": "softsync", "n": 1}, "shards": 2, "compensation": 0.1, "compensation_memory": 0.9},
        3,
    ),
    "ssp-S2": (4, {"protocol": {"name": "ssp", "slack": 1}, "shards": 2}, 0),
    "async": (4, {"protocol": "async", "evaluator": True}, 3),
    "slow-backup": (
        3,
        {
            "protocol": {"name": "backup", "b": 0},
            "checkpoint": {"every_updates": 3},
            "straggler": {"delay": "constant", "delay_mean_s": 1.0},
            "epochs": 0.3,
        },
        2,
    ),
}
if REST:
    JOBS = {name: job for name, job in JOBS.items() if name not in ("allreduce", "teams", "softsync-S2", "ssp-S2")}
SYNCHRONOUS = [name for name in JOBS if name in ("hardsync-S2", "allreduce", "allreduce-node", "teams", "groups-S2", "slow-backup")]
"""Of which a run has the same bits each time; backup, because it waits for both of two learners."""


def config(name: str, out: Path) -> dict[str, Any]:
    return {**COMMON, **JOBS[name][1], "out": str(out)}


def updates(path: Path, attempt: int) -> int:
    """How many are in the log of an attempt that is under way."""
    try:
        run = Run(path)
        return len(run.updates) if run.attempt == attempt else 0
    except (DataError, OSError, KeyError, RuntimeError):
        return 0


@contextlib.contextmanager
def ranks_of(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A launch; nothing of it is left afterwards."""
    process = subprocess.Popen(command, env=environment(), start_new_session=True, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], within_s: float = 600) -> None:
    until_s = time.monotonic() + within_s
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < until_s, "it did not come to that"
        time.sleep(0.05)


def taken(pid: int) -> bool:
    """Whether no SIGTERM waits for a process: it was held up, and the others would go on without it."""
    lines = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("S"))
    return not (int(lines["SigPnd"], 16) | int(lines["ShdPnd"], 16)) >> (signal.SIGTERM - 1) & 1


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All jobs at once, in one launch: twice interrupted each, then to their end; the runs as signals left them are kept."""
    directory = tmp_path_factory.mktemp("signals")
    listing, kept = directory / "jobs.json", (directory / "first", directory / "second")
    jobs = [
        {
            "ranks": ranks,
            "config": config(name, directory / name),
            "kept": [str(each / name) for each in kept],
            "most": 4 if name == "slow-backup" else 12,  # so that some updates are in the log's file
            "sent": [str(directory / f"{name}-sent-{attempt}") for attempt in range(len(kept))],
            "whole": str(directory / "whole" / name) if name in SYNCHRONOUS else None,
        }
        for name, (ranks, _, _) in JOBS.items()
    ]
    listing.write_text(json.dumps(jobs))
    ranks = sum(ranks for ranks, _, _ in JOBS.values())
    with ranks_of([*mpirun(ranks), sys.executable, str(DRIVE), str(listing), "interrupted"]) as process:
        wait_for(lambda: all(updates(directory / name, 0) > 1 for name in JOBS), process)
        pids = json.loads(Path(f"{listing}.pids").read_text())
        for pid in (each for of_job in pids for each in of_job):  # as launchers do, which may be held up
            os.kill(pid, signal.SIGUSR1)
        for name in JOBS:
            (directory / f"{name}-sent-0").touch()
        left = {name: pids[number][rank] for number, (name, (_, _, rank)) in enumerate(JOBS.items())}

        def stop_who_goes_on() -> bool:
            """One rank of each job, as soon as the job has gone on for a little."""
            for name in [each for each in left if (kept[0] / each / "kept").exists()]:
                if updates(directory / name, 1) > newest(kept[0] / name).clock:
                    os.kill(left[name], signal.SIGTERM)
                    wait_for(functools.partial(taken, left[name]), process)
                    (directory / f"{name}-sent-1").touch()
                    del left[name]
            return not left

        wait_for(stop_who_goes_on, process)
        _, said = process.communicate(timeout=600)
    assert process.returncode == 0, said
    (directory / "said").write_text(said)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("time", ["first", "second"])
def test_nothing_that_was_done_is_lost(runs: Path, name: str, time: str) -> None:
    path = runs / time / name
    saved = newest(path)
    assert saved.clock == interruption.newest(path)
    assert saved.attempt == ["first", "second"].index(time)
    run = Run(path)
    assert run.done is None
    for part in saved.parts:
        made = run.updates["clock"][run.updates["shard"] == part.account.shard]
        assert made[-1] == part.account.clock == saved.clock
        told = run.events[(run.events["kind"] == Event.INTERRUPTED) & (run.events["shard"] == part.account.shard)]
        assert told["value"][-1] in (0, [signal.SIGUSR1, signal.SIGTERM][saved.attempt]), "0: another rank has heard it"
    assert not len(run.evaluations[run.evaluations["clock_max"] >= saved.clock]) or JOBS[name][1].get("evaluator")
    assert not (path / schema.WEIGHTS).exists()
    assert replay.check(path, trust=True) == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_it_says_how_to_go_on(runs: Path, name: str) -> None:
    for attempt, what in enumerate(["SIGUSR1", "SIGTERM"]):
        clock = newest(runs / ["first", "second"][attempt] / name).clock
        line = (
            f"mpisgd: interrupted by {what} at clock {clock}, checkpoint at clock {clock} (nothing is lost);"
            f" go on with: {words(JOBS[name][0])} mpisgd train --resume {runs / name}\n"
        )
        assert line in (runs / "said").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_it_goes_on_to_its_end(runs: Path, name: str) -> None:
    run = Run(runs / name)
    assert run.attempt == 2
    assert run.done is not None
    assert all(books.balanced for books in run.books())
    for shard, summary in enumerate(run.summaries):
        made = run.updates[run.updates["shard"] == shard]
        assert made["clock"].tolist() == list(range(1, summary["final_clock"] + 1)), "no row lost, none doubled"
        pushes = run.pushes[run.pushes["shard"] == shard]
        for learner_id in range(run.lambda_):
            seqs = pushes["seq"][(pushes["learner_id"] == learner_id) & (pushes["reason"] != schema.Reason.REPEATED)]
            assert seqs.tolist() == list(range(len(seqs)))
        resumed = run.events["clock"][(run.events["shard"] == shard) & (run.events["kind"] == Event.RESUMED)]
        assert resumed.tolist() == [newest(runs / each / name).clock for each in ("first", "second")]
    rows = run.evaluations
    kinds = 1 + ("averaging" in JOBS[name][1])
    assert rows["snapshot"].tolist() == sorted([*range(len(rows) // kinds)] * kinds)
    assert not list((runs / name).glob(".*")), "no scratch is left"


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_replay_proves_all_attempts(runs: Path, name: str) -> None:
    proof = replay.replay(runs / name, trust=True)
    assert proof.reason == ""
    assert proof.lines()[-1].startswith("identical")
    assert len(proof.seams) == 2 * Run(runs / name).shards
    assert not [line for line in proof.seams if "slice of the checkpoint" in line], "the log alone gives all of it"


@pytest.mark.slow
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_the_bits_of_a_run_without_interruption(runs: Path, name: str) -> None:
    laws.same_bits(runs / name, runs / "whole" / name)


# ------------------------------------------------------------------------------------------------------- the command line


def command(out: Path, *more: str) -> list[str]:
    words = ["--epochs", "1e6", "--model", "softmax", "--threads", "1", "--log.flush-s", "0.1", "--log.progress", "off"]
    return [*mpirun(2), sys.executable, "-m", "mpisgd", "train", "--out", str(out), *words, *more]


def test_the_command_ends_with_status_85(tmp_path: Path) -> None:
    with ranks_of(command(tmp_path / "run")) as process:
        wait_for(lambda: updates(tmp_path / "run", 0) > 0, process)
        process.send_signal(signal.SIGUSR1)
        _, said = process.communicate(timeout=240)
    assert process.returncode == EXIT_INTERRUPTED, said
    assert "mpisgd: interrupted by SIGUSR1 at clock" in said
    assert "failed" not in said
    assert newest(tmp_path / "run").clock > 0
    assert not (tmp_path / "run" / schema.LOCK).exists()


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_written_is_a_failure(tmp_path: Path) -> None:
    with ranks_of(command(tmp_path / "run")) as process:
        wait_for(lambda: updates(tmp_path / "run", 0) > 0, process)
        (tmp_path / "run" / schema.CHECKPOINTS).write_text("in the way")
        process.send_signal(signal.SIGUSR1)
        _, said = process.communicate(timeout=240)
    assert process.returncode not in (0, EXIT_INTERRUPTED), said
    assert "could not be written" in said
    assert "CheckpointError: interrupted by SIGUSR1" in said
    assert "has no complete checkpoint" in said


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    """The shard waits for learners that sleep, and cannot drain: the first signal alone would take ten minutes."""
    with ranks_of(command(tmp_path / "run", "--straggler.delay", "constant", "--straggler.delay-mean-s", "600")) as process:
        shard = tmp_path / "run" / schema.shard_file(0)
        wait_for(shard.exists, process)
        time.sleep(3.0)  # it waits for pushes
        process.send_signal(signal.SIGUSR1)
        time.sleep(1.5)
        assert process.poll() is None
        while process.poll() is None:  # the first may have come late, and one within a second of it is the same
            process.send_signal(signal.SIGUSR1)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.5)
        _, said = process.communicate(timeout=30)
    assert process.returncode not in (0, EXIT_INTERRUPTED), said
    assert "SIGUSR1 after SIGUSR1" in said
    assert "ends at once, nothing is saved" in said
    assert not (tmp_path / "run" / schema.DONE).exists()
    assert not (tmp_path / "run" / schema.CHECKPOINTS).exists()
