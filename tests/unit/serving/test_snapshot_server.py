"""A snapshot is given out when learner 0 has left, beside it, what it keeps beside its weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from mpisgd.serving.snapshot_server import SnapshotServer


def test_a_pull_that_asks_again_is_not_counted() -> None:
    """Until all shards have one clock, shard 0 may be asked several times for the weights of one mini-batch."""
    given: list[int] = []
    channel = SimpleNamespace(answer_snapshot=lambda vectors, clock, samples, taken_s: given.append(clock))
    taken = SimpleNamespace(vectors=[], clock=5, samples=0, taken_s=0.0)
    rules = SimpleNamespace(present={0, 1}, interrupted=False, finished=False)
    snapshots = SimpleNamespace(count=1, get=lambda number: taken)
    snapshot_server = SnapshotServer(*cast(Any, (channel, rules, None, snapshots)), pulls=3)
    snapshot_server.ask(0)
    for _ in range(9):
        snapshot_server.has_pulled()
    assert given == []
    for _ in range(2):
        snapshot_server.has_computed()
        snapshot_server.has_pulled()
    assert given == [5]
