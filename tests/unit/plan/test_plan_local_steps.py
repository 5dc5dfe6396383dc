"""How many own steps between two exchanges a plan wants: against closed forms, and against runs with so many."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from mpisgd.config import StragglerOptions, replace
from mpisgd.config.config_virtual import ConstantComputeOptions, LognormalComputeOptions, NetworkOptions
from mpisgd.plan import local_steps
from mpisgd.plan.costs.fit import fit
from mpisgd.plan.costs.predict import predict
from mpisgd.protocols import AsyncOptions, BackupOptions, DownpourOptions, HardsyncOptions
from mpisgd.records.log.reader import Run
from tests.unit.plan.test_plan_fit import virtual_run

pytestmark = pytest.mark.slow

C, LEARNERS = 0.01, 4
SLOW = NetworkOptions(bandwidth=4e6, node_bandwidth=4e6, local_bandwidth=4e6)


@pytest.fixture(scope="module")
def constant(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("constant") / "run"
    return virtual_run(path, AsyncOptions(), learners=LEARNERS, pushes=200, compute=ConstantComputeOptions(mean_s=C))


def test_an_exchange_counts_once_for_all_own_steps(constant: Run) -> None:
    """One asynchronous learner: H c of H c + x, where x is what is left of the first cycle."""
    config = replace(fit(constant), network=SLOW)
    config = replace(config, virtual=dataclasses.replace(config.virtual, learners=1))
    found = local_steps.choices(config, 2000)
    assert [each.local_steps for each in found] == [2**k for k in range(len(found))]
    exchange_s = C / found[0].of_free - C
    assert exchange_s > C / 4
    for each in found:
        compute_s = each.local_steps * C
        assert each.of_free == pytest.approx(compute_s / (compute_s + exchange_s), rel=0.02)
        assert each.nbytes_per_sample == pytest.approx(8 * config.virtual.parameters / (each.local_steps * config.mu))
    assert found[-1].of_free >= 0.95 > found[-2].of_free
    assert f"with H = {found[-1].local_steps}, " in local_steps.advice(found)[0]


@pytest.mark.parametrize(
    "protocol",
    [HardsyncOptions(), *(pytest.param(each, marks=pytest.mark.rare) for each in (AsyncOptions(), BackupOptions(b=1)))],
    ids=lambda each: type(each).__name__,
)
def test_it_is_what_a_run_with_so_many_does(protocol: HardsyncOptions | AsyncOptions | BackupOptions, tmp_path: Path) -> None:
    run = virtual_run(
        tmp_path / "one", protocol, learners=LEARNERS, pushes=800, compute=LognormalComputeOptions(mean_s=C), network=SLOW
    )
    found = {each.local_steps: each for each in local_steps.choices(fit(run), 4000)}
    truth = predict(replace(fit(run), local_steps=4, seed=99), 2000)
    assert found[4].samples_per_s == pytest.approx(4 * run.config["mu"] * truth.gradients_per_s, rel=0.05)


def test_a_log_of_own_steps_gives_the_costs_of_one(tmp_path: Path) -> None:
    """Though each of its compute seconds is of four mini-batches; also where they are taken from the log."""
    quick = NetworkOptions(
        bandwidth=2.5e8, node_bandwidth=2.5e8, local_bandwidth=2.5e8
    )  # no queue, whose waits a log does not tell apart
    common = {"learners": LEARNERS, "compute": ConstantComputeOptions(mean_s=C), "network": quick}
    one = virtual_run(tmp_path / "one", AsyncOptions(), pushes=400, **common)
    four = virtual_run(tmp_path / "four", AsyncOptions(), pushes=400, local_steps=4, **common)
    expected = local_steps.choices(fit(one), 2000)
    for found in (local_steps.choices(fit(four, from_log=from_log), 2000) for from_log in (False, True)):
        for one_choice, other in zip(expected, found, strict=True):
            assert other.samples_per_s == pytest.approx(one_choice.samples_per_s, rel=0.05)


def test_delays_come_once_for_each_exchange(constant: Run) -> None:
    late = replace(fit(constant), straggler=StragglerOptions(delay="constant", delay_mean_s=C))
    one, *_, last = local_steps.choices(late, 2000)
    assert one.of_free < 0.55
    assert last.of_free >= 0.95


def test_who_takes_no_such_steps_has_no_table(constant: Run) -> None:
    config = fit(constant)
    for protocol in (DownpourOptions(n_push=2), BackupOptions(b=1, abort=True)):
        assert local_steps.choices(replace(config, protocol=protocol), 200) == ()
    assert local_steps.advice(()) == []


def test_none_are_needed_where_nothing_is_waited_for(constant: Run) -> None:
    fast = replace(fit(constant), network=NetworkOptions())
    assert "none are needed" in local_steps.advice(local_steps.choices(fast, 1000))[0]
