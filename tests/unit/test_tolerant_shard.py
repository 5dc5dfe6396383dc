"""A shard whose learners die, or hang: what the protocol is told, what the log says, who evaluates (DESIGN 4, laws 2, 4)."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpisgd.base.errors import PeerError
from mpisgd.comm import messages
from mpisgd.comm.messages import FINAL, NOTHING_MORE, Ending, Goodbye, Lost, Message, Pull, SnapshotPull, Torn
from mpisgd.config import SgdOptions
from mpisgd.protocols import (
    AsyncOptions,
    BackupOptions,
    DownpourOptions,
    HardsyncOptions,
    ProtocolOptions,
    SoftsyncOptions,
    SspOptions,
    TimeoutOptions,
    VersionedOptions,
)
from mpisgd.records.checkpoint.snapshots import Snapshots
from mpisgd.records.log.progress import Progress
from mpisgd.records.log.rank_file import read_summary, read_table
from mpisgd.records.log.schema import Event, Reason, Verdict
from mpisgd.records.log.writer import ShardLog, TableFile
from mpisgd.records.shard_records import ShardRecords
from mpisgd.rules.rules import Rules
from mpisgd.serving.faults import Faults
from mpisgd.serving.succession import Succession
from mpisgd.shard import Shard
from mpisgd.update.slice_update import SliceUpdate
from tests.unit.fakes import Crew, ScriptedChannel, Stuck, push, tensor

PATIENCE_S = 100.0
LATER_NS = 10**12
"""So long after the start that who was heard of then is not overdue."""
EVALUATOR = 9
LEAVE = SnapshotPull(NOTHING_MORE)


class Channel(ScriptedChannel):
    """Learner l is rank l + 1; rank 9 evaluates at first. What is not in the script comes not: time passes instead."""

    evaluator_rank = EVALUATOR
    spare_ranks: tuple[int, ...] = ()

    def __init__(self, script: list[Any]) -> None:
        super().__init__(script)
        self.duties: list[tuple[int, int]] = []
        self.given_up: list[int] = []
        self.told: list[int] = []
        self.passed_on = 0

    def receive(self, gradient: np.ndarray, learner_id: int | None = None, until_s: float = math.inf) -> Message | None:
        message = super().receive(gradient, learner_id, until_s)
        if message is None:
            self.seconds += 2 * PATIENCE_S
        return message

    def has_parted(self, learner_id: int) -> None: ...

    def answer_goodbye(self, learner_id: int, appointed: int) -> None:
        self.duties.append((learner_id, appointed))

    def pass_on_nothing_more(self) -> None:
        self.passed_on += 1

    def give_up(self, rank: int) -> None:
        self.given_up.append(rank)

    def tell_given_up(self, learner_id: int) -> None:
        self.told.append(learner_id)

    def rank_of(self, learner_id: int) -> int:
        return learner_id + 1


class Served:
    """A shard of one weight, at 0, plain SGD of rate 1, two samples in a push; what was left when everybody had gone."""

    def __init__(
        self, path: Path, channel: Any, options: ProtocolOptions, lambda_: int, budget: float, *, first: bool, size: int = 1
    ) -> None:
        zeros = tensor(*[0.0] * size)
        update = SliceUpdate(zeros, SgdOptions(momentum=0.0), learning_rate=1.0, schedule=lambda _: 1.0, train_samples=4)
        snapshots = Snapshots(path.with_suffix(".snapshots"), every_epochs=0.0, vectors=1, size=size)
        log = ShardLog(TableFile(path, shard=0, flush_rows=100, flush_s=1e9), 0)
        self.shard = shard = Shard(
            channel,
            Rules(options.make(lambda_), lambda_, budget),
            update,
            ShardRecords(log, Progress("off", 1.0, 1.0), snapshots),
            nonfinite="stop",
        )
        Faults(shard, channel, PATIENCE_S, Succession(dedicated=True) if first else None, "shard 0")
        try:
            shard.serve()
        finally:
            snapshots.close()
        self.path = path
        self.answers = channel.answers
        self.channel = channel

    def rows(self, table: str, *columns: str) -> list[Any]:
        return read_table(self.path, table)[list(columns)].tolist()

    @property
    def weights(self) -> list[float]:
        return self.shard.update.weights.tolist()

    def told(self, *kinds: Event) -> list[tuple[int, int, int]]:
        """(kind, clock, learner_id) of events."""
        return [row for row in self.rows("events", "kind", "clock", "learner_id") if row[0] in kinds]

    def balanced(self) -> bool:
        summary = read_summary(self.path)[0]
        return int(summary["received"]) == int(summary["pushed"]) == len(read_table(self.path, "pushes"))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log.h5"


def serve(
    log: Path, script: list[Any], options: ProtocolOptions | None = None, lambda_: int = 3, budget: float = 4, first: bool = False
) -> Served:
    return Served(log, Channel(script), options or HardsyncOptions(), lambda_, budget, first=first)


def pulls(*learner_ids: int, clock: int = 0) -> list[Pull]:
    return [Pull(learner_id, clock) for learner_id in learner_ids]


def now(learner_id: int, timestamp: int = 0, seq: int = -1) -> Any:
    """A push that has just come."""
    return push(learner_id, timestamp, seq, arrival_ns=LATER_NS)


def byes(**pushed: int) -> list[Any]:
    return [*(Goodbye(int(name[1:]), count, True) for name, count in pushed.items()), LEAVE]


# ------------------------------------------------------------------------------------------------------------------- dead


def test_hardsync_goes_on_with_one_less(log: Path) -> None:
    done = serve(log, [*pulls(0, 1, 2), (now(0), 1.0), (now(1), 2.0), Lost(3, 2), *pulls(0, 1, clock=1), *byes(l0=1, l1=1)])
    assert done.weights == [-1.5], "the divisor is counted"
    assert done.told(Event.LOST) == [(Event.LOST, 0, 2)]
    assert done.rows("updates", "clock", "gradients", "samples") == [(1, 2, 4)]
    assert done.balanced()


def test_a_whole_gradient_counts_though_its_learner_is_dead(log: Path) -> None:
    """Kept until its turn, it is summed, in the order of learners as far as it can be."""
    done = serve(log, [*pulls(0, 1), (now(1), 3.0), Lost(2, 1), (now(0), 1.0), *pulls(0, clock=1), *byes(l0=1)], lambda_=2)
    assert done.weights == [-2.0]
    assert done.balanced()


def test_a_whole_gradient_counts_though_its_learner_hangs(log: Path) -> None:
    """As that of one that leaves or dies: it was kept until its turn when a transfer was given up."""
    script = [*pulls(0, 1), (now(1), 3.0), messages.Stuck(2, 1), (now(0), 1.0), *pulls(0, clock=1), *byes(l0=1)]
    done = serve(log, script, lambda_=2)
    assert done.weights == [-2.0]
    assert done.rows("pushes", "learner_id", "verdict") == [(1, Verdict.APPLY), (0, Verdict.APPLY)]
    assert done.told(Event.MISSED) == [(Event.MISSED, 0, 1)]
    assert done.balanced()


def test_a_torn_gradient_is_never_applied(log: Path) -> None:
    torn = Torn(now(1, seq=0))
    script = [*pulls(0, 1), (now(0), 1.0), torn, Lost(2, 1), *pulls(0, clock=1), (now(0, 1), 1.0), *pulls(0, clock=2), *byes(l0=2)]
    channel = Channel(script)
    done = Served(log, channel, HardsyncOptions(), 2, 4, first=False)
    assert done.weights == [-2.0]
    assert done.rows("pushes", "learner_id", "verdict", "reason") == [
        (0, Verdict.APPLY, Reason.NONE), (1, Verdict.DROP, Reason.TORN), (0, Verdict.APPLY, Reason.NONE)
    ]  # fmt: skip
    assert done.rows("updates", "gradients") == [(1,), (1,)]
    assert done.balanced()


def test_the_next_gradient_is_not_received_where_a_torn_one_may_yet_be_written(log: Path) -> None:
    places: list[int] = []

    class Watching(Channel):
        def receive(self, gradient: np.ndarray, learner_id: int | None = None, until_s: float = math.inf) -> Message | None:
            places.append(gradient.ctypes.data)
            return super().receive(gradient, learner_id, until_s)

    Served(log, Watching([*pulls(0, 1), Torn(now(1, seq=0)), Lost(2, 1), (now(0), 1.0), *pulls(0, clock=1), *byes(l0=1)]),
           AsyncOptions(), 2, 2, first=False)  # fmt: skip
    assert places[2] not in places[3:]


def test_a_dead_one_that_waited_for_weights_is_given_none(log: Path) -> None:
    script = [*pulls(0, 1), (now(0), 1.0), *pulls(0, clock=1), Lost(1, 0), (now(1), 3.0), *pulls(1, clock=1), *byes(l1=1)]
    done = serve(log, script, lambda_=2)
    assert [answer[:2] for answer in done.answers] == [("weights", 0), ("weights", 1), ("stop", 1)]
    assert done.balanced()


@pytest.mark.parametrize("wrong", [Goodbye(1, 5, Ending.FINISHED), Goodbye(1, 0, Ending.FINISHED)])
def test_a_goodbye_that_cannot_be_is_refused_and_the_true_one_counts(log: Path, wrong: Goodbye, capsys: Any) -> None:
    script = [*pulls(0, 1), (now(0), 1.0), (now(1), 2.0), wrong, *pulls(0, 1, clock=1), *byes(l0=1, l1=1)]
    done = serve(log, script, lambda_=2)
    assert done.told(Event.REFUSED) == [(Event.REFUSED, 1, 1)]
    assert f"learner 1 says goodbye after {wrong.pushed} pushes: expected 1 ... 1" in capsys.readouterr().err
    assert done.balanced()


def test_nobody_says_goodbye_twice(log: Path) -> None:
    script = [*pulls(0, 1), (now(0), 1.0), (now(1), 2.0), *pulls(0, 1, clock=1), *byes(l0=1)[:1], *byes(l0=1)[:1], *byes(l1=1)]
    done = serve(log, script, lambda_=2)
    assert done.told(Event.REFUSED) == [(Event.REFUSED, 1, 0)]
    assert done.balanced()


def test_the_last_one_is_not_waited_for_after_a_goodbye_that_was_refused(log: Path) -> None:
    """It would be, for ever: it believes that it has left."""
    script = [*pulls(0), (push(0, 0), 1.0), Goodbye(0, 9, Ending.FINISHED), None]
    with pytest.raises(PeerError, match="no learner is left at clock 1"):
        serve(log, script, AsyncOptions(), lambda_=1, budget=100)


def test_without_learners_there_is_no_run(log: Path) -> None:
    with pytest.raises(PeerError, match="no learner is left at clock 0"):
        serve(log, [*pulls(0, 1), Lost(1, 0), Lost(2, 1)], lambda_=2)


def test_who_has_said_goodbye_may_die(log: Path) -> None:
    script = [*pulls(0, 1), (now(0), 1.0), (now(1), 1.0), *pulls(0, 1, clock=1), Goodbye(0, 1, True), Lost(1, 0), *byes(l1=1)]
    assert serve(log, script, lambda_=2).told(Event.LOST) == []


# ----------------------------------------------------------------------------------------------------------------- missed


def test_one_that_hangs_is_missed_and_comes_back(log: Path) -> None:
    script = [
        *pulls(0, 1, 2), (now(0), 1.0), *pulls(0, clock=1), (now(1), 2.0), *pulls(1, clock=1), None,  # 2 owes a push
        (now(0, 1), 1.0), (now(2), 100.0), *pulls(2, clock=1), (now(1, 1), 1.0),  # its late gradient is dropped, then it is back
        *pulls(0, 1, clock=2), (now(2, 1), 1.0), *pulls(2, clock=2), *byes(l0=2, l1=2, l2=2),
    ]  # fmt: skip
    done = serve(log, script, budget=10)
    assert done.told(Event.MISSED, Event.RETURNED) == [(Event.MISSED, 0, 2), (Event.RETURNED, 1, 2)]
    assert done.weights == [-2.5]
    assert done.rows("updates", "gradients") == [(2,), (3,)]
    assert (2, Verdict.DROP, Reason.MISSED) in done.rows("pushes", "learner_id", "verdict", "reason")
    assert done.balanced()


def test_the_last_one_is_waited_for(log: Path) -> None:
    script = [
        *pulls(0, 1),
        (now(1), 1.0),
        *pulls(1, clock=1),
        Lost(2, 1),
        None,
        None,
        (now(0), 3.0),
        *pulls(0, clock=1),
        *byes(l0=1),
    ]
    done = serve(log, script, lambda_=2)
    assert done.told(Event.MISSED) == []
    assert done.weights == [-2.0]


def test_one_that_was_missed_is_back_with_a_gradient_of_this_clock(log: Path) -> None:
    """All others are dead: if it were dropped, nobody would ever make the update that its learner then waits for."""
    script = [*pulls(0, 1, 2), (now(2), 1.0), *pulls(2, clock=1), (now(1), 1.0), *pulls(1, clock=1), None, (now(1, 1), 1.0),
              Lost(2, 1), *pulls(0, clock=1), Lost(3, 2), (now(0, 1), 3.0), *pulls(0, clock=2), *byes(l0=1)]  # fmt: skip
    done = serve(log, script, budget=8)
    assert done.told(Event.MISSED, Event.LOST, Event.RETURNED) == [
        (Event.MISSED, 0, 0), (Event.LOST, 1, 1), (Event.RETURNED, 1, 0), (Event.LOST, 1, 2)
    ]  # fmt: skip
    assert done.weights == [-3.0]
    assert done.balanced()


def test_missed_ones_are_waited_for_where_all_others_are_dead(log: Path) -> None:
    script = [*pulls(0, 1), (now(1), 1.0), *pulls(1, clock=1), None, Lost(2, 1), None, (now(0), 9.0), *pulls(0, clock=1),
              (now(0, 1), 3.0), *pulls(0, clock=2), *byes(l0=2)]  # fmt: skip
    done = serve(log, script, lambda_=2, budget=4)
    assert done.weights == [-4.0]


def test_who_does_not_come_back_is_lost_at_the_end_and_nobody_waits(log: Path) -> None:
    done = serve(log, [*pulls(0, 1), (now(1), 1.0), *pulls(1, clock=1), None, *byes(l1=1)], lambda_=2, budget=2)
    assert done.told(Event.MISSED, Event.LOST) == [(Event.MISSED, 0, 0), (Event.LOST, 1, 0)]
    assert done.channel.given_up == [1]
    assert done.channel.told == [0], "the other shards are: when it goes on, it waits for this one"
    assert done.balanced()


@pytest.mark.parametrize("also", [0, 2])
def test_without_whom_another_shard_has_ended_nobody_is_waited_for(log: Path, also: int) -> None:
    """`also`: one that has said goodbye to this shard; it cannot go on either, and might be the one that is to evaluate."""
    script = [*pulls(0, 1, 2), (now(0), 1.0), (now(1), 1.0), (now(2), 1.0), *pulls(0, 2, clock=1), *byes(l0=1, l2=1)]
    done = serve(log, [*script, messages.GivenUp(also), messages.GivenUp(1)])
    assert done.told(Event.LOST) == [(Event.LOST, 1, 1)]
    assert done.channel.given_up == [also + 1, 2]
    assert done.channel.told == []
    assert done.balanced()


def test_who_comes_back_after_the_end_is_told_to_stop(log: Path) -> None:
    script = [*pulls(0, 1), (now(1), 1.0), *pulls(1, clock=1), None, (now(0), 3.0), *pulls(0, clock=1), *byes(l0=1, l1=1)]
    done = serve(log, script, lambda_=2, budget=2)
    assert done.answers[-1] == ("stop", 0, 1)
    assert done.weights == [-1.0]
    assert done.channel.given_up == []


def test_weights_that_take_long_to_leave_stay_as_they_are(log: Path) -> None:
    """Giving up an answer, the shard goes on with the same weights elsewhere; the learner's gradient is as good as any."""
    sent: list[np.ndarray] = []

    class Slow(Channel):
        def start_answers(self, learner_ids: list[int], weights: np.ndarray, *more: Any) -> None:
            super().start_answers(learner_ids, weights, *more)
            sent.append(weights)

        def finish_answers(self) -> bool:
            return len(sent) != 2

    script = [
        *pulls(1, 0), messages.Stuck(1, 0), (now(1), 1.0), *pulls(1, clock=1), (now(0), 1.0), *pulls(0, clock=1),
        (now(0, 1), 1.0), (now(1, 1), 1.0), *pulls(0, 1, clock=2), *byes(l0=2, l1=2),
    ]  # fmt: skip
    done = Served(log, Slow(script), HardsyncOptions(), 2, 6, first=False)
    assert done.told(Event.STUCK, Event.MISSED, Event.RETURNED) == [
        (Event.STUCK, 0, 0), (Event.MISSED, 0, 0), (Event.RETURNED, 1, 0)
    ]  # fmt: skip
    assert [weights.tolist() for weights in sent[:2]] == [[0.0], [0.0]], "the old memory"
    assert done.weights == [-2.0]
    assert (0, Verdict.DROP, Reason.MISSED) in done.rows("pushes", "learner_id", "verdict", "reason"), "of a clock that went on"


def test_a_shard_that_others_have_left_behind_does_not_wait_for_what_will_not_come(log: Path) -> None:
    """Learner 0 was given the weights of clock 1 here; another shard, which went on without it, has given it those of clock 2."""
    script = [
        *pulls(0, 1), (now(1), 1.0), *pulls(1, clock=1), None, (now(0), 1.0), *pulls(0, clock=1),  # missed, and back
        (now(1, 1), 1.0), *pulls(1, clock=2), *pulls(0, clock=2),  # it asks again: no gradient of clock 1 will come
        (now(0, 2), 1.0), (now(1, 2), 1.0), *pulls(0, 1, clock=3), *byes(l0=2, l1=3),
    ]  # fmt: skip
    done = serve(log, script, lambda_=2, budget=8)
    assert done.told(Event.PASSED) == [(Event.PASSED, 1, 0)]
    assert done.rows("updates", "gradients") == [(1,), (1,), (2,)]
    assert done.balanced()


def test_an_interrupted_run_does_not_wait_for_those_who_hang(log: Path) -> None:
    script = [
        *pulls(0, 1),
        (now(1), 1.0),
        *pulls(1, clock=1),
        None,
        messages.Interrupt(15),
        Goodbye(1, 1, Ending.INTERRUPTED),
        LEAVE,
    ]
    done = serve(log, script, lambda_=2, budget=100)
    assert done.told(Event.MISSED, Event.LOST) == [(Event.MISSED, 0, 0), (Event.LOST, 1, 0)]
    assert done.channel.given_up == [1]


def test_an_interrupted_run_is_saved_though_its_last_learner_dies(log: Path) -> None:
    """The evaluator, which was to wait until all have left, is answered; the run is not finished."""
    script = [*pulls(0, 1), SnapshotPull(FINAL), (now(0), 1.0), *pulls(0, clock=1), messages.Interrupt(15),
              Goodbye(0, 1, Ending.INTERRUPTED), Lost(2, 1), LEAVE]  # fmt: skip
    done = serve(log, script, lambda_=2, budget=100)
    assert [answer[0] for answer in done.answers[-2:]] == ["interrupted", "snapshot"]
    assert not done.shard.rules.finished


def test_a_run_whose_others_have_done_their_share_ends_when_the_last_one_dies(log: Path) -> None:
    """versioned: each leaves by itself; the share of the dead is not trained on, but the weights are there."""
    script = [*pulls(0, 1), (now(0), 1.0), *pulls(0), Goodbye(0, 1, Ending.NONE), SnapshotPull(FINAL), Lost(2, 1), LEAVE]
    done = serve(log, script, VersionedOptions(grads_to_wait=1), lambda_=2, budget=math.inf)
    assert done.answers[-1][0] == "snapshot"
    assert done.shard.rules.finished
    assert done.balanced()


# -------------------------------------------------------------------------------------------------------------- evaluation


def test_the_evaluator_says_goodbye_to_the_first_shard_which_passes_it_on(log: Path) -> None:
    done = serve(log, [*pulls(0), (now(0), 1.0), *pulls(0, clock=1), *byes(l0=1)], lambda_=1, budget=2, first=True)
    assert done.channel.passed_on == 1
    assert done.channel.duties == [(0, 0)]


def test_a_learner_follows_the_evaluator_and_another_follows_that(log: Path) -> None:
    script = [
        *pulls(0, 1, 2), (now(0), 1.0), (now(1), 1.0), (now(2), 1.0), SnapshotPull(0), *pulls(0, 1, 2, clock=1),
        Lost(EVALUATOR, -1), Goodbye(2, 1, True), Goodbye(1, 1, True), Lost(3, 2), Goodbye(0, 1, True),
        SnapshotPull(FINAL), LEAVE,
    ]  # fmt: skip
    done = serve(log, script, lambda_=3, budget=6, first=True)
    assert done.channel.duties == [(2, 1), (1, 2), (0, 0)]
    assert done.answers[-1][0] == "snapshot"


def test_where_nobody_is_left_to_save_the_weights_the_run_fails(log: Path) -> None:
    script = [*pulls(0), (now(0), 1.0), *pulls(0, clock=1), Goodbye(0, 1, True), Lost(1, 0), Lost(EVALUATOR, -1)]
    with pytest.raises(PeerError, match="no rank is left to evaluate"):
        serve(log, script, lambda_=1, budget=2, first=True)


# ------------------------------------------------------------------------------------------------------- random schedules


class FaultyCrew(Crew):
    """Learners of whom some die, in the middle of a push, say, or hang, at random moments.

    `sent` counts what each has begun to send to the shard; `lost` are the dead.
    """

    evaluator_rank = EVALUATOR
    spare_ranks: tuple[int, ...] = ()

    def __init__(self, lambda_: int, next_clock: Any, seed: int) -> None:
        super().__init__(lambda_, next_clock, lambda learner_id, seq: 1.0, seed=seed)
        self._dice = random.Random(seed + 1)
        self._alive = set(range(lambda_))
        self._hanging: set[int] = set()
        self._hidden: list[Any] = []
        self._last_words: dict[int, Any] = {}
        self.lost: list[int] = []
        self.duties: list[tuple[int, int]] = []

    def receive(self, gradient: np.ndarray, learner_id: int | None = None, until_s: float = math.inf) -> Message | None:
        self._befall()
        self._hide()
        try:
            message = super().receive(gradient, learner_id, until_s)
        except Stuck:
            assert until_s < math.inf, "the shard would wait for ever"
            self.seconds += 2 * PATIENCE_S
            if self._dice.random() < 0.3:
                self._wake()
            return None
        who = self._of(message)
        if who in self._last_words:
            del self._last_words[who]
            self._bury(who)
        return message

    def _befall(self) -> None:
        draw, who = self._dice.random(), self._dice.choice(sorted(self._alive))
        if draw < 0.02 and len(self._alive) > 1:
            self._die(who)
        elif draw < 0.06:
            self._hanging.add(who)
        elif draw < 0.09:
            self._wake()

    def _die(self, who: int) -> None:
        """What it was sending comes whole, or in part, or not at all; then it is dead."""
        self._alive.discard(who)
        self._hanging.discard(who)
        pending = [item for item in self.waiting + self._hidden if self._of(item) == who]
        self._hide({who})
        self._hidden = [item for item in self._hidden if self._of(item) != who]
        pushes = [item for item in pending if isinstance(item, tuple) and not hasattr(item, "_fields")]
        draw = self._dice.random()
        if pushes and draw < 0.7:
            words = Torn(pushes[0][0]) if draw < 0.4 else pushes[0]
            self._last_words[who] = words
            self.waiting.append(words)
        else:
            self._bury(who)

    def _bury(self, who: int) -> None:
        self.waiting = [item for item in self.waiting if self._of(item) != who]  # the pull after its last push
        self.waiting.append(Lost(who + 1, who))
        self.lost.append(who)

    def _wake(self) -> None:
        self.waiting += self._hidden
        self._hidden.clear()
        self._hanging.clear()

    def _hide(self, of: set[int] | None = None) -> None:
        hidden = self._hanging if of is None else of
        self._hidden += [item for item in self.waiting if self._of(item) in hidden]
        self.waiting = [item for item in self.waiting if self._of(item) not in hidden]

    @staticmethod
    def _of(item: Any) -> int:
        message = item[0] if isinstance(item, tuple) and not hasattr(item, "_fields") else item
        if isinstance(message, Torn):
            return message.push.learner_id
        return -1 if isinstance(message, Lost) else getattr(message, "learner_id", -1)

    def receive_pull(self) -> Message | None:
        """What has become of others is told first, as on the wire."""
        lost = [item for item in self.waiting if isinstance(item, Lost)]
        if lost and self._dice.random() < 0.5:
            self.waiting.remove(lost[0])
            return lost[0]
        return super().receive_pull()

    def start_answers(self, learner_ids: list[int], weights: np.ndarray, *more: Any) -> None:
        super().start_answers(learner_ids, weights, *more)
        self.waiting = [
            item for item in self.waiting if self._of(item) < 0 or self._of(item) in self._alive | set(self._last_words)
        ]

    def has_parted(self, learner_id: int) -> None: ...

    def answer_goodbye(self, learner_id: int, appointed: int) -> None:
        self.duties.append((learner_id, appointed))

    def pass_on_nothing_more(self) -> None:
        """There is one shard."""

    def give_up(self, rank: int) -> None:
        """Nobody waits."""

    def tell_given_up(self, learner_id: int) -> None:
        """There is one shard."""

    def rank_of(self, learner_id: int) -> int:
        return learner_id + 1


PROTOCOLS: dict[str, ProtocolOptions] = {
    "hardsync": HardsyncOptions(),
    "softsync": SoftsyncOptions(n=2),
    "async": AsyncOptions(most_staleness=3),
    "backup": BackupOptions(b=1),
    "backup-late": BackupOptions(b=1, late="apply"),
    "timeout": TimeoutOptions(N=3, N_min=1, timeout_s=1e9),
    "ssp": SspOptions(slack=1),
    "downpour": DownpourOptions(),
    "versioned": VersionedOptions(grads_to_wait=2),
}


@pytest.mark.parametrize("name", PROTOCOLS)
@pytest.mark.parametrize("seed", range(12))
def test_whatever_befalls_learners_the_run_ends_and_the_books_balance(
    name: str, seed: int, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third time weights are sent in chunks, and who pulls, or is lost, meanwhile is heard of then."""
    monkeypatch.setattr("mpisgd.vectors.chunks.CHUNK_NBYTES", 4)
    lambda_ = 5
    options = PROTOCOLS[name]
    crew = FaultyCrew(lambda_, options.make(lambda_).next_clock, seed)
    crew.waiting.append(LEAVE)
    done = Served(log, crew, options, lambda_, budget=150, first=seed % 2 == 0, size=3 if seed % 3 == 0 else 1)
    rows = read_table(log, "pushes")
    applied = rows[rows["verdict"] == Verdict.APPLY]
    for learner_id in range(lambda_):
        mine = applied["seq"][applied["learner_id"] == learner_id]
        assert len(set(mine.tolist())) == len(mine), "nothing is applied twice"
    assert done.balanced()
    assert done.shard.update.samples >= 150
    assert done.weights[0] != 0.0
    assert set(crew.lost) >= {row[2] for row in done.told(Event.LOST)} - set(crew._hanging) - done.shard.rules.absent
    updates = read_table(log, "updates")
    for clock, gradients in updates[["clock", "gradients"]].tolist():
        assert np.count_nonzero(applied["clock"] == clock - 1) == gradients, "the divisor is counted"


# ------------------------------------------------------------------------------------------------------ messages that cannot be


def test_who_was_told_to_stop_elsewhere_is_not_waited_for_once_all_others_wait(log: Path) -> None:
    """Another shard, which lacks nothing, has finished, and told one learner so; the others ask this shard first."""
    script = [*pulls(0, 1, 2), Goodbye(2, 0, Ending.FINISHED), (now(0), 1.0), *pulls(0, clock=1), (now(1), 2.0),
              *pulls(1, clock=1), *byes(l0=1, l1=1)]  # fmt: skip
    done = serve(log, script, budget=100)
    assert done.weights == [-1.5]
    assert done.told(Event.DEPARTED) == [(Event.DEPARTED, 0, 2)]
    assert done.balanced()


def test_a_torn_push_counts_and_the_next_one_is_in_its_order(log: Path) -> None:
    script = [*pulls(0, 1), Torn(now(0, 0, 0)), (now(1), 1.0), *pulls(0, 1, clock=1), (now(0, 1, 1), 2.0), (now(1, 1), 2.0),
              *pulls(0, 1, clock=2), *byes(l0=2, l1=2)]  # fmt: skip
    done = serve(log, script, lambda_=2, budget=6)
    assert done.weights == [-3.0]
    assert done.shard.refusals.total == 0
    assert done.balanced()


def test_a_torn_push_that_cannot_be_is_refused(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = [*pulls(0, 1), Torn(now(0, 0, 7)), (now(0), 1.0), (now(1), 1.0), *pulls(0, 1, clock=1), *byes(l0=2, l1=1)]
    done = serve(log, script, SoftsyncOptions(), lambda_=2, budget=4)
    assert "learner 0 pushed mini-batch 7: expected 0 ... 0, the next one" in capsys.readouterr().err
    assert done.weights == [-1.0]
    assert done.told(Event.REFUSED) == [(Event.REFUSED, 0, 0)]
    assert done.balanced()


def test_one_that_was_missed_may_push_what_is_no_longer_fresh_others_may_not(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = [*pulls(0, 1, 2), (now(1), 1.0), (now(2), 1.0), *pulls(1, 2, clock=1), None, (now(0), 9.0), (now(1, 0, 1), 9.0),
              (now(1, 1, 1), 1.0), (now(2, 1), 1.0), *pulls(0, 1, 2, clock=2), *byes(l0=1, l1=3, l2=2)]  # fmt: skip
    done = serve(log, script, budget=8)
    assert done.rows("pushes", "learner_id", "reason")[2] == (0, Reason.MISSED)
    assert "learner 1 pushed timestamp 0: expected 1, the shard's clock" in capsys.readouterr().err
    assert done.told(Event.REFUSED) == [(Event.REFUSED, 1, 1)]
    assert done.weights == [-2.0]
    assert done.balanced()
