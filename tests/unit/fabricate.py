"""Run directories made by hand, without MPI or torch: rows of the schema into the files that a run leaves (DESIGN 6)."""

from __future__ import annotations

import heapq
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import tomli_w

from mpisgd.records.log import schema
from mpisgd.records.log.schema import Reason, Verdict

TRAIN_SAMPLES = 1000


def row(table: str, **fields: Any) -> np.ndarray:
    """One row; fields that are not given are 0, answer_s and norms NaN, weight and gradients 1, staleness clock - timestamp."""
    record = np.zeros(1, schema.TABLES[table])
    if table == "pushes":
        fields = {"answer_s": np.nan, "weight": 1.0, "samples": 4, "gradients": 1, **fields}
        fields.setdefault("staleness", fields.get("clock", 0) - fields.get("timestamp", 0))
    if table == "updates":
        fields = {"gradient_sq": np.nan, "sum_sq": np.nan, **fields}
    for name, value in fields.items():
        record[name] = value
    return record


def rows(table: str, records: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, schema.TABLES[table]), *records])


@dataclass
class Log:
    """The tables of a run, over all shards."""

    pushes: np.ndarray = field(default_factory=lambda: rows("pushes", []))
    updates: np.ndarray = field(default_factory=lambda: rows("updates", []))
    evaluations: np.ndarray = field(default_factory=lambda: rows("evaluations", []))
    events: np.ndarray = field(default_factory=lambda: rows("events", []))


def write_run(
    path: Path,
    log: Log,
    protocol: Mapping[str, Any],
    learners: int,
    *,
    shards: int = 1,
    ended: bool = True,
    done: bool = True,
    diverged: bool = False,
    pushed: Mapping[int, int] | None = None,
    evaluator: bool = False,
    environment: Mapping[str, Any] | None = None,
) -> Path:
    """`ended`: the shards wrote their summaries; `done`: there is DONE; `pushed`: what learners claim, by shard."""
    path.mkdir(parents=True)
    clocks = [int(log.updates["clock"][log.updates["shard"] == shard].max(initial=0)) for shard in range(shards)]
    samples = [int(log.updates["samples"][log.updates["shard"] == shard].max(initial=0)) for shard in range(shards)]
    for shard in range(shards):
        own = {name: part[part["shard"] == shard] for name, part in vars(log).items() if name != "evaluations"}
        own["evaluations"] = rows("evaluations", []) if evaluator or shard else log.evaluations
        received = len(own["pushes"])
        said = (pushed or {}).get(shard, received)
        summary = (shard, clocks[shard], samples[shard], received, said, diverged) if ended else (shard, -1, 0, 0, 0, 0)
        write_file(path / schema.shard_file(shard), own, summary, shard)
    if evaluator:
        write_file(path / schema.evaluator_file(), {"evaluations": log.evaluations}, (-1, -1, 0, 0, 0, 0), -1)
    text = tomli_w.dumps(configuration(protocol, learners, shards, environment or {}))
    (path / schema.CONFIG).write_text(text, encoding="utf-8")
    if done and ended:
        what = {"clock": clocks, "samples": samples, "diverged": diverged, "seconds": 1.0, "books_balanced": True}
        (path / schema.DONE).write_text(json.dumps(what))
    return path


def write_file(
    path: Path,
    tables: Mapping[str, np.ndarray],
    summary: tuple[int, ...],
    shard: int,
    version: int = schema.SCHEMA_VERSION,
) -> None:
    """One rank's file, with three torn rows after the committed ones of each table."""
    with h5py.File(path, "w", libver="latest") as file:
        file.attrs["schema_version"] = version
        file.attrs["shard"] = shard
        committed = []
        for name, dtype in schema.TABLES.items():
            data = tables.get(name, np.empty(0, dtype))
            torn = np.frombuffer(b"\x7f" * (3 * dtype.itemsize), dtype)
            file.create_dataset(name, data=np.concatenate([data, torn]), maxshape=(None,), chunks=(64,))
            committed.append(len(data))
        file["committed"] = np.array(committed, np.int64)
        file["summary"] = np.array([summary], schema.SUMMARY)


def configuration(protocol: Mapping[str, Any], learners: int, shards: int, environment: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "protocol": dict(protocol),
        "model": {"name": "cifar10_full"},
        "data": {"name": "cifar10", "subtract_mean": True},
        "shards": shards,
        "mu": 4,
        "epochs": 10.0,
        "alpha0": 0.05,
        "seed": 1,
        "environment": {
            "learners": learners,
            "world_size": learners + shards,
            "evaluator_rank": -1,
            "hosts": ["n1"] * shards + ["n2"] * learners,
            "versions": {"mpisgd": "0.1"},
            "git_commit": "0123abc",
            "command_line": ["mpisgd", "train"],
            "started": "2026-01-01T00:00:00",
            "parameters": 89578,
            "parameter_nbytes": 358312,
            "train_samples": TRAIN_SAMPLES,
            "test_samples": 100,
            "gradients_per_update": int(protocol.get("N", learners)),
            "batch_norm_policy": "recalibrate",
            **environment,
        },
    }


# -------------------------------------------------------------------------------------------- realistic logs, for figures


@dataclass
class _Learner:
    factor: float
    timestamp: int = 0
    seq: int = 0
    row: int = -1
    started_s: float = 0.0
    push_s: float = 0.0
    wait_s: float = 0.0
    compute_s: float = 0.0
    delay_s: float = 0.0


def simulated(
    name: str, *, learners: int = 30, updates: int = 300, wanted: int = 1, shards: int = 1, seed: int = 1, mu: int = 4
) -> Log:
    """A log as a run of so many updates of `wanted` gradients would leave: uneven learners, some mini-batches delayed."""
    random = np.random.default_rng(seed)
    push_s, pull_s, update_s = 0.0004, 0.0006, 0.0005
    crew = [_Learner(factor=random.uniform(0.95, 1.15)) for _ in range(learners)]
    pushes: list[dict[str, Any]] = []
    done: list[dict[str, Any]] = []
    arrivals: list[tuple[float, int]] = []
    waiting: list[int] = []
    losses: list[float] = []
    clock, summed, samples, free_s = 0, 0, 0, 0.0

    def answer(learner_id: int, asked_s: float, now_s: float) -> None:
        me = crew[learner_id]
        if me.row >= 0:
            pushes[me.row]["answer_s"] = now_s
        me.timestamp, me.wait_s = clock, now_s - asked_s
        me.compute_s = 0.05 * me.factor * random.lognormal(0, 0.12)
        me.delay_s = random.exponential(0.08) if random.random() < 0.04 else 0.0
        heapq.heappush(arrivals, (now_s + pull_s + me.compute_s + me.delay_s, learner_id))

    for learner_id in range(learners):
        answer(learner_id, 0.0, 0.0)
    while arrivals:
        arrival_s, learner_id = heapq.heappop(arrivals)
        me = crew[learner_id]
        free_s = max(free_s, arrival_s) + push_s
        verdict, reason = Verdict.APPLY, Reason.NONE
        if clock >= updates:
            verdict, reason = Verdict.LATE, Reason.FINISHED
        elif name == "backup" and me.timestamp < clock:
            verdict, reason = Verdict.DROP, Reason.STALE
        loss = 2.3 * np.exp(-clock / (0.3 * updates)) + random.normal(0, 0.05)
        pushes.append(
            {
                "clock": clock,
                "timestamp": me.timestamp,
                "learner_id": learner_id,
                "seq": me.seq,
                "samples": mu,
                "verdict": verdict,
                "reason": reason,
                "learning_rate": 0.05,
                "arrival_s": arrival_s,
                "compute_s": me.compute_s,
                "delay_s": me.delay_s,
                "push_s": me.push_s,
                "wait_s": me.wait_s,
                "pull_s": pull_s,
                "loss": loss,
            }
        )
        me.row, me.seq, me.started_s, me.push_s = len(pushes) - 1, me.seq + 1, free_s, free_s - arrival_s
        waiting.append(learner_id)
        if verdict == Verdict.APPLY:
            summed, samples, losses = summed + 1, samples + mu, [*losses, loss]
        if summed == wanted:
            clock, free_s = clock + 1, free_s + update_s
            done.append(
                {
                    "clock": clock,
                    "gradients": summed,
                    "samples": samples,
                    "learning_rate": 0.05,
                    "time_s": free_s,
                    "update_s": update_s,
                    "mean_loss": float(np.mean(losses)),
                }
            )
            summed, losses = 0, []
        if clock < updates:
            ready = [at for at in waiting if name == "softsync" or crew[at].timestamp < clock]
            for at in ready:
                answer(at, crew[at].started_s, max(free_s, crew[at].started_s))
            waiting = [at for at in waiting if at not in ready]
    return Log(
        pushes=rows("pushes", [row("pushes", shard=shard, **fields) for shard in range(shards) for fields in pushes]),
        updates=rows("updates", [row("updates", shard=shard, **fields) for shard in range(shards) for fields in done]),
    )


def learning(log: Log, final: float = 0.2, averaged: bool = True, train: bool = True, snapshots: int = 11) -> np.ndarray:
    """Evaluations with errors that fall from 0.9 towards `final`, evenly over the updates of shard 0."""
    random = np.random.default_rng(2)
    updates = log.updates[log.updates["shard"] == 0]
    result = []
    for snapshot in range(snapshots):
        share = snapshot / max(1, snapshots - 1)
        at = updates[min(len(updates) - 1, int(share * len(updates)))]
        for kind in range(2 if averaged else 1):
            for data in range(2 if train else 1):
                error = final + (0.9 - final) * np.exp(-4 * share) + random.normal(0, 0.01) - 0.03 * share * (kind + data)
                result.append(
                    row(
                        "evaluations",
                        snapshot=snapshot,
                        clock_min=at["clock"],
                        clock_max=at["clock"],
                        samples=at["samples"],
                        epochs=at["samples"] / TRAIN_SAMPLES if snapshot else 0.0,
                        taken_s=at["time_s"] if snapshot else 0.0,
                        averaged=kind,
                        train=data,
                        loss=2.5 * error,
                        error=error,
                    )
                )
    return rows("evaluations", result)
