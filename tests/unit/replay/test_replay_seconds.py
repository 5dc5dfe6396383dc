"""What a learner has spent fits between the moments at which a shard heard of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from mpisgd.records.log import schema
from mpisgd.replay.checks.finding import Untrue
from mpisgd.replay.checks.seconds import _check_spent


def shard(compute_s: tuple[float, float]) -> Any:
    """A shard that hears of two mini-batches, 0.05 s and 0.1 s after it has begun, and answers the first at once."""
    pushes = np.zeros(2, schema.PUSHES)
    pushes["compute_s"], pushes["arrival_s"], pushes["answer_s"] = compute_s, (0.05, 0.1), (0.05, 0.1)
    row = SimpleNamespace(clock=0, learner_id=0, seq=0)
    return SimpleNamespace(shard=1, pushes=pushes, start=SimpleNamespace(since_s=0.0), row=lambda _: row)


def test_in_an_allreduce_in_buckets_a_learner_begins_before_other_shards_do() -> None:
    """Seen on real ranks, of which one left the barrier 1.5 ms after the other."""
    rows = cast(Any, np.arange(2))
    _check_spent(shard((0.0515, 0.05)), rows, ahead=True)
    with pytest.raises(Untrue, match=r"has spent 0.0515 s, but the push arrived 0.05 s after the start"):
        _check_spent(shard((0.0515, 0.05)), rows, ahead=False)
    with pytest.raises(Untrue, match=r"has spent 0.2 s, but the push arrived 0.1 s after the start"):
        _check_spent(shard((0.0515, 0.2)), rows, ahead=True)
