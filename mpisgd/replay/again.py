"""A virtual job simulated again: all log rows are compared, seconds too."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import numpy as np

from mpisgd.base import durable
from mpisgd.base.errors import MpisgdError
from mpisgd.config import Config
from mpisgd.config.config_virtual import EmpiricalComputeOptions
from mpisgd.exchange.ways import STREAMED
from mpisgd.job.parts import UserObjects
from mpisgd.records.log import schema
from mpisgd.records.log.rank_file import read_summary, read_tables
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Event, LogRows
from mpisgd.replay.checks.environment import compare
from mpisgd.replay.checks.finding import Untrue, refuse
from mpisgd.replay.checks.proof import Proof
from mpisgd.replay.checks.record import Record
from mpisgd.replay.rerun.compare import as_before, refuse_first
from mpisgd.simulate.job import Job

#: Compared by the rerun, bit for bit or within its tolerance; `diverged` follows from these columns.
_COMPUTED = {
    "pushes": ("loss", "rounded", "scale"),
    "updates": ("mean_loss", "gradient_sq", "sum_sq"),
    "evaluations": ("loss", "error"),
}


def simulate_again(record: Record, user_objects: UserObjects, proof: Proof, *, evaluated: bool) -> None:
    """Simulate a virtual job again; findings, or why this is impossible, go into `proof`.

    `evaluated`: evaluate, too.
    """
    if why := _why_not(record):
        proof.not_simulated = why
        return
    with tempfile.TemporaryDirectory(prefix="mpisgd-replay-") as directory, durable.thrown_away():
        again = Path(directory) / "run"
        log = dataclasses.replace(record.config.log, enabled=True, progress="off")
        config = dataclasses.replace(record.config, out=str(again), overwrite=False, threads=proof.threads, log=log, device="cpu")
        try:
            ended = _simulate(config, user_objects, record, evaluated)
            _compare_files(record, again, evaluated)
            if record.done is not None:
                _compare_end(record, Run(again), ended)
        except Untrue as untrue:
            proof.find(untrue.finding)
    proof.simulated = True


def _why_not(record: Record) -> str:
    config = record.config
    if (record.run.events["kind"] == Event.INTERRUPTED).any():
        return "a signal interrupted the run, and the configuration holds no signals"
    if (record.rules < 3 and config.per_layer) or (record.rules < 4 and config.in_buckets):
        return "an earlier mpisgd cut layers or buckets, and asked for their weights, otherwise"
    if record.rules < 9 and config.way == STREAMED:
        return "an earlier mpisgd streamed other chunks, from the first on"
    if record.rules < 5 and config.network.core_bandwidth:
        return "an earlier mpisgd's cores copied nothing within their nodes (network.core_bandwidth)"
    compute = config.compute
    if isinstance(compute, EmpiricalComputeOptions) and not (Path(compute.run) / schema.CONFIG).is_file():
        return f"the compute seconds were drawn from {compute.run}, not found here"
    return ""


def _simulate(config: Config, user_objects: UserObjects, record: Record, evaluated: bool) -> str:
    """Return the job's failure, "" = none. Raises Untrue."""
    needed = evaluated or not record.computed or config.evaluation.patience > 0
    try:
        job = Job(config, user_objects, evaluated=needed, kept=False)
    except MpisgdError as error:
        refuse(f"a run of this configuration cannot be simulated: {error}", -1, schema.CONFIG)
    compare(record, job.environment())
    try:
        job.run()
    except MpisgdError as error:
        return str(error)
    return ""


def _compare_files(record: Record, again: Path, evaluated: bool) -> None:
    for log in record.shards:
        name = schema.shard_file(log.shard, record.attempt)
        tables = ("pushes", "updates", "events")
        pairs = zip(*(read_tables(path / name, tables) for path in (again, record.path)), strict=True)
        for table, (found, theirs) in zip(tables, pairs, strict=True):
            ours = as_before(found, theirs.dtype)
            if table == "events" and record.older:  # older logs have no goodbyes
                ours = ours[ours["kind"] != Event.GOODBYE]
            skipped = _COMPUTED.get(table, ()) if record.computed else ()
            _compare(ours, theirs, log.shard, table, skipped, whole=log.finished)
        if log.finished:
            summary, recorded = (read_summary(path / name)[0] for path in (again, record.path))
            for column in schema.SUMMARY.names or ():
                if column != "diverged" and summary[column] != recorded[column]:
                    refuse(f"{column} {recorded[column]}, simulated again {summary[column]}", log.shard, "summary")
    ours, theirs = Run(again).evaluations, record.run.evaluations
    if ours.dtype != theirs.dtype:
        metrics = [", ".join(schema.extra("evaluations", rows.dtype)) or "none" for rows in (theirs, ours)]
        refuse(f"metrics {metrics[0]}, simulated again {metrics[1]}", -1, "evaluations")
    skipped = () if evaluated else (*_COMPUTED["evaluations"], *schema.extra("evaluations", ours.dtype))
    _compare(ours, theirs, -1, "evaluations", skipped, whole=record.done is not None)


def _compare(ours: LogRows, theirs: LogRows, shard: int, table: str, skipped: tuple[str, ...], *, whole: bool) -> None:
    """Raise Untrue at the first difference; an unfinished log may lack last rows."""
    both, differs = min(len(ours), len(theirs)), dict[str, np.ndarray]()
    for column in (name for name in ours.dtype.names or () if name not in skipped):
        one, other = ours[column][:both], theirs[column][:both]
        differs[column] = ~((one == other) | (np.isnan(one) & np.isnan(other)))
        if column == "answer_s" and not whole:
            differs[column] &= ~np.isnan(other)
    if table == "events":  # a nonfinite gradient's loss is computed
        differs["value"] &= ours["kind"][:both] != Event.NONFINITE
    refuse_first(differs, ours, theirs, shard, table, "simulated again")
    if len(theirs) > len(ours) or (whole and len(theirs) < len(ours)):
        refuse(f"{len(theirs)} rows, simulated again {len(ours)}", shard, table, row=both)


def _compare_end(record: Record, again: Run, failed: str) -> None:
    if again.done is None:
        refuse(f"simulated again, the run does not end: {failed}", -1, schema.DONE)
    for name in ("clock", "samples", "seconds"):
        if (record.done or {}).get(name) != again.done[name]:
            refuse(f"{name} {(record.done or {}).get(name)}, simulated again {again.done[name]}", -1, schema.DONE)
