"""Groups whose ranks are all at work on the same layer: the laws over random jobs, replay, seconds, and the unsplit model."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from torch import nn

from mpisgd import replay
from mpisgd.base.errors import ConfigError, DeadlockError
from mpisgd.config import compatibility
from mpisgd.job.parts import UserObjects
from mpisgd.models.partition import Partition
from mpisgd.pipeline.stage_messages import WireLinks
from mpisgd.records.log.reader import Run
from mpisgd.simulate import simulate
from tests.effort import REST, examples, spread
from tests.virtual.jobs import TENSORS, bits, config, simulated
from tests.virtual.test_laws import obeys
from tests.virtual.test_model_parallel import in_groups
from tests.virtual.test_optimisers import weights

IMAGES = {**TENSORS, "data": {"name": "synthetic", "shape": [2, 3, 6], "classes": 3, "samples": 120, "test_samples": 30}}
LOCAL: dict[str, Any] = {"model": {"name": "local", "channels": [2, 3]}, "group_form": "partition"}
SPEECH: dict[str, Any] = {"model": {"name": "speech", "hidden": [7, 5, 6]}, "group_form": "partition"}

# --------------------------------------------------------------------------------------------------------- random jobs


@pytest.mark.slow
@given(in_groups(), st.sampled_from([LOCAL, SPEECH]))
@settings(
    max_examples=examples(240) // (2 if REST else 1),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)
def test_every_group_obeys_the_laws(drawn: tuple[dict[str, Any], float], form: dict[str, Any]) -> None:
    changes, jitter_s = drawn
    own = form if changes["group_size"] > 1 else {"model": form["model"]}
    job = {**changes, **own, "pipeline": "gpipe"}
    with tempfile.TemporaryDirectory() as directory:
        assume(not compatibility.refused(config(Path(directory) / "run", IMAGES, **job), virtual=True))
        obeys(Path(directory) / "run", IMAGES, job, jitter_s)


@pytest.mark.parametrize(
    ("form", "protocol"),
    spread([(LOCAL, {"name": "softsync", "n": 2}), (SPEECH, {"name": "backup", "b": 1})], 2, unpack=True),
    ids=["local", "speech"],
)
def test_some_groups_obey_the_laws(protocol: dict[str, Any], form: dict[str, Any], tmp_path: Path) -> None:
    changes = {"protocol": protocol, "group_size": 3, "shards": 4, "micro_batches": 2, "mu": 6, "epochs": 0.3}
    obeys(tmp_path / "run", IMAGES, {**changes, **form}, 0.05)


def test_what_is_clipped_or_dropped_is_so_in_all_pieces(tmp_path: Path) -> None:
    """The norm is that of the whole gradient: with it, weights are others; and replay has them."""
    changes = {"group_size": 2, "shards": 3, "micro_batches": 2, "mu": 6, "epochs": 0.3, "nonfinite": "drop", **SPEECH}
    run = obeys(tmp_path / "run", IMAGES, {**changes, "clip_norm": 0.3}, 0.05).run
    plain = simulated(tmp_path / "plain", IMAGES, **changes)
    assert bits(run) != bits(plain)


def test_sends_that_are_waited_for_first_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With sends that block: were each piece to wait until its own were taken before it takes others, nobody could go on."""

    class Finished:
        def __init__(self, wire: Any) -> None:
            self._wire = wire

        def start(self, *message: Any) -> None:
            self._wire.finish(self._wire.start(*message))

        def __getattr__(self, name: str) -> Any:
            return getattr(self._wire, name)

    begin = WireLinks.__init__

    def careless(links: Any, wire: Any, *others: Any) -> None:
        begin(links, wire, *others)
        links._wire = Finished(wire)

    monkeypatch.setattr(WireLinks, "__init__", careless)
    with pytest.raises(DeadlockError, match="sends ACTIVATION"):
        simulated(tmp_path / "run", IMAGES, **LOCAL, group_size=2, shards=2)


# -------------------------------------------------------------------------------------------------------- the unsplit model


class Mlp(nn.Module):
    """Columns, then rows; the same initial values as of the whole, for each number of pieces."""

    def __init__(self, partition: Partition) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        first, second = (torch.randn(shape, generator=generator) / 3 for shape in ((12, 6), (3, 12)))
        share = partition.share(12)
        self.partition = partition
        self.first = nn.Parameter(first[share.start : share.stop].clone())
        self.second = nn.Parameter(second[:, share.start : share.stop].clone())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.partition.sum(torch.tanh(inputs @ self.first.T) @ self.second.T)


def trained(path: Path, **changes: Any) -> tuple[Run, torch.Tensor]:
    """A run, and the trained first layer, of its pieces joined."""
    run = simulated(path, TENSORS, UserObjects(model=Mlp), **{"alpha0": 0.2, "mu": 8, "epochs": 1, **changes})
    found = weights(path)
    return run, torch.cat([each for name, each in found.items() if name.endswith("first")])


@pytest.mark.parametrize(
    "own", [{}, {"local_steps": 2, "inner_optimizer": "sgd", "inner_alpha0": 0.2, "alpha0": 1.0}], ids=["", "own"]
)
@pytest.mark.parametrize(
    ("parts", "size"), [(2, 3), pytest.param(4, 2, marks=pytest.mark.slow), pytest.param(1, 4, marks=pytest.mark.slow)]
)
def test_pieces_train_as_the_whole_does(parts: int, size: int, own: dict[str, Any], tmp_path: Path) -> None:
    """Within what is rounded otherwise: sums over pieces are summed by piece first. Own steps need no agreement."""
    alone, expected = trained(tmp_path / "one", protocol="hardsync", micro_batches=parts, **own)
    assert alone.evaluations["error"][-1] < alone.evaluations["error"][0]
    some = {"group_size": size, "group_form": "partition", "shards": size + 1, "micro_batches": parts}
    run, found = trained(tmp_path / "pieces", protocol="hardsync", **some, **own)
    assert replay.replay(run.path, UserObjects(model=Mlp)).holds
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    first = [each.pushes[each.pushes["shard"] == 0] for each in (run, alone)]
    ours, theirs = (np.sort(each, order=["learner_id", "seq"])["loss"] for each in first)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)


class Drawn(nn.Module):
    """Batch norm of its own units, dropout, and what autocast casts."""

    def __init__(self, partition: Partition) -> None:
        super().__init__()
        self.partition, units = partition, len(partition.share(8))
        self.layers = nn.Sequential(nn.Linear(6, units), nn.BatchNorm1d(units), nn.ReLU(), nn.Dropout(0.3))
        self.last = nn.Linear(8, 3) if partition.place == 0 else None
        self.own = nn.Linear(units, 3, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        passed = self.layers(inputs)
        gathered = self.partition.gather(passed)
        output = self.own(passed)
        return self.partition.sum(output + self.last(gathered) if self.last is not None else output + 0 * gathered.sum())


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"protocol": {"name": "softsync", "n": 4}, "autocast": "bfloat16", "averaging": 0.9},
        pytest.param({"protocol": "hardsync"}, marks=pytest.mark.slow),
    ],
    ids=["softsync", "hardsync"],
)
def test_own_pieces_that_draw_are_proved(changes: dict[str, Any], tmp_path: Path) -> None:
    some = {"group_size": 2, "group_form": "partition", "shards": 3, "micro_batches": 2, "mu": 8, "evaluator": True, "epochs": 0.6}
    simulated(tmp_path / "run", TENSORS, UserObjects(model=Drawn), **some, **changes)
    proof = replay.replay(tmp_path / "run", UserObjects(model=Drawn))
    assert proof.holds
    assert proof.simulated, "it is the same again"


# -------------------------------------------------------------------------------------------------------------- seconds


def test_pieces_take_their_share_and_the_slowest_link(tmp_path: Path) -> None:
    """Two pieces of one learner, of 152 and 136 of 288 parameters; where links cost nothing, one waits for the other's biases."""
    free = {"latency_s": 0.0, "overhead_s": 0.0, "bandwidth": 1e18, "node_bandwidth": 1e18, "local_bandwidth": 1e18}
    some = {"compute": {"name": "constant", "mean_s": 1.2}, "virtual": {"learners": 1, "gradients": False, "train_samples": 48}}
    base = {**TENSORS, **some, "mu": 12, "epochs": 1.0, "network": free, "shards": 2, "group_size": 2, "group_form": "partition"}
    even = {"model": {"name": "speech", "hidden": [8, 8, 8]}, "data": {**TENSORS["data"], "shape": [8], "classes": 8}}  # type: ignore[dict-item]
    run = simulated(tmp_path / "free", base, **even)
    for shard, (compute_s, neighbour_s) in enumerate([(152 / 240, 0), (136 / 240, 16 / 240 * 11 / 12)]):
        own = run.pushes[run.pushes["shard"] == shard]
        assert own["compute_s"] == pytest.approx(compute_s) and own["neighbour_s"] == pytest.approx(neighbour_s, rel=0.2)
    slow = simulated(tmp_path / "slow", base, **even, network={"bandwidth": 1e4, "node_bandwidth": 1e4, "local_bandwidth": 1e4})
    # Two layers' sums of 12 x 8 float32, each a half there and a half back, forward and backward alike: 8 messages of 192 bytes.
    assert slow.pushes["neighbour_s"].min() > 8 * 192 / 1e4


# -------------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"group_form": "partition"}, "group_form = 'partition': expected 'stages' .*: one rank alone has the whole model"),
        (
            {**LOCAL, "group_size": 2, "pipeline": "1f1b"},
            "pipeline = '1f1b': expected 'gpipe' .*: each rank has a piece of all layers",
        ),
        ({**LOCAL, "group_size": 7, "shards": 7}, "group_size = 7: expected at most the units of a layer, 6"),
        ({"group_size": 2, "group_form": "partition"}, "model 'mlp' has no pieces, expected 'speech' or 'local'"),
        ({**LOCAL, "group_size": 2, "shards": 1}, "shards = 1: expected at least group_size = 2"),
        (
            {"group_size": 5, "group_form": "partition", "model": {"name": "local", "field": 5}},
            r"exchange: halo = 2: piece 1 of 5 has a tensor of shape \(4, 8, 3, 1\)",
        ),
    ],
)
def test_bad_input(changes: dict[str, Any], refused: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=refused):
        simulate(config(tmp_path / "run", {**IMAGES, "shards": 6}, **changes))
    assert not (tmp_path / "run").exists()
