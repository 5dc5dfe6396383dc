"""The vocabulary of the wire: tags, layouts of headers, and what a shard may receive (DESIGN 5).

A message is a small header of int64 and float64 fields, begun by a magic number, and perhaps slices that follow it under a tag of
their own. Nothing is pickled. On a real wire the header is packed into bytes; a virtual one passes the fields as they are.
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


class Ending(enum.IntEnum):
    """Ways in which a run ends for a learner: what shards answer to its pull, and what it says in its goodbye."""

    NONE = 0
    """Go on; in a goodbye: the learner leaves by itself, while others go on."""
    FINISHED = 1
    """The run is over."""
    ENOUGH = 2
    """Evaluations are no better any more: the run comes to its end."""
    INTERRUPTED = 3
    """A signal ends this attempt, and another may go on."""
    BROKEN = 4
    """In a goodbye alone: another rank of the learner's group is lost, and with it the learner."""


class Op(enum.IntEnum):
    """What the coordinator of a batch optimisation commands its shards (`sandblaster/`): a, b and out are numbers of slots.

    `ANSWERED` are answered by RESULT, in the order of commands.
    """

    ADD = 1
    """out = a + alpha b"""
    SUB = 2
    """out = a - b"""
    SCALE = 3
    """out = alpha a"""
    FREE = 4
    """a is wanted no more."""
    DOT = 5
    """The sum of a b, of this slice."""
    ABSMAX = 6
    ABSSUM = 7
    BEGIN = 8
    """An evaluation begins: learners that pull are given a."""
    COMMIT = 9
    """Add push b of learner a to the sum; it is of `out` portions."""
    DISCARD = 10
    """Forget all pushes of learner a until number b that were not committed, also those that are still to come."""
    END = 11
    """The evaluation is over: out = the sum / its samples. alpha: the loss; beta: the step length. Answered by |out|^2."""
    ACCEPT = 12
    """The weights are a now: an iteration is over."""
    FINISH = 13
    """There are no more commands; a: an `Ending`."""
    KEEP = 14
    """The next checkpoint has a, besides what it has already."""
    SAVE = 15
    """Write a checkpoint of what is kept, as of the last iteration."""


ANSWERED = frozenset({Op.DOT, Op.ABSMAX, Op.ABSSUM, Op.BEGIN, Op.END})

MAGIC = 0x6D7069736764000C  # "mpisgd", version 12 of the messages

Fields = tuple[Any, ...]

_FLOATS = frozenset({"rounded", "scale", "loss", "alpha", "beta", "value"})

NOBODY = -2
"""In the place of a learner_id, where a communicator says that a rank is lost, or stuck: no rank has sent that."""


class Layout:
    """Layout of one kind of message.

    Args:
        fields: names of its fields, in order; each is an int64, those in `_FLOATS` a float64.
        body: the tag of the slices that follow the header; 0 = none follow.
        announced: the sender is sure to wait until the receiver has taken the header (`Communicator.start`).
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
        """The fields of a received header. Raises PeerError where the magic number is another."""
        fields = self._struct.unpack(header)
        if fields[0] != MAGIC:
            raise PeerError(f"rank {sender} sent magic {fields[0]:#x}: expected {MAGIC:#x}; another program or version?", sender)
        return fields[1:]


_SECONDS = ("compute_ns", "delay_ns", "push_ns", "wait_ns", "pull_ns", "neighbour_ns")
_COMPUTED = ("portion", "skipped", "rounded", "scale", "loss")
_PUSH = ("learner_id", "timestamp", "seq", "samples", "gradients", *_SECONDS, "nbytes", *_COMPUTED)
MOST_DIMENSIONS = 8
"""Of a tensor that passes from stage to stage."""
#: What a tensor is: the number of its type, whether a gradient of it is wanted, its dimensions (-1: there is none), sizes, strides.
_TENSOR = ("type", "wanted", "dimensions", *(f"{what}_{at}" for what in ("size", "stride") for at in range(MOST_DIMENSIONS)))
_PASSED = ("seq", "micro", "place", "count", *_TENSOR, "loss")
PushFields = tuple[int, int, int, int, int, int, int, int, int, int, int, int, int, int, float, float, float]

LAYOUTS: Mapping[int, Layout] = {
    Tag.PUSH: Layout(*_PUSH, body=Tag.GRADIENT, announced=True),
    Tag.PULL: Layout("learner_id", "min_clock"),
    Tag.ANSWER: Layout("shard", "clock", "ending", "verdict", "notices", "portion", "snapshots", "nbytes", body=Tag.WEIGHTS),
    Tag.PART: Layout("nbytes", body=Tag.PART_BODY),
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
    Tag.GIVEN_UP: Layout("learner_id"),
    Tag.COMMAND: Layout("op", "out", "a", "b", "alpha", "beta"),
    Tag.RESULT: Layout("shard", "signal", "value"),
    Tag.NEXT: Layout("learner_id", "clock", "portion", "samples", "pushed", *_SECONDS[:2], "signal", "loss"),
    Tag.DEAL: Layout("clock", "portion", "counts"),
    Tag.TAKEN: Layout("shard", "seq", "whole"),
    Tag.SNAPSHOT_PULL: Layout("number", "enough"),
    Tag.SNAPSHOT_ANSWER: Layout("shard", "there", "clock", "samples", "taken_ns", "nbytes", body=Tag.SNAPSHOT_WEIGHTS),
}

FINAL = -1
"""The index under which the last weights of a run are pulled as a snapshot."""
NOTHING_MORE = -2
"""The evaluator's goodbye."""


# Made for every gradient: plain classes, whose fields are cheaper to set and to read than those of a named tuple.


class Push:
    """A gradient has arrived: the header's fields; the slice lies in the buffer that was handed to `receive`.

    Of a team, it is the sum of `gradients` gradients, with `samples` samples in all and the mean of their losses.

    `runs`: as many as `skipped` says, of elements that it has no gradient of; they come before it.
    """

    __slots__ = (*_PUSH, "arrival_ns", "runs")

    def __init__(self, fields: PushFields, arrival_ns: int) -> None:
        """`fields`: in the order of the header."""
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
        self.runs = NOTHING


class Pull:
    """A learner wants weights whose clock is at least `min_clock`; its receives are posted."""

    __slots__ = ("learner_id", "min_clock")

    def __init__(self, learner_id: int, min_clock: int) -> None:
        self.learner_id = learner_id
        self.min_clock = min_clock


class Goodbye(NamedTuple):
    """A learner sends nothing any more; it has pushed `pushed` times to this shard. `ending`: an `Ending`."""

    learner_id: int
    pushed: int
    ending: int


class GaveUp(NamedTuple):
    """A learner has given up mini-batch `seq`, because an update was made without it; it will begin it anew."""

    learner_id: int
    seq: int


class NormPull(NamedTuple):
    """A learner wants the norm of this shard's slice of the averaged gradient that is to give clock + 1 (`agreement.py`)."""

    learner_id: int
    clock: int


class NormTold(NamedTuple):
    """A learner tells the norm of that whole gradient."""

    learner_id: int
    clock: int
    value: float


class Torn(NamedTuple):
    """A gradient of which only a part has come, because its learner was lost or hangs; what is in the buffer must not be used."""

    push: Push


class Lost(NamedTuple):
    """A rank is dead; it is learner `learner_id`, or -1."""

    rank: int
    learner_id: int


class Stuck(NamedTuple):
    """A rank has held up a transfer for too long, and that was given up."""

    rank: int
    learner_id: int


class GivenUp(NamedTuple):
    """Another shard has come to its end without a learner: nothing is taken of it there any more, and it cannot go on."""

    learner_id: int


class Interrupt(NamedTuple):
    """A signal, of this number, has told this rank or another to come to an end."""

    signal: int


class SnapshotPull(NamedTuple):
    """The evaluator wants snapshot `number` (or FINAL), or leaves (NOTHING_MORE).

    `enough`: 1 + the snapshot at which it has seen enough, and training is to end; 0 = it has not.
    """

    number: int
    enough: int = 0


class Command(NamedTuple):
    """The coordinator commands it (`Op`)."""

    op: int
    out: int
    a: int
    b: int
    alpha: float
    beta: float


class Next(NamedTuple):
    """A learner asks the coordinator what to do next.

    Of the evaluation at `clock` it has computed `portion` (-1 = none), of so many samples, with this mean loss; all shards have its
    push `pushed` (-1 = there is nothing new to say of that). `signal` has told it to come to an end.
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
"""In the place of a portion that is dealt: what the learner is to do instead."""
FORGET = -1
"""In the place of whether a result counts: nothing does that the learner has summed, and not pushed."""


class Refused(NamedTuple):
    """A message that cannot be, of that rank; it was received into memory of its own, and is gone. `push`: it began a push."""

    rank: int
    why: str
    push: bool


FromLearner = Push | Pull | Goodbye | GaveUp
Message = FromLearner | NormPull | NormTold | Torn | Lost | Stuck | GivenUp | Interrupt | SnapshotPull | Refused | Command
