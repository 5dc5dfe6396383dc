"""Learners of several ranks, one for each stage of the model: the laws over random jobs, replay, and the bits of one rank."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from mpisgd import data, models, replay
from mpisgd.analysis import throughput, timeline
from mpisgd.analysis.cycles import DELAY, NEIGHBOUR
from mpisgd.base.errors import ConfigError, DataError, DeadlockError
from mpisgd.comm.messages import Tag
from mpisgd.config import DigitsOptions, MlpOptions
from mpisgd.exchange.learner_channel import LearnerChannel
from mpisgd.job.parts import UserObjects
from mpisgd.pipeline import stage
from mpisgd.pipeline.group_channel import GroupChannel
from mpisgd.pipeline.micro_batches import Pieces
from mpisgd.plan.costs import fit
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from mpisgd.report import figures_timeline
from mpisgd.simulate import simulate
from mpisgd.simulate.stage_seconds import StageSeconds
from tests.effort import REST, examples
from tests.forge import forge
from tests.virtual.jobs import TENSORS, config, simulated
from tests.virtual.test_laws import jobs, obeys
from tests.virtual.test_optimisers import JOB, LEARNERS, MU, SEED, Weights, accumulated, check_equal, weights

UPDATES = 6
SOME = {**JOB, "epochs": UPDATES * LEARNERS * MU / 1437}
DEEP = {"name": "mlp", "hidden": [24, 16, 12]}
PROTOCOLS = ("hardsync", "softsync", "backup", "timeout", "versioned", "async", "ssp", "downpour")


# --------------------------------------------------------------------------------------------------------- random jobs


@st.composite
def in_groups(draw: st.DrawFn) -> tuple[dict[str, Any], float]:
    """Any job of any protocol, but what `compatibility` refuses, and how late its messages are."""
    job = draw(jobs(draw(st.sampled_from(PROTOCOLS)), most_learners=5))
    size = draw(st.integers(1, 4))
    return {
        **{name: job[name] for name in ("protocol", "evaluator", "seed", "network", "service", "epochs")},
        "virtual": {**job["virtual"], "slow_nodes": {}, "gradients": draw(st.booleans()), "train_samples": 120},
        "straggler": job["straggler"],
        "failures": job["failures"],
        "compute": job["compute"],
        "model": {"name": "mlp", "hidden": [5, 4, 6], "batch_norm": draw(st.booleans())},
        "mu": 12,
        "shards": draw(st.integers(size, 6)),
        "group_size": size,
        "micro_batches": draw(st.integers(1, 6).filter(lambda many: many != 5)),
        "pipeline": draw(st.sampled_from(["gpipe", "1f1b"])) if size > 1 else "gpipe",
        "clip_norm": draw(st.sampled_from([0.0, 0.5])),
        "nonfinite": draw(st.sampled_from(["stop", "drop"])),
        "push_format": draw(st.sampled_from(["float32", "float32", "bfloat16", "topk"])),
        "pull_format": draw(st.sampled_from(["float32", "float32", "bfloat16"])),
    }, draw(st.sampled_from([0.0, 0.01, 0.2]))


@pytest.mark.slow
@given(in_groups())
@settings(
    max_examples=examples(240) // (2 if REST else 1),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)
def test_every_group_obeys_the_laws(drawn: tuple[dict[str, Any], float]) -> None:
    changes, jitter_s = drawn
    with tempfile.TemporaryDirectory() as directory:
        obeys(Path(directory) / "run", TENSORS, changes, jitter_s)


def test_some_groups_obey_the_laws(tmp_path: Path) -> None:
    protocol = {"name": "versioned", "grads_to_wait": 2}
    changes = {"protocol": protocol, "group_size": 3, "shards": 4, "micro_batches": 3, "model": {"hidden": [5, 4]}, "mu": 6}
    obeys(tmp_path / "run", TENSORS, {**changes, "epochs": 0.5}, 0.05)


def test_an_order_that_waits_in_a_circle_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With sends that block: were a stage to wait for gradients before all of its activations had left, nobody could go on."""
    compute = stage.Stage.compute

    def backward_first(stage: Any, seq: int) -> float:
        if stage._after is not None:
            stage._seq = seq
            stage._take(Tag.DELTA, stage._after, 0)
        return compute(stage, seq)

    monkeypatch.setattr(stage.Stage, "compute", backward_first)
    with pytest.raises(DeadlockError, match="waits for DELTA"):
        simulated(tmp_path / "run", TENSORS, group_size=2, shards=2)


# ------------------------------------------------------------------------------------------------------------ the same bits


def digits_of(run: Run) -> tuple[Any, ...]:
    """What must be the same to the bit: losses in the order of learners and mini-batches, and the last weights."""
    first = run.pushes[run.pushes["shard"] == 0]
    first = first[np.lexsort((first["seq"], first["learner_id"]))]
    return first["loss"].tobytes(), first["seq"].tobytes(), *(each.numpy().tobytes() for each in weights(run.path).values())


@pytest.mark.parametrize(
    ("protocol", "rounded"),
    [
        ({"name": "backup", "b": 0}, {"push_format": "bfloat16", "pull_format": "bfloat16"}),
        pytest.param("hardsync", {}, marks=[pytest.mark.slow, pytest.mark.rare]),
    ],
    ids=["bfloat16", "float32"],
)
def test_stages_have_the_bits_of_one_rank(protocol: Any, rounded: dict[str, Any], tmp_path: Path) -> None:
    """Each element is rounded by itself, and what was rounded off is kept where it is computed, or held."""
    job = {**SOME, **rounded, "model": DEEP, "protocol": protocol, "compute": {"name": "constant", "mean_s": 0.1}}
    runs = [
        simulated(tmp_path / f"{size}-{shards}", job, group_size=size, shards=shards) for size, shards in ((1, 3), (2, 2), (4, 4))
    ]
    assert len({digits_of(run) for run in runs}) == 1


def loop(micro_batches: int) -> tuple[Weights, Weights]:
    """First and last weights of a loop that accumulates over micro-batches, of as many learners."""
    digits = data.load(DigitsOptions(), seed=SEED)
    model = models.make(MlpOptions(hidden=(24, 16, 12)), input_shape=digits.input_shape, classes=digits.classes, seed=SEED)
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    accumulated(model, micro_batches, UPDATES)
    return before, {name: each.detach() for name, each in model.named_parameters()}


def test_hardsync_is_a_loop_over_micro_batches(tmp_path: Path) -> None:
    """And one rank, which sums as they do, has the same bits."""
    changes = {"model": DEEP, "micro_batches": 4}
    run = simulated(tmp_path / "run", SOME, **changes, group_size=3, shards=3)
    check_equal(weights(tmp_path / "run"), loop(4))
    assert digits_of(run) == digits_of(simulated(tmp_path / "alone", SOME, **changes, shards=2))
    assert replay.replay(tmp_path / "run").holds


@pytest.mark.parametrize(
    ("size", "micro_batches"), [(3, 4), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, 1), (4, 8)))]
)
def test_one_forward_one_back_has_the_bits_of_gpipe_and_keeps_fewer(
    size: int, micro_batches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With sends that block. Of a stage, at most as many micro-batches are on their way as there are stages from it on."""
    most: dict[tuple[str, int], int] = {}
    under_way: dict[int, int] = {}
    order = ""

    def counting(step: int, kind: Any) -> Any:
        def counted(passes: Any, *arguments: Any) -> Any:
            rank = passes._rank.rank
            under_way[rank] = under_way.get(rank, 0) + step
            most[order, rank] = max(most.get((order, rank), 0), under_way[rank])
            return kind(passes, *arguments)

        return counted

    monkeypatch.setattr(StageSeconds, "pass_on", counting(1, StageSeconds.pass_on))
    monkeypatch.setattr(StageSeconds, "pass_back", counting(-1, StageSeconds.pass_back))
    runs = []
    for order in ("gpipe", "1f1b"):
        changes = {"model": DEEP, "group_size": size, "shards": size, "micro_batches": micro_batches, "pipeline": order}
        runs.append(simulated(tmp_path / order, SOME, **changes))
    assert digits_of(runs[0]) == digits_of(runs[1])
    seen = dict(most)
    assert replay.replay(tmp_path / "1f1b").holds
    for at, rank in enumerate(runs[0].environment["groups"][0]):
        assert (seen["gpipe", rank], seen["1f1b", rank]) == (micro_batches, min(micro_batches, size - at))


class Block(nn.Module):
    """A skip connection across the border of two stages; draws, and keeps a buffer in training."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3)
        self.last = last

    def forward(self, passed: Any) -> Any:
        inputs, before = passed if isinstance(passed, tuple) else (passed, 0)
        output = self.drop(torch.relu(self.norm(self.layer(inputs)))) + before
        return output if self.last else (output, inputs)


def blocks() -> list[nn.Module]:
    return [Block(False), Block(False), nn.Sequential(Block(True), nn.Linear(6, 3))]


@pytest.mark.slow
def test_own_stages_that_draw_are_proved(tmp_path: Path) -> None:
    """And what a stage draws depends on its number and the micro-batch's: else all would drop the same units."""
    changes = {"protocol": {"name": "softsync", "n": 4}, "mu": 8, "shards": 3, "epochs": 1}
    run = simulated(tmp_path / "run", TENSORS, UserObjects(model=blocks), **changes, group_size=3, micro_batches=2, evaluator=True)
    assert replay.replay(tmp_path / "run", UserObjects(model=blocks)).holds
    assert run.environment["groups"] == [[3, 4, 5], [6, 7, 8], [9, 10, 11], [12, 13, 14]]
    assert len(np.unique(run.pushes["loss"])) == len(run.pushes) / 3


def test_a_list_of_factories_is_a_model(tmp_path: Path) -> None:
    """A virtual cluster, and a replay, make all of its pieces, in one process."""
    user_objects = UserObjects(
        model=lambda: [lambda: Block(False), lambda: Block(False), lambda: Block(True), lambda: nn.Linear(6, 3)]
    )
    simulated(tmp_path / "run", TENSORS, user_objects, group_size=3, shards=4, micro_batches=2, mu=8, averaging=0.9, epochs=0.5)
    assert replay.replay(tmp_path / "run", user_objects).holds


def test_a_seed_names_stages_and_micro_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[float] = []
    through = Pieces._draw_for

    def watched(self: Any, *names: int) -> None:
        through(self, *names)
        state = torch.get_rng_state()
        drawn.append(float(torch.rand(())))
        torch.set_rng_state(state)

    monkeypatch.setattr(Pieces, "_draw_for", watched)
    simulated(tmp_path / "run", TENSORS, model={"hidden": [5, 4]}, group_size=3, shards=3, micro_batches=2, epochs=0.1)
    of_a_mini_batch = drawn[-6:]
    assert len(set(of_a_mini_batch)) == 6


# -------------------------------------------------------------------------------------------------------------- seconds


def seconds(path: Path, **changes: Any) -> float:
    """Virtual seconds of a mini-batch, at its first stage, of one learner whose shards and links cost nothing."""
    free = {"latency_s": 0.0, "overhead_s": 0.0, "bandwidth": 1e18, "node_bandwidth": 1e18, "local_bandwidth": 1e18}
    constant = {"name": "constant", "mean_s": 1.2}
    base = {**TENSORS, "data": {**TENSORS["data"], "shape": [8]}, "model": {"name": "mlp", "hidden": [8, 8, 8]}}  # type: ignore[dict-item]
    some = {"network": free, "compute": constant, "virtual": {"learners": 1, "gradients": False, "train_samples": 60}, "mu": 12}
    run = simulated(path, {**base, **some, "epochs": 1.0}, **changes)
    pushes = run.pushes[run.pushes["shard"] == 0]
    return float(np.median(pushes["compute_s"] + (pushes["neighbour_s"] if "group_size" in changes else 0.0)))


def test_a_pipeline_takes_what_its_longest_stage_and_the_bubble_do(tmp_path: Path) -> None:
    """Two stages of 144 and 99 of 243 parameters: in M parts, (M of the longer + 1 of the shorter) / M, forward and backward."""
    longer, shorter = 144 / 243 * 1.2, 99 / 243 * 1.2
    assert seconds(tmp_path / "one") == pytest.approx(1.2)
    for parts in (1, 2, 6):
        found = seconds(tmp_path / f"{parts}", group_size=2, shards=2, micro_batches=parts)
        assert found == pytest.approx(longer + shorter / parts, rel=1e-6)


def test_waiting_for_neighbours_is_told_apart(tmp_path: Path) -> None:
    """Of the run above, in two parts: the first stage waits for the other's passes of one part, and the report says how much."""
    longer, shorter = 144 / 243 * 1.2, 99 / 243 * 1.2
    seconds(tmp_path / "run", group_size=2, shards=3, micro_batches=2)
    run = Run(tmp_path / "run")
    assert run.environment["stages"] == [[0, 1], [2]]
    for at, shards, alone_s in ((0, [0, 1], longer), (1, [2], shorter)):
        own = run.pushes[np.isin(run.pushes["shard"], shards)]
        assert own["compute_s"] == pytest.approx(alone_s, rel=1e-6)
        waited_s = shorter / 2 if at == 0 else longer / 6 + (longer - shorter) * 0.5
        assert own["neighbour_s"] == pytest.approx(waited_s, rel=1e-6)
    table = throughput.bubble_table(run)
    assert [row[:2] for row in table.rows] == [(0, "0, 1"), (1, "2")]
    assert table.rows[0][-1] == pytest.approx(100 * shorter / 2 / (longer + shorter / 2))
    assert "33.3 % with 2 micro-batches" in table.note
    assert "neighbours" in [column.name for column in throughput.time_table(run).columns]
    assert float(throughput.learner_time(run).other.sum()) == pytest.approx(0.0, abs=1e-3)


def test_a_timeline_has_a_row_for_each_stage(tmp_path: Path) -> None:
    run = simulated(tmp_path / "run", TENSORS, model={"hidden": [5, 4]}, group_size=2, shards=3, evaluator=True)
    found = timeline.look(run)
    assert list(found.names.values())[:6] == [
        "shard 0",
        "shard 1",
        "shard 2",
        "evaluator",
        "learner 0, stage 0",
        "learner 0, stage 1",
    ]
    stages = {0: 0, 1: 0, 2: 1} if run.environment["stages"] == [[0, 1], [2]] else {0: 0, 1: 1, 2: 1}
    assert [row["learner_id"] % 2 for row in found.pushes] == [stages[row["shard"]] for row in found.pushes]
    edges = found.cycles.edges
    waited = (edges[:, DELAY] - edges[:, NEIGHBOUR]) / 1e9
    assert waited == pytest.approx(found.pushes["neighbour_s"][found.cycles.row])
    assert (found.cycles.slack >= 0).all() and (np.diff(edges, axis=1) >= 0).all()
    for rank in range(2 * run.lambda_):  # what a rank does does not overlap
        own = edges[found.cycles.learner_id == rank]
        assert len(own) and (own[1:, 0] >= own[:-1, -1]).all()
    assert figures_timeline.drawing(run, timeline.look(run, learners=1)).missing == ""


def test_runs_of_groups_whose_log_does_not_tell_are_read(tmp_path: Path) -> None:
    """An earlier mpisgd counted waiting for neighbours as computing, and had no column for it."""
    simulated(tmp_path / "run", TENSORS, model={"hidden": [5, 4]}, group_size=2, shards=2)
    for path in (tmp_path / "run").glob("shard-*.h5"):
        with h5py.File(path, "r+") as file:
            rows = file["pushes"][:]
            older = np.empty(len(rows), schema.PUSHES)
            for name in schema.PUSHES.names or ():
                older[name] = rows[name]
            older["compute_s"] = (np.rint(1e9 * rows["compute_s"]) + np.rint(1e9 * rows["neighbour_s"])) * 1e-9
            del file["pushes"]
            file.create_dataset("pushes", data=older, maxshape=(None,), chunks=True)
            forge(file)
    run = Run(tmp_path / "run")
    assert replay.replay(tmp_path / "run").holds
    assert not throughput.tells_neighbours(run)
    with pytest.raises(DataError, match="no timeline: this log of groups lacks the waits"):
        timeline.look(run)


# -------------------------------------------------------------------------------------------------------------- agreement


def test_a_group_that_does_not_agree_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The laws see a stage that goes on by itself: with late messages, one would stop while another computes."""
    changes = {"group_size": 2, "shards": 2, "protocol": {"name": "backup", "N": 2}, "epochs": 1}
    monkeypatch.setattr(GroupChannel, "pull", LearnerChannel.pull)
    with pytest.raises(DeadlockError, match="sends ACTIVATION"):
        obeys(tmp_path / "run", TENSORS, changes, 0.2)


# -------------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"group_size": 5}, "group_size = 5: expected at most the number of possible stages of the model, 2"),
        ({"group_size": 2, "shards": 1}, "shards = 1: expected at least group_size = 2, one for each stage"),
        ({"group_size": 2, "accumulation": 2}, "accumulation = 2: expected 1 beside group_size > 1: micro_batches are parts"),
        ({"group_size": 2, "protocol": "allreduce", "shards": 1}, "group_size = 2: expected 1 beside protocol allreduce"),
        (
            {"group_size": 2, "virtual": {"gradients": False, "parameters": 50}},
            "virtual.parameters = 50: expected 0 beside group_size",
        ),
        ({"group_size": 2, "failures": {"at_s": {"9": 1.0}, "then": "stop"}}, "a learner_id from 0 to 3"),
        ({"pipeline": "1f1b"}, "pipeline = '1f1b'.*: one rank alone has the whole model, and passes nothing on"),
        ({"micro_batches": 3}, "micro_batches = 3: expected a divisor of mu = 4"),
        (
            {"group_size": 2, "micro_batches": 4, "model": {"batch_norm": True}},
            r"does not fit stage 1 with first weights of .*: ValueError: Expected more than 1 value",
        ),
    ],
)
def test_bad_input(changes: dict[str, Any], refused: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=refused):
        simulate(config(tmp_path / "run", {**TENSORS, "shards": 6}, **changes))
    assert not (tmp_path / "run").exists()


def test_what_needs_seconds_of_whole_learners_says_so(tmp_path: Path) -> None:
    run = simulated(tmp_path / "run", TENSORS, group_size=2, shards=2)
    with pytest.raises(ConfigError, match="is a run of groups"):
        fit.fit(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("protocol", "how"),
    [
        ({"name": "downpour", "n_push": 2, "n_fetch": 4}, {"push_format": "topk"}),
        pytest.param({"name": "softsync", "n": 2}, {"pull_format": "bfloat16", "push_format": "bfloat16"}, marks=pytest.mark.slow),
    ],
    ids=["topk", "bfloat16"],
)
def test_what_stages_round_is_replayed(protocol: dict[str, Any], how: dict[str, Any], tmp_path: Path) -> None:
    """A stage tells how much of its own piece was rounded off: its shards say the same, and others something else. With own steps,
    a push has what all of them have waited."""
    run = simulated(tmp_path / "run", TENSORS, model={"hidden": [5, 4]}, group_size=3, shards=4, protocol=protocol, **how)
    assert replay.replay(run.path).holds
    first = run.pushes[(run.pushes["learner_id"] == 0) & (run.pushes["seq"] == run.pushes["seq"].min())]
    assert len(set(first["rounded"].tolist())) == 3
    assert (run.pushes["neighbour_s"] > 0).all()
