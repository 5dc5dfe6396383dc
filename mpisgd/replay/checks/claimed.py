"""Claims of a batch optimisation's log: each evaluation counts each portion once."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np

from mpisgd.data.sampling import PortionSampling
from mpisgd.protocols import SandblasterOptions
from mpisgd.records.log.schema import LogRows, Outcome, Why
from mpisgd.replay.checks.finding import refuse, same
from mpisgd.replay.checks.record import Record
from mpisgd.rules.verdict import Kind

Push = tuple[int, int, list[int]]
"""A learner, its push's number, and rows of `portions` in order of summation."""


class Stretch(NamedTuple):
    """An attempt's evaluations in the run's course, from `first` to before `end`."""

    record: Record
    first: int
    end: int


class Claimed:
    """The log's claims about sums; `pushes`: per evaluation, in order of summation. Raises Untrue."""

    def __init__(self, record: Record) -> None:
        config = record.config
        assert isinstance(config.protocol, SandblasterOptions)
        self._options = config.protocol
        self._sampling = PortionSampling(record.environment("train_samples"), config.mu, config.protocol.share, config.seed)
        self.rows = record.run.of_coordinator("portions")
        self.iterations = record.run.of_coordinator("iterations")
        self.evaluations = min(log.final_clock for log in record.shards)
        attempts = [*record.earlier, record]
        ends = [*(each.start_clock for each in attempts[1:]), self.evaluations]
        self.stretches = [Stretch(each, each.start_clock, end) for each, end in zip(attempts, ends, strict=True)]
        self._check_dealt()
        self.pushes = [self._evaluation(clock) for clock in range(self.evaluations)]
        self._check_iterations(finished=record.done is not None)
        for stretch in self.stretches:
            for log in stretch.record.shards:
                if log.start.clock != stretch.first or log.final_clock < stretch.end:
                    why = f"of clocks {log.start.clock} ... {log.final_clock}, expected {stretch.first} ... {stretch.end}"
                    refuse(why, log.shard, "updates")
                self._check_shard(stretch, log.shard, log.pushes, log.updates)
        for log in record.shards:
            if log.finished and log.final_clock != self.evaluations:
                refuse(f"{log.final_clock} evaluations, another shard has {self.evaluations}", log.shard, "updates")

    def _check_dealt(self) -> None:
        learners = np.zeros(len(self.rows), np.int64)
        for stretch in self.stretches:
            learners[self.rows["clock"] >= stretch.first] = stretch.record.lambda_
        most = {"portion": self._sampling.portions, "outcome": len(Outcome), "copy": 2}
        bounds = {"learner_id": learners, **{name: np.full(len(self.rows), end) for name, end in most.items()}}
        for name, end in bounds.items():
            wrong = np.flatnonzero((self.rows[name] < 0) | (self.rows[name] >= end))
            if len(wrong):
                why = f"{name} {self.rows[name][wrong[0]]}, expected 0 ... {end[wrong[0]] - 1}"
                refuse(why, -1, "portions", row=int(wrong[0]))
        copies = np.flatnonzero(self.rows["copy"])
        if len(copies) and not self._options.duplicates:
            refuse("dealt a second time, and protocol.duplicates is off", -1, "portions", row=int(copies[0]))

    def _evaluation(self, clock: int) -> list[Push]:
        rows, sampling = self.rows, self._sampling
        numbers = np.flatnonzero((rows["clock"] == clock) & (rows["outcome"] == Outcome.COUNTED)).tolist()
        dealt = rows["portion"][numbers].tolist()
        if sorted(dealt) != list(range(sampling.portions)):
            twice = [each for each, group in itertools.groupby(sorted(dealt)) if len(list(group)) > 1]
            missing = sorted(set(range(sampling.portions)) - set(dealt))
            what = f"portion {twice[0]} is counted twice" if twice else f"portion {missing[0]} is not counted"
            refuse(what, -1, "portions", clock=clock)
        if self._options.order == "portions" and dealt != sorted(dealt):
            refuse("not in the order of portions, as protocol.order says", -1, "portions", clock=clock)
        for number, portion in zip(numbers, dealt, strict=True):
            if rows["samples"][number] != len(sampling.indices(0, portion)):
                why = f"{rows['samples'][number]} samples, portion {portion} has {len(sampling.indices(0, portion))}"
                refuse(why, -1, "portions", row=number, clock=clock)
        pushes: list[Push] = []
        for (learner_id, seq), group in itertools.groupby(
            numbers, key=lambda number: (int(rows["learner_id"][number]), int(rows["seq"][number]))
        ):
            pushes.append((learner_id, seq, list(group)))
            if len(pushes[-1][2]) > self._options.push_every:
                refuse(f"a push of {len(pushes[-1][2])} portions", -1, "portions", row=numbers[0], clock=clock)
        return pushes

    def _check_iterations(self, *, finished: bool) -> None:
        rows = self.iterations
        for at, row in enumerate(rows):
            last = at == len(rows) - 1
            if row["iteration"] != at + 1 or at >= self._options.iterations:
                why = f"iteration {row['iteration']}, expected {at + 1} of at most {self._options.iterations}"
                refuse(why, -1, "iterations", row=at)
            if row["why"] >= len(Why) or (row["why"] != Why.GOES_ON and not last):
                refuse(f"why {row['why']}, and others follow", -1, "iterations", row=at)
        if finished and (not len(rows) or rows["why"][-1] == Why.GOES_ON or rows["clock"][-1] != self.evaluations):
            refuse(f"the last iteration does not end at clock {self.evaluations}", -1, "iterations", row=len(rows) - 1)

    def _check_shard(self, stretch: Stretch, shard: int, pushes: LogRows, updates: LogRows) -> None:
        _, first, end = stretch
        summed = np.flatnonzero((pushes["verdict"] == Kind.APPLY) & (pushes["clock"] < end)).tolist()
        claimed = [(clock, push) for clock in range(first, end) for push in self.pushes[clock]]
        if len(summed) != len(claimed):
            refuse(f"{len(summed)} pushes were summed, the coordinator has committed {len(claimed)}", shard, "pushes")
        for number, (clock, (learner_id, seq, members)) in zip(summed, claimed, strict=True):
            samples = int(self.rows["samples"][members].sum())
            total = 0.0
            for member in members:
                total += float(self.rows["loss"][member]) * int(self.rows["samples"][member])
            expected = {
                "shard": shard,
                "clock": clock,
                "timestamp": clock,
                "staleness": 0,
                "learner_id": learner_id,
                "seq": seq,
                "samples": samples,
                "gradients": len(members),
                "reason": 0,
                "weight": 1.0,
                "learning_rate": 0.0,
                "loss": total / samples,
            }
            for name, value in expected.items():
                if not same(pushes[name][number].item(), value):
                    refuse(f"{name} {pushes[name][number]}, the coordinator's portions give {value}", shard, "pushes", row=number)
        for at, row in enumerate(updates[: end - first]):
            clock = first + at + 1
            made = {
                "shard": shard,
                "clock": clock,
                "gradients": self._sampling.portions,
                "samples": self._sampling.samples * clock,
            }
            for name, value in made.items():
                if row[name] != value:
                    refuse(f"{name} {row[name]}, expected {value}", shard, "updates", row=at)
            if math.isnan(row["mean_loss"]):
                refuse("mean_loss NaN", shard, "updates", row=at)
