"""Teams of ranks on virtual nodes: the laws hold, the logs prove the weights, and the sums are those of the ranks in order."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mpisgd import replay
from mpisgd.analysis import about, books, timeline
from mpisgd.base.errors import ConfigError, PeerError
from mpisgd.comm.messages import Tag
from mpisgd.config import Config
from mpisgd.exchange.roles import of_job, world_size
from mpisgd.gradient import stages
from mpisgd.job import parts
from mpisgd.job.parts import NO_OBJECTS, UserObjects
from mpisgd.plan.costs.fit import fit
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Reason, Verdict
from mpisgd.simulate import job
from tests.effort import examples, spread
from tests.virtual.jobs import SIZES, TENSORS, config, merged, simulated, tables
from tests.virtual.scene import WatchedWire
from tests.virtual.test_laws import COMMON, jitters, jobs, obeys

ONE_NODE = {"aggregation": "node", "virtual": {"ranks_per_node": 100}}
COLUMNS = ["clock", "gradients", "samples", "learning_rate"]


def in_teams(size: int, **changes: Any) -> dict[str, Any]:
    return merged({**ONE_NODE, "team_size": size}, changes)


def weights(run: Run) -> bytes:
    states = torch.load(run.path / schema.WEIGHTS, weights_only=True)
    return b"".join(value.numpy().tobytes() for state in states.values() for value in state.values())


# ---------------------------------------------------------------------------------------------------------------- the laws


@st.composite
def team_jobs(draw: st.DrawFn, protocol: str) -> dict[str, Any]:
    """Any job, its ranks in any teams; its protocol counts these."""
    changes = draw(jobs("hardsync"))
    changes["way"] = changes["way"].replace("streamed", "whole")
    changes |= {"aggregation": "node", "team_size": draw(st.sampled_from([0, 0, 1, 2, 3])), "failures": {}}
    virtual = changes["virtual"]
    virtual["slow_nodes"] = {}
    virtual["ranks_per_node"] = draw(st.integers(1, 6))
    size = world_size(Config(shards=changes["shards"], evaluator=changes["evaluator"]), virtual["learners"])
    hosts = [str(rank // virtual["ranks_per_node"]) for rank in range(size)]
    asked = {name: changes[name] for name in ("shards", "placement", "evaluator", "aggregation", "team_size")}
    lambda_ = of_job(Config(**asked), hosts).lambda_
    options: dict[str, dict[str, Any]] = {
        "hardsync": {},
        "backup": {"N": draw(st.integers(1, lambda_))},
        "timeout": {"N": draw(st.integers(1, lambda_)), "N_min": 1, "timeout_s": draw(st.sampled_from([0.0, 0.05, 0.3]))},
    }
    return {**changes, "protocol": {"name": protocol, **options[protocol]}}


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["backup", *(pytest.param(name, marks=pytest.mark.rare) for name in ("hardsync", "timeout"))])
def test_any_virtual_job_in_teams_obeys(protocol: str) -> None:
    @settings(COMMON, max_examples=examples(50))
    @given(team_jobs(protocol), jitters)
    def one(changes: dict[str, Any], jitter_s: float) -> None:
        with tempfile.TemporaryDirectory() as directory:
            run = obeys(Path(directory) / "run", SIZES, changes, jitter_s).run
            assert sum(map(len, run.teams)) == changes["virtual"]["learners"]

    one()


@pytest.mark.parametrize("protocol", spread(["backup", "hardsync", "timeout"], 3))
def test_so_does_one_with_gradients(protocol: str) -> None:
    @settings(COMMON, max_examples=examples(8))
    @given(team_jobs(protocol), jitters)
    def one(changes: dict[str, Any], jitter_s: float) -> None:
        with tempfile.TemporaryDirectory() as directory:
            changed = {**changes, "alpha0": 0.001}
            obeys(Path(directory) / "run", TENSORS, changed, jitter_s)

    one()


@pytest.mark.parametrize("base", spread([SIZES, TENSORS], 2), ids=["sizes", "tensors"])
def test_it_is_the_same_again(base: dict[str, Any], tmp_path: Path) -> None:
    changes = in_teams(2, protocol={"name": "backup", "b": 1}, virtual={"learners": 5}, shards=2)
    runs = [simulated(tmp_path / name, base, **changes) for name in ("first", "again")]
    assert runs[0].teams == [[2, 3], [4, 5], [6]]
    assert tables(runs[0]) == tables(runs[1])


# ---------------------------------------------------------------------------------------------------------------- the sums


@pytest.mark.parametrize(
    "changes",
    spread(
        [
            {"shards": 2, "averaging": 0.9, "optimizer": "adam", "clip_norm": 0.1, "sampling": "replacement", "schedule": "linear"},
            {"model": {"name": "mlp", "hidden": [8], "batch_norm": True}, "virtual": {"learners": 7}, "evaluator": True},
            {"protocol": {"name": "timeout", "timeout_s": 100.0}},
            {"protocol": {"name": "backup", "b": 0}},
        ],
        4,
    ),
)
def test_one_team_has_the_bits_of_hardsync(changes: dict[str, Any], tmp_path: Path) -> None:
    plain = simulated(tmp_path / "plain", TENSORS, **{**changes, "protocol": "hardsync"})
    team = simulated(tmp_path / "team", TENSORS, **merged(ONE_NODE, changes))
    assert (len(team.teams), team.lambda_) == (1, 1)
    assert weights(team) == weights(plain)
    assert np.array_equal(team.updates[COLUMNS], plain.updates[COLUMNS])
    assert team.updates["mean_loss"] == pytest.approx(plain.updates["mean_loss"], rel=1e-12)
    assert team.evaluations[["clock_max", "loss", "error"]].tolist() == plain.evaluations[["clock_max", "loss", "error"]].tolist()
    assert replay.check(team.path) == ""


@pytest.mark.parametrize(("learners", "size", "sizes"), spread([(7, 3, [3, 2, 2]), (5, 3, [3, 2]), (4, 2, [2, 2])], 3, unpack=True))
def test_teams_are_serial_sums_in_that_order(learners: int, size: int, sizes: list[int], tmp_path: Path) -> None:
    """SGD with momentum by hand: within a team first, in the order of its ranks, then over the teams; all counted."""
    changes = in_teams(size, virtual={"learners": learners}, linear_scaling=True, alpha0=0.01)
    run = simulated(tmp_path / "run", TENSORS, **changes)
    assert [len(team) for team in run.teams] == sizes
    made = config(tmp_path / "serial", TENSORS, **changes)
    data = parts.load_data(made, NO_OBJECTS)
    model = parts.build_model(made, parts.meta_of(data), NO_OBJECTS)
    sampling = parts.make_sampling(made, parts.meta_of(data), learners)
    loss = parts.load_loss(made, NO_OBJECTS)
    ranks = [stages.make_gradient(made, model, loss, data, sampling, number) for number in range(learners)]
    theta = nn.Parameter(model.weights.clone())
    optimizer = torch.optim.SGD([theta], lr=0.01 * learners, momentum=0.9)
    for seq in range(int(run.summaries["final_clock"][0])):
        gradients = []
        for rank in ranks:
            model.weights.copy_(theta.detach())
            rank.compute(seq)
            gradients.append(model.gradients.clone())
        theta.grad = in_order([in_order(gradients[sum(sizes[:at]) :][:count]) for at, count in enumerate(sizes)]) / learners
        optimizer.step()
    assert (run.updates["gradients"] == learners).all()
    assert run.updates["learning_rate"] == pytest.approx(0.01 * learners, rel=1e-15)
    assert weights(run) == theta.detach().numpy().tobytes()


def in_order(gradients: list[Tensor]) -> Tensor:
    total = gradients[0].clone()
    for gradient in gradients[1:]:
        total += gradient
    return total


@pytest.mark.slow
def test_a_team_of_other_ranks_computes_other_sums(tmp_path: Path) -> None:
    """Else the test above would show less than it says: float sums depend on their order."""
    runs = [simulated(tmp_path / str(size), TENSORS, **in_teams(size, virtual={"learners": 7})) for size in (7, 3, 2)]
    assert len({weights(run) for run in runs}) == 3


def test_what_a_push_says_of_a_team(tmp_path: Path) -> None:
    """The log of teams beside that of the same ranks alone: counts and samples are sums, losses means, compute_s the slowest's."""
    changes = {"virtual": {"learners": 5}, "compute": {"name": "normal"}}
    alone = simulated(tmp_path / "alone", TENSORS, **changes).pushes[:5]
    pushes = simulated(tmp_path / "teams", TENSORS, **in_teams(3, **changes)).pushes[:2]
    assert pushes["gradients"].tolist() == [3, 2]
    assert pushes["samples"].tolist() == [12, 8]
    losses, compute_s = alone["loss"].tolist(), alone["compute_s"]
    assert pushes["loss"].tolist() == [sum(losses[:3]) / 3, sum(losses[3:]) / 2]
    slowest = np.array([compute_s[:3].max(), compute_s[3:].max()])
    assert (pushes["compute_s"] > slowest).all(), "the sum takes its time"
    assert pushes["compute_s"] == pytest.approx(slowest, rel=1e-4)


def test_stragglers_are_ranks_and_hold_up_their_team(tmp_path: Path) -> None:
    """Rank 3 of those that compute, the last of the second team; its delay is in the team's compute_s."""
    changes = in_teams(2, straggler={"slowdown": {"3": 5.0}}, compute={"name": "constant", "mean_s": 0.1})
    pushes = simulated(tmp_path / "run", SIZES, **changes).pushes
    assert (pushes["delay_s"] == 0).all()
    for learner_id, seconds in ((0, 0.1), (1, 0.5)):
        assert pushes["compute_s"][pushes["learner_id"] == learner_id] == pytest.approx(seconds, rel=1e-3)
    with pytest.raises(ConfigError, match=r"straggler.slowdown\[4\]: there is no learner 4, expected 0 ... 3"):
        simulated(tmp_path / "none", SIZES, **in_teams(2, straggler={"slowdown": {"4": 5.0}}))


@pytest.mark.slow
@pytest.mark.parametrize("batched", spread([True, False], 2))
def test_gradients_may_be_computed_as_one_batch(batched: bool, tmp_path: Path) -> None:
    runs = [
        simulated(tmp_path / name, TENSORS, **in_teams(size, virtual={"batched": batched})) for name, size in (("a", 2), ("b", 4))
    ]
    for run in runs:
        assert replay.check(run.path) == ""
    assert runs[0].evaluations["loss"] == pytest.approx(runs[1].evaluations["loss"], rel=1e-4)


# ------------------------------------------------------------------------------------------------ what is not finite, and fails


class Steep(torch.autograd.Function):
    """Passes its first argument on; the gradient of the second is nearly the largest float32."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, extra: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.full((1,), 3e38)


class Sometimes(nn.Module):
    """In some mini-batches, by their content, the loss is NaN; or one weight's gradient is so steep that two are too much."""

    def __init__(self, steep: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(6, 3))
        self.extra = nn.Parameter(torch.zeros(1))
        self.steep = steep

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.layers(inputs)
        if int(inputs.abs().sum() * 1e4) % 6 < 3 * self.steep + (not self.steep):
            return Steep.apply(output, self.extra) if self.steep else output * float("nan")  # type: ignore[no-untyped-call]
        return output


@pytest.mark.parametrize("steep", [False, True])
def test_the_sum_of_a_team_is_dropped_on_all_shards_alike(steep: bool, tmp_path: Path) -> None:
    """`steep`: each gradient is finite, and so is its loss, but the sum of two is not, and only one shard could see it."""
    user_objects = UserObjects(model=lambda: Sometimes(steep))
    out = tmp_path / "run"
    run = simulated(out, TENSORS, user_objects, **in_teams(2, virtual={"learners": 6}, nonfinite="drop", shards=2))
    verdicts = [run.pushes[run.pushes["shard"] == shard][["learner_id", "seq", "verdict", "reason"]].tolist() for shard in (0, 1)]
    assert sorted(verdicts[0]) == sorted(verdicts[1])
    dropped = run.pushes[run.pushes["verdict"] == Verdict.DROP]
    assert 0 < len(dropped) < len(run.pushes) / 2
    assert (dropped["reason"] == Reason.NONFINITE).all()
    assert np.isnan(dropped["loss"]).all()
    assert set(run.updates["gradients"].tolist()) <= {0, 2, 4, 6}
    assert len(set(run.updates["gradients"].tolist())) > 1
    assert replay.check(out, user_objects) == ""


def test_a_rank_that_fails_ends_the_job(tmp_path: Path) -> None:
    """A member as well as a leader; nobody leaves a team alone."""
    for number in (0, 1, 3):
        with pytest.raises(PeerError, match=f"learner {number} failed at .* the job is ended"):
            simulated(tmp_path / str(number), SIZES, **in_teams(2, failures={"at_s": {str(number): 0.5}, "then": "stop"}))
    with pytest.raises(ConfigError, match=r"failures.then = 'leave': expected 'stop' beside .*: no rank can leave alone"):
        simulated(tmp_path / "leave", SIZES, **in_teams(2, failures={"at_s": {"1": 0.5}}))


# --------------------------------------------------------------------------------------------------------- what crosses the wire


class Counting(WatchedWire):
    """Counts the bytes of slices that are sent."""

    nbytes: ClassVar[dict[int, int]] = {}

    def start(self, dest: int, tag: int, fields: Any, *bodies: Any) -> Any:
        self.nbytes[tag] = self.nbytes.get(tag, 0) + sum(body.nbytes for body in bodies)
        return super().start(dest, tag, fields, *bodies)


def test_teams_of_k_send_and_receive_one_kth_of_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "VirtualWire", Counting)
    crossed = {}
    for size in (0, 1, 2, 8):
        Counting.nbytes = {}
        virtual = {"learners": 8, "train_samples": 64}
        simulated(
            tmp_path / str(size),
            SIZES,
            **merged({"virtual": virtual, "shards": 2}, in_teams(size) if size else {"way": "whole"}),
        )
        crossed[size] = dict(Counting.nbytes)
    for size, tag in itertools.product((1, 2, 8), (Tag.PUSH, Tag.ANSWER)):
        assert crossed[0][tag] == size * crossed[size][tag] > 0


def test_over_a_slow_network_a_team_is_faster(tmp_path: Path) -> None:
    """8 ranks a node, a vector takes 0.1 s over a node's link: what 16 ranks wait for, two teams do not."""
    slow = {
        "virtual": {"learners": 16, "ranks_per_node": 8, "parameters": 250_000},
        "network": {"bandwidth": 1e7, "node_bandwidth": 1e7, "local_bandwidth": 1e10},
        "placement": "spread",
        "evaluator": False,
    }
    seconds = [
        simulated(tmp_path / name, SIZES, **merged(slow, changes)).updates["time_s"][-1]
        for name, changes in (("alone", {}), ("teams", {"aggregation": "node"}))
    ]
    assert seconds[0] > 3 * seconds[1]


def test_it_is_no_aggregation_without_a_node(tmp_path: Path) -> None:
    """Of nodes with one rank each, teams have one rank each: the bits and counts of hardsync."""
    plain = simulated(tmp_path / "plain", TENSORS)
    alone = simulated(tmp_path / "alone", TENSORS, aggregation="node")
    assert alone.teams == [[1], [2], [3], [4]]
    assert weights(alone) == weights(plain)
    assert plain.teams == []


@pytest.mark.parametrize("protocol", ["allreduce", "hardsync"])
def test_ranks_of_a_node_share_memory_without_teams(protocol: str, tmp_path: Path) -> None:
    run = simulated(tmp_path / "run", TENSORS, protocol=protocol, virtual={"learners": 3, "ranks_per_node": 4})
    assert run.teams == [] and run.lambda_ == 3
    told = dict(about.header(run, about.status(run), "").rows)
    assert told["exchange"] == "gradients and weights lie in memory that all ranks share"


# ------------------------------------------------------------------------------------------------------------ what is told of it


def test_what_a_report_a_timeline_and_a_plan_say_of_teams(tmp_path: Path) -> None:
    run = simulated(tmp_path / "run", SIZES, **in_teams(3, virtual={"learners": 5}))
    told = dict(about.header(run, about.status(run), "").rows)
    assert (told["learners λ"], told["aggregation"]) == ("2", "learners are teams of 2 to 3 ranks; 5 ranks compute")
    even = simulated(tmp_path / "even", SIZES, **in_teams(2))
    told = dict(about.header(even, about.status(even), "").rows)
    assert told["aggregation"] == "learners are teams of 2 ranks; 4 ranks compute"
    alone = simulated(tmp_path / "alone", SIZES)
    assert "aggregation" not in dict(about.header(alone, about.status(alone), "").rows)
    assert books.imbalances(run) == []
    assert timeline.ranks_of(run).learners == [1, 4]
    with pytest.raises(ConfigError, match=r"is a run of teams \(aggregation = 'node'\): .*; expected first a run with aggregation"):
        fit(run)


def test_a_book_that_counts_pushes_for_gradients_does_not_balance(tmp_path: Path) -> None:
    """Law 3: the updates' divisors are the ranks of the pushes that they are made of."""
    run = simulated(tmp_path / "run", SIZES, **in_teams(2))
    run.pushes["gradients"] = 1
    (line,) = books.imbalances(run)
    assert line == f"shard 0: {len(run.pushes)} gradients applied, but the updates sum {2 * len(run.pushes)}"
