"""Learning rates of whole runs: what the log says of each update, whatever the protocol makes updates of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.virtual.jobs import SIZES, TENSORS, simulated

#: Protocol -> samples of one update of four learners, with mini-batches of four.
UPDATES: dict[str, tuple[dict[str, Any], int]] = {
    "hardsync": ({"name": "hardsync"}, 16),
    "backup": ({"name": "backup", "b": 1}, 12),
    "softsync": ({"name": "softsync", "n": 2}, 8),
    "async": ({"name": "async"}, 4),
    "downpour": ({"name": "downpour", "n_push": 2}, 8),
    "allreduce": ({"name": "allreduce"}, 16),
}


@pytest.mark.parametrize("base", [SIZES, TENSORS], ids=["sizes", "tensors"])
@pytest.mark.parametrize("name", UPDATES)
def test_a_warm_up_of_k_updates_begins_with_one_kth_of_the_rate(name: str, base: dict[str, Any], tmp_path: Path) -> None:
    """The first update has a rate, too, and the k-th the whole one."""
    protocol, samples = UPDATES[name]
    size = base["virtual"].get("train_samples") or base["data"]["samples"]
    schedule = {"name": "constant", "warmup_epochs": 5 * samples / size}
    run = simulated(tmp_path / "run", base, protocol=protocol, schedule=schedule, alpha0=0.1)
    rates = run.updates["learning_rate"][run.updates["shard"] == 0]
    assert rates[:7] == pytest.approx([0.02, 0.04, 0.06, 0.08, 0.1, 0.1, 0.1])
