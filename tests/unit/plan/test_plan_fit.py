"""Costs fitted from logs: those of virtual runs, whose costs are known exactly, read as if they were of real ranks."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpisgd.base.errors import DataError
from mpisgd.config import Config, LogOptions, StragglerOptions, replace
from mpisgd.config.config_virtual import LognormalComputeOptions, NetworkOptions, VirtualOptions
from mpisgd.exchange.learner_channel import LearnerChannel
from mpisgd.gradient.straggler import Delays
from mpisgd.plan.costs.fit import fit, fitted, with_rest
from mpisgd.plan.costs.messages import measured
from mpisgd.plan.costs.observe import Lag, distance, observe
from mpisgd.plan.costs.predict import predict
from mpisgd.plan.costs.waits import without_waits
from mpisgd.protocols import BackupOptions, HardsyncOptions, SoftsyncOptions, SspOptions
from mpisgd.records.log.reader import Run
from mpisgd.simulate import simulate
from tests.effort import spread
from tests.unit import fabricate

pytestmark = pytest.mark.slow

COMPUTE = LognormalComputeOptions(mean_s=0.02, sigma=0.3)
PARAMETERS = 100_000
NBYTES = 4 * PARAMETERS


def virtual_run(
    path: Path, protocol: Any, *, learners: int = 8, pushes: int = 3000, parameters: int = PARAMETERS, **fields: Any
) -> Run:
    """A virtual run without gradients of about so many pushes."""
    rules = protocol.make(learners)
    updates = pushes // (learners if rules.consistent else rules.gradients_per_update)
    virtual = VirtualOptions(
        learners=learners,
        gradients=False,
        parameters=parameters,
        train_samples=updates * rules.gradients_per_update * 16,
        ranks_per_node=fields.pop("ranks_per_node", 1),
    )
    log = LogOptions(progress="off", flush_rows=8192)
    config = Config(protocol=protocol, virtual=virtual, epochs=1.0, mu=16, out=str(path), log=log, **{"compute": COMPUTE, **fields})
    return Run(simulate(config).path)


COSTLY = [SoftsyncOptions(n=1), SoftsyncOptions(n=8), HardsyncOptions(), BackupOptions(b=2)]


@pytest.mark.parametrize(("protocol", "shards"), spread(itertools.product(COSTLY, [1, 2]), 8, unpack=True))
def test_the_costs_of_a_virtual_run_are_found_in_its_log(tmp_path: Path, protocol: Any, shards: int) -> None:
    run = virtual_run(tmp_path / "run", protocol, shards=shards, pushes=1000)
    real = Config().network
    found = {cost.name: cost.value for cost in fitted(run, from_log=True).costs}
    assert found["bandwidth, two nodes"] == pytest.approx(real.bandwidth, rel=1e-3)
    assert found["latency"] == pytest.approx(real.latency_s, abs=0.1e-6)
    assert found["service of a gradient"] == pytest.approx(1e-10 * NBYTES / shards, rel=0.05)
    assert found["update"] == pytest.approx(5e-10 * NBYTES / shards, rel=1e-3)
    assert found["rest of a cycle"] < 0.02 * COMPUTE.mean_s, "the virtual cluster has no other costs"


BESIDE = [
    (HardsyncOptions(), {"parameters": 10_000_000}),  # streamed
    (HardsyncOptions(), {}),
    (BackupOptions(b=1), {}),
    (SoftsyncOptions(n=4), {}),
    (SoftsyncOptions(n=4), {"ahead": 1}),
]


@pytest.mark.parametrize(("protocol", "how"), spread(BESIDE, 4, unpack=True), ids=str)
def test_the_links_of_shards_beside_learners_are_found(tmp_path: Path, protocol: Any, how: dict[str, Any]) -> None:
    """A shard and a learner on each of four nodes: a slice of its own node's shard does not cross a learner's link."""
    network = NetworkOptions(bandwidth=10e9, node_bandwidth=125e6, local_bandwidth=10e9, turn_nbytes=1_250_000)
    scene: dict[str, Any] = {
        "learners": 4,
        "shards": 4,
        "ranks_per_node": 2,
        "parameters": 1_000_000,
        "network": network,
        "placement": "spread",
        **how,
    }
    fit_of = fit(virtual_run(tmp_path / "run", protocol, pushes=400, **scene), from_log=True)
    if "ahead" not in how:  # where a link carries a push or an answer besides, or does not
        assert fit_of.network.node_bandwidth == pytest.approx(125e6, rel=0.15 if how else 0.1)
    truth = observe(virtual_run(tmp_path / "other", protocol, seed=7, pushes=400, **scene))
    assert truth is not None
    rel = 0.1 if how else 0.05
    assert predict(fit_of, 400).seconds_per_update == pytest.approx(truth.seconds_per_update, rel=rel)


@pytest.mark.parametrize("beside", [False, True])
def test_a_run_that_gathered_behind_a_slow_link_is_predicted(tmp_path: Path, *, beside: bool) -> None:
    """Where each node has a shard, all transfers cross that link: no learner's tells it from the others."""
    network = NetworkOptions(bandwidth=10e9, node_bandwidth=125e6, local_bandwidth=10e9, slow_links={3: 8.0})
    layout = {"shards": 4, "ranks_per_node": 2, "placement": "spread"} if beside else {"shards": 2, "placement": "packed"}
    scene: dict[str, Any] = {"learners": 4, "parameters": 1_000_000, "network": network, **layout}
    run = virtual_run(tmp_path / "run", SoftsyncOptions(n=4), pushes=600, **scene)
    assert run.environment["way"] == "gathered"
    fit_of = fit(run, from_log=True)
    if not beside:
        assert fit_of.network.node_bandwidth == pytest.approx(125e6, rel=0.02)
        assert fit_of.network.slow_links == {3: pytest.approx(8.0, rel=0.02)}
    truth = observe(virtual_run(tmp_path / "other", SoftsyncOptions(n=4), seed=7, pushes=600, **scene))
    assert truth is not None
    assert predict(fit_of, 600).seconds_per_update == pytest.approx(truth.seconds_per_update, rel=0.1)


def test_a_run_and_its_fit_agree(tmp_path: Path) -> None:
    run = virtual_run(tmp_path / "run", SoftsyncOptions(n=2), straggler=StragglerOptions(delay="exponential", delay_mean_s=0.03))
    found = fitted(run, from_log=True)
    assert found.differences["seconds_per_update"] == pytest.approx(0, abs=0.02)
    assert found.staleness_distance is not None
    assert found.staleness_distance < 0.05
    assert found.config.straggler.delay == "exponential", "the learner's loop injects the stragglers again"
    assert found.config == fit(run, from_log=True)
    again = Run(simulate(found.config).path)
    assert again.path == Path(f"{run.path}-virtual")
    assert len(again.updates) == len(run.updates)


OTHERS = [
    HardsyncOptions(),
    BackupOptions(b=1),
    BackupOptions(b=3),
    SoftsyncOptions(n=1),
    SoftsyncOptions(n=3),
    SoftsyncOptions(n=8),
]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Config]:
    """The fits of a run of each kind."""
    folder = tmp_path_factory.mktemp("sources")
    runs = {"hardsync": HardsyncOptions(), "softsync": SoftsyncOptions(n=4)}
    return {name: fit(virtual_run(folder / name, protocol), from_log=True) for name, protocol in runs.items()}


@pytest.mark.parametrize("protocol", spread(OTHERS, 3), ids=str)
def test_a_log_predicts_other_protocols(sources: dict[str, Config], tmp_path: Path, protocol: Any) -> None:
    truth = observe(virtual_run(tmp_path / "truth", protocol, seed=7))
    assert truth is not None
    for source in sources.values():
        found = predict(replace(source, protocol=protocol), 3000)
        assert found.seconds_per_update == pytest.approx(truth.seconds_per_update, rel=0.05)
        assert found.mean_staleness == pytest.approx(truth.mean_staleness, rel=0.05)


@pytest.mark.parametrize("source", [HardsyncOptions(), pytest.param(SoftsyncOptions(n=8), marks=pytest.mark.rare)], ids=str)
def test_a_slow_link_is_found_in_a_log_and_counted(tmp_path: Path, source: Any) -> None:
    """That of learner 7: 1.2 MB take 0.01 s elsewhere, and 0.1 s there."""
    slow = NetworkOptions(bandwidth=125e6, node_bandwidth=125e6, slow_links={8: 10.0}, turn_nbytes=1_000_000)
    scene: dict[str, Any] = {"parameters": 300_000, "pushes": 1000, "network": slow, "compute": LognormalComputeOptions(mean_s=0.2)}
    fit_of = fit(virtual_run(tmp_path / "run", source, **scene), from_log=True)
    assert fit_of.network.slow_links == {8: pytest.approx(10, rel=0.01)}
    for protocol in (HardsyncOptions(), BackupOptions(b=1), SoftsyncOptions(n=8)):
        truth = observe(virtual_run(tmp_path / type(protocol).__name__, protocol, seed=7, **scene))
        assert truth is not None
        assert predict(replace(fit_of, protocol=protocol), 1000).seconds_per_update == pytest.approx(
            truth.seconds_per_update, rel=0.05
        )


@pytest.mark.parametrize(
    ("source", "shards", "rel"),
    [
        (HardsyncOptions(), 1, 0.03),  # streamed: the log tells less
        (SoftsyncOptions(n=4), 4, 0.16),
        pytest.param(SoftsyncOptions(n=4), 1, 0.02, marks=pytest.mark.rare),
        pytest.param(BackupOptions(b=1), 1, 0.02, marks=pytest.mark.rare),
        pytest.param(HardsyncOptions(), 4, 0.16, marks=pytest.mark.rare),
        pytest.param(BackupOptions(b=1), 4, 0.16, marks=pytest.mark.rare),
    ],
    ids=str,
)
def test_a_log_of_shards_that_never_rest_predicts_other_protocols(tmp_path: Path, source: Any, shards: int, rel: float) -> None:
    """44 MB over 1 Gbit/s, which connections share: all pushes wait, and no transfer has a link for itself."""
    shared = NetworkOptions(bandwidth=5e9, node_bandwidth=120e6, local_bandwidth=5e9, turn_nbytes=1_000_000)
    scene: dict[str, Any] = {"parameters": 11_000_000, "pushes": 600, "learners": 4, "network": shared, "shards": shards}
    scene |= {"compute": LognormalComputeOptions(mean_s=0.05)} | (
        {"ranks_per_node": 2, "placement": "spread"} if shards > 1 else {}
    )
    fit_of = fit(virtual_run(tmp_path / "run", source, **scene), from_log=True)
    for protocol in (HardsyncOptions(), BackupOptions(b=1), SoftsyncOptions(n=4)):
        truth = observe(virtual_run(tmp_path / type(protocol).__name__, protocol, seed=7, **scene))
        assert truth is not None
        found = predict(replace(fit_of, protocol=protocol), 600).gradients_per_s
        assert found == pytest.approx(truth.gradients_per_s, rel=rel)


@pytest.mark.parametrize(("ranks_per_node", "between_nodes"), [(1, 2e8), (9, 1e8)])
def test_links_that_the_log_has_seen_are_faster_until_the_fit_is_no_slower(
    tmp_path: Path, ranks_per_node: int, between_nodes: float
) -> None:
    true = NetworkOptions(bandwidth=1e9, node_bandwidth=2e8, local_bandwidth=2e8)
    scene: dict[str, Any] = {"parameters": 11_000_000, "pushes": 300, "learners": 4, "ranks_per_node": ranks_per_node}
    run = virtual_run(tmp_path / "run", SoftsyncOptions(n=4), compute=LognormalComputeOptions(mean_s=0.05), network=true, **scene)
    real, fit_of = observe(run), fit(run, from_log=True)
    assert real is not None
    network = fit_of.network
    slow = dataclasses.replace(network, bandwidth=1e8, node_bandwidth=1e8, local_bandwidth=1e8, latency_s=0.1)
    found, virtual, costs = without_waits(replace(fit_of, network=slow), real, 300)
    assert [cost.name for cost in costs] == ["latency", "links beyond that"]
    assert found.network.latency_s == NetworkOptions().latency_s
    assert found.network.local_bandwidth == pytest.approx(2e8, rel=0.05)
    assert found.network.node_bandwidth == pytest.approx(between_nodes, rel=0.05)
    assert virtual.gradients_per_s == pytest.approx(real.gradients_per_s, rel=0.03)


def test_a_virtual_run_is_believed_what_it_says_of_itself(tmp_path: Path) -> None:
    run = virtual_run(tmp_path / "run", SoftsyncOptions(n=1), pushes=500)
    found = fitted(run)
    assert found.config.compute == COMPUTE
    assert found.costs == ()
    assert found.differences["seconds_per_update"] == pytest.approx(0, abs=1e-9)
    assert found.staleness_distance == 0


# --------------------------------------------------------------------------------------------------------- what a log lacks


def test_a_log_without_pushes_or_sizes_is_refused(tmp_path: Path) -> None:
    path = fabricate.write_run(tmp_path / "empty", fabricate.Log(), {"name": "hardsync"}, learners=2)
    with pytest.raises(DataError, match="empty holds no pushes"):
        fit(Run(path))
    unknown = {"parameter_nbytes": "many"}
    path = fabricate.write_run(tmp_path / "sizes", fabricate.backup(), {"name": "backup", "N": 2}, 3, environment=unknown)
    with pytest.raises(DataError, match=r"parameter_nbytes = 'many': expected the bytes"):
        fit(Run(path))


def test_a_short_log_is_fitted_as_far_as_it_goes(tmp_path: Path) -> None:
    path = fabricate.write_run(tmp_path / "run", fabricate.backup(), {"name": "backup", "N": 2}, learners=3)
    found = fitted(Run(path))
    assert found.real is None
    assert found.differences == {}
    assert found.staleness_distance is None
    assert found.differences == {}
    assert any("too short" in line for line in found.assumptions)
    assert found.config.virtual.parameters == 358312 // 4
    assert found.config.virtual.ranks_per_node == 3, "hosts n1, n2 with one and three ranks"


def test_learners_without_pushes_draw_from_all(tmp_path: Path) -> None:
    path = fabricate.write_run(tmp_path / "run", fabricate.softsync(), {"name": "softsync", "n": 1}, learners=3)
    found = fitted(Run(path))
    assert found.config.compute.pooled  # type: ignore[union-attr]
    assert any("as some pushed none" in line for line in found.assumptions)


def test_a_run_in_place_and_its_fit_agree(tmp_path: Path) -> None:
    """Headers alone are sent, so a transfer takes no time from any cost."""
    run = virtual_run(tmp_path / "run", HardsyncOptions(), parameters=2_000_000, ranks_per_node=16, pushes=1000)
    assert run.environment["way"] == "in-place"
    found = fitted(run, from_log=True)
    sources = {cost.name: cost.source for cost in found.costs}
    assert sources["bandwidth"] == "assumed: headers alone do not tell the bandwidth"
    assert found.differences["seconds_per_update"] == pytest.approx(0, abs=0.02)


def test_small_messages_do_not_tell_a_bandwidth(tmp_path: Path) -> None:
    run = virtual_run(tmp_path / "run", SoftsyncOptions(n=1), pushes=300, parameters=1000)
    wire = measured(run)
    assert wire.network.bandwidth == Config().network.bandwidth
    assert "do not tell" in wire.costs[0].source


def test_more_ranks_than_cores_are_told(tmp_path: Path) -> None:
    log = fabricate.simulated("softsync", learners=4, updates=50, wanted=4)
    path = fabricate.write_run(tmp_path / "run", log, {"name": "softsync", "n": 1}, 4, environment={"cores_per_node": 2})
    assert any("4 ranks on a node of 2 cores" in line for line in fitted(Run(path)).assumptions)


# --------------------------------------------------------------------------------------------------------------- the rest

STRAGGLERS = [
    StragglerOptions(),
    StragglerOptions(delay="constant", delay_mean_s=0.1),
    StragglerOptions(delay="normal", delay_mean_s=0.1, delay_spread=0.2),
    StragglerOptions(delay="pareto", delay_mean_s=0.1, delay_spread=1.5, delay_probability=0.2),
    StragglerOptions(slowdown={3: 5.0}, delay="exponential", delay_mean_s=0.1),
    StragglerOptions(rest_mean_s=0.1),
]


@pytest.mark.parametrize("straggler", STRAGGLERS, ids=str)
def test_the_rest_lengthens_every_mini_batch_alike(straggler: StragglerOptions) -> None:
    """Those of a slow learner, too, by no more; and however rare injected delays are."""
    before, after = (Delays(options, 1, 3) for options in (straggler, with_rest(straggler, Lag(0.02, 0.0))))
    assert [after.of(seq, 1.0) - before.of(seq, 1.0) for seq in range(50)] == pytest.approx([0.02] * 50)
    assert with_rest(straggler, Lag(0.0, 0.1)) == straggler


HIDDEN = {
    "slow": StragglerOptions(slowdown={3: 5.0}),
    "slow and late": StragglerOptions(slowdown={3: 5.0}, delay="exponential", delay_mean_s=0.02),
    "rarely late": StragglerOptions(delay="pareto", delay_spread=1.5, delay_mean_s=0.02, delay_probability=0.2),
}


PUSHED = [HardsyncOptions(), BackupOptions(b=1), SoftsyncOptions(n=4), SspOptions()]


@pytest.mark.parametrize(("name", "protocol"), spread(itertools.product(HIDDEN, PUSHED), 12, unpack=True), ids=str)
def test_what_no_column_tells_is_repeated_beside_stragglers(
    name: str, protocol: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every learner takes 4 ms more for a cycle than its columns say, a slow one no more than the others: were that multiplied by
    its slowdown, or put into rare delays, a virtual run would be 10 to 30 % slower than its log."""
    push, random = LearnerChannel.push, np.random.default_rng(1)

    def slow(self: Any, report: Any, meanwhile: Any = None) -> None:
        self._wire.work(int(4e6 * random.lognormal(-0.125, 0.5)))
        push(self, report, meanwhile)

    monkeypatch.setattr(LearnerChannel, "push", slow)
    run = virtual_run(tmp_path / "run", protocol, straggler=HIDDEN[name], pushes=2000)
    monkeypatch.undo()
    found = fitted(run, from_log=True)
    rest = next(cost.value for cost in found.costs if cost.name == "rest of a cycle")
    assert rest == pytest.approx(0.004, rel=0.1)
    assert found.differences["seconds_per_update"] == pytest.approx(0, abs=0.05)
    assert found.differences["gradients_per_s"] == pytest.approx(0, abs=0.05)
    assert ("mean_staleness" in found.differences) == (not isinstance(protocol, HardsyncOptions | BackupOptions))
    assert found.differences.get("mean_staleness", 0) == pytest.approx(0, abs=0.05)


def test_what_a_log_has_more_than_the_columns_is_found(tmp_path: Path) -> None:
    """Learners that take 5 ms for what no column tells: constant delays, whose column is then emptied."""
    run = virtual_run(tmp_path / "run", SoftsyncOptions(n=1), straggler=StragglerOptions(delay="constant", delay_mean_s=0.005))
    run.config["straggler"] = {}
    run.pushes["delay_s"] = 0
    found = fitted(run, from_log=True)
    rest = next(cost.value for cost in found.costs if cost.name == "rest of a cycle")
    assert rest == pytest.approx(0.005, rel=0.1)
    assert found.differences["seconds_per_update"] == pytest.approx(0, abs=0.02)


# ------------------------------------------------------------------------------------------------------------ observation


def test_observation_by_hand(tmp_path: Path) -> None:
    """`fabricate.softsync`: updates at 2.05, 4.05, 6.05, 8.05 s; a fifth of 10 pushes, 2, are before the first."""
    found = observe(Run(fabricate.write_run(tmp_path / "run", fabricate.softsync(), {"name": "softsync", "n": 1}, learners=2)))
    assert found is not None
    assert found.intervals == pytest.approx([2.0] * 2)
    assert (found.updates, found.gradients, found.pushes) == (2, 4, 4)
    assert found.seconds_per_update == pytest.approx(2)
    assert found.gradients_per_s == pytest.approx(1)
    assert found.staleness.tolist() == [2, 1, 0, 1]
    assert found.mean_staleness == pytest.approx(1)
    assert found.beyond == pytest.approx(0.25)
    short = fabricate.write_run(tmp_path / "short", fabricate.backup(), {"name": "backup", "N": 2}, learners=3)
    assert observe(Run(short)) is None


def test_kolmogorov_smirnov_distance() -> None:
    assert distance(np.array([1, 1]), np.array([2, 2])) == 0
    assert distance(np.array([4]), np.array([0, 0, 3])) == 1
    assert distance(np.array([1, 1]), np.array([1, 2, 1])) == pytest.approx(0.25)
