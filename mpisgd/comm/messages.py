"""Vocabulary of the wire: tags, layouts of headers, and messages to a shard (DESIGN 5).

A message is a magic number, int64 and float64 fields, and perhaps slices under their own tag; nothing is pickled.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

from mpisgd.base.errors import PeerError
from mpisgd.vectors.skipped import NOTHING


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
    NOTICE = 10
    GAVE_UP = 11
    INTERRUPT = 12
    ROUND = 13
    LOST = 14
    STUCK = 15
    HERE = 16
    MET = 17
    GIVEN_UP = 19
    COMMAND = 20
    RESULT = 21
    NEXT = 22
    DEAL = 23
    ACTIVATION = 30
    ACTIVATION_BODY = 31
    DELTA = 32
    DELTA_BODY = 33
    AGREE = 34
    TAKEN = 35
    NORM = 36
    WANTED = 37
    NORM_PULL = 38
    NORM_ANSWER = 39
    NORM_TOLD = 43
    PART = 50
    PART_BODY = 51
    SKIPPED = 52
    COMPUTED = 53


class Ending(enum.IntEnum):
    """A learner's end of a run, in answers to its pull and in its goodbye."""

    NONE = 0
    """Go on; in a goodbye: this learner alone leaves."""
    FINISHED = 1
    ENOUGH = 2
    """Evaluations no longer improve: the run ends."""
    INTERRUPTED = 3
    """A signal ends this attempt; another may go on."""
    BROKEN = 4
    """In a goodbye: another rank of the learner's group is lost."""


class Op(enum.IntEnum):
    """Commands of a batch optimisation's coordinator to shards (`sandblaster/`); a, b, out: numbers of slots.

    Shards answer `ANSWERED` by RESULT, in order.
    """

    ADD = 1
    """out = a + alpha b"""
    SUB = 2
    """out = a - b"""
    SCALE = 3
    """out = alpha a"""
    FREE = 4
    """Free a."""
    DOT = 5
    """Sum of a b, over this slice."""
    ABSMAX = 6
    ABSSUM = 7
    BEGIN = 8
    """Begin an evaluation: pulls get a."""
    COMMIT = 9
    """Add push b of learner a, of `out` portions, to the sum."""
    DISCARD = 10
    """Forget learner a's uncommitted pushes until number b, past and future."""
    END = 11
    """End the evaluation: out = sum / samples. alpha: loss; beta: step length. Answered by |out|^2."""
    ACCEPT = 12
    """Make a the weights: an iteration is over."""
    FINISH = 13
    """No more commands; a: an `Ending`."""
    KEEP = 14
    """Add a to the next checkpoint."""
    SAVE = 15
    """Write a checkpoint of kept slots, as of the last iteration."""


ANSWERED = frozenset({Op.DOT, Op.ABSMAX, Op.ABSSUM, Op.BEGIN, Op.END})

MAGIC = 0x6D7069736764000D  # "mpisgd", version 13 of the messages

Fields = tuple[Any, ...]

_FLOATS = frozenset({"rounded", "scale", "loss", "alpha", "beta", "value"})

NOBODY = -2
"""Learner_id in a communicator's report of a lost or stuck rank."""


class Layout:
    """Layout of a kind of message.

    Args:
        fields: names, in order, of int64 or float64 (`_FLOATS`) fields.
        body: tag of slices after the header; 0 = none.
        announced: whether senders wait until the header is taken (`Communicator.start`).
    """

    def __init__(self, *fields: str, body: int = 0, announced: bool = False) -> None:
        self.fields = fields
        self.body = body
        self.announced = announced
        self._struct = struct.Struct("<q" + "".join("d" if name in _FLOATS else "q" for name in fields))
        self.nbytes = self._struct.size

    def pack(self, fields: Fields) -> bytes:
        return self._struct.pack(MAGIC, *fields)

    def unpack(self, header: bytearray, sender: int) -> Fields:
        """Return a header's fields. Raises PeerError: another magic number."""
        fields = self._struct.unpack(header)
        if fields[0] != MAGIC:
            raise PeerError(f"rank {sender} sent magic {fields[0]:#x}: expected {MAGIC:#x}; another program or version?", sender)
        return fields[1:]


_SECONDS = ("compute_ns", "delay_ns", "push_ns", "wait_ns", "pull_ns", "neighbour_ns")
_COMPUTED = ("portion", "skipped", "rounded", "scale", "loss")
_PUSH = ("learner_id", "timestamp", "seq", "samples", "gradients", *_SECONDS, "nbytes", *_COMPUTED)
MOST_DIMENSIONS = 8
#: Description of a tensor: number of its type, whether its gradient is wanted, dimensions (-1: no tensor), sizes, strides.
_TENSOR = ("type", "wanted", "dimensions", *(f"{what}_{at}" for what in ("size", "stride") for at in range(MOST_DIMENSIONS)))
_PASSED = ("seq", "micro", "place", "count", *_TENSOR, "loss")
PushFields = tuple[int, int, int, int, int, int, int, int, int, int, int, int, int, int, float, float, float]

LAYOUTS: Mapping[int, Layout] = {
    Tag.PUSH: Layout(*_PUSH, body=Tag.GRADIENT, announced=True),
    Tag.PULL: Layout("learner_id", "min_clock"),
    Tag.ANSWER: Layout("shard", "clock", "ending", "verdict", "notices", "portion", "snapshots", "nbytes", body=Tag.WEIGHTS),
    Tag.PART: Layout("skipped", "nbytes", body=Tag.PART_BODY),
    Tag.COMPUTED: Layout("compute_ns"),
    Tag.GOODBYE: Layout("learner_id", "pushed", "ending", announced=True),
    Tag.NOTICE: Layout("shard", "clock"),
    Tag.GAVE_UP: Layout("learner_id", "seq"),
    Tag.INTERRUPT: Layout("signal"),
    Tag.ROUND: Layout("signal", *_PUSH),
    Tag.ACTIVATION: Layout(*_PASSED, body=Tag.ACTIVATION_BODY),
    Tag.DELTA: Layout(*_PASSED, body=Tag.DELTA_BODY),
    Tag.AGREE: Layout("ending", "oldest", "newest", "rejected"),
    Tag.NORM: Layout("value"),
    Tag.SKIPPED: Layout("start", "stop"),
    Tag.NORM_PULL: Layout("learner_id", "clock"),
    Tag.NORM_ANSWER: Layout("shard", "ending", "value"),
    Tag.NORM_TOLD: Layout("learner_id", "clock", "value"),
    Tag.WANTED: Layout("given_up", "leaves", "loss"),
    Tag.GIVEN_UP: Layout("learner_id", "clock"),
    Tag.COMMAND: Layout("op", "out", "a", "b", "alpha", "beta"),
    Tag.RESULT: Layout("shard", "signal", "value"),
    Tag.NEXT: Layout("learner_id", "clock", "portion", "samples", "pushed", *_SECONDS[:2], "signal", "loss"),
    Tag.DEAL: Layout("clock", "portion", "counts"),
    Tag.TAKEN: Layout("shard", "seq", "whole"),
    Tag.SNAPSHOT_PULL: Layout("number", "enough"),
    Tag.SNAPSHOT_ANSWER: Layout("shard", "there", "clock", "samples", "taken_ns", "nbytes", body=Tag.SNAPSHOT_WEIGHTS),
}

FINAL = -1
"""Snapshot number of the last weights."""
NOT_OVER = -1
NOTHING_MORE = -2
"""The evaluator's goodbye."""


# Made for every gradient: fields of plain classes are cheaper to set and to read than fields of named tuples.


class Push:
    """An arrived gradient; its slice is `body`.

    From a team: the sum of `gradients` gradients, all samples, mean loss. `runs`: `skipped` runs of elements without a gradient,
    received before the slice. `backward_ns`: computing after the header, of a streamed gradient.
    """

    __slots__ = (*_PUSH, "arrival_ns", "backward_ns", "body", "runs")

    backward_ns: int

    def __init__(self, fields: PushFields, arrival_ns: int) -> None:
        (
            self.learner_id,
            self.timestamp,
            self.seq,
            self.samples,
            self.gradients,
            self.compute_ns,
            self.delay_ns,
            self.push_ns,
            self.wait_ns,
            self.pull_ns,
            self.neighbour_ns,
            self.nbytes,
            self.portion,
            self.skipped,
            self.rounded,
            self.scale,
            self.loss,
        ) = fields
        self.arrival_ns = arrival_ns
        self.body: Any = None
        self.runs = NOTHING


class Pull:
    """A wish for weights of clock `min_clock` at least; receives are posted."""

    __slots__ = ("learner_id", "min_clock")

    def __init__(self, learner_id: int, min_clock: int) -> None:
        self.learner_id = learner_id
        self.min_clock = min_clock


class Goodbye(NamedTuple):
    """A learner's last message, after `pushed` pushes to this shard."""

    learner_id: int
    pushed: int
    ending: int


class GaveUp(NamedTuple):
    """Notice that a learner begins mini-batch `seq` anew, after an update without it."""

    learner_id: int
    seq: int


class NormPull(NamedTuple):
    """A wish for the norm of this shard's slice of the averaged gradient to clock + 1."""

    learner_id: int
    clock: int


class NormTold(NamedTuple):
    """Norm of the whole averaged gradient."""

    learner_id: int
    clock: int
    value: float


class Torn(NamedTuple):
    """A partly received gradient of a lost or hanging learner; never use the buffer."""

    push: Push


class Lost(NamedTuple):
    """A dead rank; learner `learner_id`, or -1."""

    rank: int
    learner_id: int


class Stuck(NamedTuple):
    """A rank that held up a transfer, now given up, for too long."""

    rank: int
    learner_id: int


class GivenUp(NamedTuple):
    """A learner given up at another shard's end; `clock`: where the run is over, NOT_OVER = a failure or a signal."""

    learner_id: int
    clock: int


class Interrupt(NamedTuple):
    signal: int


class SnapshotPull(NamedTuple):
    """The evaluator's wish for snapshot `number` or FINAL, or its goodbye (NOTHING_MORE).

    `enough`: 1 + the snapshot that showed enough to end training; 0 = not yet.
    """

    number: int
    enough: int = 0


class Command(NamedTuple):
    op: int
    out: int
    a: int
    b: int
    alpha: float
    beta: float


class Next(NamedTuple):
    """A learner's wish for its next task.

    Reports `portion` (-1 = none) of the evaluation at `clock`, and push `pushed`, now at all shards (-1 = no news). `signal` has
    told the learner to end.
    """

    learner_id: int
    clock: int
    portion: int
    samples: int
    pushed: int
    compute_ns: int
    delay_ns: int
    signal: int
    loss: float


PUSH_NOW, STOP_FINISHED, STOP_INTERRUPTED = -1, -2, -3
"""Orders in place of a dealt portion."""
FORGET = -1
"""In place of whether a result counts: drop sums not yet pushed."""


class Refused(NamedTuple):
    """An invalid message, received elsewhere and dropped; `push`: whether it began a push."""

    rank: int
    why: str
    push: bool


FromLearner = Push | Pull | Goodbye | GaveUp
Message = FromLearner | NormPull | NormTold | Torn | Lost | Stuck | GivenUp | Interrupt | SnapshotPull | Refused | Command
