"""Checks of DONE, summaries and [environment] against configuration, data and log."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from mpisgd.base.errors import DataError
from mpisgd.config import ConstantOptions
from mpisgd.gradient import stages
from mpisgd.job.finish import account, outcome_of
from mpisgd.records.log import schema, sums
from mpisgd.replay.checks.difference import reading
from mpisgd.replay.checks.finding import refuse
from mpisgd.replay.checks.record import Record

#: Keys of [environment] derived from configuration, hosts, model and data.
FOLLOWS = (
    "learners", "teams", "groups", "stages", "world_size", "shard_ranks", "evaluator_rank", "train_samples", "test_samples",
    "gradients_per_update", "parameters", "parameter_nbytes", "batch_norm_policy", "layers",
)  # fmt: skip


def compare(record: Record, expected: Mapping[str, Any]) -> None:
    """Raise Untrue if an [environment] entry is not as expected; absent keys pass."""
    environment = record.run.environment
    for name in (*FOLLOWS, "hosts"):
        if name not in environment or name not in expected or _are_older(record, name, environment[name], expected[name]):
            continue
        if environment[name] != expected[name]:
            refuse(f"[environment] {name} = {environment[name]!r}, expected {expected[name]!r}", -1, schema.CONFIG)
    if "layers" in environment and "layers" not in expected and "parameters" in expected:
        refuse("[environment] layers: slices are not cut between layers", -1, schema.CONFIG)


def check_rules(record: Record) -> None:
    """Raise DataError if older rules (`schema.RULES`) gave other learning rates."""
    config = record.config
    own_rates = stages.steps_by_itself(config) and not isinstance(config.schedule, ConstantOptions)
    if record.older and (config.schedule.warmup_epochs > 0 or own_rates):
        raise DataError(
            f"{record.path}: an earlier mpisgd began a warm-up with a rate of 0 and let learners' own steps keep"
            f" alpha0: replay the run with mpisgd {record.run.environment.get('versions', {}).get('mpisgd', 'of then')}"
        )


def _are_older(record: Record, name: str, said: Any, expected: Any) -> bool:
    """Return whether an entry follows older rules: rules before 3 named parts of large layers otherwise."""
    if name == "layers" and record.rules < 3:
        return isinstance(said, list) and list(map(_whole, said)) == list(map(_whole, expected))
    return name == "batch_norm_policy" and record.older


def _whole(names: Any) -> list[str]:
    return list(dict.fromkeys(str(name).partition(" ")[0] for name in names))


def check_attempts(record: Record) -> None:
    """Compare [environment]'s attempts. Raises Untrue."""
    told = {each["attempt"]: each for each in record.run.environment.get("attempts", []) if "attempt" in each}
    for before, attempt in zip([None, *record.earlier], [*record.earlier, record], strict=True):
        entry = told.get(attempt.attempt)
        if entry is None:
            continue
        expected: dict[str, Any] = {"shards": len(attempt.shards), "learners": attempt.lambda_}
        expected["group_size"] = attempt.config.group_size
        if before is not None:
            expected |= {"clock": attempt.start_clock, "continues": before.attempt}
        for name, value in expected.items():
            if name in entry and entry[name] != value:
                refuse(f"[environment] attempt {attempt.attempt}: {name} = {entry[name]!r}, expected {value!r}", -1, schema.CONFIG)


def check_done(record: Record) -> None:
    """Raise Untrue if DONE contradicts the log; only computing tells `diverged`.

    Raises DataError: best weights or `log.h5` have another checksum.
    """
    done = record.done
    if done is None:
        return
    accounts = np.stack([account(log.final_clock, log.final_samples, training_s=log.final_s) for log in record.shards])
    outcome = outcome_of(record.path, accounts)
    expected = {"clock": list(outcome.clocks), "samples": list(outcome.samples), "books_balanced": True}
    for name, value in expected.items():
        if done.get(name) != value:
            refuse(f"{name} = {done.get(name)!r}, but the log gives {value!r}", -1, schema.DONE)
    if not math.isclose(float(done.get("seconds", math.nan)), outcome.training_s, rel_tol=0, abs_tol=1e-8):
        refuse(f"seconds = {done.get('seconds')!r}, but the last update was done at {outcome.training_s!r} s", -1, schema.DONE)
    for name in ("best", "log"):
        path = record.path / schema.SUMMED[name]
        if name in done and (name == "best" or path.is_file()):  # log.h5 may be deleted to save room
            with reading(path):
                sums.check_file(path, done[name])
