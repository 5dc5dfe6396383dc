"""A run is made again by its log: its own loops, with messages in the order of the log, write the same rows (DESIGN 4, law 6)."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mpisgd.base.errors import DataError
from mpisgd.records.log import schema, sums
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Event, Verdict
from mpisgd.replay import UserObjects, replay
from mpisgd.replay.checks.finding import Untrue
from mpisgd.replay.checks.numbers import check_numbers
from mpisgd.replay.checks.proof import Proof
from mpisgd.replay.checks.record import ShardRecord, read
from mpisgd.replay.rerun.attempts import Reach, run_again
from mpisgd.replay.rerun.pulls import given_elsewhere
from tests.effort import spread
from tests.torch_law.law import vectors
from tests.torch_law.optimizers import Heads
from tests.virtual.jobs import NO_OBJECTS, TENSORS, simulated
from tests.virtual.kinds import KINDS


def again(path: Path) -> str:
    """Return the first disagreement of a run made again; "" = none."""
    record = read(path)
    proof = Proof(path, "", record.environment("threads"))
    try:
        for attempt in (*record.earlier, record):
            check_numbers(attempt)
        run_again(record, NO_OBJECTS, proof)
    except Untrue as untrue:
        proof.find(untrue.finding)
    except DataError as error:
        return str(error)
    return proof.reason


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    directory = tmp_path_factory.mktemp("again")

    @cache
    def made(kind: str) -> Path:
        return simulated(directory / kind.replace(" ", "-"), TENSORS, **KINDS[kind]).path

    return made


@pytest.mark.parametrize("kind", spread(KINDS, 4))
def test_each_kind_of_run(kind: str, runs: Callable[[str], Path]) -> None:
    """All rows, all evaluations and the last weights, by the messages of the log; and all seconds, simulated again."""
    proof, run = replay(runs(kind)), Run(runs(kind))
    assert proof.reason == ""
    assert proof.simulated
    assert proof.clocks == tuple(run.summaries["final_clock"]) > (0,)
    if proof.computed:
        names = ["theta", "thetabar"][: 1 + (run.config["averaging"] > 0)]
        assert [each.name for each in proof.differences] == names
        said = f"identical: {' and '.join(names)}, {proof.parameters:,} parameters, bit for bit"
        assert proof.tolerance > 0 or proof.lines()[-1] == said
        assert proof.gradients == run.pushes["gradients"][run.pushes["shard"] == 0].sum()
        assert proof.evaluations == len(run.evaluations) > 0


def test_the_runs_have_what_they_are_for(runs: Callable[[str], Path]) -> None:
    rejected, backup = Run(runs("versioned")), Run(runs("backup"))
    assert Verdict.REJECT in rejected.pushes["verdict"]
    assert {Verdict.APPLY, Verdict.DROP, Verdict.LATE} == set(backup.pushes["verdict"])
    assert Run(runs("large batches; lars")).pushes["staleness"].max() > 2
    for kind in ("learners leave", "two of hardsync leave"):
        assert np.count_nonzero(Run(runs(kind)).events["kind"] == Event.DEPARTED) == (2 if kind == "learners leave" else 4)
    assert not np.isfinite(Run(runs("diverged")).updates["mean_loss"]).all()


@pytest.mark.parametrize("way", [{"protocol": "allreduce"}, {"protocol": "hardsync", "shards": 2}], ids=str)
def test_parameters_without_a_gradient(way: dict[str, Any], tmp_path: Path) -> None:
    """Learners that compute ahead of others tell them of runs of elements, several to a push, in their order."""
    objects = UserObjects(model=Heads, data=vectors)
    base = {name: each for name, each in TENSORS.items() if name not in ("data", "model")}
    adamw = {"optimizer": {"name": "adamw", "weight_decay": 0.1}, "alpha0": 0.01}
    path = simulated(tmp_path / "run", {**base, **adamw}, objects, **way).path
    record, proof = read(path), Proof(path, "", 1)
    run_again(record, objects, proof)
    assert proof.reason == ""


@pytest.mark.parametrize("how", ["changed", "renamed", "more", "damaged"])
@pytest.mark.parametrize("average", ["theta", "thetabar"])
def test_other_weights_are_found(average: str, how: str, runs: Callable[[str], Path], tmp_path: Path) -> None:
    path = shutil.copytree(runs("momentum, averages"), tmp_path / "run")
    done = json.loads((path / schema.DONE).read_text())
    states = torch.load(path / schema.WEIGHTS, weights_only=True)
    name, tensor = next(iter(states[average].items()))
    if how == "changed":
        tensor.view(-1)[0] = torch.nextafter(tensor.view(-1)[0], torch.tensor(math.inf))
    elif how == "renamed":
        states[average]["other"] = states[average].pop(name)
    else:
        states[average]["more"] = tensor
    torch.save(states, path / schema.WEIGHTS)
    if how == "damaged":
        (path / schema.WEIGHTS).write_bytes((path / schema.WEIGHTS).read_bytes()[:-100])
    done = {name: value for name, value in done.items() if name not in ("crc32", "weights")}  # a checksum would tell
    (path / schema.DONE).write_text(sums.sealed_json(done))
    assert again(path)


# ----------------------------------------------------------------------------------------------------- logs of killed shards


def cut(log: ShardRecord, second: float) -> ShardRecord:
    """As a kill leaves the log of a shard that flushed at this second for the last time."""
    pushes, updates, events = log.pushes[log.pushes["arrival_s"] <= second].copy(), log.updates, log.events
    pushes["answer_s"][pushes["answer_s"] > second] = math.nan
    updates, events = updates[updates["time_s"] <= second], events[events["time_s"] <= second]
    summary = log.summary.copy()
    summary["final_clock"] = -1
    kept = {"pushes": pushes[pushes["clock"] <= len(updates)], "events": events[events["clock"] <= len(updates)]}
    return dataclasses.replace(log, updates=updates, summary=summary, **kept)


@pytest.mark.parametrize("kind", spread(["softsync", "hardsync", "async", "backup", "ssp", "versioned", "duplex"], 3))
def test_logs_that_end_at_different_seconds(kind: str, runs: Callable[[str], Path]) -> None:
    record, dice = read(runs(kind)), random.Random(kind)
    end_s = float(record.shards[0].updates["time_s"][-1])
    for _ in range(6):
        second, apart_s = dice.uniform(0.1, 0.9) * end_s, dice.choice([0.02, 0.1, 0.3]) * end_s
        shards = [cut(log, second - dice.uniform(0, apart_s)) for log in record.shards]
        proof = Proof(record.path, "", 1)
        run_again(dataclasses.replace(record, shards=shards, done=None), NO_OBJECTS, proof)
        assert proof.reason == ""


def test_another_shard_tells_the_clock_of_weights_whose_push_a_log_lacks(runs: Callable[[str], Path]) -> None:
    """A learner asks a shard that lags again, until all have given the same clock."""
    first, second = read(runs("hardsync")).shards
    for learner_id in range(first.lambda_):
        row = int(first.rows_of[learner_id][3])
        killed = cut(second, float(second.pushes["arrival_s"][second.rows_of[learner_id][3]]) - 1e-9)
        assert given_elsewhere(killed, [first, killed], consistent=True)[learner_id] == int(first.pushes["timestamp"][row])
    assert given_elsewhere(second, [cut(first, 0.0), second], consistent=True) == {}
    assert given_elsewhere(first, [first, second], consistent=True) == {}, "whole logs have all rows"


def test_a_shard_whose_log_ends_before_the_clock_is_not_described(runs: Callable[[str], Path]) -> None:
    record = read(runs("softsync"))
    end_s = float(record.shards[0].updates["time_s"][-1])
    shards = [cut(log, share * end_s) for log, share in zip(record.shards, (0.6, 0.3), strict=True)]
    killed, last = dataclasses.replace(record, shards=shards, done=None), len(shards[1].updates)
    for until, described in ((last, [0, 1]), (last + 2, [0])):
        proof = Proof(record.path, "", 1)
        run_again(killed, NO_OBJECTS, proof, Reach(until))
        assert proof.reason == ""
        assert [(point.shard, point.clock) for point in proof.waypoints] == [(shard, until) for shard in described]
