"""Evaluations of a run made again: wanted snapshots are measured and compared; then the run's values count."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from mpisgd.comm.messages import FINAL
from mpisgd.evaluator import Evaluator
from mpisgd.exchange.evaluator_channel import Snapshot
from mpisgd.gradient.measure import Unmeasured, batch_norms
from mpisgd.records.log import schema
from mpisgd.records.log.rank_file import attempt_of
from mpisgd.records.log.schema import Event
from mpisgd.replay.checks.finding import Finding, Untrue, same
from mpisgd.replay.checks.proof import Proof
from mpisgd.replay.checks.record import Record
from mpisgd.replay.checks.seconds import seconds_of

_MEASURED = ("loss", "error")


class Told:
    """Rows of `evaluations` that an attempt wrote.

    Args:
        unmade: snapshots that cannot be made again.
        taken_s: seconds of snapshots, by clock of shard 0; grows by the attempt's.
    """

    def __init__(self, run: Record, attempt: Record, proof: Proof, unmade: set[int], taken_s: dict[int, float]) -> None:
        rows = run.run.evaluations
        writers = [attempt_of(part.path) for part in run.run.parts for _ in range(part.length("evaluations"))]
        mine = [at for at, writer in enumerate(writers) if writer == attempt.attempt]
        self._rows = {tuple(rows[["snapshot", "averaged", "train"]][at].item()): (at, rows[at]) for at in mine}
        self._last = int(rows["snapshot"][-1]) if len(rows) else -1
        self._metrics = schema.extra("evaluations", rows.dtype)
        self._proof = proof
        self._findings: list[Finding] = []
        self._unmade = unmade
        log = attempt.shards[0]
        there = log.events[log.events["kind"] == Event.SNAPSHOT]
        for clock in [clock for clock in taken_s if clock > log.start.clock]:
            del taken_s[clock]
        self._taken_s = taken_s
        taken_s.update(zip(there["clock"].tolist(), there["time_s"].tolist(), strict=True))
        self._final_s = log.final_s

    def compare(self) -> None:
        """Raise Untrue at the first other result."""
        if self._findings:
            raise Untrue(self._findings[0])

    def wants(self, number: int) -> bool:
        """Return whether a snapshot is measured again."""
        return {"all": True, "last": number in (self._last, FINAL), "none": False}[self._proof.which]

    def settle(self, row: dict[str, Any], clock: int, *, measured: bool, last: bool) -> dict[str, Any]:
        """Return a row with the run's results, after a comparison; `clock`: of shard 0's slice."""
        at, logged = self._rows.get((row["snapshot"], row["averaged"], row["train"]), (-1, None))
        if logged is None or row["snapshot"] in self._unmade:
            return row
        place = {"row": at, "clock": int(logged["clock_max"])}
        self._compare_seconds(logged, clock, last, place)
        for name in (*_MEASURED, *self._metrics) if measured else ():
            said, value = logged[name].item(), row.get(name, math.nan)
            if not same(said, value) and not abs(said - value) <= self._proof.tolerance * max(1.0, abs(said)):
                self._findings.append(Finding(f"{name} {said!r}, evaluated again {value!r}", -1, "evaluations", **place))
        self._proof.evaluations += measured
        return {**row, **{name: logged[name].item() for name in (*_MEASURED, *self._metrics)}}

    def _compare_seconds(self, logged: Any, clock: int, last: bool, place: dict[str, int]) -> None:
        said, spent = logged["taken_s"].item(), logged["evaluate_s"].item()
        taken_s = seconds_of(self._final_s if last else self._taken_s.get(clock, math.nan))
        if not (said >= taken_s if last else math.isnan(taken_s) or said == taken_s):
            why = f"taken at {said} s, expected {'not before ' if last else ''}{taken_s} s"
            self._findings.append(Finding(why, -1, "evaluations", **place))
        if not spent >= 0:
            self._findings.append(Finding(f"evaluate_s {spent}", -1, "evaluations", **place))


class EvaluatorByLog(Evaluator):
    """Evaluator of a run made again."""

    def __init__(self, *arguments: Any, told: Told, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._told = told
        self._real = self._measure

    def _pull(self, number: int) -> Snapshot | None:
        self._measure = self._real if self._told.wants(number) else Unmeasured()
        return super()._pull(number)

    def _before_batch(self) -> None:
        """Let no rank go on: learners share the model."""

    def _row(self, snapshot: Snapshot, *arguments: Any) -> dict[str, Any]:
        row, measured = super()._row(snapshot, *arguments), self._measure is self._real
        return self._told.settle(row, snapshot.clocks[0], measured=measured, last=self._last)

    def _evaluate(self, snapshot: Snapshot, *, last: bool = False) -> Any:
        self._last = last
        return super()._evaluate(snapshot, last=last)


def has_lasting_buffers(module: nn.Module, policy: str) -> bool:
    """Return whether evaluation depends on buffers not measured anew (`measure`)."""
    layers = [] if policy == "learner" else batch_norms(module)
    anew = {id(each) for layer in layers for each in layer.buffers()}
    return any(id(each) not in anew for each in module.buffers())


def why_not(record: Record, module: nn.Module) -> str:
    """Return why a run's evaluations cannot be made again; "" = they can."""
    if record.older and batch_norms(module):
        return "an earlier mpisgd had other batch-norm statistics"
    if not has_lasting_buffers(module, record.config.buffers_evaluated):
        return ""
    if record.rules < 6:
        return "an earlier mpisgd evaluated with other buffers"
    failures = record.config.failures
    lost = Event.LOST in record.run.events["kind"] or bool(failures.at_s or failures.mean_s)
    return "the model has buffers of each rank's own, and ranks were lost" if lost else ""
