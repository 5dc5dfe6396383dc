"""Real ranks against what their logs predict: one configuration repeated in virtual time, and others foretold.

The learners sleep for most of a mini-batch, so that two cores can stand for all ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpisgd.analysis import staleness
from mpisgd.config import Config, replace
from mpisgd.config_file import from_mapping
from mpisgd.plan import fit
from mpisgd.plan.observe import distance, observe
from mpisgd.plan.predict import predict
from mpisgd.plan.scale import with_shards
from mpisgd.records.reader import Run
from mpisgd.simulate import simulate

from .conftest import drive

LAMBDA = 8
SAMPLES = 1437  # of the digits

SCENE = {
    "model": "softmax",
    "mu": 1,
    "alpha0": 0.001,
    "straggler": {"delay": "normal", "delay_mean_s": 0.1, "delay_spread": 0.2},
    "evaluation": {"every_epochs": 0},
    "log": {"progress": "off"},
}

#: Name -> protocol, shards, gradients that are applied.
RUNS: dict[str, tuple[dict[str, Any], int, int]] = {
    "hardsync": ({"name": "hardsync"}, 1, 176),
    "backup-1": ({"name": "backup", "b": 1}, 1, 154),
    "backup-2": ({"name": "backup", "b": 2}, 1, 132),
    "softsync-1": ({"name": "softsync", "n": 1}, 1, 320),
    "softsync-2": ({"name": "softsync", "n": 2}, 1, 320),
    "softsync-2-s2": ({"name": "softsync", "n": 2}, 2, 320),
    "softsync-4": ({"name": "softsync", "n": 4}, 1, 320),
    "softsync-8": ({"name": "softsync", "n": 8}, 1, 320),
}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    directory = tmp_path_factory.mktemp("plan")
    jobs = [
        {
            "ranks": LAMBDA + shards,
            "config": {
                **SCENE,
                "protocol": protocol,
                "shards": shards,
                "epochs": gradients / SAMPLES,
                "out": str(directory / name),
            },
        }
        for name, (protocol, shards, gradients) in RUNS.items()
    ]
    drive(directory, jobs, ranks=LAMBDA + 2, timeout_s=200)
    return {name: Run(directory / name) for name in RUNS}


@pytest.fixture(scope="module")
def fits(real: dict[str, Run]) -> dict[str, Config]:
    return {name: fit(real[name]) for name in ("hardsync", "softsync-2")}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("source", ["hardsync", "softsync-2"])
def test_one_log_predicts_the_others(real: dict[str, Run], fits: dict[str, Config], source: str, name: str) -> None:
    measured, wanted = observe(real[name]), from_mapping(real[name].config)
    assert measured is not None
    config = with_shards(replace(fits[source], protocol=wanted.protocol), wanted.shards, wanted.placement)
    found = predict(config, len(real[name].pushes) // wanted.shards)
    assert found.seconds_per_update == pytest.approx(measured.seconds_per_update, rel=0.15)
    assert found.mean_staleness == pytest.approx(measured.mean_staleness, rel=0.15)


@pytest.mark.parametrize("name", ["softsync-1", "softsync-2", "softsync-2-s2", "softsync-4", "softsync-8"])
def test_virtual_ranks_repeat_real_ones(real: dict[str, Run], tmp_path: Path, name: str) -> None:
    """The same configuration, fed with the measured costs: all of both runs, from their first gradient on."""
    config = replace(fit(real[name]), out=str(tmp_path / "virtual"))
    virtual = Run(simulate(config).path)
    assert distance(staleness.histogram(real[name]), staleness.histogram(virtual)) < 0.1
    speeds = [run.updates["clock"].max() / run.updates["time_s"].max() for run in (real[name], virtual)]
    assert speeds[1] == pytest.approx(speeds[0], rel=0.15)
