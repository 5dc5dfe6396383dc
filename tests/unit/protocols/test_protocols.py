"""The protocols as pure functions, and under random schedules of pushes, departures and discards (DESIGN 4)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpisgd.base.errors import ConfigError, ProtocolError
from mpisgd.protocols import (
    AsyncOptions,
    BackupOptions,
    DownpourOptions,
    HardsyncOptions,
    Protocol,
    ProtocolOptions,
    SoftsyncOptions,
    SspOptions,
    TimeoutOptions,
    VersionedOptions,
)
from mpisgd.rules.membership import Gone
from mpisgd.rules.modulation import Modulation
from mpisgd.rules.rules import GIVE, SUM, Rules
from mpisgd.rules.verdict import Kind, Verdict
from tests.effort import examples, thinned

OPTIONS: dict[str, Callable[[int], ProtocolOptions]] = {
    "hardsync": lambda _: HardsyncOptions(),
    "softsync n=1": lambda _: SoftsyncOptions(n=1),
    "softsync n=2": lambda lambda_: SoftsyncOptions(n=min(2, lambda_)),
    "softsync n=lambda": lambda lambda_: SoftsyncOptions(n=lambda_, modulation="none"),
    "backup b=0": lambda _: BackupOptions(b=0),
    "backup b=1": lambda lambda_: BackupOptions(b=min(1, lambda_ - 1)),
    "backup N=1": lambda _: BackupOptions(N=1),
    "backup late": lambda lambda_: BackupOptions(b=min(1, lambda_ - 1), late="apply"),
    "timeout": lambda lambda_: TimeoutOptions(N_min=min(2, lambda_)),
    "versioned": lambda _: VersionedOptions(),
    "versioned 2": lambda lambda_: VersionedOptions(grads_to_wait=min(2, lambda_)),
    "versioned tolerance=1": lambda lambda_: VersionedOptions(grads_to_wait=1, tolerance=1),
    "async": lambda _: AsyncOptions(),
    "async ramp": lambda _: AsyncOptions(warm_up=3, ramp=20),
    "downpour": lambda _: DownpourOptions(n_push=2, n_fetch=4, warm_up=5),
    "async most=1": lambda _: AsyncOptions(most_staleness=1),
    "ssp s=0": lambda _: SspOptions(slack=0),
    "ssp s=2": lambda _: SspOptions(slack=2),
}


# -------------------------------------------------------------------------------------------------------------- one by one


def test_hardsync_refuses_what_its_own_law_excludes() -> None:
    with pytest.raises(ProtocolError, match="hardsync: learner 1 pushed timestamp 2 at clock 3"):
        HardsyncOptions().make(2).on_push(1, 2, 3)


@pytest.mark.parametrize(
    ("lambda_", "n", "c"), [(30, 1, 30), (30, 2, 15), (30, 30, 1), (30, 4, 7), (30, 16, 1), (5, 3, 1), (7, 2, 3), (1, 1, 1)]
)
def test_softsync_updates_at_the_floor_of_lambda_over_n(lambda_: int, n: int, c: int) -> None:
    protocol = SoftsyncOptions(n=n).make(lambda_)
    assert protocol.gradients_per_update == c
    for _ in range(2):
        for count in range(1, c + 1):
            assert protocol.expects() is None
            protocol.on_push(0, 0, 0)
            assert protocol.update_due() is (count == c)
        protocol.on_update()
    assert protocol.may_pull(0, 0)
    assert protocol.next_clock(4) == 4


def test_backup_still_waits_for_a_learner_whose_stale_gradient_was_not_finite() -> None:
    """Its gradient for this update is still to come: else N gradients are at hand and one makes the update."""
    protocol = BackupOptions(N=2, b=1).make(3)
    protocol.on_discard(2, 0, 1)
    protocol.on_push(0, 1, 1)
    protocol.on_discard(1, 1, 1)
    assert not protocol.update_due()
    protocol.on_push(2, 1, 1)
    assert protocol.update_due()


@pytest.mark.parametrize(
    ("options", "lambda_", "wanted"),
    [
        (BackupOptions(), 5, 4),
        (BackupOptions(b=0), 5, 5),
        (BackupOptions(b=4), 5, 1),
        (BackupOptions(N=3), 5, 3),
        (BackupOptions(N=3, b=2), 5, 3),
        (BackupOptions(N=1), 1, 1),
    ],
)
def test_wanted(options: BackupOptions, lambda_: int, wanted: int) -> None:
    assert options.wanted(lambda_) == options.make(lambda_).gradients_per_update == wanted


@pytest.mark.parametrize(
    ("options", "lambda_", "message"),
    [
        (SoftsyncOptions(n=5), 4, r"protocol\.n = 5: expected 1 <= n <= lambda = 4 learners, for c = floor"),
        (BackupOptions(N=5), 4, r"protocol\.N = 5: expected at most lambda = 4 learners"),
        (BackupOptions(N=3, b=2), 4, r"protocol\.N \+ protocol\.b = 3 \+ 2 = 5: expected lambda = 4 learners"),
        (BackupOptions(N=1, b=2), 4, r"protocol\.N \+ protocol\.b = 1 \+ 2 = 3: expected lambda = 4 learners"),
        (BackupOptions(b=4), 4, r"protocol\.b = 4: expected N = lambda - b = 4 - 4 >= 1"),
        (TimeoutOptions(N=5), 4, r"protocol\.N = 5: expected at most lambda = 4 learners"),
        (TimeoutOptions(N_min=5), 4, r"protocol\.N_min = 5: expected at most lambda = 4 learners"),
        (VersionedOptions(grads_to_wait=5), 4, r"protocol\.grads_to_wait = 5: expected at most lambda = 4 learners"),
        (BackupOptions(), 1, r"protocol\.b = 1: expected N = lambda - b = 1 - 1 >= 1"),
    ],
)
def test_contradictions_are_refused_with_their_numbers(options: ProtocolOptions, lambda_: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options.make(lambda_)


# ------------------------------------------------------------------------------------------------- under random schedules

FRESH = {"hardsync", "backup b=0", "backup b=1", "backup N=1", "timeout", "versioned", "versioned 2"}
"""Only gradients of the present clock are applied."""
UNEVEN = {"timeout", "backup late"}
"""An update may be made of fewer or more gradients than usual."""


@dataclass
class OneShard:
    """A shard and its learners, in a few lines: the rules that `shard.py` obeys, about gradients that are only counted.

    `next_of[l]` is the message that learner l is blocked in: a push of a timestamp, or a pull of a least clock. `seq[l]` is its
    mini-batch; `done[l]` are those of which it need not compute another gradient.
    """

    protocol: Protocol
    lambda_: int
    next_of: dict[int, tuple[str, int]] = field(default_factory=dict)
    summed: list[int] = field(default_factory=list)
    updates: list[list[int]] = field(default_factory=list)
    applied: list[tuple[int, int, float]] = field(default_factory=list)
    dropped: int = 0
    rejected: int = 0
    pushes: int = 0
    done: dict[int, list[int]] = field(default_factory=dict)
    pushed: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rules = Rules(self.protocol, self.lambda_, math.inf)
        self.next_of = {learner_id: ("pull", 0) for learner_id in range(self.lambda_)}
        self.done = {learner_id: [] for learner_id in range(self.lambda_)}
        self.pushed = dict.fromkeys(range(self.lambda_), 0)

    def enabled(self) -> list[int]:
        expected = self.rules.turn()
        return [who for who, (what, _) in self.next_of.items() if what == "pull" or expected in (None, who)]

    def take(self, learner_id: int, *, leaves: bool, finite: bool) -> None:
        what, value = self.next_of.pop(learner_id)
        if what == "pull":
            if self.rules.on_pull(learner_id, value) is GIVE:
                self.next_of[learner_id] = ("push", self.rules.clock)
        elif leaves:
            self.rules.membership.on_departure(learner_id, Gone.LEFT)
        else:
            self.next_of[learner_id] = ("pull", self.protocol.next_clock(value))
            self.judge(learner_id, value, finite)
        self.update_and_answer()

    def time_out(self) -> None:
        self.rules.on_timeout()
        self.update_and_answer()

    def update_and_answer(self) -> None:
        while self.rules.update_due():
            self.updates.append(self.summed)
            self.summed = []
            self.rules.on_update(0)
        for who in self.rules.ready():
            self.next_of[who] = ("push", self.rules.clock)

    def judge(self, learner_id: int, timestamp: int, finite: bool) -> None:
        self.pushes += 1
        self.pushed[learner_id] += 1
        seq = len(self.done[learner_id])
        assert 0 <= timestamp <= self.rules.clock, "staleness is never negative"
        assert self.rules.on_push(learner_id, timestamp) is SUM
        verdict = self.rules.judge(learner_id, timestamp, seq, finite)
        if verdict.kind is Kind.APPLY:
            self.summed.append(learner_id)
            self.applied.append((timestamp, self.rules.clock, verdict.weight))
        elif verdict.kind is Kind.REJECT:
            self.rejected += 1
            return
        else:
            self.dropped += 1
        self.done[learner_id].append(seq)


@pytest.mark.deeper
@settings(max_examples=examples(600, of=8), deadline=None)
@given(
    kind=st.sampled_from(sorted(OPTIONS)),
    lambda_=st.integers(1, 6),
    seed=st.integers(0, 2**32),
    leaving=st.sampled_from([0.0, 0.02, 0.1]),
    nonfinite=st.sampled_from([0.0, 0.1, 0.5]),
    timeouts=st.sampled_from([0.0, 0.1]),
)
def test_any_schedule_keeps_the_laws(kind: str, lambda_: int, seed: int, leaving: float, nonfinite: float, timeouts: float) -> None:
    chance = random.Random(seed)
    protocol = OPTIONS[kind](lambda_).make(lambda_)
    shard = OneShard(protocol, lambda_)
    for _ in range(150):
        enabled = shard.enabled()
        if not shard.next_of and not shard.rules.waiting:
            break  # all have left
        assert enabled, f"nobody can go on: {shard}"
        if chance.random() < timeouts:
            shard.time_out()
            continue
        shard.take(chance.choice(enabled), leaves=chance.random() < leaving, finite=chance.random() >= nonfinite)
    assert shard.pushes == len(shard.applied) + shard.dropped + shard.rejected
    assert sum(len(update) for update in shard.updates) + len(shard.summed) == len(shard.applied)
    assert len(shard.updates) == shard.rules.clock
    if kind in FRESH:
        assert all(timestamp == clock and weight == 1.0 for timestamp, clock, weight in shard.applied)
    if kind in FRESH and not kind.startswith("versioned"):
        assert all(len(set(update)) == len(update) for update in shard.updates)
    if not kind.startswith("versioned"):
        assert not shard.rejected
    if kind == "versioned tolerance=1":
        assert all(clock - timestamp <= 1 for timestamp, clock, _ in shard.applied)
    if kind == "async most=1":
        assert all(clock - timestamp <= 1 for timestamp, clock, _ in shard.applied)
    if kind == "hardsync":
        assert all(update == sorted(update) for update in shard.updates)
    if not leaving and not nonfinite and kind not in UNEVEN:
        assert all(len(update) == protocol.gradients_per_update for update in shard.updates)
    if kind == "softsync n=2":
        assert all(weight == 1 / max(1, clock - timestamp) for timestamp, clock, weight in shard.applied)


# -------------------------------------------------------------------------------------------------------------------- ssp


def ahead(seed: int, lambda_: int, slack: int, leaving: float) -> int:
    """The most mini-batches that a learner was ahead of the slowest when it was given weights, in one random schedule.

    Learners differ in speed by up to 50 times.
    """
    chance = random.Random(seed)
    shard = OneShard(SspOptions(slack=slack).make(lambda_), lambda_)
    speed = [chance.choice([1.0, 1.0, 5.0, 50.0]) for _ in range(lambda_)]
    most = 0
    for _ in range(60):
        enabled = shard.enabled()
        if not enabled:
            break
        who = chance.choices(enabled, [speed[each] for each in enabled])[0]
        shard.take(who, leaves=chance.random() < leaving, finite=chance.random() > 0.05)
        present = shard.protocol.present
        given = [each for each, (what, _) in shard.next_of.items() if what == "push"]
        if given and present:
            most = max(most, max(shard.pushed[each] for each in given) - min(shard.pushed[each] for each in present))
    return most


@pytest.mark.slow
def test_the_bound_of_ssp_holds_in_all_schedules_and_is_reached() -> None:
    most = {slack: 0 for slack in (0, 1, 3)}
    for seed in thinned(range(10_000), 17):  # odd to all that takes turns
        slack = (0, 1, 3)[seed % 3]
        found = ahead(seed, lambda_=2 + seed % 4, slack=slack, leaving=0.02 * (seed % 2))
        assert found <= slack, f"seed {seed}: {found} ahead, slack {slack}"
        most[slack] = max(most[slack], found)
    assert most == {0: 0, 1: 1, 3: 3}


# ------------------------------------------------------------------------------------------------------------- modulation


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("none", [1.0, 1.0, 1.0, 1.0]),
        ("inverse", [1.0, 1.0, 1 / 2, 1 / 3]),
        ("inverse_plus_one", [1.0, 1 / 2, 1 / 3, 1 / 4]),
        ("exponential:0.5", [1.0, math.exp(-0.5), math.exp(-1.0), math.exp(-1.5)]),
        ("exponential:0", [1.0, 1.0, 1.0, 1.0]),
        ("tests.unit.protocols.test_protocols:own_rule", [7.0, 7.0, 5.0, 3.0]),
    ],
)
def test_the_weight_of_a_stale_gradient(name: str, weights: list[float]) -> None:
    modulation = Modulation(name)
    assert [modulation.applied(timestamp, 7) for timestamp in (7, 6, 5, 4)] == [Verdict(Kind.APPLY, each) for each in weights]


def own_rule(staleness: int, clock: int) -> float:
    return float(max(0, clock - 2 * max(0, staleness - 1)))


def no_number(staleness: int, clock: int) -> str:
    return "much"


def no_rule(staleness: int, clock: int) -> float:
    return math.nan


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exponential:", r"protocol\.modulation = 'exponential:': expected exponential: and a finite number >= 0"),
        ("exponential:-1", r"protocol\.modulation = 'exponential:-1': expected exponential: and a finite number >= 0"),
        ("exponential:x", r"protocol\.modulation = 'exponential:x': expected"),
        ("tests.unit.protocols.test_protocols:nothing", r"protocol\.modulation = .* has no attribute 'nothing'"),
        ("tests.unit.protocols.test_protocols:no_number", r"weight 'much' at tau = 0, clock = 0; expected a finite number >= 0"),
        ("tests.unit.protocols.test_protocols:no_rule", r"weight nan at tau = 0, clock = 0; expected a finite number >= 0"),
    ],
)
def test_a_rule_that_is_none_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Modulation(name)
