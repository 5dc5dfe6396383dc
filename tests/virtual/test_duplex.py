"""Push and pull at the same time, or behind the computation: gradients are older, and links carry bytes both ways at once.

That laws hold whatever the schedule is tested in `test_laws.py`.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from mpisgd.base.errors import ProtocolError
from mpisgd.exchange.exchange import Report
from mpisgd.exchange.learner_channel import LearnerChannel, Slices
from mpisgd.exchange.rounds import DUPLEX, PREFETCH, Round
from tests.effort import spread
from tests.virtual.jobs import SIZES, simulated
from tests.virtual.scene import Scene, packed
from tests.virtual.test_one_learner import ALPHA, ByHand, weights

SOFTSYNC = {"name": "softsync", "n": 2}


@pytest.mark.parametrize(
    ("ahead", "protocol", "shards"), spread(itertools.product((1, 2), ("softsync", "async"), (1, 2)), 3, unpack=True)
)
def test_with_one_learner_it_is_sgd_with_a_delay(ahead: int, protocol: str, shards: int, tmp_path: Path) -> None:
    by_hand = ByHand(tmp_path / "by_hand")
    now = by_hand.weights()
    before = [now] * ahead
    for seq in range(by_hand.mini_batches):
        before.append(now)
        weight = 1 / max(1, min(seq, ahead)) if protocol == "softsync" else 1.0
        now = now - weight * ALPHA * by_hand.gradient(before.pop(0), seq)
    found = weights(tmp_path / "run", {"name": protocol}, ahead=ahead, shards=shards)
    torch.testing.assert_close(found, now, rtol=1e-5, atol=1e-6)


def seconds_of_a_round(path: Path, ahead: int, compute_s: float, way: str = "whole") -> float:
    """Two nodes, each with a shard and a learner, 44 MB and 1 Gbit/s: a vector each way in a round."""
    run = simulated(
        path,
        SIZES,
        protocol=SOFTSYNC,
        ahead=ahead,
        way=way,
        shards=2,
        virtual={"learners": 2, "ranks_per_node": 2, "parameters": 11_000_000, "train_samples": 160},
        compute={"name": "constant", "mean_s": compute_s},
        network={"node_bandwidth": 125e6, "bandwidth": 125e6, "local_bandwidth": 1e10},
    )
    updates = run.updates[run.updates["shard"] == 0]
    return 2 * float(np.diff(updates["time_s"])[10:].mean())


LIMIT_S = 44e6 / 125e6


def test_links_carry_gradients_and_weights_at_the_same_time(tmp_path: Path) -> None:
    """In turn, only one way is used at a time."""
    whole, duplex = (seconds_of_a_round(tmp_path / str(ahead), ahead, 0.04) for ahead in (0, 1))
    assert whole > 1.8 * LIMIT_S
    assert LIMIT_S <= duplex < 1.35 * LIMIT_S


def test_a_learner_computes_while_links_carry(tmp_path: Path) -> None:
    """As long as it takes to carry them, computing costs nothing."""
    duplex, prefetch = (seconds_of_a_round(tmp_path / str(ahead), ahead, LIMIT_S) for ahead in (1, 2))
    assert duplex > 1.9 * LIMIT_S
    assert LIMIT_S <= prefetch < 1.4 * LIMIT_S


def test_where_shards_gather_links_are_the_limit(tmp_path: Path) -> None:
    """A shard that takes gradients in turn leaves its link idle while the learner beside it pushes."""
    duplex = seconds_of_a_round(tmp_path / "duplex", 1, 0.04, "gathered")
    prefetch = seconds_of_a_round(tmp_path / "prefetch", 2, LIMIT_S, "gathered")
    assert LIMIT_S <= duplex < 1.15 * LIMIT_S
    assert LIMIT_S <= prefetch < 1.05 * LIMIT_S


@pytest.mark.parametrize(("ahead", "when"), [(1, DUPLEX), (2, PREFETCH)])
def test_there_is_a_pull_after_each_push(ahead: int, when: Round) -> None:
    scene, roles, vector = Scene(2), packed(learners=1), np.zeros(3, np.float32)
    channel = LearnerChannel(scene.wires[1], roles, 0, Slices(vector, vector, [(0, 3)]), consistent=False, when=when)
    with pytest.raises(ProtocolError, match=f"ahead = {ahead}: two pushes, no pull in between"):
        channel.push(Report(seq=0, samples=1, loss=0.0, compute_ns=0, delay_ns=0), meanwhile=lambda: None)
