"""The driver for a shard: a real `Shard` of plain SGD, rate 1, before scripted learners.

`serve(path, script, options, lambda_)` plays the script to its end, and returns what is left (`Served`): answers, weights, rows of
the log. A script is, in the order in which the shard hears of them:

    *pulls(0, 1, clock=1)      learners 0 and 1 ask for weights of clock 1 or later
    (push(0, 1, seq=1), 2.0)   learner 0 pushes a gradient, 2 everywhere, of the weights of clock 1
    Goodbye(...), Lost(...)    any other message, as it is
    None                       nothing comes in time
    *byes({0: 2})              learner 0 leaves after 2 pushes, then the evaluator: the end

Nothing more in the script, while the shard waits, is `Stuck`. `Crew` are learners that behave, in any order, in place of a script.
`tolerant_serve` is the same of a shard whose learners may die, or hang; its pushes are made by `now`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from mpisgd.comm.messages import (
    FINAL,
    LAYOUTS,
    NOTHING_MORE,
    Ending,
    Goodbye,
    Interrupt,
    Message,
    Pull,
    Push,
    SnapshotPull,
    Tag,
    Torn,
)
from mpisgd.config import SgdOptions
from mpisgd.exchange.shard_channel import Numbers
from mpisgd.protocols import HardsyncOptions, ProtocolOptions
from mpisgd.records.checkpoint.snapshots import Snapshots, Taken
from mpisgd.records.log.progress import Progress
from mpisgd.records.log.rank_file import read_summary, read_table
from mpisgd.records.log.schema import Event
from mpisgd.records.log.writer import ShardLog, TableFile
from mpisgd.records.shard_records import ShardRecords
from mpisgd.rules.rules import Rules
from mpisgd.serving.fail_fast import FAIL_FAST
from mpisgd.serving.fault_tolerant import FaultTolerant
from mpisgd.shard import Shard
from mpisgd.update.average import Average
from mpisgd.update.slice_update import SliceUpdate
from mpisgd.vectors.body import Pool
from tests.unit.fakes import Stuck, tensor

LEAVE = SnapshotPull(NOTHING_MORE)
EVERYBODY = (0, 1, 2)
EVALUATOR, SHARD_0 = 9, 10
PATIENCE_S = 100.0
LATER_NS = 10**12
"""Long after the start: a learner heard of then is not overdue."""


# -------------------------------------------------------------------------------------------------------------- the script


def push(learner_id: int, timestamp: int = 0, seq: int = -1, **fields: Any) -> Push:
    """A push of which only what matters is said; a channel numbers mini-batches of -1."""
    given: dict[str, Any] = {
        **dict.fromkeys(LAYOUTS[Tag.PUSH].fields, 0),
        "samples": 2,
        "gradients": 1,
        "nbytes": 4,
        "rounded": 0.25,
        "loss": 1.0,
    }
    given |= {"learner_id": learner_id, "timestamp": timestamp, "seq": seq, **fields}
    arrival_ns = given.pop("arrival_ns", 0)
    return Push(tuple(given.values()), arrival_ns)


def now(learner_id: int, timestamp: int = 0, seq: int = -1) -> Push:
    """A push that has just come."""
    return push(learner_id, timestamp, seq, arrival_ns=LATER_NS)


def pulls(*learner_ids: int, clock: int = 0) -> list[Pull]:
    return [Pull(learner_id, clock) for learner_id in learner_ids]


def byes(pushed: dict[int, int], ending: Ending = Ending.FINISHED) -> list[Any]:
    return [*(Goodbye(learner_id, count, ending) for learner_id, count in pushed.items()), LEAVE]


# -------------------------------------------------------------------------------------------------------------- the channel


class ScriptedChannel:
    """A shard's channel that plays messages from a list, and writes down answers and what else it is told.

    As on the wire, the shard may say whose push it wants next; pulls are always to be had. This shard is rank 0, learner l rank
    l + 1, the evaluator at first rank 9.

    Attributes:
        verdicts: those that answers told, by learner.
        hang: ranks without a sign of life.
        asked: all ranks that were ever asked for one.
    """

    duplex = False
    rounds_in_chunks = False
    evaluator_rank = EVALUATOR
    first_rank = SHARD_0
    is_first = False

    def __init__(self, script: Sequence[Message | tuple[Push, Sequence[float] | float] | None]) -> None:
        self.waiting = list(script)
        self.verdicts: list[tuple[int, int]] = []
        self._next_seq: dict[int, int] = {}
        self.answers: list[tuple[Any, ...]] = []
        self.seconds = 0.0
        self.numbers = Numbers()
        self.opened: list[int] = []
        self._chunks: list[np.ndarray] = []
        self._told: tuple[int, dict[int, int]] = (0, {})
        self.given_up: list[int] = []
        self.told: list[int] = []
        self.passed_on = 0
        self.hang: set[int] = set()
        self.asked: set[int] = set()

    def now_s(self) -> float:
        self.seconds += 1.0
        return self.seconds

    def rank_of(self, learner_id: int) -> int:
        return 1 + learner_id

    def ranks_of(self, learner_id: int) -> tuple[int, ...]:
        return (self.rank_of(learner_id),)

    def learner_of(self, rank: int) -> int:
        return -1 if rank == EVALUATOR else rank - 1

    def receive(self, bodies: Pool, learner_id: int | None = None, until_s: float = math.inf) -> Message | None:
        for place, item in enumerate(self.waiting):
            message: Any
            message, values = item if isinstance(item, tuple) and not hasattr(item, "_fields") else (item, None)
            if message is None:
                assert until_s < math.inf, "nobody asked for a time-out"
                del self.waiting[place]
                self.seconds += 2 * PATIENCE_S
                return None
            if learner_id is None or isinstance(message, Pull | SnapshotPull | Interrupt) or message.learner_id == learner_id:
                del self.waiting[place]
                push = message.push if isinstance(message, Torn) else message
                if isinstance(push, Push):
                    push.body = bodies.take()
                    push.body.memory[:] = 0.0 if values is None else values
                return self._numbered(message)
        raise Stuck(f"the shard waits for learner {learner_id}; there are only {self.waiting}")

    def _numbered(self, message: Message) -> Message:
        if not isinstance(message, Push):
            return message
        if message.seq < 0:
            message.seq = self._next_seq.get(message.learner_id, 0)
        self._next_seq[message.learner_id] = message.seq + 1
        return message

    def receive_pull(self) -> Message | None:
        for message in self.waiting:
            if isinstance(message, Pull):
                self.waiting.remove(message)
                return message
        return None

    # ------------------------------------------------------------------------------------------------------- answers

    def open_answers(self, learner_ids: list[int], weights: np.ndarray, clock: int, verdicts: dict[int, int]) -> None:
        self.opened += learner_ids
        self._told = (clock, verdicts)

    def add_chunk(self, chunk: np.ndarray) -> None:
        self._chunks.append(chunk.copy())  # as it is now

    def close_answers(self) -> None:
        if self.opened:
            self.start_answers(self.opened, np.concatenate(self._chunks), *self._told)
        self.opened, self._chunks = [], []

    def start_answers(self, learner_ids: list[int], weights: np.ndarray, clock: int, verdicts: dict[int, int]) -> None:
        for learner_id in learner_ids:
            self.answers.append(("weights", learner_id, clock, weights.tolist()))
            self.verdicts.append((learner_id, verdicts.get(learner_id, -1)))

    def finish_answers(self, *, last: bool = False) -> bool:
        """Nothing is under way."""
        return True

    def stop(self, learner_id: int, clock: int, ending: int, chunks: int) -> None:
        self.answers.append(("stop" if ending == Ending.FINISHED else "interrupted", learner_id, clock))

    def answer_snapshot(self, vectors: list[np.ndarray], clock: int, samples: int, taken_s: float) -> None:
        self.answers.append(("snapshot", clock, samples, [vector.tolist() for vector in vectors]))

    # ----------------------------------------------------------------------------------------------- ranks that may die

    @property
    def evaluates(self) -> bool:
        return self.is_first and self.evaluator_rank == 0

    def lose_evaluator(self) -> None:
        self.evaluator_rank = 0

    def pass_on_nothing_more(self) -> None:
        self.passed_on += 1

    def give_up(self, rank: int) -> None:
        self.given_up.append(rank)

    def give_up_learner(self, learner_id: int) -> None:
        self.give_up(self.rank_of(learner_id))

    def tell_given_up(self, learner_id: int, clock: int) -> None:
        self.told.append(learner_id)

    def silent(self, ranks: Iterable[int]) -> frozenset[int]:
        asked = frozenset(ranks)
        self.asked |= asked
        return asked & self.hang


class Crew(ScriptedChannel):
    """Learners that behave: each pulls, pushes what `gradient` says, pulls; who comes next is drawn from a seed.

    Args:
        leave: learner_id -> number of pushes after which it departs while others go on.
    """

    def __init__(
        self,
        lambda_: int,
        next_clock: Callable[[int], int],
        gradient: Callable[[int, int], Sequence[float] | float],
        *,
        seed: int = 0,
        leave: dict[int, int] | None = None,
    ) -> None:
        super().__init__([Pull(learner_id, 0) for learner_id in range(lambda_)])
        self._next_clock = next_clock
        self._gradient = gradient
        self._random = random.Random(seed)
        self._leave = leave or {}
        self._seq = [0] * lambda_

    def receive(self, bodies: Pool, learner_id: int | None = None, until_s: float = math.inf) -> Message | None:
        self._random.shuffle(self.waiting)
        message = super().receive(bodies, learner_id, until_s)
        if isinstance(message, Push):
            who, self._seq[message.learner_id] = message.learner_id, message.seq + 1
            if self._leave.get(who) == message.seq + 1:
                self.waiting.append(Goodbye(who, message.seq + 1, Ending.NONE))
            else:
                self.waiting.append(Pull(who, self._next_clock(message.timestamp)))
        return message

    def receive_pull(self) -> Message | None:
        """Some have come already, and some have not."""
        return super().receive_pull() if self._random.random() < 0.5 else None

    def start_answers(self, learner_ids: list[int], weights: np.ndarray, clock: int, verdicts: dict[int, int]) -> None:
        super().start_answers(learner_ids, weights, clock, verdicts)
        for learner_id in learner_ids:
            seq = self._seq[learner_id]
            self.waiting.append((push(learner_id, clock, seq), self._gradient(learner_id, seq)))

    def stop(self, learner_id: int, clock: int, ending: int, chunks: int) -> None:
        super().stop(learner_id, clock, ending, chunks)
        self.waiting.append(Goodbye(learner_id, self._seq[learner_id], ending))


# --------------------------------------------------------------------------------------------------------------- the shard


class Served:
    """A shard, and what is left of it when everybody has gone: to be served by `run`.

    Args:
        budget: of samples; two are in a push, four in an epoch.
        weights: number of weights, at first 0.
        tolerant: whether learners may die, or hang; else whatever befalls one ends the job.
        first: whether this is shard 0, which evaluates where nobody else can.
    """

    def __init__(
        self,
        path: Path,
        script: Sequence[Any] | ScriptedChannel,
        options: ProtocolOptions,
        lambda_: int,
        *,
        budget: float = 10**6,
        weights: int = 1,
        nonfinite: Literal["stop", "drop", "continue"] = "stop",
        every_epochs: float = 0.0,
        averaging: float = 0.0,
        timeout_s: float = math.inf,
        tolerant: bool = False,
        first: bool = False,
    ) -> None:
        self.path = path
        self.channel = cast(Any, script if isinstance(script, ScriptedChannel) else ScriptedChannel(script))
        self.channel.is_first = first
        zeros = tensor(*[0.0] * weights)
        average = Average.of(zeros, averaging)
        update = SliceUpdate(
            zeros, SgdOptions(momentum=0.0), learning_rate=1.0, schedule=lambda _: 1.0, train_samples=4, average=average
        )
        vectors = 1 + (averaging > 0)
        self.snapshots = Snapshots(path.with_suffix(".snapshots"), every_epochs=every_epochs, vectors=vectors, size=weights)
        log = ShardLog(TableFile(path, shard=0, flush_rows=100, flush_s=1e9), 0)
        presence = FaultTolerant(self.channel, self.channel, lambda_, PATIENCE_S, "shard 0") if tolerant else FAIL_FAST
        self.shard = Shard(
            self.channel,
            Rules(options.make(lambda_), lambda_, budget),
            update,
            ShardRecords(log, Progress("off", 1.0, 1.0), self.snapshots),
            nonfinite=nonfinite,
            timeout_s=timeout_s,
            presence=presence,
        )
        self.evaluated: list[Taken] = []
        """The last weights, if they were evaluated on this rank."""

    def run(self) -> Served:
        try:
            self.shard.serve(self._evaluate)
        finally:
            self.snapshots.close()
        return self

    def _evaluate(self) -> None:
        self.evaluated.append(self.shard.snapshot(FINAL))
        self.shard.end_evaluation()

    @property
    def answers(self) -> list[tuple[Any, ...]]:
        answers: list[tuple[Any, ...]] = self.channel.answers
        return answers

    def rows(self, table: str, *columns: str) -> list[Any]:
        rows: list[Any] = read_table(self.path, table)[list(columns)].tolist()
        return rows

    def told(self, *kinds: Event) -> list[tuple[int, int, int]]:
        """(kind, clock, learner_id) of events."""
        return [row for row in self.rows("events", "kind", "clock", "learner_id") if row[0] in kinds]

    @property
    def weights(self) -> list[float]:
        weights: list[float] = self.shard.update.weights.tolist()
        return weights

    @property
    def summary(self) -> tuple[Any, ...]:
        return tuple(read_summary(self.path)[0].tolist())

    def balanced(self) -> bool:
        summary = read_summary(self.path)[0]
        return int(summary["received"]) == int(summary["pushed"]) == len(read_table(self.path, "pushes"))


def serve(path: Path, script: Sequence[Any] | ScriptedChannel, options: ProtocolOptions, lambda_: int, **fields: Any) -> Served:
    return Served(path, script, options, lambda_, **fields).run()


def tolerant_serve(
    path: Path,
    script: Sequence[Any] | ScriptedChannel,
    options: ProtocolOptions | None = None,
    lambda_: int = 3,
    *,
    budget: float = 4,
    **fields: Any,
) -> Served:
    return serve(path, script, options or HardsyncOptions(), lambda_, budget=budget, tolerant=True, **fields)
