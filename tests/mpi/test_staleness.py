"""Staleness on 31 ranks [Zhang16 2.4, Fig. 1], and backup learners against stragglers [Chen16 3.1]."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Verdict

from .conftest import Shared, drive, jobs_of

LAMBDA = 30

# The learners sleep for most of a mini-batch, so that two cores can stand for thirty.
SCENE = {
    "model": "softmax",
    "mu": 1,
    "alpha0": 0.001,
    "straggler": {"delay": "normal", "delay_mean_s": 0.15, "delay_spread": 0.1},
    "evaluation": {"every_epochs": 0},
    "log": {"progress": "off"},
}


@pytest.fixture(scope="module")
def thirty(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Run]:
    """n -> the run of n-softsync; all in one launch."""
    directory = tmp_path_factory.mktemp("staleness")
    jobs = [
        {
            "ranks": LAMBDA + 1,
            "config": {
                **SCENE,
                "protocol": {"name": "softsync", "n": n},
                "epochs": pushes / 1437,
                "out": str(directory / str(n)),
            },
        }
        for n, pushes in ((1, 600), (15, 1100), (30, 1100))
    ]
    drive(directory, jobs, ranks=LAMBDA + 1, timeout_s=400)
    return {n: Run(directory / str(n)) for n in (1, 15, 30)}


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize("n", [15, 30])
def test_mean_staleness_is_n_and_hardly_any_exceeds_twice_n(thirty: dict[int, Run], n: int) -> None:
    staleness = thirty[n].pushes["staleness"][thirty[n].pushes["verdict"] == Verdict.APPLY]
    settled = staleness[LAMBDA * 2 :]  # the first gradients of all learners come from clock 0
    assert settled.mean() == pytest.approx(n, rel=0.1)
    assert (staleness > 2 * n).mean() < 0.01, "but for learners that were kept from a core"


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.rare
def test_1_softsync_has_staleness_0_1_2(thirty: dict[int, Run]) -> None:
    applied = thirty[1].pushes[thirty[1].pushes["verdict"] == Verdict.APPLY]
    assert (applied["staleness"] > 2).mean() < 0.01, "but for learners that were kept from a core"
    assert 0.5 < applied["staleness"].mean() < 1.5


# ------------------------------------------------------------------------------------------------------------- stragglers

STRAGGLERS = {
    "model": "softmax",
    "mu": 4,
    "shards": 2,
    "straggler": {"delay": "constant", "delay_mean_s": 0.01, "slowdown": {"3": 16.0}},
    "evaluation": {"every_epochs": 0},
    "log": {"progress": "off"},
}
PROTOCOLS: dict[str, tuple[int, dict[str, Any]]] = {
    "backup": (6, {"protocol": {"name": "backup", "b": 1}, "epochs": 1.0}),
    "hardsync": (6, {"protocol": "hardsync", "epochs": 0.25}),
}
SHARED = Shared([("send", name) for name in PROTOCOLS], jobs_of(PROTOCOLS, STRAGGLERS))


@pytest.fixture
def backup_and_hardsync(runs: Path) -> tuple[Run, Run]:
    return Run(runs / "send" / "backup"), Run(runs / "send" / "hardsync")


@pytest.mark.slow
def test_backup_drops_what_the_straggler_sends_late(backup_and_hardsync: tuple[Run, Run]) -> None:
    pushes = backup_and_hardsync[0].pushes
    assert (pushes["staleness"][pushes["verdict"] == Verdict.APPLY] == 0).all()
    dropped = pushes[pushes["verdict"] == Verdict.DROP]
    assert len(dropped) > 0
    assert (dropped["staleness"] > 0).all()
    slow = (pushes["learner_id"] == 3) & (pushes["verdict"] != Verdict.LATE)
    assert (pushes["verdict"][slow] == Verdict.DROP).mean() > 0.5
    assert all(books.balanced and books.dropped > 0 for books in backup_and_hardsync[0].books())


@pytest.mark.slow
def test_backup_is_faster_per_update_than_hardsync(backup_and_hardsync: tuple[Run, Run]) -> None:
    backup, hardsync = (np.median(np.diff(run.updates["time_s"][run.updates["shard"] == 0])) for run in backup_and_hardsync)
    assert backup < 0.5 * hardsync, "three learners take 10 ms, the fourth 160 ms"


@pytest.mark.slow
def test_injected_delays_are_in_the_log(backup_and_hardsync: tuple[Run, Run]) -> None:
    pushes = backup_and_hardsync[1].pushes
    others = pushes["delay_s"][pushes["learner_id"] != 3]
    assert np.allclose(others, 0.01)
    assert (pushes["delay_s"][pushes["learner_id"] == 3] >= 0.16 - 1e-9).all()
