"""Sums over a shard's pushes and updates, added some rows at a time: of a log that may be larger than memory."""

from __future__ import annotations

import numpy as np

from mpisgd.records.log.schema import LogRows, Verdict

_UNUSED = (Verdict.DROP, Verdict.REJECT, Verdict.LATE)


class Tally:
    """Gradients with verdict APPLY.

    Attributes:
        learners: int64 (learners,), the slices of each.
        staleness: int64, how many of staleness 0, 1, 2 ...
        gradients: that they are the sums of: as many, or more where learners are teams.
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
    """Of a shard's pushes.

    Attributes:
        unused: int64 (learners, 3): DROP, REJECT and LATE of each learner.
        next_seq: int64 (learners,): 1 + the largest seq of each; 0 where it has pushed nothing.
        settled: the gradients of clocks before `clock`.
        newest: those of `clock`: in flight, until the update is made.
    """

    def __init__(self) -> None:
        self.unused = np.zeros((0, len(_UNUSED)), np.int64)
        self.next_seq = np.zeros(0, np.int64)
        self.settled, self.newest = Tally(), Tally()
        self.clock = 0

    def add(self, rows: LogRows) -> None:
        """Rows of `pushes`, in the order of the table."""
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
        """Pushes that are part of an update that was made, where `final_clock` updates were."""
        found = Tally()
        found.merge(self.settled)
        if self.clock < final_clock:
            found.merge(self.newest)
        return found

    def books(self, final_clock: int) -> np.ndarray:
        """Of each learner, pushes that came, and of these applied, dropped, rejected and in flight: int64 (learners, 5)."""
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
    """Of a shard's updates: how many, the gradients they sum, seconds in the optimiser; of the last its clock, samples, second."""

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
    """Both, of one shard."""

    def __init__(self) -> None:
        self.pushes, self.updates = Pushes(), Updates()


def _longer(counts: np.ndarray, length: int) -> np.ndarray:
    """Append zeros where it is shorter."""
    if len(counts) >= length:
        return counts
    return np.concatenate([counts, np.zeros((length - len(counts), *counts.shape[1:]), np.int64)])
