"""A learner's own step is taken while its push is under way [ElasticDL]: in virtual time it costs only what it takes longer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mpisgd import parts
from mpisgd.local_steps import LocalSteps
from tests.virtual.jobs import SIZES, simulated
from tests.virtual.scene import FREE

COMPUTE_S, PUSH_S = 0.1, 0.04
#: One learner and one shard; only bytes take time: 4,000 of them 40 ms, in each direction.
JOB = {
    "virtual": {"learners": 1, "ranks_per_node": 1},
    "compute": {"name": "constant", "mean_s": COMPUTE_S},
    "network": {**vars(FREE), "bandwidth": 1e5},
    "service": {"gradient_s": 0.0, "gradient_s_per_byte": 0.0, "update_s": 0.0, "update_s_per_byte": 0.0},
}


@pytest.mark.parametrize("step_s", [0.0, 0.01, 0.04, 0.05])
@pytest.mark.parametrize("protocol", [{"name": "ssp", "get_model_frequency": 4}, {"name": "downpour", "n_push": 1, "n_fetch": 4}])
def test_only_what_outlasts_the_push_takes_time(
    step_s: float, protocol: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(LocalSteps):
        def take_own_step(self) -> None:
            super().take_own_step()
            self._gradient._rank.work(round(step_s * 1e9))  # type: ignore[attr-defined]

    monkeypatch.setattr(parts, "LocalSteps", Slow)
    pushes = simulated(tmp_path / "run", SIZES, **JOB, protocol=protocol).pushes
    assert len(pushes) == 100
    apart_s = np.diff(pushes["arrival_s"])
    pulled = np.arange(1, 100) % 4 == 0
    assert apart_s[~pulled] == pytest.approx(COMPUTE_S + max(PUSH_S, step_s), rel=1e-9), "one after the other, it were the sum"
    assert apart_s[pulled] == pytest.approx(COMPUTE_S + 2 * PUSH_S, rel=1e-9), "before a pull there is no step"
