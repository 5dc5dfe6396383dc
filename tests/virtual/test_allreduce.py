"""allreduce on virtual ranks: seconds by hand, the bits of hardsync, an evaluator beside it, and what is refused."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mpisgd import replay
from mpisgd.analysis.timeline import look
from mpisgd.base.errors import ConfigError, DivergenceError, PeerError
from mpisgd.comm.messages import LAYOUTS, Fields, Tag
from mpisgd.config import config_file
from mpisgd.exchange.collectives.team_channel import TeamChannel
from mpisgd.exchange.exchange import Report
from mpisgd.job.parts import UserObjects
from mpisgd.plan import fit
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Event, Verdict
from mpisgd.simulate import simulate
from mpisgd.simulate.sized import Memory, SizedVector
from mpisgd.vectors.body import Pool
from tests.effort import spread
from tests.virtual.jobs import SIZES, TENSORS, config, simulated, tables
from tests.virtual.scene import Scene, packed

# ------------------------------------------------------------------------------------------------------------ by hand

#: Slices of 500 parameters of two learners take 1 s; a message without bytes 0.25 s.
SLOW = {
    "virtual": {"learners": 2, "parameters": 1000, "train_samples": 24},
    "compute": {"name": "constant", "mean_s": 10.0},
    "network": {"latency_s": 0.25, "overhead_s": 0.0, "bandwidth": 2000, "node_bandwidth": 2000},
    "service": {"gradient_s_per_byte": 0.0, "update_s_per_byte": 0.0, "gradient_s": 0.5, "update_s": 2.0},
}
SLICE_S = 0.25 + 1.0


def test_the_seconds_of_an_iteration_by_hand(tmp_path: Path) -> None:
    """The initial weights are shared; compute 10 s, headers 0.25, slices 1.25, two sums of 0.5, an update of 2, slices again."""
    run = simulated(tmp_path / "run", SIZES, protocol="allreduce", **SLOW)
    period_s = 10 + 0.25 + SLICE_S + 2 * 0.5 + 2 + SLICE_S
    for shard in range(2):
        updates, rows = (table[table["shard"] == shard] for table in (run.updates, run.pushes))
        assert updates["time_s"] == pytest.approx(period_s * np.arange(1, 4), abs=1e-9), "the first has shared before it"
        assert rows["learner_id"].tolist() == [0, 1] * 3
        assert rows["arrival_s"].tolist() == pytest.approx(np.repeat(SLICE_S + 10.25 + period_s * np.arange(3), 2).tolist())
        assert rows["answer_s"][:4].tolist() == pytest.approx(np.repeat(period_s * np.arange(1, 3), 2).tolist())
        assert np.isnan(rows["answer_s"][4:]).all(), "after the last update there are no weights to be had"
        assert rows["push_s"][2:].tolist() == pytest.approx([0.25 + SLICE_S] * 4)
        assert rows["wait_s"][2:].tolist() == pytest.approx([2 * 0.5 + 2] * 4)
        assert rows["pull_s"].tolist() == pytest.approx([SLICE_S] * 6)


def test_everybody_waits_for_the_slowest(tmp_path: Path) -> None:
    run = simulated(tmp_path / "run", SIZES, protocol="allreduce", **SLOW, straggler={"slowdown": {"1": 3.0}})
    assert np.diff(run.updates["time_s"][run.updates["shard"] == 0]) == pytest.approx(20 + 15.75)
    fast = run.pushes[(run.pushes["learner_id"] == 0) & (run.pushes["seq"] > 0)]
    assert fast["push_s"] == pytest.approx(20 + 0.25 + SLICE_S), "the exchange waits for the gradient that comes last"


def test_as_many_bytes_as_a_reduce_scatter_and_no_link_is_everybodys_first(tmp_path: Path) -> None:
    """Of four, each sends three quarters of the vector, and receives as many bytes at the same time."""
    virtual = {"learners": 4, "parameters": 1000, "train_samples": 32}
    run = simulated(tmp_path / "run", SIZES, protocol="allreduce", **{**SLOW, "virtual": virtual})
    assert np.diff(run.updates["time_s"][run.updates["shard"] == 0]) == pytest.approx(10 + 2 * 0.25 + 2 * (0.25 + 3 * 0.5) + 4)


# --------------------------------------------------------------------------------------------------------- the team


@pytest.mark.parametrize("size", range(1, 10))
def test_a_team_tells_exchanges_and_shares(size: int) -> None:
    """Slices of different lengths, ranks in no order, and one rank that takes no part."""
    scene = Scene(size + 1)
    ranks = tuple(range(size, 0, -1))
    edges = [place * (place + 1) // 2 for place in range(size + 1)]
    bounds = list(zip(edges[:-1], edges[1:], strict=True))
    told: dict[int, list[Fields]] = {}
    exchanged, shared, meanwhile = {}, {}, []

    def main(place: int) -> None:
        wire = scene.wires[ranks[place]]
        team = wire.team(ranks, bounds)
        own = place + 1
        wire.work(place * 7 % 5)
        vector = np.arange(edges[-1], dtype=np.float32) + 100 * place
        exchanged[place], shared[place] = np.zeros(size * own, np.float32), np.zeros(edges[-1], np.float32)
        told[place] = team.tell(Tag.GOODBYE, (place, 10 * place))
        team.exchange(vector, exchanged[place])
        team.finish(team.share(np.full(own, place, np.float32), shared[place]), lambda: meanwhile.append(place))
        team.disband()

    scene.run({rank: lambda place=place: main(place) for place, rank in enumerate(ranks)})  # type: ignore[misc]
    assert sorted(meanwhile) == list(range(size))
    for place, (start, end) in enumerate(bounds):
        assert told[place] == [(other, 10 * other) for other in range(size)]
        expected = [np.arange(start, end) + 100 * other for other in range(size)]
        assert exchanged[place].tolist() == np.concatenate(expected).tolist()
        assert shared[place].tolist() == [owner for owner, (start, end) in enumerate(bounds) for _ in range(start, end)]


class Told:
    """A wire, and a team that was told these headers."""

    rank = 0
    signal = 0
    take_body = None

    def __init__(self, headers: list[Fields]) -> None:
        self.headers = headers
        self.clock = self

    def now_ns(self) -> int:
        return 0

    def sleep(self, seconds: float) -> None: ...

    def tell(self, tag: int, fields: Fields) -> list[Fields]:
        return self.headers


@pytest.mark.parametrize(("field", "value"), [("learner_id", 0), ("nbytes", 36)])
def test_a_header_of_another_learner_or_model_is_refused_before_slices_move(field: str, value: int) -> None:
    vector: Any = SizedVector(10)
    fields = dict.fromkeys(LAYOUTS[Tag.ROUND].fields, 0) | {"nbytes": 40}
    headers = [tuple(fields.values()), tuple((fields | {"learner_id": 1, field: value}).values())]
    told: Any = Told(headers)
    roles = packed(shards=0, learners=2)
    channel = TeamChannel(told, roles, 0, (0, 10), team=told, memory=Memory(vector, vector), row=Pool(vector).row(2))
    said = {"learner_id": "learner 1 calls itself learner 0", "nbytes": "learner 1 has a gradient of 36 bytes, expected 40"}
    with pytest.raises(PeerError, match=said[field]):
        channel.exchange(Report(0, samples=1, loss=0.0, compute_ns=0, delay_ns=0))


# ------------------------------------------------------------------------------------------------------ beside hardsync

#: What differs from TENSORS, in both.
ALIKE: dict[str, dict[str, Any]] = {
    "plain": {},
    "uneven": {"straggler": {"slowdown": {"0": 3.0}, "delay": "exponential"}},
    "adam": {"optimizer": "adam", "alpha0": 0.01, "clip_norm": 0.1, "averaging": 0.9},
    "schedule": {"schedule": {"name": "linear", "warmup_epochs": 0.5}, "linear_scaling": True, "alpha0": 0.01},
    "replacement": {"sampling": "replacement", "optimizer": {"name": "sgd", "momentum": 0.9, "nesterov": True}},
    "drops": {"nonfinite": "drop"},
    "diverges": {"alpha0": 1e30, "nonfinite": "continue"},
    "one": {"virtual": {"learners": 1}},
    "bfloat16": {"push_format": "bfloat16", "pull_format": "bfloat16", "nonfinite": "drop", "clip_norm": 0.5, "averaging": 0.9},
    "few": {"push_format": "topk", "topk_share": 0.2, "virtual": {"learners": 3}, "accumulation": 2},
    "pulls": {"pull_format": "bfloat16", "virtual": {"learners": 5}, "evaluator": True, "epochs": 0.5},
    "seven": {"virtual": {"learners": 7, "ranks_per_node": 3}, "evaluator": True},
}
QUICK = (("adam", True), ("drops", False), ("bfloat16", False), ("few", False))
ROUNDED = ("bfloat16", "few", "pulls")
"""By messages alone: in shared memory nothing is exchanged."""


def now_and_then_nan(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss that some mini-batches have no gradient of."""
    return torch.nn.functional.cross_entropy(output, target) * (math.nan if int(target.sum()) % 3 == 0 else 1.0)


BROUGHT = {"drops": UserObjects(loss=now_and_then_nan)}


@pytest.mark.parametrize(
    ("name", "shared"),
    [
        pytest.param(*case, marks=() if case in QUICK else (pytest.mark.slow, pytest.mark.rare)[: 1 + (number % 3 > 0)])
        for number, case in enumerate(itertools.product(ALIKE, (False, True)))
        if not case[1] or case[0] not in ROUNDED
    ],
)
def test_the_bits_of_hardsync(name: str, shared: bool, tmp_path: Path) -> None:
    """The same weights, evaluations, losses and decisions, by messages or in shared memory; the log proves them."""
    changes, user_objects = {"epochs": 1, **ALIKE[name]}, BROUGHT.get(name, UserObjects())
    changes["virtual"] = {
        **TENSORS["virtual"],
        **changes.get("virtual", {}),
        **({"ranks_per_node": 9} if shared else {}),
    }
    learners = changes["virtual"]["learners"]
    run = simulated(tmp_path / "allreduce", TENSORS, user_objects, protocol="allreduce", **changes)
    twin = simulated(tmp_path / "hardsync", TENSORS, user_objects, protocol="hardsync", shards=learners, **changes)
    ours, theirs = (torch.load(each.path / schema.WEIGHTS, weights_only=True) for each in (run, twin))
    assert ours.keys() == theirs.keys()
    for vector, state in ours.items():
        for key, value in state.items():
            assert value.numpy().tobytes() == theirs[vector][key].numpy().tobytes()
    for table, columns in {
        "pushes": [
            "shard",
            "clock",
            "timestamp",
            "learner_id",
            "seq",
            "samples",
            "verdict",
            "reason",
            "learning_rate",
            "loss",
            "rounded",
        ],
        "updates": ["shard", "clock", "gradients", "samples", "learning_rate", "mean_loss", "gradient_sq", "sum_sq"],
        "evaluations": ["snapshot", "clock_min", "clock_max", "samples", "averaged", "loss", "error"],
        "summaries": ["shard", "final_clock", "samples", "received", "pushed", "diverged"],
    }.items():
        one, other = (getattr(each, table)[columns] for each in (run, twin))
        for column in columns:
            assert np.array_equal(one[column], other[column], equal_nan=one[column].dtype.kind == "f"), (table, column)
    assert replay.check(run.path, user_objects) == ""
    if name == "drops":
        gradients = run.updates["gradients"]
        assert set(run.pushes["verdict"]) == {Verdict.APPLY, Verdict.DROP}
        assert gradients.min() < gradients.max() == run.lambda_, "the divisor is counted"
    assert run.summaries["diverged"].any() == (name == "diverges")


def test_a_gradient_that_is_not_finite_ends_the_job(tmp_path: Path) -> None:
    with pytest.raises(DivergenceError, match="not finite; lower alpha0"):
        simulate(config(tmp_path / "run", TENSORS, protocol="allreduce", alpha0=1e30))


# ---------------------------------------------------------------------------------------------------------- evaluation


@pytest.mark.parametrize("every_epochs", spread([0.3, 0.0], 2))
def test_an_evaluator_of_its_own_changes_nothing_but_when(every_epochs: float, tmp_path: Path) -> None:
    """Law 7: where the network costs nothing, no update is a nanosecond later; and it evaluates the same weights."""
    free = {"latency_s": 0.0, "overhead_s": 0.0, "bandwidth": 1e18, "node_bandwidth": 1e18, "local_bandwidth": 1e18}
    common: dict[str, Any] = {"protocol": "allreduce", "evaluation": {"every_epochs": every_epochs, "train": True}, "network": free}
    own, none = (simulated(tmp_path / f"{on}", TENSORS, **common, evaluator=on) for on in (True, False))
    assert own.environment["world_size"] == none.environment["world_size"] + 1
    assert own.updates.tobytes() == none.updates.tobytes()
    columns = ["snapshot", "clock_min", "clock_max", "train", "loss", "error", "taken_s"]
    ours, theirs = (run.evaluations[columns][:-2] for run in (own, none))  # the last weights are taken when they are asked for
    assert ours.tolist() == theirs.tolist()
    assert own.evaluations["loss"][-2:].tolist() == none.evaluations["loss"][-2:].tolist()
    assert len(ours) == 2 * len(np.unique(own.events["clock"][own.events["kind"] == Event.SNAPSHOT]))


def test_snapshots_are_pulled_while_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    whole = TeamChannel.snapshot_pull

    def noting(channel: TeamChannel) -> Any:
        found = whole(channel)
        if found is not None:
            asked.append(channel.now_s())
        return found

    monkeypatch.setattr(TeamChannel, "snapshot_pull", noting)
    run = simulated(tmp_path / "run", TENSORS, protocol="allreduce", evaluator=True, evaluation={"every_epochs": 0.3})
    assert len(asked) > 4
    second_s = run.updates["time_s"][run.updates["clock"] == 2].min()
    assert sorted(asked)[3] < second_s, "all four at their first mini-batches, not one after the other"


# -------------------------------------------------------------------------------------------------- a run's directory


def test_a_run_says_how_many_shards_it_had_and_its_configuration_runs_again(tmp_path: Path) -> None:
    run = simulated(tmp_path / "run", SIZES, protocol="allreduce", epochs=0.2)
    assert run.shards == run.lambda_ == run.environment["world_size"] == 4
    assert run.environment["shard_ranks"] == [0, 1, 2, 3]
    again = simulate(config_file.from_mapping({**run.config, "out": str(tmp_path / "again")}))
    assert tables(Run(again.path)) == tables(run)
    with pytest.raises(ConfigError, match="a run of allreduce, where learners double as shards; expected first a run with"):
        fit(run)


@pytest.mark.parametrize("evaluator", spread([True, False], 2))
def test_its_timeline_has_a_row_for_each_learner_and_each_shard(evaluator: bool, tmp_path: Path) -> None:
    run = simulated(tmp_path / "run", TENSORS, protocol="allreduce", evaluator=evaluator, epochs=0.5)
    ranks = look(run).ranks
    assert (list(ranks.learners), ranks.dedicated_evaluator) == ([0, 1, 2, 3], evaluator)
    assert not {*ranks.shards} & {*ranks.learners, ranks.evaluator}
    assert [ranks.host(rank) for rank in ranks.shards] == [ranks.host(rank) for rank in ranks.learners]


@pytest.mark.slow
def test_many_learners(tmp_path: Path) -> None:
    run = simulated(tmp_path / "run", SIZES, protocol="allreduce", virtual={"learners": 50}, epochs=1)
    assert run.summaries["final_clock"].tolist() == [2] * 50
    assert all(books.balanced and books.applied == 100 for books in run.books())


# --------------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"shards": 2}, r"shards = 2: allreduce has as many shards as learners, 4"),
        (
            {"failures": {"at_s": {"0": 1.0}}},
            r"failures\.then = 'leave': expected 'stop'.*no rank can leave alone: .*; allowed with [^;]*ssp$",
        ),
        ({"failures": {"mean_s": 1.0}}, r"failures\.then = 'leave'"),
        ({"virtual": {"parameters": 3}}, r"shards = 4: expected at most the number of parameters, 3"),
    ],
)
def test_what_cannot_be_is_refused_before_the_start(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        simulate(config(tmp_path / "run", SIZES, protocol="allreduce", **changes))
    assert not (tmp_path / "run").exists()


def test_a_failure_ends_the_job(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"learner 2 failed at .* the job is ended"):
        simulate(config(tmp_path / "run", SIZES, protocol="allreduce", failures={"at_s": {"2": 0.5}, "then": "stop"}))
