"""The driver for a made log: run directories without a run, without MPI or torch (DESIGN 6).

Where a real run will do, `tests/virtual/jobs.py` simulates one, and `tests/forge.py` changes its log.

    write_run(path, Log(pushes, updates), {"name": "softsync"}, learners=2)    the directory; `make` reads it, too
    row("pushes", clock=1, ...), rows("pushes", [row, ...])                    rows of which only what matters is said
    softsync(), backup(), one_learner()                                        tiny logs to be checked with a pencil
    simulated("hardsync", learners=30), learning(log), true_log(seed)          logs as real runs leave them; evaluations
    run_of(path), random_rows("pushes", 100), table_file(path)                 rows that mean nothing, of which every byte matters
"""

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

from mpisgd.records import directory
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Reason, Verdict
from mpisgd.records.log.writer import TableFile

TRAIN_SAMPLES = 1000
SOFTSYNC = {"name": "softsync", "n": 1}
PROTOCOLS = [("hardsync", 5), ("softsync", 2), ("backup", 4)]
"""Of `simulated`, with its `wanted`."""


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


def make(path: Path, log: Log, learners: int, **options: Any) -> Run:
    """Write `path/run`, of softsync unless another protocol is given, and read it."""
    return Run(write_run(path / "run", log, options.pop("protocol", SOFTSYNC), learners, **options))


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


# ------------------------------------------------------------------------------------------------------------- tiny logs, by hand

#: n = 1, λ = 2, c = 2: (learner_id, seq, timestamp, clock, arrival_s); all applied but the last two.
SOFTSYNC_PUSHES = [
    (0, 0, 0, 0, 1.0),
    (1, 0, 0, 0, 2.0),
    (0, 1, 0, 1, 3.0),
    (0, 2, 1, 1, 4.0),
    (0, 3, 1, 2, 5.0),
    (0, 4, 2, 2, 6.0),
    (1, 1, 0, 3, 7.0),
    (0, 5, 3, 3, 8.0),
    (0, 6, 4, 4, 9.0),  # summed, but its update never came
    (1, 2, 3, 4, 10.0),  # late
]


def softsync(shards: int = 1) -> Log:
    """Updates 0.05 s after the arrival that completes them, answers 0.1 s after each arrival but the last two."""
    pushes, updates = [], []
    for shard in range(shards):
        for at, (learner_id, seq, timestamp, clock, arrival_s) in enumerate(SOFTSYNC_PUSHES):
            late = at == len(SOFTSYNC_PUSHES) - 1
            pushes.append(
                row(
                    "pushes",
                    shard=shard,
                    learner_id=learner_id,
                    seq=seq,
                    timestamp=timestamp,
                    clock=clock,
                    arrival_s=arrival_s,
                    answer_s=arrival_s + 0.1 if at < 8 else float("nan"),
                    verdict=Verdict.LATE if late else Verdict.APPLY,
                    reason=Reason.FINISHED if late else Reason.NONE,
                    compute_s=0.5 + learner_id,
                    delay_s=0.125,
                    push_s=0.0 if seq == 0 else 0.01,
                    wait_s=0.02,
                    pull_s=0.03,
                )
            )
        for clock, time_s in enumerate((2.05, 4.05, 6.05, 8.05), start=1):
            updates.append(row("updates", shard=shard, clock=clock, gradients=2, samples=8 * clock, time_s=time_s, update_s=0.25))
    return Log(pushes=rows("pushes", pushes), updates=rows("updates", updates))


#: N = 2, b = 1, λ = 3: (learner_id, seq, timestamp, clock, arrival_s, verdict).
BACKUP_PUSHES = [
    (0, 0, 0, 0, 1.0, Verdict.APPLY),
    (1, 0, 0, 0, 2.0, Verdict.APPLY),
    (2, 0, 0, 1, 3.0, Verdict.DROP),
    (1, 1, 1, 1, 3.5, Verdict.APPLY),
    (0, 1, 1, 1, 4.0, Verdict.APPLY),
    (2, 1, 1, 2, 5.5, Verdict.LATE),
]


def backup() -> Log:
    """Update 1 at 2.5 s, update 2 at 4.5 s."""
    pushes = [
        row("pushes", learner_id=learner_id, seq=seq, timestamp=timestamp, clock=clock, arrival_s=arrival_s, verdict=verdict)
        for learner_id, seq, timestamp, clock, arrival_s, verdict in BACKUP_PUSHES
    ]
    updates = [
        row("updates", clock=1, gradients=2, samples=8, time_s=2.5, update_s=0.1),
        row("updates", clock=2, gradients=2, samples=16, time_s=4.5, update_s=0.1),
    ]
    return Log(pushes=rows("pushes", pushes), updates=rows("updates", updates))


def evaluation(snapshot: int, epochs: float, error: float, averaged: bool = False, train: bool = False) -> np.ndarray:
    """One row of `evaluations`: taken after 10 s per epoch, loss = 2 error."""
    return row(
        "evaluations",
        snapshot=snapshot,
        epochs=epochs,
        taken_s=10 * epochs,
        error=error,
        loss=2 * error,
        averaged=averaged,
        train=train,
    )


def one_learner() -> Log:
    """One learner, one shard. In truth: prepares until 0.1 s, waits until 0.3, pulls until 0.4, computes until 1.4, is delayed
    until 1.9, pushes until 2.2, prepares until 2.25, waits until 2.4, pulls until 2.5, computes until 3.5, pushes."""
    first = {"arrival_s": 2.0, "answer_s": 2.4, "wait_s": 0.2, "pull_s": 0.1, "compute_s": 1.0, "delay_s": 0.5, "loss": np.nan}
    second = {"arrival_s": 3.6, "push_s": 0.3, "wait_s": 0.15, "pull_s": 0.1, "compute_s": 1.0, "seq": 1, "loss": 0.5}
    return Log(
        pushes=rows("pushes", [row("pushes", **first), row("pushes", **second, clock=1, timestamp=1)]),
        updates=rows("updates", [row("updates", clock=1, gradients=1, samples=4, time_s=2.3, update_s=0.05, mean_loss=np.nan)]),
    )


def evaluated(log: Log) -> Log:
    """Two snapshots, of 0 and 1 s, each evaluated on test and training data in 0.7 s."""
    log.evaluations = rows(
        "evaluations",
        [row("evaluations", snapshot=at, taken_s=at, train=train, evaluate_s=0.7, error=0.5) for at in (0, 1) for train in (0, 1)],
    )
    return log


# ----------------------------------------------------------------------------------------------------------------- realistic logs


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


def true_log(seed: int, learners: int = 3, shards: int = 2, pushes: int = 30) -> tuple[Log, np.ndarray, np.ndarray]:
    """A log whose truth is known: (log, begin of each push, its end), the latter two (learners, pushes) in seconds.

    Pushes queue for long or not at all, answers take their time to arrive, and the learner does things that no row tells of.
    """
    random = np.random.default_rng(seed)
    some = [0.0, 1e-6, 1e-3, 0.02]

    def take() -> float:
        return float(random.choice(some) * random.random())

    begin, end = np.zeros((learners, pushes)), np.zeros((learners, pushes))
    table: list[np.ndarray] = []
    for learner_id in range(learners):
        now, push = 0.0, 0.0
        for at in range(pushes):
            now += take()
            asked = now
            answers = [asked + take() for _ in range(shards)]
            for old, moment in zip(table[len(table) - shards :] if at else [], answers, strict=False):
                old["answer_s"] = moment
            began = answers[0] + take()
            ended = max([began, *answers]) + take()
            compute, delay = 0.01 + take(), take()
            begin[learner_id, at] = ended + compute + delay
            arrivals = [begin[learner_id, at] + take() for _ in range(shards)]
            told = {"learner_id": learner_id, "seq": at, "wait_s": began - asked, "pull_s": ended - began, "push_s": push}
            for shard, arrival_s in enumerate(arrivals):
                more = {"shard": shard, "arrival_s": arrival_s, "compute_s": compute, "delay_s": delay}
                table.append(row("pushes", **told, **more))
            now = end[learner_id, at] = max(arrivals) + take()
            push = now - begin[learner_id, at]
    log = rows("pushes", table)
    return Log(pushes=log[np.argsort(log["arrival_s"], kind="stable")]), begin, end


# --------------------------------------------------------------------------------------------------------- rows that mean nothing


def random_rows(table: str, count: int, seed: int = 0) -> np.ndarray:
    """Rows of which every byte matters; floats are finite, so that they compare equal."""
    random = np.random.default_rng(seed)
    rows = np.zeros(count, schema.TABLES[table])
    for name in schema.TABLES[table].names or ():
        whole = rows.dtype[name].kind != "f"
        rows[name] = random.integers(0, 100, count) if whole else random.normal(size=count)
    return rows


def table_file(path: Path | None, *, flush_rows: int = 1000, flush_s: float = 1e9, shard: int = 0) -> TableFile:
    return TableFile(path, shard=shard, flush_rows=flush_rows, flush_s=flush_s)


def run_of(path: Path, shards: int = 3) -> dict[str, list[np.ndarray]]:
    """A directory as a run leaves it, but for log.h5; returns its tables, file by file."""
    directory.claim(path, overwrite=False)
    directory.write_config(path, f"shards = {shards}\n[environment]\nlearners = 2\n")
    tables: dict[str, list[np.ndarray]] = {table: [] for table in schema.TABLES}
    for place, name in enumerate([*map(schema.shard_file, range(shards)), schema.evaluator_file()]):
        last = place == shards
        file = table_file(path / name, shard=-1 if last else place)
        for table in schema.TABLES:
            count = ((table == "evaluations") is last and (3 + place) * 10) or 0
            rows = random_rows(table, count, seed=place)
            rows[(rows.dtype.names or ("shard",))[0]] = place
            for row in rows:
                file.append(table, tuple(row.tolist()))
            tables[table].append(rows)
        file.close(None if last else (place, 30, 120, 30, 30, 0))
    return tables
