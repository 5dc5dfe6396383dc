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
from mpisgd.records.log.schema import Event
from mpisgd.replay import UserObjects
from mpisgd.replay.checks.finding import Untrue
from mpisgd.replay.checks.numbers import check_numbers
from mpisgd.replay.checks.proof import Proof
from mpisgd.replay.checks.record import ShardRecord, read
from mpisgd.replay.rerun.attempts import Reach, run_again
from mpisgd.replay.rerun.pulls import given_elsewhere
from tests import forge
from tests.effort import spread
from tests.torch_law.law import vectors
from tests.torch_law.optimizers import Heads
from tests.virtual.jobs import NO_OBJECTS, TENSORS, simulated

SOFTSYNC = {"protocol": {"name": "softsync", "n": 2}, "shards": 2}
HARDSYNC = {"protocol": {"name": "hardsync"}, "shards": 2}
PATIENCE = {"every_epochs": 0.25, "best": "error", "patience": 2}
GROUPS = {"model": {"name": "mlp", "hidden": [8, 8]}, "group_size": 2, "micro_batches": 2, "shards": 2}
LEAVES = {"failures": {"at_s": {"1": 0.0}, "notice_s": 60.0}}
KINDS: dict[str, dict[str, Any]] = {
    "hardsync": HARDSYNC,
    "softsync": SOFTSYNC,
    "async": {"protocol": {"name": "async"}, "shards": 2},
    "ssp": {"protocol": {"name": "ssp", "slack": 1}, "shards": 2},
    "backup": {"protocol": {"name": "backup", "b": 1}, "shards": 2},
    "backup, late gradients count": {"protocol": {"name": "backup", "b": 1, "late": "apply"}, "shards": 2},
    "backup, late gradients are given up": {"protocol": {"name": "backup", "b": 1, "abort": True}, "shards": 2},
    "timeout": {"protocol": {"name": "timeout", "N_min": 2, "timeout_s": 0.05}, "shards": 2},
    "versioned": {"protocol": {"name": "versioned", "grads_to_wait": 3}, "shards": 2},
    "downpour": {"protocol": {"name": "downpour", "n_push": 2}, "shards": 2},
    "allreduce": {"protocol": {"name": "allreduce"}, "shards": 4},
    "local steps": {**SOFTSYNC, "local_steps": 2, "inner_alpha0": 0.01},
    "accumulation": {**SOFTSYNC, "accumulation": 2},
    "teams": {**HARDSYNC, "aggregation": "node", "team_size": 2, "virtual": {"learners": 8, "ranks_per_node": 4}},
    "groups": {**SOFTSYNC, **GROUPS},
    "layerwise": {**SOFTSYNC, "exchange": "layerwise"},
    "duplex": {**SOFTSYNC, "exchange": "duplex"},
    "streamed": {**HARDSYNC, "exchange": "streamed"},
    "bfloat16": {**SOFTSYNC, "push_format": "bfloat16", "pull_format": "bfloat16"},
    "top-k": {**SOFTSYNC, "push_format": "topk", "topk_share": 0.1},
    "momentum, averages": {**SOFTSYNC, "optimizer": {"name": "sgd", "momentum": 0.9}, "averaging": 0.9},
    "adam": {**SOFTSYNC, "optimizer": {"name": "adam"}},
    "compensation": {"protocol": {"name": "async"}, "compensation": 0.5, "shards": 2},
    "the average clipped": {**HARDSYNC, "clip_average": 0.5},
    "batch norm": {**SOFTSYNC, "model": {"name": "mlp", "hidden": [8], "batch_norm": True}},
    "dealt": {**SOFTSYNC, "sampling": "dealt", "straggler": {"slowdown": {"1": 4.0}}},
    "an evaluator": {**SOFTSYNC, "evaluator": True, "evaluation": {"every_epochs": 0.5}},
    "evaluations end training": {**SOFTSYNC, "evaluator": True, "alpha0": 0.0, "evaluation": PATIENCE, "epochs": 8},
    "learners leave": {**SOFTSYNC, "failures": {"at_s": {"1": 1.0}, "then": "leave"}},
    "a learner without a push leaves after the last update": {**SOFTSYNC, **LEAVES},
    "a learner without a pull leaves": {**SOFTSYNC, **LEAVES, "exchange": "layerwise"},
    "sizes alone": {**SOFTSYNC, "virtual": {"gradients": False, "parameters": 1000, "train_samples": 400}},
}  # fmt: skip


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


@pytest.mark.parametrize("kind", spread(KINDS, 3))
def test_each_kind_of_run(kind: str, runs: Callable[[str], Path]) -> None:
    assert again(runs(kind)) == ""


def up(rows: np.ndarray, name: str, at: int) -> None:
    rows[name][at] = ~rows[name][at] & 1 if rows.dtype[name] == np.uint8 else rows[name][at] + 1


def swapped(rows: np.ndarray, at: int) -> np.ndarray:
    order = np.arange(len(rows))
    order[[at, at + 1]] = order[[at + 1, at]]
    return rows[order]


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


#: Not made again: seconds; the machine's own events.
COLUMNS = [
    (table, name)
    for table, dtype in (("pushes", schema.PUSHES), ("updates", schema.UPDATES), ("events", schema.EVENTS))
    for name in dtype.names or ()
    if not name.endswith("_s")
]


@pytest.mark.parametrize(("table", "column"), spread(COLUMNS, 4, unpack=True))
@pytest.mark.parametrize("kind", ["softsync", "backup, late gradients are given up", "timeout"])
def test_another_value_is_found(kind: str, table: str, column: str, runs: Callable[[str], Path], tmp_path: Path) -> None:
    path, dice = shutil.copytree(runs(kind), tmp_path / "run"), random.Random(f"{kind}{table}{column}")

    def change(rows: np.ndarray) -> None:
        there = np.flatnonzero(~np.isnan(rows[column].astype(float)) & (table != "events" or rows["kind"] != Event.GAVE_UP))
        up(rows, column, int(dice.choice(there)))

    forge.rewrite(path / schema.shard_file(1), table, change)
    assert again(path)


@pytest.mark.parametrize("table", ["pushes", "updates", "events"])
@pytest.mark.parametrize("how", ["missing", "twice", "swapped"])
@pytest.mark.parametrize("kind", spread(["softsync", "timeout", "hardsync"], 3))
def test_another_row_is_found(kind: str, how: str, table: str, runs: Callable[[str], Path], tmp_path: Path) -> None:
    path, dice = shutil.copytree(runs(kind), tmp_path / "run"), random.Random(f"{kind}{table}{how}")

    def change(rows: np.ndarray) -> np.ndarray:
        at = dice.randrange(len(rows) // 2, len(rows) - 1)
        return {"missing": np.delete(rows, at), "twice": np.insert(rows, at, rows[at]), "swapped": swapped(rows, at)}[how]

    forge.rewrite(path / schema.shard_file(0), table, change)
    if how != "swapped" or table != "events":  # of one clock, in any order
        assert again(path)


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


def test_events_without_a_witness_are_left_out(runs: Callable[[str], Path], tmp_path: Path) -> None:
    path = shutil.copytree(runs("softsync"), tmp_path / "run")

    def add(rows: np.ndarray) -> np.ndarray:
        more = rows[-1:].copy()
        more["kind"], more["learner_id"] = Event.SKIPPED, -1
        return np.concatenate([rows, more])

    forge.rewrite(path / schema.shard_file(0), "events", add)
    assert again(path) == ""


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
