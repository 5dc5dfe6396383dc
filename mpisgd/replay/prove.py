"""The replay of a run: its log is checked, then computed again, then compared (DESIGN 4, law 6)."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch

from mpisgd.errors import ConfigError
from mpisgd.finish import headline
from mpisgd.parts import NOTHING_BROUGHT, Brought
from mpisgd.records.schema import Event
from mpisgd.replay.again import changed, renamed, saying_how
from mpisgd.replay.attempts import check_start, through_attempts
from mpisgd.replay.finding import Untrue, refuse
from mpisgd.replay.learners import compare_shards
from mpisgd.replay.order import serial_order
from mpisgd.replay.proof import Proof
from mpisgd.replay.recompute import Told
from mpisgd.replay.record import Record, read
from mpisgd.replay.serial import as_in_the_run, load_data
from mpisgd.replay.walk import walk

FOREIGN_TOLERANCE = 0.05
"""Share of the way of weights, and of a loss, by which a CPU may differ from the GPU, or the batch, that a run computed on."""


def replay(
    path: str | Path,
    brought: Brought = NOTHING_BROUGHT,
    *,
    until: int | None = None,
    tolerance: float | None = None,
    data_dir: str | None = None,
    named: Mapping[str, str] = MappingProxyType({}),
    told: Told = lambda number, row, loss: None,
    at_first: bool = False,
) -> Proof:
    """Compute a run again, serially, from its log, and compare with what it left.

    Args:
        path: the run's directory; of a run that did not finish, it is replayed as far as its log goes.
        brought: the objects that the run was given as Python objects (`mpisgd.train(model=..., loss=..., data=...)`).
        until: stop when all shards have come to this clock.
        tolerance: by which share of the way of weights recomputed ones may differ; default: 0, every bit must be the same, but
            `FOREIGN_TOLERANCE` for runs that did not compute as a CPU does, one mini-batch at a time.
        data_dir: where the data lie here, if not where the run found them.
        named: the user's own model, data or loss, as package.module:attribute; default: as the run named them.
        told: see `Told`.
        at_first: stop at the first disagreement.

    Raises:
        DataError: there is no run, no log or no weights of it that can be read, or the data or model are of other sizes.
        ConfigError: model, data or loss cannot be made, or the log does not reach `until`.
    """
    record = renamed(read(path), named)
    if data_dir is not None:
        record = dataclasses.replace(record, config=dataclasses.replace(record.config, data_dir=data_dir))
    proof = _begin(record, tolerance)
    last = min(log.final_clock for log in record.shards)
    if until is not None and not 0 <= until <= last:
        raise ConfigError(f"until = {until}: expected 0 to {last}, the clock at which the log ends")
    try:
        for attempt in (*record.earlier, record):
            check_log(attempt)
    except Untrue as untrue:
        proof.finding = untrue.finding
        return proof
    if not record.computed:
        proof.clocks = tuple(log.final_clock for log in record.shards)
        proof.nothing_to_compare = "the run computed no gradients: what can be checked is the protocol's decisions"
        return proof
    started_s = time.monotonic()
    with saying_how(record, brought), as_in_the_run(proof.threads):
        data, meta = load_data(record, brought)
        proof.notes += changed(record.run)
        through_attempts(record, brought, data, meta, proof, told, until=until, at_first=at_first)
    proof.seconds = time.monotonic() - started_s
    return proof


def check(path: str | Path, brought: Brought = NOTHING_BROUGHT) -> str:
    """ "" where the log of a run proves what it left; else, in one line, the first place that does not fit.

    Raises what `replay` raises.
    """
    return replay(path, brought, at_first=True).reason


def check_log(record: Record) -> None:
    """All that can be seen without computing. Raises Untrue at the first place that cannot be."""
    for shard in record.shards:
        check_start(record, shard)
        walk(record, shard)
    compare_shards(record)
    for _ in serial_order(record):
        """That there is an order is all that is asked here."""
    for log, clock in zip(record.shards, record.done["clock"] if record.done else [], strict=False):
        if log.final_clock != clock or not log.finished:
            refuse(f"DONE says that it ended at clock {clock}", log.shard, "updates", row=log.final_clock)


def _begin(record: Record, tolerance: float | None) -> Proof:
    config = record.config
    parameters, train_samples, threads = map(record.environment, ("parameters", "train_samples", "threads"))
    proof = Proof(record.path, headline(config, record.lambda_, record.ranks, parameters, train_samples), threads)
    if config.virtual.batched and record.run.environment.get("virtual", False):
        proof.why_tolerant = "the run computed many gradients as one batch"
    if "cuda" in (config.device, config.shard_device):
        proof.why_tolerant = "the run computed on cuda, this is a CPU"
    proof.tolerance = tolerance if tolerance is not None else FOREIGN_TOLERANCE if proof.why_tolerant else 0.0
    if proof.tolerance and not proof.why_tolerant:
        proof.why_tolerant = "as asked for"
    recorded, here = record.run.environment.get("versions", {}).get("torch"), str(torch.__version__)
    if recorded != here:
        proof.notes.append(f"the run computed with torch {recorded}, this is {here}: last bits may differ")
    refused = np.count_nonzero(record.run.events["kind"] == Event.REFUSED)
    if refused:
        proof.notes.append(
            f"shards refused {refused:,} messages that cannot be (events REFUSED):"
            " whoever sent them may also have sent some that can be"
        )
    return proof
