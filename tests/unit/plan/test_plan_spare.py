"""How many spare nodes a plan wants, each with a shard alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from rich.console import Console

from mpisgd.config import Config, LogOptions, replace
from mpisgd.config.config_virtual import ConstantComputeOptions, NetworkOptions, VirtualOptions
from mpisgd.plan import spare
from mpisgd.plan.costs.fit import fit
from mpisgd.plan.planner import Wishes, plan
from mpisgd.protocols import AllreduceOptions, HardsyncOptions
from mpisgd.records.log.reader import Run
from mpisgd.simulate import simulate
from tests.unit.plan.test_plan_fit import virtual_run

pytestmark = pytest.mark.slow

NODES = 4
SLOW = NetworkOptions(latency_s=1e-5, overhead_s=1e-6, bandwidth=4e9, node_bandwidth=1.25e8, local_bandwidth=4e9)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("constant") / "run"
    return virtual_run(path, HardsyncOptions(), learners=NODES, pushes=200, compute=ConstantComputeOptions(mean_s=1e-3))


def test_rounds_are_shorter_as_the_links_limit_says(run: Run) -> None:
    """[BytePS 3, Theorem 1]: with k spare nodes links carry 2(n - 1) / (n^2 + kn - 2k) of what n learners push and pull."""
    config = replace(fit(run), network=SLOW)
    config = replace(config, virtual=dataclasses.replace(config.virtual, parameters=11_000_000))
    found = spare.choices(config, 400)
    assert [each.k for each in found] == [0, 1, 2, 4]
    for each in found:
        carried = NODES * 2 * (NODES - 1) / (NODES**2 + each.k * NODES - 2 * each.k)
        limit_s = 4.4e7 * carried / 1.25e8
        assert limit_s <= 1.01 * NODES / each.gradients_per_s < 1.1 * limit_s, each.k
    assert spare.enough(found).k == 4
    assert "Spare nodes: 4 beside the 4 of learners" in spare.advice(found)[0]
    assert [row[-1] for row in spare.table(found).rows] == [None, None, None, "enough"]


def test_a_run_with_spare_nodes_is_planned_from(tmp_path: Path) -> None:
    nodes = {"learners": NODES, "gradients": False, "parameters": 11_000_000, "train_samples": 16 * NODES * 30, "ranks_per_node": 2}
    config = Config(
        protocol=HardsyncOptions(),
        shards=NODES + 2,
        epochs=1.0,
        mu=16,
        virtual=VirtualOptions(**nodes, spare_nodes=2),
        network=SLOW,
        log=LogOptions(progress="off"),
        out=str(tmp_path / "run"),
    )
    run = Run(simulate(config).path)
    assert len(run.slices_of(0)) == NODES + 2
    found = plan([run.path], None, Wishes(pushes=100, learners=NODES, from_log=True), Console(quiet=True))
    assert found.fit.config.virtual.spare_nodes == 2
    assert [row[0] for row in found.table("spare").rows] == [0, 1, 2, 4]


def test_where_links_limit_nothing_none_are_wanted(run: Run) -> None:
    found = spare.choices(replace(fit(run), compute=ConstantComputeOptions(mean_s=1.0)), 80)
    assert spare.enough(found).k == 0
    assert "none are needed" in spare.advice(found)[0]


def test_where_no_shard_can_be_apart_nothing_is_said(run: Run, tmp_path: Path) -> None:
    config = fit(run)
    alike = replace(config, protocol=AllreduceOptions(), shards=1)
    fewer = replace(config, virtual=dataclasses.replace(config.virtual, learners=2))
    for each in (alike, fewer):
        assert spare.choices(each, 80) == []
    assert spare.advice([]) == []
