"""`simulate --device cuda`, on a pretended GPU: what is exchanged stays there, and the log is that of the CPU's run.

The pretended GPU knows no autograd: gradients are computed on the CPU here, from weights that lie on the GPU and into memory there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpisgd import replay
from mpisgd.base.errors import ConfigError
from mpisgd.config import Config
from mpisgd.job import parts
from mpisgd.records.log.reader import Run
from mpisgd.simulate import simulate
from mpisgd.simulate.batch import Batch
from mpisgd.vectors.flat import FlatModel
from tests.effort import spread
from tests.pretend_gpu import OnGpu, pretend_gpu
from tests.virtual.jobs import TENSORS, bits, config, flat

#: Each with whether what is exchanged lies on the GPU, and whether gradients of several learners are computed at once.
WAYS: dict[str, tuple[dict[str, Any], bool, bool]] = {
    "softsync": ({"protocol": {"name": "softsync", "n": 2}}, True, True),
    "hardsync": ({"protocol": "hardsync", "shards": 2, "averaging": 0.9}, True, True),
    "backup": ({"protocol": {"name": "backup", "b": 1, "abort": True}, "optimizer": {"name": "adam"}}, True, True),
    "compensation": ({"protocol": "async", "compensation": 0.1, "clip_norm": 0.5, "nonfinite": "drop"}, True, True),
    "accumulation": ({"protocol": "async", "accumulation": 2}, True, False),
    "local steps": ({"protocol": "hardsync", "local_steps": 2}, False, True),
    "downpour": ({"protocol": {"name": "downpour", "n_push": 2, "n_fetch": 4}}, False, True),
    "formats": ({"protocol": "softsync", "push_format": "topk", "pull_format": "bfloat16"}, False, True),
    "duplex": ({"protocol": "async", "ahead": 1}, False, True),
    "prefetch": ({"protocol": "async", "ahead": 2}, False, True),
    "layers": ({"protocol": "async", "per_layer": True, "shards": 2}, False, True),
    "sandblaster": ({"protocol": {"name": "sandblaster", "iterations": 3}, "epochs": Config().epochs}, False, False),
    "streamed": ({"protocol": "hardsync", "way": "streamed"}, False, True),
    "gathered": ({"protocol": "hardsync", "way": "gathered"}, False, True),
    "teams": ({"protocol": "hardsync", "aggregation": "node", "virtual": {"ranks_per_node": 2}}, False, True),
    "allreduce": ({"protocol": "allreduce", "shards": 4}, False, True),
}


CASES = [(way, late) for way, (_, _, at_once) in WAYS.items() for late in (False, True) if at_once or not late]
"""A model on the CPU does not wait for copies into a late GPU, as a model there need not: they are in order."""
COMPUTED: dict[str, dict[str, Any]] = {name: {"rtol": 2e-5} for name in ("loss", "mean_loss", "gradient_sq", "sum_sq")}
"""Columns that arithmetic decides; all others are the same to the bit."""


@pytest.fixture
def computed_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    made = parts.build_model

    def on_cpu(config: Config, meta: Any, user_objects: Any, device: str = "cpu", **named: Any) -> FlatModel:
        return made(config, meta, user_objects, "cpu", **named)

    monkeypatch.setattr(parts, "build_model", on_cpu)


@pytest.mark.usefixtures("computed_on_cpu")
@pytest.mark.parametrize(("way", "late"), spread(CASES, 3, unpack=True))
def test_the_log_and_the_weights_are_those_of_the_cpu(
    way: str, late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, stays, at_once = WAYS[way]
    virtual = {**changes.get("virtual", {}), "batched": at_once}
    simulate(config(tmp_path / "cpu", TENSORS, **{**changes, "virtual": virtual}))
    pulled: list[bool] = []
    add = Batch.add

    def noted(batch: Batch, learner_id: int, seq: int, weights: Any, gradients: Any) -> None:
        pulled.append(isinstance(weights, OnGpu) and isinstance(gradients, OnGpu))
        add(batch, learner_id, seq, weights, gradients)

    with pretend_gpu(late=late) as gpu:
        monkeypatch.setattr(Batch, "add", noted)
        simulate(config(tmp_path / "gpu", TENSORS, **changes, device="cuda", log={"progress": "plain"}))
    one, other = Run(tmp_path / "cpu"), Run(tmp_path / "gpu")
    assert bits(other) == bits(one) or stays
    np.testing.assert_allclose(flat(other), flat(one), rtol=2e-5, atol=2e-7)  # a GPU's optimiser has other kernels
    for table in ("pushes", "updates", "events", "evaluations"):
        for column in one.table(table).dtype.names or ():
            close = np.testing.assert_allclose if column in COMPUTED else np.testing.assert_array_equal
            close(other.table(table)[column], one.table(table)[column], err_msg=f"{table} {column}", **COMPUTED.get(column, {}))
    assert (gpu.asked > 100) == stays
    assert all(each == stays for each in pulled[2:]), "after the check before the start"
    assert f"gradients on a GPU, {'up to 64 at once' if at_once else 'one by one'}" in capsys.readouterr().err
    assert replay.replay(tmp_path / "gpu").holds, "where there is no GPU, too"


def test_without_a_gpu_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="device = 'cuda': torch finds no CUDA device here"):
        simulate(config(tmp_path / "run", TENSORS, device="cuda"))
    with pytest.raises(ConfigError, match=r"shard_device = 'cuda': .* virtual shards lie where learners compute"):
        simulate(config(tmp_path / "run", TENSORS, shard_device="cuda"))
