"""A run's snapshots, taken again during the computation, and evaluated as in the run."""

from __future__ import annotations

import bisect
import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mpisgd.config import Part
from mpisgd.data import DataSet
from mpisgd.gradient.measure import Measured, batch_norms
from mpisgd.job import parts
from mpisgd.job.tensors import EVALUATOR
from mpisgd.records.best import best_row
from mpisgd.records.checkpoint import buffers
from mpisgd.records.log import schema
from mpisgd.records.log.rank_file import attempt_of
from mpisgd.records.log.schema import Event
from mpisgd.records.weights import EVALUATION, WEIGHTS, read_best
from mpisgd.replay.checks.finding import Finding, refuse, same
from mpisgd.replay.checks.happened import due_snapshots
from mpisgd.replay.checks.record import Record
from mpisgd.replay.checks.seconds import seconds_of
from mpisgd.replay.difference import reading
from mpisgd.replay.proof import Proof
from mpisgd.replay.serial import Serial
from mpisgd.update.slice_update import SliceUpdate
from mpisgd.vectors.kept_state import is_stateful
from mpisgd.vectors.memory import host_view

Which = Literal["all", "last", "none"]


class Taken(NamedTuple):
    clock: int
    samples: int
    taken_s: float


@dataclass(frozen=True)
class Plan:
    """A run's snapshots.

    Attributes:
        taken: slices by shard of the last attempt.
        known: the same, as told to each attempt's evaluator: before a new cut, slices had their own shards' clocks.
        numbers: snapshot number by attempt, shard and clock.
        kept: number of snapshots at the begin, by attempt and shard.
    """

    taken: list[list[Taken]]
    known: dict[int, list[list[Taken]]]
    numbers: dict[tuple[int, int], dict[int, int]]
    kept: dict[tuple[int, int], int]

    @property
    def count(self) -> int:
        return min(map(len, self.taken))

    def slices(self, number: int, attempt: int) -> list[Taken]:
        """Return a snapshot's slices, as told to this attempt's evaluator if possible."""
        known = self.known.get(attempt, [])
        there = bool(known) and number < min(map(len, known))
        return [mine[number] for mine in (known if there else self.taken)]


def plan_of(record: Record) -> Plan:
    """Return the plan from all attempts; seams keep the checkpoint's snapshots."""
    taken: list[list[Taken]] = []
    known: dict[int, list[list[Taken]]] = {}
    numbers: dict[tuple[int, int], dict[int, int]] = {}
    kept: dict[tuple[int, int], int] = {}
    chain = [*record.earlier, record]
    for attempt, following in zip(chain, [*chain[1:], None], strict=True):
        if not taken:
            taken = [[] for _ in attempt.shards]
        elif attempt.recut:  # all new shards begin alike (`recut.recut`)
            taken = [taken[0][: min(map(len, taken))] for _ in attempt.shards]
        for shard in attempt.shards:
            events = shard.events[shard.events["kind"] == Event.SNAPSHOT]
            at_s = dict(zip(events["clock"].tolist(), events["time_s"].tolist(), strict=True))
            mine = taken[shard.shard]
            due = due_snapshots(attempt, shard)
            kept[attempt.attempt, shard.shard] = len(mine)
            numbers[attempt.attempt, shard.shard] = {clock: len(mine) + at for at, (clock, _) in enumerate(due)}
            seam = math.inf if following is None else following.start_clock
            mine += [Taken(clock, samples, at_s.get(clock, math.nan)) for clock, samples in due if clock <= seam]
        known[attempt.attempt] = [list(mine) for mine in taken]
    return Plan(taken, known, numbers, kept)


def check_rows(record: Record, plan: Plan) -> None:
    """Raise Untrue at the first row of `evaluations` not due there; after a kill, evaluations may be ahead of the logs."""
    rows = record.run.evaluations
    expected = list(_expected(record, plan)) if record.computed else []
    names = [name for name in schema.EVALUATIONS.names or () if name not in ("taken_s", "loss", "error", "evaluate_s")]
    for at, (row, (wanted, taken_s, final)) in enumerate(zip(rows, expected, strict=False)):
        for name, value in zip(names, wanted, strict=True):
            if row[name] != value:
                refuse(f"{name} {row[name]}, expected {value}", -1, "evaluations", row=at, clock=int(wanted[1]))
        said = row["taken_s"].item()
        if not (said >= taken_s if final else math.isnan(taken_s) or said == taken_s):
            why = f"taken at {said} s, expected {'not before ' if final else ''}{taken_s} s"
            refuse(why, -1, "evaluations", row=at, clock=int(wanted[1]))
        if not row["evaluate_s"] >= 0:
            refuse(f"evaluate_s {row['evaluate_s']}", -1, "evaluations", row=at, clock=int(wanted[1]))
    if record.whole and (len(rows) > len(expected) or (record.done and len(rows) < len(expected))):
        why = f"{len(rows)} rows, but {len(expected)} are of this run"
        refuse(why, -1, "evaluations", row=min(len(rows), len(expected)))


def _expected(record: Record, plan: Plan) -> Iterator[tuple[tuple[float, ...], float, bool]]:
    """Yield a row's values without seconds; the time taken; whether of the last weights."""
    train_samples = record.environment("train_samples")
    vectors, evaluated = _kinds(record)
    rows_each = vectors * len(evaluated)
    writers = [attempt_of(part.path) for part in record.run.parts for _ in range(part.length("evaluations"))][::rows_each]
    for number in range(plan.count + record.whole):
        if number == plan.count:
            slices = [Taken(log.final_clock, log.final_samples, log.final_s) for log in record.shards]
        else:
            slices = plan.slices(number, writers[number] if number < len(writers) else record.attempt)
        clocks = [slice_.clock for slice_ in slices]
        samples, taken_s = slices[0].samples, seconds_of(slices[0].taken_s)
        for averaged in range(vectors):
            for part in evaluated:
                wanted = (number, min(clocks), max(clocks), samples, samples / train_samples, averaged, int(part))
                yield wanted, taken_s, number == plan.count


def _kinds(record: Record) -> tuple[int, tuple[Part, ...]]:
    return (2 if record.config.averaging > 0 else 1), record.config.evaluated


class Kept:
    """Slices of snapshots, on disk until the end."""

    def __init__(self, record: Record, plan: Plan) -> None:
        self._size = record.environment("parameters")
        self._vectors, _ = _kinds(record)
        self._plan = plan
        self._file: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 - closed with this object
        self._buffers = tempfile.TemporaryDirectory(prefix="mpisgd-replay-")
        self._there: dict[int, dict[int, int]] = {}

    def begin(self, attempt: Record, bounds: list[tuple[int, int]]) -> None:
        """Forget later snapshots: the run lost these, and took them again."""
        for shard, (start, _) in enumerate(bounds):
            first = self._plan.kept[attempt.attempt, shard]
            for number, slices in self._there.items():
                if number >= first:
                    for each in list(slices) if attempt.recut else [start]:
                        slices.pop(each, None)

    def keep(self, attempt: Record, serial: Serial) -> None:
        """Restore learners' state beside parameters, and keep learner 0's, as the run did."""
        module, first = serial.model.module, self._plan.kept[attempt.attempt, 0]
        if not (attempt.config.hands_state_on and is_stateful(module)):
            return
        run = Path(self._buffers.name)
        buffers.forget(run, first)
        for learner_id, (rank, *_) in enumerate(attempt.members if attempt.attempt else ()):
            serial.turn_of(rank)()
            buffers.begin_again(attempt.path, attempt.attempt, learner_id, module)
        clocks = sorted(self._plan.numbers[attempt.attempt, 0])
        keeper = buffers.Keeper(
            module, run, serial.turn_of(serial.first_rank), begun=attempt.start_clock if attempt.attempt else -1
        )
        serial.keep(keeper, lambda clock: first + bisect.bisect_right(clocks, clock))

    def given(self, serial: Serial) -> buffers.Given:
        return buffers.Given(serial.model.module, Path(self._buffers.name), serial.turn_of(EVALUATOR))

    def look(self, attempt: Record, shard: int, clock: int, start: int, update: SliceUpdate) -> None:
        """Keep a slice, from `start` of the vector, if due at this clock."""
        number = self._plan.numbers[attempt.attempt, shard].get(clock)
        if number is None:
            return
        for vector, slice_ in enumerate((update.weights, update.averaged)[: self._vectors]):
            assert slice_ is not None
            self._file.seek(4 * ((number * self._vectors + vector) * self._size + start))
            self._file.write(host_view(slice_).tobytes())
        self._there.setdefault(number, {})[start] = len(update.weights)

    def get(self, number: int, vector: int) -> Tensor | None:
        """Return a snapshot's (parameters,) float32; None if slices are missing."""
        if sum(self._there.get(number, {}).values()) < self._size:
            return None
        self._file.seek(4 * (number * self._vectors + vector) * self._size)
        return torch.from_numpy(np.frombuffer(self._file.read(4 * self._size), np.float32).copy())


def has_lasting_buffers(module: nn.Module, policy: str) -> bool:
    """Return whether evaluation depends on buffers not measured anew (`measure`)."""
    layers = [] if policy == "learner" else batch_norms(module)
    anew = {id(each) for layer in layers for each in layer.buffers()}
    return any(id(each) not in anew for each in module.buffers())


def evaluate_again(record: Record, serial: Serial, data: DataSet, plan: Plan, kept: Kept, proof: Proof) -> None:
    """Evaluate snapshots `proof.which` and last weights; compare with recorded rows."""
    rows = record.run.evaluations
    vectors, evaluated = _kinds(record)
    snapshots = -(-len(rows) // (vectors * len(evaluated)))
    numbers = {"all": range(snapshots), "last": range(snapshots)[-1:], "none": range(0)}[proof.which]
    handed_on = record.rules > 5 and record.config.hands_state_on and is_stateful(serial.model.module)
    given = kept.given(serial) if handed_on else None
    if given is None:  # the evaluating rank's; of a dedicated evaluator, or a group, as made by the factory
        alone = record.config.evaluator or record.config.in_groups
        serial.turn_of(EVALUATOR if alone else serial.first_rank)()
    measure = parts.make_measure(record.config, serial.model, serial.tensors.loss, data)
    best = BestOfRun(record, proof)
    for number in numbers:
        final = record.whole and number == plan.count
        for vector in range(vectors):
            weights = serial.weights(averaged=vector == 1) if final else kept.get(number, vector)
            if weights is None:
                proof.seams.append(f"snapshot {number} cannot be evaluated again: the logs do not lead to all slices")
                break
            if given is not None:
                if record.earlier and not (final or given.has(number)):
                    proof.seams.append(
                        f"snapshot {number} cannot be evaluated again: learner 0 was interrupted before this snapshot"
                    )
                    break
                given.put(number, last=final)
            serial.model.weights.copy_(weights)
            best.compare(number, vector, weights, serial, proof)
            measure.prepare()
            _compare_saved(record, serial, vector, proof, final and record.rules > 5)
            for place, part in enumerate(evaluated):
                at = (number * vectors + vector) * len(evaluated) + place
                if at < len(rows):
                    proof.evaluations += 1
                    _compare(rows[at], at, measure.of(part), proof)
            _compare_saved(record, serial, vector, proof, final and record.rules < 6)


class BestOfRun:
    """File of best weights, compared with `evaluations` and recomputed weights. Raises DataError.

    A continued run may keep the best of evaluations after the checkpoint, unknown to the log.
    """

    def __init__(self, record: Record, proof: Proof) -> None:
        path, options = record.path / schema.BEST, record.config.evaluation
        self._told: Mapping[str, Any] | None = None
        if record.done is None or "best" not in record.done:
            return
        found = read_best(path)
        row = best_row(options, record.run.evaluations)
        names = [name for name in record.run.evaluations.dtype.names or () if row is not None and name in found[EVALUATION]]
        if row is not None and all(same(float(found[EVALUATION][name]), float(row[name])) for name in names):
            self._told, self._state = found[EVALUATION], found[WEIGHTS]
        elif record.earlier:
            proof.seams.append(f"{schema.BEST} is on trust: the evaluation came after the checkpoint that the run went on from")
        else:
            proof.find(Finding("the weights are not of the best evaluation of the log", -1, schema.BEST))

    def compare(self, number: int, vector: int, weights: Tensor, serial: Serial, proof: Proof) -> None:
        if self._told is None or (self._told["snapshot"], self._told["averaged"]) != (number, vector):
            return
        with reading(Path(schema.BEST)):
            for name, view in serial.model.views(weights).items():
                saved = self._state[name]
                if saved.shape != view.shape or not torch.allclose(
                    saved.to(view.dtype), view, rtol=proof.tolerance, atol=proof.tolerance, equal_nan=True
                ):
                    proof.find(Finding(f"{name} is not of snapshot {number}", -1, schema.BEST))
                    return


def _compare(row: np.void, at: int, found: Measured, proof: Proof) -> None:
    names = row.dtype.names or ()
    for name, value in {"loss": found.loss, "error": found.error, **found.metrics}.items():
        said = row[name].item() if name in names else math.nan
        if not same(said, value) and not abs(said - value) <= proof.tolerance * max(1.0, abs(said)):
            proof.find(Finding(f"{name} {said!r}, evaluated again {value!r}", -1, "evaluations", at, int(row["clock_max"])))


def _compare_saved(record: Record, serial: Serial, vector: int, proof: Proof, there: bool) -> None:
    """Compare saved buffers; rules before 6 saved them after evaluation."""
    if there and record.done is not None:
        _compare_buffers(record, serial.model.module, ("theta", "thetabar")[vector], proof)


def _compare_buffers(record: Record, module: nn.Module, name: str, proof: Proof) -> None:
    path = record.path / schema.WEIGHTS
    with reading(path):
        state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")[name]
        saved = {key: state[key] for key, _ in module.named_buffers() if key in module.state_dict()}
    for key, value in saved.items():
        ours = module.state_dict()[key]
        if value.shape != ours.shape or not torch.allclose(value, ours, rtol=proof.tolerance, atol=proof.tolerance, equal_nan=True):
            proof.find(Finding(f"{name}: the buffer {key} is not of these weights", -1, schema.WEIGHTS))
