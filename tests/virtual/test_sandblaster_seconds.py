"""Exact seconds of an evaluation of 8 learners, one five times slower, where messages take none [Dean12 4.2]."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpisgd.records.log.reader import Run
from mpisgd.simulate.job import simulate
from tests.virtual.test_sandblaster import job

SLOW = 5
UNIT_S = 1 / 64
"""Of a usual learner for a portion."""
FREE = {"latency_s": 0.0, "overhead_s": 0.0, "bandwidth": 1e300, "node_bandwidth": 1e300, "local_bandwidth": 1e300}
NOTHING = {"gradient_s_per_byte": 0.0, "update_s_per_byte": 0.0}


@pytest.mark.parametrize(
    ("portions", "duplicates", "units"),
    [
        (8, False, 5),  # one each: the slow one's takes five units
        (8, True, 2),  # the others, idle after one, do it again
        (16, True, 3),  # the slow one's first is waited for no longer
        pytest.param(16, False, 5, marks=pytest.mark.slow),  # it is, and all others are done after three
        pytest.param(24, False, 5, marks=pytest.mark.slow),
        pytest.param(24, True, 4, marks=pytest.mark.slow),
        (32, False, 5),  # of four rounds of 7 and the slow one's, three are left: nobody waits for it
        (32, True, 5),
    ],
)
def test_the_first_evaluation_takes_what_its_portions_allow(portions: int, duplicates: bool, units: int, tmp_path: Path) -> None:
    """The ideal share is portions / (7 + 1 / 5) units: 1.125 of it with 32 portions, 4.5 with 8 that are dealt once."""
    config = job(
        tmp_path / "run",
        learners=8,
        mu=2,
        threads=1,
        data={"name": "synthetic", "samples": 2 * portions, "test_samples": 8, "shape": [6], "classes": 4},
        protocol={"duplicates": duplicates, "iterations": 1},
        compute={"name": "constant", "mean_s": UNIT_S},
        straggler={"slowdown": {3: SLOW}},
        network=FREE,
        service=NOTHING,
    )
    simulate(config)
    assert Run(tmp_path / "run").updates["time_s"][0] == units * UNIT_S
