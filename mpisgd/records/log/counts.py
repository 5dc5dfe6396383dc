"""Sums over a shard's pushes and updates, counted one by one: exact where a bounded log keeps only some of the rows.

Counted when rows are flushed, some hundred at a time, from the first row of the layout on, also over attempts. In a file they are
one vector of int64, `Counts.numbers`; a checkpoint has the same, as they were at its clock.

A file has them twice, `counts_0` and `counts_1`, written in turn, at each flush: the number of the flush, how many numbers follow,
their CRC-32, and the numbers. The newest whose sum fits is what counts: whenever the writer is killed, one is whole.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import h5py
import numpy as np

from mpisgd.base import contained
from mpisgd.base.errors import DataError
from mpisgd.records.log.schema import LogRows, Verdict

SLOTS = ("counts_0", "counts_1")
_HEADER = 3

_UNUSED = (Verdict.DROP, Verdict.REJECT, Verdict.LATE)


class Tally:
    """Gradients with verdict APPLY.

    Attributes:
        learners: int64 (learners, 2): of each, how many slices, and the sum of their staleness.
        staleness: int64, how many of staleness 0, 1, 2 ...
        gradients: that they are the sums of: as many, or more where learners are teams.
    """

    def __init__(self) -> None:
        self.learners = np.zeros((0, 2), np.int64)
        self.staleness = np.zeros(0, np.int64)
        self.gradients = 0

    def add(self, rows: LogRows) -> None:
        if len(rows):
            self.learners = _longer(self.learners, 1 + int(rows["learner_id"].max()))
            np.add.at(self.learners[:, 0], rows["learner_id"], 1)
            np.add.at(self.learners[:, 1], rows["learner_id"], rows["staleness"])
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
            found[: len(each.learners), 0] += each.learners[:, 0]
        applied = self.applied(final_clock).learners[:, 0]
        found[:, 4] = found[:, 0] + self.unused[:, 2]
        found[: len(applied), 1] = applied
        found[:, 4] -= found[:, 1]
        found[:, 2:4] = self.unused[:, :2]
        found[:, 0] += self.unused.sum(axis=1)
        return found

    def numbers(self) -> np.ndarray:
        """All of it, int64; the first is how many they are."""
        tallies = [self.settled, self.newest]
        parts = [self.unused, self.next_seq, *(each.learners for each in tallies), *(each.staleness for each in tallies)]
        head = [*(len(part) for part in parts), self.clock, *(each.gradients for each in tallies)]
        found = np.concatenate([[0], head, *(part.ravel() for part in parts)]).astype(np.int64)
        found[0] = len(found)
        return found

    @classmethod
    def of(cls, numbers: np.ndarray) -> Pushes:
        """Raises ValueError, IndexError where they are none."""
        new, at = cls(), 10
        parts = []
        for length, width in zip(numbers[1:7].tolist(), (len(_UNUSED), 0, 2, 2, 0, 0), strict=True):
            shape = (length, width) if width else (length,)
            size = length * max(1, width)
            parts.append(numbers[at : at + size].reshape(shape).copy())
            at += size
        if at != len(numbers) or at != numbers[0]:
            raise ValueError(f"{len(numbers)} numbers, expected {at}")
        new.unused, new.next_seq, new.settled.learners, new.newest.learners, new.settled.staleness, new.newest.staleness = parts
        new.clock, new.settled.gradients, new.newest.gradients = numbers[7:10].tolist()
        return new


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

    def numbers(self) -> np.ndarray:
        """All of it, int64 (6,); floats by their bits."""
        floats = np.array([self.time_s, self.update_s]).view(np.int64)
        return np.array([self.rows, self.clock, self.samples, self.gradients, *floats.tolist()], np.int64)

    @classmethod
    def of(cls, numbers: np.ndarray) -> Updates:
        new = cls()
        new.rows, new.clock, new.samples, new.gradients = numbers[:4].tolist()
        new.time_s, new.update_s = numbers[4:].view(np.float64).tolist()
        return new


class Counts:
    """Both, of one shard."""

    def __init__(self, pushes: Pushes | None = None, updates: Updates | None = None) -> None:
        self.pushes = pushes or Pushes()
        self.updates = updates or Updates()

    def numbers(self) -> np.ndarray:
        return np.concatenate([self.pushes.numbers(), self.updates.numbers()])

    @classmethod
    def of(cls, numbers: Sequence[int] | np.ndarray) -> Counts:
        """From `numbers`. Raises ValueError, IndexError where they are none."""
        all_ = np.array(numbers, np.int64)
        return cls(Pushes.of(all_[: all_[0]]), Updates.of(all_[all_[0] :]))


def _longer(counts: np.ndarray, length: int) -> np.ndarray:
    """Append zeros where it is shorter."""
    if len(counts) >= length:
        return counts
    return np.concatenate([counts, np.zeros((length - len(counts), *counts.shape[1:]), np.int64)])


def sealed(counts: Counts, flush: int) -> np.ndarray:
    """As a file has them, after so many flushes before: int64."""
    numbers = counts.numbers()
    return np.concatenate([np.array([flush, len(numbers), zlib.crc32(numbers.tobytes())], np.int64), numbers])


def read(what: str, file: h5py.File) -> Counts:
    """The newest that an open file has. Raises DataError where it is damaged, ValueError where it has none."""
    newest = np.array([-1, 0, 0], np.int64)
    for name in SLOTS:
        found = contained.whole(file, name)
        if len(found) > _HEADER and found[0] > newest[0] and 0 < found[1] <= len(found) - _HEADER:
            numbers = found[_HEADER : _HEADER + found[1]]
            if zlib.crc32(numbers.tobytes()) == found[2]:
                newest = found[: _HEADER + found[1]]
    try:
        return Counts.of(newest[_HEADER:])
    except (ValueError, IndexError) as error:
        raise DataError(f"{what}: its counts do not have the checksum that they were written with: the file is damaged") from error
