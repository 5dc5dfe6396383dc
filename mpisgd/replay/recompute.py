"""Computation in serial order, attempt by attempt, compared with the run's losses, updates and last weights."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mpisgd.base.errors import CheckpointError, DataError
from mpisgd.data import DataSet
from mpisgd.job.parts import UserObjects
from mpisgd.records.checkpoint import checkpoint as disk
from mpisgd.records.log import schema
from mpisgd.records.log.schema import Event, LogRows
from mpisgd.replay.checks.finding import Finding, refuse, same
from mpisgd.replay.checks.order import Compute, Take, Update, serial_order
from mpisgd.replay.checks.record import Record, Row, ShardRecord
from mpisgd.replay.difference import difference, load_weights
from mpisgd.replay.proof import Proof, Waypoint
from mpisgd.replay.serial import Serial
from mpisgd.replay.snapshots import Kept
from mpisgd.rules.verdict import Kind
from mpisgd.vectors.memory import host_view

_NORM_TOLERANCE = 1e-3
"""Relative; numpy's own number of threads sets the order of float32 sums in squared norms."""

_FROM_THE_START = "from the first gradient on: have model, loss or data changed since, or generators of their own?"

_OF_A_STREAM = "the data are a stream: does the stream give learners the same samples again? If not, the run cannot be replayed"

OnRow = Callable[[int, Row, float], None]
"""Callback per gradient taken by a shard: row number, row, recomputed loss."""


class Reach(NamedTuple):
    """Extent of a computation (`prove.replay`), and its callback."""

    until: int | None
    at_first: bool
    on_row: OnRow


class Recompute:
    """Computation of an attempt, until all shards reach `seam`, the next attempt's clock; findings go into `proof`."""

    def __init__(self, record: Record, serial: Serial, proof: Proof, on_row: OnRow, kept: Kept, seam: int | None = None) -> None:
        self.record = record
        self.serial = serial
        self.proof = proof
        self.on_row = on_row
        self.kept = kept
        self.clocks = [shard.start.clock for shard in record.shards]
        self.seam = seam
        self.at_seam: dict[int, dict[str, np.ndarray]] = {}
        kept.begin(record, serial.bounds)
        kept.keep(record, serial)
        for shard in range(len(record.shards)):
            self._come_to_seam(shard)
            self._keep(shard)
        self._losses = [0.0 for _ in record.shards]
        self._gradients = [0 for _ in record.shards]
        proof.parameters = serial.model.size

    def run(self, *, until: int | None, at_first: bool) -> None:
        """Compute to the log's end, clock `until` on all shards, or the first disagreement."""
        proof = self.proof
        for shard in range(len(self.clocks)):
            self._pass(shard, until, math.nan, math.nan)
        if until != 0 and not (until is None and len(self.at_seam) == len(self.clocks)):
            for action in serial_order(self.record):
                self._do(action, until)
                if len(proof.waypoints) == len(self.clocks) or (at_first and proof.finding):
                    break
                if until is None and len(self.at_seam) == len(self.clocks):
                    break
        proof.clocks = tuple(self.clocks)
        self._check_nonfinite()
        if self.seam is not None and until is None:
            return
        proof.waypoints.sort()
        if until is not None:
            there = "stopped at" if len(proof.waypoints) == len(self.clocks) else "the logs end before all shards come to"
            proof.nothing_to_compare = f"{there} clock {until}"
        elif self.record.done is None:
            proof.nothing_to_compare = "the run did not finish: no weights to compare with"
        elif not (at_first and proof.finding):
            self._compare_weights()

    def _do(self, action: Compute | Take | Update, until: int | None) -> None:
        match action:
            case Compute():
                self._compute(action)
            case Take(shard=shard, row=number):
                row = self.record.shards[shard].row(number)
                loss = self.serial.take(action, row)
                if row.verdict == Kind.APPLY:
                    self._losses[shard] += loss * row.gradients
                    self._gradients[shard] += row.gradients
                self.on_row(number, row, loss)
            case Update():
                self._update(action, until)

    def _compute(self, action: Compute) -> None:
        log = self.record.shards[0]
        number = int(log.rows_of[action.learner_id][action.number])
        row = log.row(number)
        loss, samples, rounded = self.serial.compute(action)
        self.proof.gradients += row.gradients
        place = {"row": number, "clock": row.clock, "learner_id": row.learner_id, "seq": row.seq}
        if samples != row.samples:
            self._find(Finding(f"{row.samples} samples, recomputed {samples}", log.shard, "pushes", **place))
        scale = self.serial.scale_of(action.learner_id)
        logged = log.scale_of(number)  # NaN in rows older than the column
        # Within a tolerance, sums differ, and so do overflow and rounding: both are on trust.
        if not (same(logged, scale) or math.isnan(logged) or self.proof.tolerance):
            self._find(Finding(f"scale {logged!r}, recomputed {scale!r}", log.shard, "pushes", **place))
        for each, share in zip(self.record.shards, rounded, strict=True):
            at = int(each.rows_of[action.learner_id][action.number])
            if at in each.inserted:  # another shard's row, and its stage rounded another slice
                continue
            said = float(each.pushes["rounded"][at])
            if not (same(said, share) or self.proof.tolerance or math.isclose(said, share, rel_tol=_NORM_TOLERANCE)):
                why = f"rounded {said!r}, recomputed {share!r}"
                self._find(Finding(why, each.shard, "pushes", **{**place, "row": at, "clock": each.row(at).clock}))
        if not same(loss, row.loss):
            self.proof.other_losses += 1
            apart = abs(loss - row.loss)
            self.proof.largest_loss = max(self.proof.largest_loss, apart if math.isfinite(apart) else math.inf)
            if not apart <= self.proof.tolerance * max(1.0, abs(row.loss)):
                self._find(Finding(f"loss {row.loss!r}, recomputed {loss!r}", log.shard, "pushes", **place))
                if self.proof.gradients == 1:
                    self.proof.notes.append(_FROM_THE_START)
                if self.record.config.sampling == "stream" and _OF_A_STREAM not in self.proof.notes:
                    self.proof.notes.append(_OF_A_STREAM)

    def _update(self, action: Update, until: int | None) -> None:
        """Make an update and compare its ingredients; equal norms show equal sums."""
        shard, clock = action
        recorded = self.record.shards[shard].update(clock)
        step = self.serial.update(action)
        self.clocks[shard] = clock
        self._come_to_seam(shard)
        self._keep(shard)
        row = clock - 1 - self.record.shards[shard].start.clock
        for name, value in step._asdict().items():
            said = recorded[name].item()
            if name.endswith("_sq"):
                agree = same(said, value) or math.isclose(said, value, rel_tol=max(_NORM_TOLERANCE, 2 * self.proof.tolerance))
                agree = agree or (self.proof.tolerance > 0 and (math.isnan(said) or math.isnan(value)))
            else:
                agree = said == value
            if not agree:
                self._find(Finding(f"{name} {said!r}, recomputed {value!r}", shard, "updates", row=row, clock=clock))
        gradients, losses = self._gradients[shard], self._losses[shard]
        self._gradients[shard], self._losses[shard] = 0, 0.0
        self._pass(shard, until, losses / gradients if gradients else math.nan, recorded["mean_loss"].item())

    def _come_to_seam(self, shard: int) -> None:
        if self.clocks[shard] == self.seam:
            self.at_seam[shard] = {name: host_view(each).copy() for name, each in self.serial.shards[shard].state().items()}

    def _keep(self, shard: int) -> None:
        start, _ = self.serial.bounds[shard]
        self.kept.look(self.record, shard, self.clocks[shard], start, self.serial.shards[shard])

    def _pass(self, shard: int, until: int | None, mean_loss: float, recorded: float) -> None:
        if self.clocks[shard] == until:
            weights = host_view(self.serial.shards[shard].weights)
            norm = float((weights.astype(float) ** 2).sum() ** 0.5)
            self.proof.waypoints.append(Waypoint(shard, until, zlib.crc32(weights.tobytes()), norm, mean_loss, recorded))

    def _find(self, finding: Finding) -> None:
        self.proof.find(finding)

    def _check_nonfinite(self) -> None:
        if self.record.config.nonfinite == "stop" or (self.proof.tolerance and self.proof.why_tolerant):
            return
        for log, found in zip(self.record.shards, self.serial.nonfinite, strict=True):
            rows = np.flatnonzero(log.events["kind"] == Event.NONFINITE)
            said = log.events[rows][["clock", "learner_id", "value"]].tolist()
            for at, (one, other) in enumerate(zip(said, found, strict=False)):
                if one[:2] != other[:2] or not same(one[2], other[2]):
                    why = f"NONFINITE: (clock, learner, loss) = {one}, recomputed {other}"
                    self._find(Finding(why, log.shard, "events", row=int(rows[at])))
            if log.finished and len(said) != len(found):
                self._find(Finding(f"NONFINITE: {len(said)} times, recomputed {len(found)}", log.shard, "events"))

    def _compare_weights(self) -> None:
        serial, names = self.serial, ["theta"]
        if self.record.config.averaging > 0:
            names.append("thetabar")
        saved = (self.record.done or {}).get("weights")
        recorded = load_weights(self.record.path / schema.WEIGHTS, names, serial.model, saved)
        for name in names:
            recomputed = serial.weights(averaged=name == "thetabar")
            each = difference(name, recomputed, recorded[name], serial.initial, serial.model, serial.bounds)
            self.proof.differences.append(each)


Tensors = Mapping[str, np.ndarray]


class Last(NamedTuple):
    """Result of all attempts; `diverged`: per shard, whether nonfinite values were met and the run continued."""

    serial: Serial
    diverged: list[bool]


def through_attempts(record: Record, user_objects: UserObjects, data: DataSet, proof: Proof, kept: Kept, reach: Reach) -> Last:
    """Compute attempts as in `prove.replay`, with findings in `proof`; return the last reached."""
    until, at_first, on_row = reach
    diverged = [False]
    begun: Sequence[Tensors] = []
    before: Serial | None = None
    attempts: list[Record] = [*record.earlier, record]
    for attempt, following in zip(attempts, [*attempts[1:], None], strict=True):
        serial = _goes_on(attempt, before, user_objects, data, begun, proof)
        seam = None if following is None else following.start_clock
        here = until if until is not None and (seam is None or until < seam) else None
        recompute = Recompute(attempt, serial, proof, on_row, kept, seam)
        recompute.run(until=here, at_first=at_first)
        diverged = _diverged(attempt, serial, diverged, following)
        if following is None or here is not None or (at_first and proof.finding is not None):
            break
        begun = [_begun(record, following, shard, recompute.at_seam.get(shard), proof) for shard in range(len(attempt.shards))]
        before = serial
    return Last(serial, diverged)


def _goes_on(
    attempt: Record, before: Serial | None, user_objects: UserObjects, data: DataSet, begun: Sequence[Tensors], proof: Proof
) -> Serial:
    """Begin an attempt, or continue another from its slices, cut anew if bounds differ."""
    serial = Serial(attempt, user_objects, data, begun, None if before is None else before.bounds)
    if before is not None and (before.record.lambda_, before.bounds) != (attempt.lambda_, serial.bounds):
        proof.seams.append(
            f"attempt {attempt.attempt}: {before.record.lambda_} learners and {len(before.bounds)} shards before,"
            f" {attempt.lambda_} and {len(serial.bounds)} from here on"
        )
    return serial


def _diverged(attempt: Record, serial: Serial, before: Sequence[bool], following: Record | None) -> list[bool]:
    seam = math.inf if following is None else following.start_clock
    goes_on = attempt.config.nonfinite == "continue"
    begun = [any(before)] * len(attempt.shards) if attempt.recut or len(before) != len(attempt.shards) else before
    return [
        was or (goes_on and any(clock < seam for clock, _, _ in found)) for was, found in zip(begun, serial.nonfinite, strict=True)
    ]


def check_start(record: Record, shard: ShardRecord) -> None:
    """Raise Untrue if shards continue from different clocks."""
    start = shard.start
    if start.clock != record.start_clock:
        why = f"this shard continues clock {start.clock}, shard {record.shards[0].shard} continues clock {record.start_clock}"
        refuse(why, shard.shard, "updates")


def _begun(record: Record, following: Record, shard: int, computed: Tensors | None, proof: Proof) -> Tensors:
    """Return a shard's tensors at an attempt's begin.

    Raises DataError: neither log nor checkpoint has the tensors.
    """
    clock = following.start_clock
    try:
        kept = disk.read(disk.directory_of(record.path, clock)).tensors(shard)
    except CheckpointError as error:
        if computed is None:
            raise DataError(
                f"the log of shard {shard} does not lead to clock {clock}, and no checkpoint gives the state: {error}"
            ) from error
        proof.seams.append(f"attempt {following.attempt}, shard {shard}: goes on at clock {clock}; {error}")
        return computed
    if computed is None:
        proof.seams.append(
            f"attempt {following.attempt}, shard {shard}: goes on at clock {clock} with the slice of the checkpoint: the logs of"
            " the attempt before end too early for this slice"
        )
        return kept
    other = [name for name in sorted({*kept, *computed}) if not _same(kept.get(name), computed.get(name))]
    if other and proof.finding is None and not proof.tolerance:
        why = f"attempt {following.attempt} begins with {', '.join(other)} of the checkpoint: the log before gives other values"
        proof.finding = Finding(why, shard, "updates", clock=clock)
    proof.seams.append(f"attempt {following.attempt}, shard {shard}: goes on at clock {clock}")
    return kept


def _same(one: LogRows | None, other: LogRows | None) -> bool:
    return one is not None and other is not None and one.tobytes() == other.tobytes()
