"""Replay of runs by layers: the same bits from slices of different clocks, and a changed row is found."""

from __future__ import annotations

import itertools
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch

from mpisgd import replay
from mpisgd.job import parts
from mpisgd.records.log import schema
from mpisgd.records.log.schema import Verdict
from tests.effort import spread
from tests.forge import rewrite, unsealed
from tests.virtual.jobs import HOW, TENSORS, simulated
from tests.virtual.test_layerwise import ASYNCHRONOUS, DEEP, STAGES, SYNCHRONOUS, VERSIONED, names, weights


@pytest.mark.parametrize("protocol", spread([*reversed(SYNCHRONOUS), *ASYNCHRONOUS], 4), ids=names)
def test_replay_computes_the_same_bits(protocol: dict[str, Any], tmp_path: Path) -> None:
    """Each gradient from slices of different clocks; of a model with buffers and dropout of its own, with averaging too."""
    changes = {"shards": 3, "protocol": protocol, "averaging": 0.9, "compute": {"name": "lognormal", "sigma": 0.5}}
    model = {"name": "mlp", "hidden": [8, 8, 8], "batch_norm": True}
    run = simulated(tmp_path / "run", TENSORS, per_layer=True, model=model, **changes)
    assert replay.check(run.path) == ""
    stamps: dict[tuple[int, int], set[int]] = {}
    for row in run.pushes:
        stamps.setdefault((row["learner_id"], row["seq"]), set()).add(row["timestamp"])
    mixed = sum(len(clocks) > 1 for clocks in stamps.values())
    assert (mixed > len(stamps) / 4) == (protocol in ASYNCHRONOUS)
    assert mixed == 0 or protocol in ASYNCHRONOUS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "protocol"),
    spread(itertools.product(STAGES, [{"name": "async"}, {"name": "backup", "b": 1}]), 5, unpack=True),
    ids=str,
)
def test_replay_computes_what_was_clipped_dropped_or_rounded(stage: str, protocol: dict[str, Any], tmp_path: Path) -> None:
    """And it does something: the weights are others than without, if only for slices leave later."""
    runs = [
        simulated(tmp_path / str(value), TENSORS, **DEEP, per_layer=True, shards=3, protocol=protocol, **{stage: value})
        for value in STAGES[stage]
    ]
    assert [replay.check(run.path) for run in runs[1:]] == [""] * (len(runs) - 1)
    plain, *others = (torch.cat([each.reshape(-1) for each in weights(run).values()]) for run in runs)
    assert not any(torch.equal(plain, other) for other in others)


@pytest.mark.parametrize("protocol", spread(VERSIONED, 2), ids=str)
def test_a_rejected_mini_batch_is_computed_again_and_replayed(protocol: dict[str, Any], tmp_path: Path) -> None:
    """Its slices are of the clocks that the learner had pulled: of one, where no stale gradient is taken."""
    run = simulated(tmp_path / "run", TENSORS, **DEEP, per_layer=True, shards=3, protocol=protocol, virtual={"learners": 6})
    assert (run.pushes["verdict"] == Verdict.REJECT).any()
    assert replay.check(run.path) == ""
    stamps: dict[tuple[int, int, int], set[int]] = {}
    for shard in range(3):
        rows = run.pushes[run.pushes["shard"] == shard]
        for learner_id in range(6):
            for number, row in enumerate(rows[rows["learner_id"] == learner_id]):
                stamps.setdefault((learner_id, number, row["seq"]), set()).add(row["timestamp"])
    assert len(stamps) == len(run.pushes) / 3, "each is pushed to all shards"
    assert (max(map(len, stamps.values())) == 1) == ("tolerance" not in protocol)


def test_a_push_says_what_was_rounded_off_its_own_slice(tmp_path: Path) -> None:
    """Of the whole gradient all shards are told the same; replay finds a share that is another slice's."""
    changes: dict[str, Any] = {**DEEP, "shards": 3, "protocol": "hardsync", "push_format": "bfloat16"}
    whole, layers = (simulated(tmp_path / how, TENSORS, **changes, **HOW[how]) for how in HOW)
    assert all(torch.equal(tensor, weights(layers)[name]) for name, tensor in weights(whole).items())
    shares = [[run.pushes["rounded"][run.pushes["shard"] == shard] for shard in range(3)] for run in (whole, layers)]
    assert sorted(shares[0][0]) == sorted(shares[0][1]) == sorted(shares[0][2])
    assert len({float(each[0]) for each in shares[1]}) == 3
    assert all(((each > 0) & (each < 1 / 256)).all() for each in shares[1])

    def others(rows: np.ndarray) -> None:
        rows["rounded"][4] = shares[1][0][4]

    rewrite(layers.path / schema.shard_file(1), "pushes", others)
    assert "rounded" in replay.check(layers.path)


ONE_OF_THREE = [[f"1 {part}/3"] for part in range(1, 4)]


@pytest.mark.parametrize(
    ("shards", "layers", "as_written"),
    [
        (3, [["1"], ["3"], ["5"]], [["1"], ["3"], ["5"]]),
        (4, [*ONE_OF_THREE, ["3", "5"]], [*ONE_OF_THREE, ["3 1/2", "3 2/2", "5"]]),
    ],
)
def test_runs_of_an_earlier_rule_have_the_slices_of_then(
    shards: int, layers: Any, as_written: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of 280, 123 and 12 parameters. A part of a layer was called so, also beside the other parts."""
    bounds = parts.bounds
    with monkeypatch.context() as then:
        then.setattr(schema, "RULES", 2)
        then.setattr(parts, "bounds", lambda config, model, rules=2: bounds(config, model, 2))
        changes = {"model": {"name": "mlp", "hidden": [40, 3]}, "shards": shards, "protocol": "hardsync", "per_layer": True}
        run = simulated(tmp_path / "run", TENSORS, **changes, epochs=0.5)
    path = run.path / schema.CONFIG
    text = unsealed(path.read_text())

    def proved(said: Any, rules: int = 2) -> str:
        config = tomllib.loads(text)
        assert config["environment"]["layers"] == layers
        config["environment"]["layers"], config["environment"]["rules"] = said, rules
        path.write_text(tomli_w.dumps(config))
        return replay.check(run.path)

    assert proved(as_written) == ""
    assert "layers" in proved([*as_written[:-1], ["5", "3"]])
    assert bool(proved(layers, rules=3)) == (shards == 3), "today's slices are others"
