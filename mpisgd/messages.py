"""The vocabulary of the wire: tags, headers, and what a shard may receive (DESIGN 5).

Headers are small structured arrays of int64 (and one float64), each begun by a magic number; nothing is pickled.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import numpy as np

from mpisgd.errors import PeerError


class Tag(enum.IntEnum):
    PUSH = 1
    GRADIENT = 2
    PULL = 3
    ANSWER = 4
    WEIGHTS = 5
    GOODBYE = 6
    SNAPSHOT_PULL = 7
    SNAPSHOT_ANSWER = 8
    SNAPSHOT_WEIGHTS = 9


MAGIC = 0x6D70697367640001  # "mpisgd", version 1 of the messages


class Header:
    """A small message: `magic`, then int64 fields, then perhaps a float64 `loss`; `wire` is its bytes, for MPI."""

    def __init__(self, *fields: str, loss: bool = False) -> None:
        names = [("magic", np.int64), *((name, np.int64) for name in fields)]
        self._array = np.zeros(1, np.dtype([*names, ("loss", np.float64)] if loss else names))
        self.wire = self._array.view(np.uint8)

    def fill(self, *values: float) -> np.ndarray:
        """Write the fields in their order, return the bytes."""
        self._array[0] = (MAGIC, *values)
        return self.wire

    def fields(self, sender: int) -> tuple[Any, ...]:
        """The fields of a received header, without `magic`.

        Raises PeerError where the magic number is another.
        """
        magic, *values = self._array[0].item()
        if magic != MAGIC:
            raise PeerError(f"rank {sender} sent magic {magic:#x}: expected {MAGIC:#x}; another program or version?")
        return tuple(values)


def push_header() -> Header:
    ours = ("learner_id", "timestamp", "seq", "samples", "compute_ns", "delay_ns", "push_ns", "wait_ns", "pull_ns", "nbytes")
    return Header(*ours, loss=True)


def pull_header() -> Header:
    return Header("learner_id", "min_clock")


def answer_header() -> Header:
    return Header("shard", "clock", "stop", "verdict", "nbytes")


def goodbye_header() -> Header:
    return Header("learner_id", "pushed", "finished")


def snapshot_pull_header() -> Header:
    return Header("number")


def snapshot_answer_header() -> Header:
    return Header("shard", "there", "clock", "samples", "taken_ns", "nbytes")


FINAL = -1
"""The index under which the last weights of a run are pulled as a snapshot."""
NOTHING_MORE = -2
"""The evaluator's goodbye."""


class Push(NamedTuple):
    """A gradient has arrived: its header; the slice lies in the buffer that was handed to `receive`."""

    learner_id: int
    timestamp: int
    seq: int
    samples: int
    compute_s: float
    delay_s: float
    push_s: float
    wait_s: float
    pull_s: float
    loss: float
    arrival_s: float


class Pull(NamedTuple):
    """A learner wants weights whose clock is at least `min_clock`; its receives are posted."""

    learner_id: int
    min_clock: int


class Goodbye(NamedTuple):
    """A learner sends nothing any more; it has pushed `pushed` times to this shard.

    `finished` says that a shard told it to stop; otherwise it leaves while others go on.
    """

    learner_id: int
    pushed: int
    finished: bool


class SnapshotPull(NamedTuple):
    """The evaluator wants snapshot `number` (or FINAL), or leaves (NOTHING_MORE)."""

    number: int


Message = Push | Pull | Goodbye | SnapshotPull
