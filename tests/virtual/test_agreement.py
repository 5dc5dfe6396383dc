"""Shards that agree on the norm of each averaged gradient: a hardsync or allreduce job clips as a loop of torch does, on any S.

Orders of messages, signals and resumed runs are drawn by the storms' generator.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from mpisgd.base.errors import ConfigError
from tests import travel
from tests.effort import spread
from tests.virtual.jobs import SIZES, TENSORS, simulated
from tests.virtual.storm import aftermath
from tests.virtual.storm.draw import draw_agreed
from tests.virtual.test_large_batch import Clipped
from tests.virtual.test_optimisers import JOB, check_equal, serial, weights

MARKS = pytest.mark.slow, pytest.mark.rare
HARDSYNC: dict[str, Any] = {"protocol": "hardsync", "clip_average": 0.2}


@pytest.mark.parametrize(
    "changes",
    spread(
        [
            {"shards": 3},
            {"shards": 2, "per_layer": True},
            {"shards": 2, "way": "gathered", "evaluator": True, "evaluation": {"every_epochs": 0.1}},
            {"protocol": "allreduce"},
            {"protocol": "allreduce", "virtual": {"learners": 3, "ranks_per_node": 3}},
        ],
        3,
    ),
    ids=str,
)
def test_the_whole_average_is_clipped_as_a_loop_does(changes: dict[str, Any], tmp_path: Path) -> None:
    simulated(tmp_path / "run", JOB, clip_average=0.2, **changes)
    loops: list[Clipped] = []

    def loop(model: nn.Module) -> tuple[Any, None]:
        loops.append(Clipped([list(model.parameters())], 0.2))
        return loops[0], None

    check_equal(weights(tmp_path / "run"), serial(loop))
    assert loops[0].clipped > 5


def test_a_round_takes_another_round_trip(tmp_path: Path) -> None:
    """Of sizes alone, on a network of which nothing but the latency counts: push, pull and answer, and, agreed, twice that."""
    latency_s = 0.001
    network = {"latency_s": latency_s, "overhead_s": 0.0, "bandwidth": 1e15, "node_bandwidth": 1e15}
    job: dict[str, Any] = {"protocol": "hardsync", "shards": 2, "network": network, "compute": {"name": "constant"}}
    ends = []
    for name, norm in (("alone", 0.0), ("agreed", 1.0)):
        run = simulated(tmp_path / name, SIZES, **job, clip_average=norm)
        updates = run.updates[run.updates["shard"] == 0]
        ends.append((updates["time_s"][-1] - updates["time_s"][0]) / (len(updates) - 1))
    more = (ends[1] - ends[0]) / latency_s
    assert 1.9 < more < 4.1, "there and back, and perhaps a wait for the header to be taken"


@pytest.mark.parametrize("number", [1, *(pytest.param(at, marks=MARKS[: 1 + (at % 9 > 0)]) for at in (0, *range(2, 32)))])
def test_signals_and_other_orders(number: int, tmp_path: Path) -> None:
    seen = aftermath.weather(draw_agreed(random.Random(f"agreed {number}"), number), tmp_path)
    assert not seen.failures, seen.failures[0]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"protocol": "softsync"}, r"protocol softsync \(shards make updates of different gradients\): .* allowed with hardsync"),
        ({"group_size": 2}, "group_size > 1: there is no single averaged gradient"),
    ],
    ids=str,
)
def test_what_cannot_agree_is_refused(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"clip_average_of = 'model': expected 'slice' beside {why}"):
        simulated(tmp_path / "run", TENSORS, **{**HARDSYNC, "shards": 2, **changes})
    assert not (tmp_path / "run").exists()


def test_streamed_they_cannot_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(travel.VARIABLE, "streamed")
    with pytest.raises(ConfigError, match=r"MPISGD_TRAVEL = 'streamed': .*: the first chunks of the new weights leave before"):
        simulated(tmp_path / "run", TENSORS, **HARDSYNC, shards=2)
    assert not (tmp_path / "run").exists()
