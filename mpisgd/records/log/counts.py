"""Sums over a shard's pushes and updates, in pieces: a log may exceed memory."""

from __future__ import annotations

import numpy as np

from mpisgd.records.log.schema import LogRows, Verdict

_UNUSED = (Verdict.DROP, Verdict.REJECT, Verdict.LATE)


class Tally:
    """Gradients with verdict APPLY.

    Attributes:
        learners: int64 (learners,), slices of each.
        staleness: int64, gradients of staleness 0, 1, 2 ...
        gradients: more than slices, for teams.
    """

    def __init__(self) -> None:
        self.learners = np.zeros(0, np.int64)
        self.staleness = np.zeros(0, np.int64)
        self.gradients = 0

    def add(self, rows: LogRows) -> None:
        if len(rows):
            self.learners = _longer(self.learners, 1 + int(rows["learner_id"].max()))
            np.add.at(self.learners, rows["learner_id"], 1)
            found = np.bincount(rows["staleness"])
            self.staleness = _longer(self.staleness, len(found))
            self.staleness[: len(found)] += found
            self.gradients += int(rows["gradients"].sum())

    def merge(self, other: Tally) -> None:
        self.learners = _longer(self.learners, len(other.learners))
        self.learners[: len(other.learners)] += other.learners
        self.staleness = _longer(self.staleness, len(other.staleness))
        self.staleness[: len(other.staleness)] += other.staleness
        self.gradients += other.gradients


class Pushes:
    """Sums of a shard's pushes.

    Attributes:
        unused: int64 (learners, 3): DROP, REJECT, LATE.
        next_seq: int64 (learners,): 1 + the largest seq; 0 = no push.
        settled: gradients of clocks before `clock`.
        newest: gradients of `clock`: in flight until the update.
    """

    def __init__(self) -> None:
        self.unused = np.zeros((0, len(_UNUSED)), np.int64)
        self.next_seq = np.zeros(0, np.int64)
        self.settled, self.newest = Tally(), Tally()
        self.clock = 0

    def add(self, rows: LogRows) -> None:
        if not len(rows):
            return
        learners = 1 + int(rows["learner_id"].max())
        self.unused, self.next_seq = _longer(self.unused, learners), _longer(self.next_seq, learners)
        for column, verdict in enumerate(_UNUSED):
            np.add.at(self.unused[:, column], rows["learner_id"][rows["verdict"] == verdict], 1)
        np.maximum.at(self.next_seq, rows["learner_id"], rows["seq"] + 1)
        summed = rows[rows["verdict"] == Verdict.APPLY]
        newest = int(summed["clock"].max(initial=self.clock))
        if newest > self.clock:
            self.settled.merge(self.newest)
            self.clock, self.newest = newest, Tally()
        self.settled.add(summed[summed["clock"] < newest])
        self.newest.add(summed[summed["clock"] == newest])

    def applied(self, final_clock: int) -> Tally:
        """Return the pushes that are part of the first `final_clock` updates."""
        found = Tally()
        found.merge(self.settled)
        if self.clock < final_clock:
            found.merge(self.newest)
        return found

    def books(self, final_clock: int) -> np.ndarray:
        """Return pushes received, applied, dropped, rejected and in flight: int64 (learners, 5)."""
        found = np.zeros((len(self.unused), 5), np.int64)
        for each in (self.settled, self.newest):
            found[: len(each.learners), 0] += each.learners
        applied = self.applied(final_clock).learners
        found[:, 4] = found[:, 0] + self.unused[:, 2]
        found[: len(applied), 1] = applied
        found[:, 4] -= found[:, 1]
        found[:, 2:4] = self.unused[:, :2]
        found[:, 0] += self.unused.sum(axis=1)
        return found


class Updates:
    def __init__(self) -> None:
        self.rows = self.clock = self.samples = self.gradients = 0
        self.time_s = self.update_s = 0.0

    def add(self, rows: LogRows) -> None:
        if len(rows):
            self.rows += len(rows)
            self.clock, self.samples = int(rows["clock"][-1]), int(rows["samples"][-1])
            self.gradients += int(rows["gradients"].sum())
            self.time_s = float(rows["time_s"][-1])
            self.update_s += float(rows["update_s"].sum())


class Counts:
    def __init__(self) -> None:
        self.pushes, self.updates = Pushes(), Updates()


def _longer(counts: np.ndarray, length: int) -> np.ndarray:
    if len(counts) >= length:
        return counts
    return np.concatenate([counts, np.zeros((length - len(counts), *counts.shape[1:]), np.int64)])
