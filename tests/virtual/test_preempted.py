"""A rank may lose its core at any look at the clock: no seconds of the log become negative, or more than have passed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from mpisgd.comm.virtual.cluster import VirtualRank
from mpisgd.replay.checks.record import read
from mpisgd.replay.prove import check_log
from tests.effort import spread
from tests.virtual.jobs import TENSORS, simulated
from tests.virtual.kinds import KINDS

BY_LAYERS = {
    "layerwise, async": {"protocol": {"name": "async"}, "per_layer": True, "shards": 2},
    "allreduce in buckets": {"protocol": {"name": "allreduce"}, "way": "buckets", "shards": 4},
}
JOBS = {**BY_LAYERS, **{kind: options for kind, options in KINDS.items() if "failures" not in options}}


@pytest.mark.parametrize("kind", [*BY_LAYERS, *spread([kind for kind in JOBS if kind not in BY_LAYERS], 12)])
def test_seconds_add_up(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    random_ = random.Random(kind)

    def now_ns(rank: VirtualRank) -> int:
        if random_.random() < 0.3:
            rank.now += random_.randrange(2_000_000_000)
        return rank.now

    monkeypatch.setattr(VirtualRank, "now_ns", now_ns)
    options: dict[str, Any] = JOBS[kind]
    check_log(read(simulated(tmp_path / "run", TENSORS, **options).path))
