"""The checks of a log, on a few rows by hand: what virtual runs do not do, and what only damaged or odd logs have."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mpisgd.config import Config
from mpisgd.protocols import BackupOptions, HardsyncOptions, ProtocolOptions, SoftsyncOptions, TimeoutOptions
from mpisgd.records.log import schema
from mpisgd.records.log.schema import Event, Reason, Verdict
from mpisgd.replay.checks.finding import Untrue
from mpisgd.replay.checks.order import Compute, Take, Update, serial_order
from mpisgd.replay.checks.record import Departure, Record, ShardRecord, Start, TimeOut
from mpisgd.replay.checks.walk import walk
from mpisgd.replay.difference import difference
from mpisgd.vectors.flat import FlatModel
from tests.unit.fabricate import row, rows

ALPHA0 = 0.5


def push(learner_id: int, seq: int, clock: int, timestamp: int | None = None, **fields: Any) -> np.ndarray:
    """A push of 4 samples and loss 1 that was applied; its weights are of `clock` where no timestamp is given."""
    timestamp = clock if timestamp is None else timestamp
    given = {"learner_id": learner_id, "seq": seq, "clock": clock, "timestamp": timestamp, "loss": 1.0, "learning_rate": ALPHA0}
    return row("pushes", **{**given, **fields})


def updates(*gradients: int, every_s: float = 1.0) -> np.ndarray:
    """Updates of so many gradients each."""
    samples = 4 * np.cumsum(gradients)
    done = [
        row(
            "updates",
            clock=clock,
            gradients=count,
            samples=samples[clock - 1],
            learning_rate=ALPHA0,
            time_s=clock * every_s,
            mean_loss=1.0 if count else math.nan,
        )
        for clock, count in enumerate(gradients, 1)
    ]
    return rows("updates", done)


def log(
    pushes: list[np.ndarray],
    made: np.ndarray,
    *,
    lambda_: int,
    shard: int = 0,
    finished: bool = True,
    left: list[Any] | None = None,
    goodbyes: dict[int, float] | None = None,
) -> ShardRecord:
    """`left`: `Departure`s; `goodbyes`: per learner that said goodbye, the second."""
    table = rows("pushes", pushes)
    table["shard"], made["shard"] = shard, shard
    summary = np.zeros(1, schema.SUMMARY)[0]
    summary["shard"], summary["final_clock"] = shard, len(made) if finished else -1
    summary["received"] = summary["pushed"] = len(table)
    summary["samples"] = made["samples"][-1] if len(made) else 0
    start = Start(0, 0, 0.0, 0, [-1] * lambda_, [0] * lambda_)
    departures = [Departure(*each) for each in left or []]
    said = {"clock": len(made), "kind": Event.GOODBYE}
    events = [row("events", learner_id=learner_id, time_s=time_s, **said) for learner_id, time_s in (goodbyes or {}).items()]
    return ShardRecord(shard, lambda_, table, made, departures, [], summary, start, events=rows("events", events))


def record(protocol: ProtocolOptions, *shards: ShardRecord, train_samples: int = 10**6) -> Record:
    run: Any = SimpleNamespace(lambda_=shards[0].lambda_, environment={"train_samples": train_samples}, path="run")
    config = Config(protocol=protocol, alpha0=ALPHA0, shards=len(shards))
    return Record(run, config, list(shards), None)


def check(protocol: ProtocolOptions, shard: ShardRecord) -> str:
    """What is refused, or ""."""
    try:
        walk(record(protocol, shard), shard)
    except Untrue as untrue:
        return str(untrue.finding)
    return ""


# ------------------------------------------------------------------------------------------------------------- departures


def test_a_gradient_that_was_kept_when_its_learner_left_is_summed_out_of_turn() -> None:
    """Learner 2 came before its turn, left, and so is summed first; those left make the update, and the next."""
    pushes = [push(2, 0, 0, arrival_s=0.2), push(0, 0, 0, arrival_s=0.4, answer_s=1.0), push(1, 0, 0, arrival_s=0.1, answer_s=1.0)]
    pushes += [push(0, 1, 1, arrival_s=1.5), push(1, 1, 1, arrival_s=1.4)]
    shard = log(pushes, updates(3, 2), lambda_=3, left=[(0, 0.3, 2)])
    assert check(HardsyncOptions(), shard) == ""
    shard.departures.clear()
    assert "row 0 (clock 0, learner 2, mini-batch 0): learner 0's turn" in check(HardsyncOptions(), shard)


def test_a_gradient_that_was_kept_when_its_learner_was_missed_counts() -> None:
    """It is summed out of turn; as one that was dropped for it, it cannot be."""
    pushes = [push(1, 0, 0, arrival_s=0.1), push(0, 0, 0, arrival_s=0.4)]
    assert check(HardsyncOptions(), log(pushes, updates(2), lambda_=2, left=[(0, 0.3, 1, Event.MISSED)])) == ""
    pushes[0]["verdict"], pushes[0]["reason"], pushes[0]["weight"] = Verdict.DROP, Reason.MISSED, 0.0
    dropped = log(pushes, updates(1), lambda_=2, left=[(0, 0.3, 1, Event.MISSED)])
    assert "DROP with weight 0.0 (MISSED), the protocol says APPLY" in check(HardsyncOptions(), dropped)


def test_nobody_passes_where_nobody_was_missed() -> None:
    """Only then another shard can have gone on without it; in lockstep none is ahead otherwise, so there it needs no word."""
    dropped = {"verdict": Verdict.DROP, "reason": Reason.MISSED, "weight": 0.0}
    pushes = [push(0, 0, 0, arrival_s=0.1, answer_s=1.0), push(1, 0, 1, 0, staleness=1, arrival_s=1.1, **dropped)]
    pushes.append(push(0, 1, 1, arrival_s=1.4))
    missed, back, passed = (0, 0.5, 1, Event.MISSED), (1, 1.2, 1, Event.RETURNED), (1, 1.5, 1, Event.PASSED)
    shard = log(pushes, updates(1, 1), lambda_=2, left=[missed, back, passed])
    assert check(HardsyncOptions(), shard) == ""
    alone = log([push(0, 0, 0, arrival_s=0.1)], updates(1), lambda_=2, left=[(0, 0.5, 1, Event.PASSED)])
    assert check(HardsyncOptions(), alone) == ""
    pushes = [push(0, 0, 0, arrival_s=0.1), push(2, 0, 0, arrival_s=0.7)]
    slow = log(pushes, updates(2), lambda_=3, left=[(0, 0.5, 1, Event.PASSED)])
    assert "nothing says that the learner's gradient of this clock would not come" in check(BackupOptions(b=1), slow)


def test_who_was_missed_after_a_time_out_was_missed_before_the_gradient_that_it_lets_make_the_update() -> None:
    """The time of clock 0 is over with one gradient, that of clock 1 with none: then the next one makes the update at once."""
    pushes = [push(0, 0, 0, arrival_s=0.1, answer_s=0.5), push(0, 1, 1, arrival_s=1.3)]
    made = updates(1, 1)
    made["time_s"] = [0.5, 1.3]
    shard = log(pushes, made, lambda_=2, left=[(1, 1.2, 1, Event.MISSED)])
    shard.timeouts.extend([TimeOut(0, 0.5), TimeOut(1, 1.0)])
    assert check(TimeoutOptions(timeout_s=0.5), shard) == ""


def test_one_who_leaves_before_its_turn_lets_those_who_were_kept_go_on() -> None:
    """Learner 1 leaves without a push, and learner 2, which came before, is summed at once: its row looks earlier."""
    pushes = [push(0, 0, 0, arrival_s=0.1), push(2, 0, 0, arrival_s=0.2)]
    assert check(HardsyncOptions(), log(pushes, updates(2), lambda_=3, left=[(0, 0.3, 1)])) == ""
    assert "learner 1's turn" in check(HardsyncOptions(), log([*pushes, push(1, 0, 0)], updates(3), lambda_=3))


def test_an_update_that_is_due_because_somebody_left() -> None:
    """c falls from 3 to 2 when two are summed: at the end, or with another row after it that arrived at the same instant."""
    first = [push(0, 0, 0, arrival_s=0.1, answer_s=1.0), push(1, 0, 0, arrival_s=0.2, answer_s=1.0)]
    assert check(SoftsyncOptions(), log(first, updates(2), lambda_=3, left=[(0, 0.9, 2)])) == ""
    more = [push(0, 1, 1, arrival_s=1.0), push(1, 1, 1, arrival_s=1.1)]
    assert check(SoftsyncOptions(), log([*first, *more], updates(2, 2), lambda_=3, left=[(0, 1.0, 2)])) == ""
    assert "row 2 " in check(SoftsyncOptions(), log([*first, *more], updates(2, 2), lambda_=3))


def test_one_who_leaves_at_the_instant_of_a_gradient_that_makes_an_update() -> None:
    """Which of the two came first, only the clock of the departure says; it may be of the one before the update."""
    pushes = [push(0, 0, 0, arrival_s=0.5, answer_s=1.0), push(0, 1, 1, arrival_s=1.5)]
    for time_s, why in ((0.5, ""), (0.6, "DEPARTED at clock 0, but the next entry is of clock 1")):
        found = check(SoftsyncOptions(n=2), log(pushes, updates(1, 1), lambda_=2, left=[(0, time_s, 1)]))
        assert found.partition(": ")[2] == why


def test_one_who_left_pushes_no_more() -> None:
    pushes = [push(0, 0, 0, arrival_s=0.1), push(1, 0, 0, arrival_s=0.5)]
    shard = log(pushes, updates(2), lambda_=3, left=[(0, 0.3, 1)])
    assert "row 1 (clock 0, learner 1, mini-batch 0): this learner had left" in check(SoftsyncOptions(), shard)


def test_who_hangs_when_the_others_were_told_the_end_is_missed_and_pushes_too_late() -> None:
    """Another shard has finished and told learner 0 so; learner 1, the last, is missed after that, which ends the run here, too.

    That learner 2, which was missed before, turns out to be dead changes nothing. Where the last is lost, the run goes on with
    those who may be back.
    """
    late = {"verdict": Verdict.LATE, "reason": Reason.FINISHED, "weight": 0.0}
    pushes = [push(0, 0, 0, arrival_s=0.5), push(1, 0, 1, 0, staleness=1, arrival_s=1.8, **late)]
    missed, last, dead = (0, 0.4, 2, Event.MISSED), (1, 1.6, 1, Event.MISSED), (1, 1.7, 2, Event.LOST)
    for left, goodbye_s, why in (
        ([missed, last], 1.5, ""),
        ([missed, last, dead], 1.5, ""),
        ([missed, last], 1.9, "this learner had left"),
        ([(0, 0.4, 1, Event.MISSED), (1, 1.6, 2, Event.LOST)], 1.5, "this learner had left"),
    ):
        shard = log(pushes, updates(1), lambda_=3, left=left, goodbyes={0: goodbye_s})
        assert check(SoftsyncOptions(n=3), shard).rpartition(": ")[2] == why


def test_a_departure_at_another_time_than_its_clock() -> None:
    pushes = [push(0, 0, 0, arrival_s=0.1, answer_s=1.1), push(1, 0, 0, arrival_s=0.2), push(0, 1, 1, arrival_s=1.2)]
    for left, why in (
        ((1, 1.1, 1), ""),
        ((0, 1.1, 1), "shard 0, events (clock 0, learner 1): DEPARTED at clock 0, but the next entry is of clock 1"),
        ((1, 0.9, 1), "shard 0, events (clock 1, learner 1): DEPARTED at 0.9 s, but clock 1 was from 1.0 to 2.0 s"),
        ((9, 3.0, 1), "shard 0, events (clock 9, learner 1): DEPARTED at clock 9, but the next entry is of clock 1"),
    ):
        made = updates(2) if left[0] == 9 else updates(2, 1)
        assert check(SoftsyncOptions(), log(pushes[: len(made) + 1], made, lambda_=2, left=[left])) == why


# ------------------------------------------------------------------------------------------------ what a learner was given


def test_a_learners_first_mini_batch_is_number_0() -> None:
    assert check(SoftsyncOptions(), log([push(1, 1, 0)], updates(), lambda_=2)).endswith("expected mini-batch 0")


def test_who_was_given_no_weights_computes_from_those_it_had() -> None:
    """Where no answer is recorded; in a log that ends early, it may only not have been written any more."""
    pushes = [push(0, 0, 0), push(0, 1, 1, arrival_s=1.5)]
    for finished, why in ((True, "timestamp 1: the learner got no weights after 0, row 0 says"), (False, "")):
        assert check(SoftsyncOptions(n=1), log(pushes, updates(1), lambda_=1, finished=finished)).partition(": ")[2] == why
    pushes = [push(0, 0, 0, answer_s=1.0, arrival_s=0.5), push(0, 1, 1, arrival_s=1.5), push(0, 2, 2, 0, weight=0.5, arrival_s=2.5)]
    found = check(SoftsyncOptions(n=1), log(pushes, updates(1, 1, 1), lambda_=1, finished=False))
    assert found.endswith("timestamp 0: the learner's gradient before was computed from 1, in row 1")


def test_at_the_instant_of_an_update_the_weights_of_either_clock_may_have_been_given() -> None:
    for timestamp in (0, 1):
        pushes = [push(0, 0, 0, answer_s=1.0), push(1, 0, 1, 0, arrival_s=1.0), push(0, 1, 2, timestamp, arrival_s=2.0)]
        pushes[2]["weight"] = 1 / (2 - timestamp)
        assert check(SoftsyncOptions(n=2), log(pushes, updates(1, 1, 1), lambda_=2)) == ""
    assert "got the weights of clocks 0 to 1 at 1.0 s" in check(
        SoftsyncOptions(n=2), log([*pushes[:2], push(0, 1, 2, arrival_s=2.0)], updates(1, 1, 1), lambda_=2)
    )


def test_who_needs_one_clock_over_all_shards_may_ask_again() -> None:
    """And is given newer weights than at first; others take what they are given."""
    pushes = [push(0, 0, 0, arrival_s=0.5, answer_s=1.1), push(1, 0, 1, arrival_s=1.5), push(0, 1, 2, arrival_s=2.5)]
    assert check(BackupOptions(N=1), log(pushes, updates(1, 1, 1), lambda_=2)) == ""
    assert "got the weights of clock 1 at 1.1 s" in check(SoftsyncOptions(n=2), log(pushes, updates(1, 1, 1), lambda_=2))


def test_what_a_protocol_itself_refuses() -> None:
    pushes = [push(0, 0, 0), push(0, 1, 1, 0)]
    found = check(HardsyncOptions(), log(pushes, updates(1, 1), lambda_=1, finished=False))
    assert found.endswith("hardsync: learner 0 pushed timestamp 0 at clock 1")


# ------------------------------------------------------------------------------------------------------------------ order


def test_a_serial_order_of_two_shards_that_drifted_apart() -> None:
    """Shard 1 is one update behind; learner 1's first gradient came from clocks 1 and 0, and both its later ones wait for it."""
    first = [push(0, 0, 0), push(1, 0, 1), push(0, 1, 2, 1)]
    second = [push(0, 0, 0), push(1, 0, 1, 0), push(0, 1, 2, 1)]
    logs = [log(pushes, updates(1, 1, 1), lambda_=2, shard=shard) for shard, pushes in enumerate((first, second))]
    assert list(serial_order(record(SoftsyncOptions(n=2), *logs))) == [
        Compute(0, 0), Take(0, 0, 0, 0), Update(0, 1), Compute(1, 0), Take(0, 1, 1, 0), Update(0, 2),
        Take(1, 0, 0, 0), Update(1, 1), Take(1, 1, 1, 0), Update(1, 2), Compute(0, 1), Take(1, 2, 0, 1), Update(1, 3),
        Take(0, 2, 0, 1), Update(0, 3),
    ]  # fmt: skip


def test_a_gradient_waits_until_all_shards_have_the_one_before() -> None:
    """Though all it came from is there: else one shard would run away, and gradients pile up for the other."""
    pushes = [push(0, seq, seq, 0) for seq in range(3)]
    logs = [log(pushes, updates(1, 1, 1), lambda_=1, shard=shard) for shard in range(2)]
    actions = list(serial_order(record(SoftsyncOptions(), *logs)))
    under_way = [sum(type(each) is Compute for each in actions[:end]) * 2 - sum(type(each) is Take for each in actions[:end])
                 for end in range(len(actions))]  # fmt: skip
    assert max(under_way) == 2


def test_the_order_ends_where_one_log_ends() -> None:
    whole = [push(0, 0, 0), push(0, 1, 1), push(0, 2, 2)]
    logs = [
        log(whole, updates(1, 1, 1), lambda_=1, finished=False),
        log(whole[:1], updates(1), lambda_=1, shard=1, finished=False),
    ]
    actions = list(serial_order(record(SoftsyncOptions(), *logs)))
    assert actions == [Compute(0, 0), Take(0, 0, 0, 0), Update(0, 1), Take(1, 0, 0, 0), Update(1, 1)]


# -------------------------------------------------------------------------------------------------------------- difference


@pytest.mark.parametrize(
    ("recomputed", "recorded", "elements", "largest", "place"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], 0, 0.0, -1),
        ([1.0, 2.5, 3.0], [1.0, 2.0, 3.25], 2, 0.5, 1),
        ([0.0, 2.0, 3.0], [-0.0, 2.0, 3.0], 1, 0.0, 0),
        ([math.nan, 2.0, 3.0], [math.nan, 2.0, 3.0], 0, 0.0, -1),
        ([math.nan, 2.0, 3.0], [1.0, 2.5, 3.0], 2, math.inf, 0),
        ([math.inf, 2.0, 3.0], [math.inf, 2.0, -math.inf], 1, math.inf, 2),
    ],
)
def test_differences(recomputed: list[float], recorded: list[float], elements: int, largest: float, place: int) -> None:
    model = FlatModel(nn.Linear(2, 1))
    one, other = torch.tensor(recomputed), torch.tensor(recorded)
    one.view(torch.int32)[one.isnan()] ^= 1  # another NaN
    found = difference("theta", one, other, torch.zeros(3), model, [(0, 2), (2, 3)])
    assert (found.elements, found.largest) == (elements, largest)
    assert found.within(0.0) == (elements == 0)
    assert found.place == place
    assert (found.shard, found.parameter) == {-1: (-1, ""), 0: (0, "weight"), 1: (0, "weight"), 2: (1, "bias")}[place]


def test_within_a_share_of_the_way_that_weights_went() -> None:
    model = FlatModel(nn.Linear(2, 1))
    moved = torch.tensor([1.0, 0.0, -4.0])
    found = difference("theta", moved + torch.tensor([0.0, 0.25, 0.0]), moved, torch.zeros(3), model, [(0, 3)])
    assert (found.moved, found.largest) == (4.0, 0.25)
    assert found.within(0.0625)
    assert not found.within(0.06)


def test_a_finished_shard_of_verdicts() -> None:
    """A drop has no place in a run that stops at what is not finite."""
    shard = log([push(0, 0, 0, verdict=Verdict.DROP, reason=2, weight=0.0)], updates(), lambda_=1)
    assert "DROP with weight 0.0 (NONFINITE), the protocol says APPLY" in check(SoftsyncOptions(), shard)
