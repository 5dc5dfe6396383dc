"""Which K and M a plan names: predictions from a run of whole models, beside virtual runs of groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpisgd.base.errors import ConfigError
from mpisgd.config.config_file import from_mapping
from mpisgd.plan import groups
from mpisgd.plan.costs.fit import fit
from mpisgd.plan.costs.observe import observe
from mpisgd.records.log.reader import Run
from tests.virtual.jobs import SIZES, TENSORS, merged, simulated

JOB: dict[str, Any] = {
    **TENSORS,
    "model": {"name": "mlp", "hidden": [64, 64, 64]},
    "mu": 16,
    "shards": 4,
    "protocol": {"name": "softsync", "n": 2},
    "virtual": {"learners": 4, "gradients": False, "train_samples": 1600},
    "network": {"bandwidth": 1e7, "latency_s": 1e-4},
    "epochs": 4,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return simulated(tmp_path_factory.mktemp("plan") / "run", JOB)


@pytest.mark.slow
def test_predictions_are_what_groups_take(run: Run, tmp_path: Path) -> None:
    found = groups.choices(fit(run), 3, 2000)
    assert {(each.group_size, each.micro_batches) for each in found} == {(1, 1)} | {
        (size, parts) for size in (2, 3) for parts in (1, 2, 4, 8, 16)
    }
    for size, parts in ((2, 1), (2, 4), (3, 8)):
        seen = observe(simulated(tmp_path / f"{size}-{parts}", JOB, group_size=size, micro_batches=parts))
        (choice,) = [each for each in found if (each.group_size, each.micro_batches) == (size, parts)]
        assert seen is not None
        assert choice.seconds == pytest.approx(seen.seconds * 4 / seen.pushes, rel=0.05)
    assert [row[-1] for row in groups.table(found).rows].count("fastest") == 1
    assert "times as fast as one rank" in groups.advice(found)[0]


def test_nothing_is_predicted_of_one_rank(run: Run) -> None:
    assert groups.choices(fit(run), 1, 2000) == ()
    assert groups.advice(()) == []


@pytest.mark.parametrize(
    ("most", "changes", "refused"),
    [
        (0, {}, "--group-size 0: expected at least 1"),
        (2, {"exchange": "duplex"}, "exchange = 'duplex': expected 'whole' beside group_size > 1"),
    ],
)
def test_bad_input(most: int, changes: dict[str, Any], refused: str, tmp_path: Path) -> None:
    config = from_mapping(merged({**SIZES, "out": str(tmp_path)}, {"protocol": "async", **changes}))
    with pytest.raises(ConfigError, match=refused):
        groups.check(config, most)
