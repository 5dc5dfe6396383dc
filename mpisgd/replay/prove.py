"""Replay of a run: its log is checked, and the run made again (DESIGN 4, law 6)."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import numpy as np
import torch

from mpisgd.base.draws import as_in_the_run
from mpisgd.base.errors import ConfigError
from mpisgd.job.finish import headline
from mpisgd.job.parts import NO_OBJECTS, UserObjects, load_data
from mpisgd.job.tensors import Tensors
from mpisgd.records.log import schema
from mpisgd.records.log.schema import Event, extra
from mpisgd.replay.again import simulate_again
from mpisgd.replay.checks.batch import Batch
from mpisgd.replay.checks.claimed import Claimed
from mpisgd.replay.checks.difference import difference, load_weights
from mpisgd.replay.checks.environment import check_done, check_rules
from mpisgd.replay.checks.finding import Untrue, refuse
from mpisgd.replay.checks.joined import check_joined
from mpisgd.replay.checks.numbers import check_numbers
from mpisgd.replay.checks.proof import Proof, Which
from mpisgd.replay.checks.record import Record, read
from mpisgd.replay.checks.seconds import check_seconds
from mpisgd.replay.rerun.attempts import OnPush, OnRow, Reach, run_again
from mpisgd.replay.rerun.results import check_sizes
from mpisgd.replay.user_objects import changed, check_consent, renamed, saying_how, with_initial

_OF_A_STREAM = "the data are a stream: does the stream give learners the same samples again? If not, the run cannot be replayed"

FOREIGN_TOLERANCE = 0.05
"""Tolerance for runs on a GPU or in batches."""


def replay(  # noqa: PLR0913 - each an option by name
    path: str | Path,
    user_objects: UserObjects = NO_OBJECTS,
    *,
    until: int | None = None,
    tolerance: float | None = None,
    data_dir: str | None = None,
    init_from: str = "",
    named: Mapping[str, str] = MappingProxyType({}),
    trust: bool = False,
    evaluations: Which = "all",
    device: Literal["cpu", "cuda"] = "cpu",
    on_row: OnRow = lambda number, row, loss: None,
    on_push: OnPush = lambda shard, row: None,
) -> Proof:
    """Make a run again, in the order of its log, and compare all rows and results.

    Args:
        path: the run's directory; an unfinished run is replayed to its log's end.
        brought: Python objects given to the run (`mpisgd.train`).
        until: stop when all shards reach this clock.
        tolerance: allowed difference of weights, as a share of their way; default: 0 (bit for bit), or `FOREIGN_TOLERANCE`
            unless computed on a CPU, one mini-batch at a time.
        data_dir: place of the data, if moved.
        init_from: place of the initial weights, if moved.
        named: replacements for the user's model, data, loss, step, protocol or schedule, as package.module:attribute.
        trust: import code named by the run, if neither brought nor `named` (`mpisgd.config.trust`).
        evaluations: snapshots to evaluate again.
        device: cuda: compute on a GPU, as the run did.
        on_row: called with a gradient's row number, row, and new loss, shard by shard.
        on_push: called in the order of the rerun, with shard and row number.

    Raises:
        DataError: no readable run, log or weights; other sizes of data or model; initial weights gone or changed; older rules.
        ConfigError: code not to be imported; model, data or loss cannot be made; the log ends before `until`.
    """
    record = read(path)
    if not trust:
        check_consent(record, user_objects, named)
    record = renamed(record, named)
    if data_dir is not None:
        record = dataclasses.replace(record, config=dataclasses.replace(record.config, data_dir=data_dir))
    check_rules(record)
    proof = _begin(record, tolerance, on_gpu=device == "cuda")
    record = with_initial(record, init_from, proof)
    last = min(log.final_clock for log in record.shards)
    if until is not None and not 0 <= until <= last:
        raise ConfigError(f"until = {until}: expected 0 to {last}, the last clock of the log")
    proof.which = evaluations
    if record.config.protocol.batch:
        return _replay_batch(record, user_objects, proof, until)
    started_s = time.monotonic()
    with saying_how(record, user_objects), as_in_the_run(proof.threads, exact=record.config.deterministic):
        try:
            check_log(record)
            proof.notes += changed(record.run)
            run_again(record, user_objects, proof, Reach(-1 if until is None else until, on_row, on_push))
        except Untrue as untrue:
            proof.find(untrue.finding)
            return proof
        _say_what_is_compared(record, proof, until)
        if proof.holds and record.run.environment.get("virtual", False) and until is None:
            not_yet = evaluations == "all" and proof.which == "none" and not record.older
            simulate_again(record, user_objects, proof, evaluated=not_yet)
    _check_joined(record, proof, until)
    proof.seconds = time.monotonic() - started_s
    return proof


def check_log(record: Record) -> None:
    """Raise Untrue at the first place impossible without computing."""
    for attempt in (*record.earlier, record):
        check_numbers(attempt)
        check_seconds(attempt)
    for log, clock in zip(record.shards, record.done["clock"] if record.done else [], strict=False):
        if log.final_clock != clock or not log.finished:
            refuse(f"DONE says that the shard ended at clock {clock}", log.shard, "updates", row=log.final_clock)
    check_done(record)


def _say_what_is_compared(record: Record, proof: Proof, until: int | None) -> None:
    if not record.computed:
        proof.computed = False
        proof.nothing_to_compare = "the run computed no gradients: only the protocol's decisions can be checked"
    elif until is not None:
        there = "stopped at" if len(proof.waypoints) == len(proof.clocks) else "the logs end before all shards come to"
        proof.nothing_to_compare = f"{there} clock {until}"
    elif record.done is None:
        proof.nothing_to_compare = "the run did not finish: no weights to compare with"
    if proof.other_losses and record.config.sampling == "stream":
        proof.notes.append(_OF_A_STREAM)


def _check_joined(record: Record, proof: Proof, until: int | None) -> None:
    """Check `log.h5` last: other checks explain a changed rank's file better."""
    if proof.holds and record.done is not None and until is None:
        if "files" not in record.done and (record.path / schema.LOG).is_file():
            proof.seams.append(f"{schema.LOG} is on trust: written by an earlier mpisgd, in other forms")
            return
        try:
            check_joined(record.run)
        except Untrue as untrue:
            proof.find(untrue.finding)


def _replay_batch(record: Record, user_objects: UserObjects, proof: Proof, until: int | None) -> Proof:
    if until is not None:
        raise ConfigError(f"until = {until}: expected None: a batch optimisation is replayed as a whole")
    proof.batch, started_s = True, time.monotonic()
    proof.commands = getattr(record.config.protocol, "log_commands")  # noqa: B009 - of `SandblasterOptions`
    try:
        claimed = Claimed(record)
        check_done(record)
        with saying_how(record, user_objects), as_in_the_run(proof.threads, exact=record.config.deterministic):
            data = load_data(record.config, user_objects)
            tensors = Tensors.load(record.config, user_objects, data, record.ranks)
            check_sizes(record, len(data.train), tensors.model.size)
            proof.notes += changed(record.run)
            batch = Batch(record, claimed, tensors, data, proof.which)
            try:
                batch.run()
            finally:
                proof.clocks, proof.gradients, proof.evaluations = batch.clocks, batch.gradients, batch.evaluated
            _compare_batch(record, batch, proof)
    except Untrue as untrue:
        proof.find(untrue.finding)
    if record.run.environment.get("virtual", False):
        proof.not_simulated = "a batch optimisation is only computed again; seconds are on trust"
    _check_joined(record, proof, until)
    proof.seconds = time.monotonic() - started_s
    return proof


def _compare_batch(record: Record, batch: Batch, proof: Proof) -> None:
    model = batch.tensors.model
    proof.parameters = model.size
    if record.done is None:
        proof.nothing_to_compare = "the run did not finish: no weights to compare with"
        return
    weights = batch.weights()
    recorded = load_weights(record.path / schema.WEIGHTS, ["theta"], model, record.done.get("weights"))["theta"]
    proof.differences.append(difference("theta", weights, recorded, batch.initial, model, batch.bounds))


def check(path: str | Path, user_objects: UserObjects = NO_OBJECTS, *, trust: bool = False) -> str:
    """Return the first contradiction, in a line; "" = proved. Raises as `replay`."""
    return replay(path, user_objects, trust=trust).reason


def _begin(record: Record, tolerance: float | None, *, on_gpu: bool) -> Proof:
    config = record.config
    of_gpu = "cuda" in (config.device, config.shard_device)
    if on_gpu and (not of_gpu or config.protocol.batch):
        why = "where portions are summed" if of_gpu else "on which the run computed"
        raise ConfigError(f"device = 'cuda': expected 'cpu', {why}")
    parameters, train_samples, threads = map(record.environment, ("parameters", "train_samples", "threads"))
    proof = Proof(record.path, headline(config, record.lambda_, record.ranks, parameters, train_samples), threads)
    proof.finished = record.done is not None
    proof.metrics = extra("evaluations", record.run.evaluations.dtype)
    proof.columns = record.run.pushes.dtype.names or ()
    if record.older:
        proof.seams.append("written by an earlier mpisgd: divergence, batch_norm_policy and goodbyes are also on trust")
    if config.virtual.batched and record.run.environment.get("virtual", False):
        proof.why_tolerant = "the run computed many gradients as one batch"
    proof.on_gpu = on_gpu
    if of_gpu and not on_gpu:
        proof.why_tolerant = "the run computed on cuda, this is a CPU"
    elif of_gpu and not config.deterministic:
        proof.why_tolerant = "deterministic = false: kernels of a GPU may have added in another order"
    proof.tolerance = tolerance if tolerance is not None else FOREIGN_TOLERANCE if proof.why_tolerant else 0.0
    if proof.tolerance and not proof.why_tolerant:
        proof.why_tolerant = "as asked for"
    recorded, here = record.run.environment.get("versions", {}).get("torch"), str(torch.__version__)
    if recorded != here:
        proof.notes.append(f"the run computed with torch {recorded}, this is {here}: last bits may differ")
    refused = np.count_nonzero(record.run.events["kind"] == Event.REFUSED)
    if refused:
        proof.notes.append(
            f"shards refused {refused:,} impossible messages (events REFUSED):"
            " the senders may also have sent false messages unnoticed"
        )
    return proof
