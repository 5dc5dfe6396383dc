"""An allreduce whose gradients leave bucket by bucket on virtual ranks: seconds by hand, the bits of whole vectors, replay."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpisgd import replay
from mpisgd.base.errors import ConfigError
from mpisgd.exchange import ways
from mpisgd.exchange.collectives.bucket_channel import BucketChannel
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from mpisgd.simulate import simulate
from mpisgd.vectors import buckets, chunks
from tests import travel
from tests.effort import examples
from tests.forge import rewrite
from tests.virtual.jobs import SIZES, TENSORS, bits, config, merged, simulated, tables
from tests.virtual.test_allreduce import SLICE_S, SLOW
from tests.virtual.test_laws import COMMON

ALLREDUCE = {"protocol": "allreduce", "way": "buckets"}
BUCKET_NBYTES = "BUCKET_NBYTES"


def test_the_seconds_of_an_iteration_by_hand(tmp_path: Path) -> None:
    """Of two slices, the second leaves 10/3 s before the backward pass ends, and so costs none; its owner has updated it a second
    earlier than the other, which is when that sends its own."""
    run = simulated(tmp_path / "run", SIZES, **ALLREDUCE, **SLOW)
    made_s = [10 + SLICE_S + 3, 10 + 0.25 + 3]
    for shard in range(2):
        updates, rows = (table[table["shard"] == shard] for table in (run.updates, run.pushes))
        first_s = SLICE_S + made_s[shard]
        assert updates["time_s"][0] == pytest.approx(first_s, abs=1e-9)
        assert np.diff(updates["time_s"]) == pytest.approx(made_s[0] + SLICE_S), "a quarter less than with whole vectors"
        assert rows["compute_s"] == pytest.approx(10)
    assert run.pushes["push_s"][run.pushes["seq"] > 0].min() == pytest.approx(0.25), "only headers were waited for"


def deep(layers: int, bandwidth: float, way: str, out: Path) -> float:
    """Seconds of an update where computing takes 0.1 s."""
    network = {"latency_s": 0.0, "overhead_s": 0.0, "bandwidth": bandwidth, "node_bandwidth": bandwidth}
    shape = {"model": {"name": "mlp", "hidden": [16] * layers}, "compute": {"name": "constant", "mean_s": 0.1}, "network": network}
    run = simulated(out, merged(TENSORS, shape), protocol="allreduce", way=way, virtual={"learners": 2}, epochs=0.7)
    return float(np.diff(run.updates["time_s"][run.updates["shard"] == 0]).mean())


def test_an_exchange_is_hidden_behind_both_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.1 s of computing, and 0.03 of each phase. Of the slice that is left last the last bucket is waited for, not all; and while
    its weights come, those who do not own it compute the layers that are there, up to a sixth of a mini-batch."""
    monkeypatch.setattr(buckets, BUCKET_NBYTES, 500)
    nbytes = 4 * (6 * 16 + 16 + 8 * (16 * 16 + 16) + 16 * 3 + 3)
    bandwidth = nbytes / 2 / 0.03
    whole, parts = (deep(9, bandwidth, way, tmp_path / way) for way in ("whole", "buckets"))
    assert whole == pytest.approx(0.1 + 2 * 0.03, rel=0.02)
    assert 0.1 + 0.03 - 0.1 / 6 < parts < 0.1 + 0.03 - 0.1 / 6 + 0.009


#: What a gradient goes through before its buckets leave, and an update after.
OPTIONS: dict[str, tuple[Any, ...]] = {
    "clip_norm": (0.0, 0.3),
    "clip_average": (0.0, 0.1),
    "accumulation": (1, 2),
    "nonfinite": ("stop", "drop"),
    "push_format": ("float32", "bfloat16"),
    "pull_format": ("float32", "bfloat16"),
    "averaging": (0.0, 0.9),
    "evaluator": (False, True),
    "optimizer": ("sgd", "adam", "adagrad", "lamb"),
    "straggler": ({}, {"slowdown": {"0": 3.0}, "delay": "exponential"}),
}


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, Any]:
    changes = {name: draw(st.sampled_from(values)) for name, values in OPTIONS.items()}
    virtual = {"learners": draw(st.integers(1, 5)), "ranks_per_node": draw(st.integers(1, 3))}
    hidden = draw(st.lists(st.integers(1, 12), max_size=4))
    return {**changes, "virtual": virtual, "model": {"name": "mlp", "hidden": hidden}, "epochs": 0.7}


@pytest.mark.deeper
def test_the_bits_of_whole_vectors_and_of_replay() -> None:
    """Weights, losses, decisions; however few bytes a bucket has. In the order of learners, as the log says."""

    @settings(COMMON, max_examples=examples(24))
    @given(jobs(), st.sampled_from([1, 60, 300, 2**22]), st.sampled_from([64, chunks.CHUNK_NBYTES]))
    def one(changes: dict[str, Any], nbytes: int, chunk_nbytes: int) -> None:
        cut = patch.multiple(buckets, **{BUCKET_NBYTES: nbytes}), patch.multiple(chunks, CHUNK_NBYTES=chunk_nbytes)
        with tempfile.TemporaryDirectory() as directory, cut[0], cut[1]:
            runs = []
            for way in ("whole", "buckets"):
                job = config(Path(directory, way), TENSORS, protocol="allreduce", way=way, **changes)
                runs.append(Run(simulate(job).path))
            same(*runs)
            assert replay.check(runs[1].path) == ""

    one()


@pytest.mark.parametrize(("bandwidth", "way"), [(ways.SLOW, "buckets"), (1.01 * ways.SLOW, "whole")])
def test_links_decide_and_replay_knows(bandwidth: float, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slowest node's: here a link twice as slow as the others."""
    monkeypatch.setattr(ways, BUCKET_NBYTES, 1)
    network = {"node_bandwidth": 2 * bandwidth, "slow_links": {"1": 2.0}}
    runs = [simulated(tmp_path / name, TENSORS, protocol="allreduce", network=network, way=name) for name in ("auto", way)]
    assert runs[0].environment["way"] == way
    assert tables(runs[0]) == tables(runs[1])
    assert bits(runs[0]) == bits(runs[1])
    assert replay.check(runs[0].path) == ""


def test_a_learner_goes_on_when_its_own_shard_has_made_its_weights_not_that_of_another(tmp_path: Path) -> None:
    """Rank 1 was slow to update: learner 0 was computing by then, layers that rank 0 owns. Of real ranks that may be."""
    run = simulated(tmp_path / "run", TENSORS, **ALLREDUCE, virtual={"learners": 2}, epochs=1)

    def later(rows: np.ndarray) -> None:
        one, after = np.flatnonzero(rows["learner_id"] == 0)[3:5]
        rows["answer_s"][one] = rows["arrival_s"][after] - rows["compute_s"][after] / 2

    for shard, why in enumerate(("s of computing and delay, but the push came", "simulated again")):
        copy = shutil.copytree(run.path, tmp_path / why)
        rewrite(copy / schema.shard_file(shard), "pushes", later)
        assert why in replay.check(copy)


def same(whole: Run, parts: Run) -> None:
    ours, theirs = (torch.load(each.path / schema.WEIGHTS, weights_only=True) for each in (parts, whole))
    assert ours.keys() == theirs.keys()
    for vector, state in ours.items():
        for key, value in state.items():
            assert value.numpy().tobytes() == theirs[vector][key].numpy().tobytes()
    for table, columns in {
        "pushes": ["shard", "clock", "timestamp", "learner_id", "seq", "samples", "verdict", "loss", "compute_s", "delay_s"],
        "updates": ["shard", "clock", "gradients", "samples", "mean_loss", "gradient_sq", "sum_sq"],
        "summaries": ["shard", "final_clock", "samples", "received", "pushed"],
    }.items():
        for column in columns:
            one, other = (getattr(each, table)[column] for each in (parts, whole))
            assert np.array_equal(one, other, equal_nan=one.dtype.kind == "f"), (table, column)


def test_buckets_leave_before_the_last_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else this shows less than it says; and each learner has all, in the order of a backward pass."""
    monkeypatch.setattr(buckets, BUCKET_NBYTES, 100)
    left: list[tuple[int, int, int]] = []
    leave = BucketChannel.leave

    def noting(channel: BucketChannel, shard: int, *rest: Any) -> None:
        left.append((channel._shard, shard, channel.now_ns()))
        leave(channel, shard, *rest)

    monkeypatch.setattr(BucketChannel, "leave", noting)
    simulated(tmp_path / "run", TENSORS, **ALLREDUCE, virtual={"learners": 2}, epochs=0.07)
    for learner_id in range(2):
        own = [(number, ns) for learner, number, ns in left if learner == learner_id]
        assert [number for number, _ in own] == [2, 1, 0] * (len(own) // 3)
        assert own[0][1] < own[1][1], "the last layer's, a layer earlier"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"push_format": "topk"}, "the largest elements of a slice are known when"),
        ({"protocol": "hardsync"}, "shards are apart from learners"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(travel.VARIABLE, "buckets")
    with pytest.raises(ConfigError, match=f"MPISGD_TRAVEL = 'buckets': .*: {why}"):
        simulate(config(tmp_path / "run", TENSORS, **{"protocol": "allreduce", **changes}))


def test_runs_of_an_earlier_rule_have_the_buckets_of_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest share of a bucket that is rounded off is logged: of others it is another. They are not simulated again."""
    monkeypatch.setattr(buckets, "OLDER_NBYTES", 600)
    with monkeypatch.context() as then:
        then.setattr(buckets, BUCKET_NBYTES, 600)
        then.setattr(schema, "RULES", 3)
        changes = {"model": {"name": "mlp", "hidden": [40, 3]}, "push_format": "bfloat16", "virtual": {"learners": 2}}
        run = simulated(tmp_path / "run", TENSORS, **ALLREDUCE, **changes)
    assert replay.check(run.path) == ""
    monkeypatch.setattr(buckets, "OLDER_NBYTES", 100)
    assert "rounded" in replay.check(run.path)
