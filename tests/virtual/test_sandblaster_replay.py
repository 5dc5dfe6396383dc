"""A log of a batch optimisation is a proof: computed again from the claims, and refused where it was tampered with."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from mpisgd.comm.messages import Op
from mpisgd.records.log import schema, sums
from mpisgd.records.log.reader import Run
from mpisgd.replay import replay
from mpisgd.replay.checks.trust_table import BATCH
from mpisgd.simulate.job import simulate
from tests.effort import spread
from tests.forge import forget
from tests.virtual.test_sandblaster import job

ORDERS: list[dict[str, Any]] = [
    {"order": "arrival", "push_every": 3, "weight_decay": 0.05},
    {"order": "portions", "share": 0.5},
    {"order": "arrival", "line_search": "none", "iterations": 3},
]


@pytest.mark.parametrize("options", spread(ORDERS, 3), ids=str)
def test_a_run_is_proved_bit_for_bit(options: dict[str, Any], tmp_path: Path) -> None:
    """With learners that are slow, and that leave."""
    config = job(
        tmp_path / "run",
        learners=5,
        shards=3,
        protocol=options,
        evaluation={"every_epochs": 1.0},
        compute={"name": "lognormal", "sigma": 0.7},
        failures={"at_s": {1: 0.9}, "then": "leave"},
    )
    simulate(config)
    proof = replay(tmp_path / "run")
    assert proof.holds, proof.reason
    assert proof.differences
    assert proof.evaluations > 3
    assert any(row[0] == "portions" and "loss" in row[1] for row in proof.claims)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("told") / "run"
    simulate(job(path, learners=4, shards=2, protocol={"iterations": 3, "log_commands": True}, evaluation={"every_epochs": 2.0}))
    assert replay(path).holds
    return path


def tamper(path: Path, file: str, table: str, row: int | tuple[Op], column: str, value: Any) -> None:
    """Change a number, and all checksums, as a forger would."""
    with h5py.File(path / file, "r+") as log:
        rows = log[table][:]
        row = row if isinstance(row, int) else np.flatnonzero(rows["op"] == row[0])[-1]  # the last command of this kind
        rows[column][row] = value(rows[column][row]) if callable(value) else value
        log[table][:] = rows
        checks = log["sums"][:]
        checks[schema.place(table)] = (len(rows), sums.add(0, table, rows))
        log["sums"][:] = checks
    forget(path)


def shorten(log: h5py.File, table: str, by: int) -> None:
    """Forget the last rows of a table."""
    rows = log[table][:-by]
    committed, checks, place = log["committed"][:], log["sums"][:], schema.place(table)
    committed[place], checks[place] = len(rows), (len(rows), sums.add(0, table, np.ascontiguousarray(rows)))
    log["committed"][:], log["sums"][:] = committed, checks


def next_after(number: float) -> float:
    """The last bit is another."""
    return math.nextafter(number, math.inf)


ADD, DOT = (Op.ADD,), (Op.DOT,)
COORDINATOR = schema.coordinator_file()
FORGED: list[tuple[str, str, int | tuple[Op], str, Any, str]] = [
    (COORDINATOR, "portions", 3, "loss", 0.5, "loss"),
    (COORDINATOR, "portions", 3, "portion", 4, "counted twice"),
    (COORDINATOR, "portions", 3, "samples", 7, "7 samples, portion"),
    (COORDINATOR, "portions", 3, "learner_id", 77, "learner_id 77, expected 0"),
    (COORDINATOR, "portions", 3, "learner_id", 0, "learner_id|pushes"),
    (COORDINATOR, "portions", 3, "seq", 9, "seq"),
    (COORDINATOR, "portions", 3, "outcome", 1, "is not counted"),
    (COORDINATOR, "portions", 3, "clock", 2, "counted twice|is not counted"),
    (COORDINATOR, "iterations", 1, "loss", 0.25, "loss 0.25, recomputed"),
    (COORDINATOR, "iterations", 1, "gradient_max", 0.25, "gradient_max 0.25, recomputed"),
    (COORDINATOR, "iterations", 1, "step", 2.0, "step 2.0, recomputed"),
    (COORDINATOR, "iterations", 1, "clock", 99, "clock 99, recomputed"),
    (COORDINATOR, "iterations", 1, "evaluations", 99, "evaluations 99, recomputed"),
    (COORDINATOR, "iterations", 1, "history", 0, "history 0, recomputed"),
    (COORDINATOR, "iterations", 1, "iteration", 7, "iteration 7, expected 2"),
    (COORDINATOR, "iterations", 1, "why", 2, "and others follow"),
    (COORDINATOR, "iterations", -1, "why", 0, "the last iteration"),
    (COORDINATOR, "commands", 9, "clock", 9, "clock 9, recomputed"),
    (COORDINATOR, "commands", 9, "op", 4, "op 4, recomputed"),
    (COORDINATOR, "commands", ADD, "alpha", 0.25, "alpha 0.25, recomputed"),
    (COORDINATOR, "commands", ADD, "out", 0, "ADD has slot 0 as out, recomputed: another slot"),
    (COORDINATOR, "commands", ADD, "a", 10_000, "ADD has slot 10000 as a, recomputed: another slot"),
    (COORDINATOR, "commands", ADD, "b", -1, "ADD has slot -1 as b, recomputed: another slot"),
    (COORDINATOR, "commands", DOT, "value", next_after, "value .* recomputed"),
    ("shard-001.attempt-0.h5", "pushes", 2, "samples", 21, "samples 21"),
    ("shard-001.attempt-0.h5", "pushes", 2, "loss", 0.1, "loss 0.1"),
    ("shard-001.attempt-0.h5", "pushes", 2, "gradients", 2, "gradients 2"),
    ("shard-001.attempt-0.h5", "pushes", 2, "verdict", 1, "pushes were summed|books|DROP"),
    ("shard-001.attempt-0.h5", "updates", 2, "mean_loss", 0.1, "mean_loss 0.1"),
    ("shard-001.attempt-0.h5", "updates", 2, "learning_rate", 3.0, "learning_rate 3.0"),
    ("shard-001.attempt-0.h5", "updates", 2, "samples", 5, "samples"),
    ("shard-001.attempt-0.h5", "updates", 2, "sum_sq", 5.0, "sum_sq 5.0"),
    ("evaluator.attempt-0.h5", "evaluations", 1, "loss", 0.1, "loss 0.1"),
    ("evaluator.attempt-0.h5", "evaluations", 1, "clock_min", 1, "clock_min 1"),
]


@pytest.mark.parametrize(
    ("file", "table", "row", "column", "value", "said"),
    spread(FORGED, 9, unpack=True),
    ids=[f"{table}-{column}-{getattr(value, '__name__', value)}" for _, table, _, column, value, _ in FORGED],
)
def test_a_forged_log_is_refused(
    file: str, table: str, row: int | tuple[Op], column: str, value: Any, said: str, told: Path, tmp_path: Path
) -> None:
    shutil.copytree(told, tmp_path / "run")
    tamper(tmp_path / "run", file, table, row, column, value)
    proof = replay(tmp_path / "run")
    assert not proof.holds
    assert re.search(said, proof.reason), proof.reason


def test_the_log_is_joined(told: Path) -> None:
    run = Run(told)
    with h5py.File(told / "log.h5") as log:
        for table in ("portions", "iterations", "commands"):
            assert np.array_equal(log[table][:].tobytes(), run.of_coordinator(table).tobytes())


def test_commands_are_logged_with_what_was_answered(told: Path) -> None:
    """Of an iteration, as torch gives them; each slot is made before it is used."""
    rows = Run(told).of_coordinator("commands")
    made = set(rows["out"].tolist()) - {-1}
    assert len(made) == np.isin(rows["op"], (Op.ADD, Op.SUB, Op.SCALE)).sum()
    answered = np.isin(rows["op"], (Op.DOT, Op.ABSMAX, Op.ABSSUM))
    assert np.array_equal(~np.isnan(rows["value"]), answered)
    iterations = Run(told).of_coordinator("iterations")
    accepted = rows[rows["op"] == Op.ACCEPT]
    assert accepted["clock"].tolist() == iterations["clock"].tolist()
    assert set(iterations["gradient_max"].tolist()) <= set(rows["value"].tolist())
    proof = replay(told)
    assert next(proved for where, proved, _, _ in proof.claims if where == "commands")[-1] == "value"


def test_a_log_that_lacks_a_command_is_refused(told: Path, tmp_path: Path) -> None:
    shutil.copytree(told, tmp_path / "run")
    with h5py.File(tmp_path / "run" / COORDINATOR, "r+") as log:
        shorten(log, "commands", 1)
    forget(tmp_path / "run")
    assert "ACCEPT follows" in replay(tmp_path / "run").reason


def test_columns_that_are_claimed_are_those_there_are() -> None:
    for table, dtype in {**schema.COORDINATOR, **{name: schema.TABLES[name] for name in ("pushes", "updates")}}.items():
        claimed = [name for claim in BATCH if claim.where == table for name in claim.names]
        assert sorted(claimed) == sorted(dtype.names or ())


def test_other_weights_are_refused(told: Path, tmp_path: Path) -> None:
    shutil.copytree(told, tmp_path / "run")
    saved = torch.load(tmp_path / "run" / "weights.pt", weights_only=True)
    next(iter(saved["theta"].values())).view(-1)[0] += 1e-6
    torch.save(saved, tmp_path / "run" / "weights.pt")
    done = tmp_path / "run" / schema.DONE
    table = {key: value for key, value in json.loads(done.read_text()).items() if key != "crc32"}
    done.write_text(sums.sealed_json({**table, "weights": sums.of_file(tmp_path / "run" / "weights.pt")}))
    proof = replay(tmp_path / "run")
    assert not proof.holds
    assert "parameters differ" in proof.reason


def test_a_run_that_was_killed_is_replayed_as_far_as_its_log_goes(told: Path, tmp_path: Path) -> None:
    shutil.copytree(told, tmp_path / "run")
    (tmp_path / "run" / schema.DONE).unlink()
    with h5py.File(tmp_path / "run" / COORDINATOR, "r+") as log:
        shorten(log, "iterations", 2)
        shorten(log, "commands", 30)
    proof = replay(tmp_path / "run")
    assert proof.holds, proof.reason
    assert proof.nothing_to_compare
