"""A batch optimisation computed again by the coordinator's own code."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpisgd.base.errors import DivergenceError
from mpisgd.comm.messages import Ending, Op
from mpisgd.data import DataSet
from mpisgd.job import parts
from mpisgd.job.tensors import Tensors
from mpisgd.protocols import SandblasterOptions
from mpisgd.records.checkpoint import snapshots
from mpisgd.replay.checks.claimed import Claimed
from mpisgd.replay.checks.finding import refuse, same
from mpisgd.replay.checks.record import Record
from mpisgd.sandblaster.coordinator import Coordinator
from mpisgd.sandblaster.learner import Sum
from mpisgd.sandblaster.noted import NONE, Noted
from mpisgd.sandblaster.remote import Slot
from mpisgd.sandblaster.replayed_slots import Here
from mpisgd.vectors.memory import Memory

_NORM_TOLERANCE = 1e-3
"""Relative; numpy's own number of threads sets the order of float32 sums."""


_SLOTS = ("out", "a", "b")


class _LogEnds(Exception):
    """End of the log before the coordinator's."""


class Batch:
    """Stand-in for `sandblaster.evaluations.Evaluations`. Raises Untrue at the first difference from the log."""

    def __init__(self, record: Record, claimed: Claimed, tensors: Tensors, data: DataSet, which: str) -> None:
        self.clock = self.gradients = self.evaluated = 0
        self.seconds = 0.0
        self.tensors = tensors
        self.initial = tensors.model.weights.clone()
        self._stretches = iter(claimed.stretches)
        self._stretch = next(self._stretches)
        self.bounds = parts.bounds(self._stretch.record.config, tensors.model)
        options = record.config.protocol
        assert isinstance(options, SandblasterOptions)
        self._record = record
        self._claimed = claimed
        self._which = which
        self._here = Here(self.initial, self.bounds, self._accepted)
        self._gradient = tensors.gradient(0, Memory.zeros(tensors.model.size))
        self._sum = Sum(self._gradient, alone=options.push_every == 1)
        self._measure = parts.make_measure(record.config, tensors.model, tensors.loss, data)
        self._iterations = self._snapshots = self._row = 0
        self._epochs = 0.0
        size = tensors.model.size
        self._commands = Commands(record) if options.log_commands else None
        here = Noted(self._here, lambda: self.clock, self._commands.compare) if self._commands is not None else self._here
        self._coordinator = Coordinator(here, self, options, size, self._iteration, on_iteration=_nobody, warn=_nobody)

    @property
    def clocks(self) -> tuple[int, ...]:
        return tuple(self.clock for _ in self.bounds)

    def weights(self) -> Any:
        return self._here.weights()

    def run(self) -> None:
        self._evaluate_snapshot()
        self._go_on()
        finished = self._record.done is not None
        try:
            self._coordinator.run()
        except _LogEnds:
            if finished:
                refuse(f"the log ends at clock {self.clock}, and another evaluation follows", -1, "updates", clock=self.clock)
            return
        except DivergenceError as error:
            if finished:
                refuse(f"recomputed, the run fails: {error}", -1, "updates", clock=self.clock)
            return
        if self._commands is not None:
            self._commands.end()
        if self.clock != self._claimed.evaluations:
            refuse(f"recomputed, the run ends at clock {self.clock}", -1, "updates", clock=self._claimed.evaluations)
        if finished:
            self._evaluate_snapshot(final=True)
            if self._row != len(self._record.run.evaluations):
                refuse(f"{len(self._record.run.evaluations)} rows, expected {self._row}", -1, "evaluations", row=self._row)

    # ---------------------------------------------------------------------------------------------------- evaluations

    def evaluate(self, point: Slot, out: int, step: float) -> tuple[float, float]:
        """Return loss and squared norm at a point, from recorded claims."""
        if self.clock == self._claimed.evaluations:
            raise _LogEnds
        rows, losses = self._claimed.rows, dict[int, tuple[float, int]]()
        weights = self._gradient.memory.weights
        self._here.begin(point.number, weights)
        for learner_id, seq, members in self._claimed.pushes[self.clock]:
            for number in members:
                portion = int(rows["portion"][number])
                loss = self._gradient.compute(portion)
                self.gradients += 1
                if not same(loss, float(rows["loss"][number])):
                    why = f"loss {rows['loss'][number].item()!r}, recomputed {loss!r}"
                    refuse(why, -1, "portions", row=number, clock=self.clock, learner_id=learner_id)
                losses[portion] = (loss, self._gradient.samples)
                self._sum.add(self._gradient.samples, loss, 0, 0)
            self._here.push(self._sum.vector, learner_id, seq, self._sum.samples)
            self._sum.clear()
        summed = [losses[portion] for portion in range(len(losses))]
        loss = sum(loss * samples for loss, samples in summed) / sum(samples for _, samples in summed)
        squared = self._here.end(out)
        self._compare_updates(loss, step, squared)
        self.clock += 1
        return loss, sum(squared)

    def _compare_updates(self, loss: float, step: float, squared: list[float]) -> None:
        record, first, _ = self._stretch
        at = self.clock - first
        for log, norm in zip(record.shards, squared, strict=True):
            row = log.updates[at]
            for name, value in (("mean_loss", loss), ("learning_rate", step)):
                if not same(row[name].item(), value):
                    why = f"{name} {row[name].item()!r}, recomputed {value!r}"
                    refuse(why, log.shard, "updates", row=at, clock=self.clock + 1)
            if not math.isclose(row["sum_sq"].item(), norm, rel_tol=_NORM_TOLERANCE):
                why = f"sum_sq {row['sum_sq'].item()!r}, recomputed {norm!r}"
                refuse(why, log.shard, "updates", row=at, clock=self.clock + 1)

    def _go_on(self) -> None:
        while self.clock == self._stretch.end and (following := next(self._stretches, None)) is not None:
            self._stretch = following
            self.bounds = parts.bounds(following.record.config, self.tensors.model)
            self._here.cut_anew(self.bounds)

    def end(self, ending: Ending) -> None:
        """Do nothing: no learners wait."""

    # ----------------------------------------------------------------------------------------------------- iterations

    def _iteration(self, **fields: float) -> None:
        rows, at = self._claimed.iterations, self._iterations
        if at == len(rows):
            raise _LogEnds
        for name, value in fields.items():
            said = rows[name][at].item()
            if not name.endswith("_s") and not same(said, value):
                refuse(f"{name} {said!r}, recomputed {value!r}", -1, "iterations", row=at, clock=self.clock)
        self._iterations += 1

    def _accepted(self) -> None:
        before, self._epochs = self._epochs, self._here.slots[0].samples / self.tensors.meta.train_samples
        if snapshots.due(self._record.config.evaluation.every_epochs, before, self._epochs):
            self._evaluate_snapshot()
        self._go_on()

    def _evaluate_snapshot(self, *, final: bool = False) -> None:
        rows, record = self._record.run.evaluations, self._record
        number, self._snapshots = self._snapshots, self._snapshots + 1
        evaluates = self._which == "all" or (self._which == "last" and final)
        self.tensors.model.weights.copy_(self._here.weights())
        if evaluates:
            self._measure.prepare()
        for part in record.config.evaluated:
            if self._row >= len(rows):
                return
            row, at, samples = rows[self._row], self._row, self._here.slots[0].samples
            self._row += 1
            expected: dict[str, float] = {
                "snapshot": number,
                "clock_min": self.clock,
                "clock_max": self.clock,
                "samples": samples,
                "epochs": samples / self.tensors.meta.train_samples,
                "averaged": 0,
                "train": int(part),
            }
            if evaluates:
                found = self._measure.of(part)
                expected |= {"loss": found.loss, "error": found.error, **found.metrics}
                self.evaluated += 1
            for name, value in expected.items():
                if not same(row[name].item(), value):
                    refuse(f"{name} {row[name].item()!r}, recomputed {value!r}", -1, "evaluations", row=at, clock=self.clock)


def _nobody(*_: Any) -> None:
    """Ignore."""


class Commands:
    """Rows of `commands`, in order; a continued run numbers slots anew."""

    def __init__(self, record: Record) -> None:
        parts = [part.rows("commands") for part in record.run.parts_of_coordinator]
        self._rows = np.concatenate(parts)
        self._begins = set(np.cumsum([len(part) for part in parts])[:-1].tolist())
        """First rows of later attempts."""
        self._finished = record.done is not None
        self._at = 0
        self._mine: dict[int, int] = {}
        """Slots here by slots of the log; `_theirs` is the inverse."""
        self._theirs: dict[int, int] = {}

    def compare(self, **fields: float) -> None:
        """Raise Untrue if the next row differs from `fields`."""
        at, op = self._at, Op(int(fields["op"]))
        if at == len(self._rows):
            if self._finished:
                refuse(f"{at} rows, and {op.name} follows", -1, "commands", row=at, clock=int(fields["clock"]))
            return
        if at in self._begins:
            self._mine, self._theirs = {}, {}
        row, self._at = self._rows[at], at + 1
        for name in ("clock", "op", "alpha", "value"):
            if not same(row[name].item(), fields[name]):
                why = f"{name} {row[name].item()!r}, recomputed {fields[name]!r}"
                refuse(why, -1, "commands", row=at, clock=int(fields["clock"]))
        for name in _SLOTS:
            said, mine = int(row[name]), int(fields[name])
            known = (self._mine.get(said, mine), self._theirs.get(mine, said))
            if known != (mine, said) or (said == NONE) != (mine == NONE):
                why = f"{op.name} has slot {said} as {name}, recomputed: another slot"
                refuse(why, -1, "commands", row=at, clock=int(fields["clock"]))
            self._mine[said], self._theirs[mine] = mine, said

    def end(self) -> None:
        if self._finished and self._at != len(self._rows):
            refuse(f"{len(self._rows)} rows, expected {self._at}", -1, "commands", row=self._at)
