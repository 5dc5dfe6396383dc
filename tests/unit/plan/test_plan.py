"""`mpisgd plan`: predictions against virtual runs, optima and bottlenecks where they must be, what is printed and refused."""

from __future__ import annotations

import dataclasses
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from mpisgd.base.errors import ConfigError, DataError
from mpisgd.cli.reading import plan as command
from mpisgd.config import Config, StragglerOptions, compatibility, replace
from mpisgd.config.config_virtual import (
    ConstantComputeOptions,
    HeavyTailComputeOptions,
    NetworkOptions,
    ServiceOptions,
    VirtualOptions,
)
from mpisgd.plan import Wishes, backup, collect, fit, plan, planner, shards, softsync
from mpisgd.plan.costs.bounds import bounds, order_statistic
from mpisgd.plan.costs.fit import Fit
from mpisgd.plan.costs.observe import observe
from mpisgd.plan.costs.predict import predict
from mpisgd.plan.costs.scale import with_learners, with_slow_links
from mpisgd.plan.target import convergence
from mpisgd.protocols import BackupOptions, HardsyncOptions, ProtocolOptions, SoftsyncOptions
from mpisgd.records.log.reader import Run
from tests.unit import fabricate
from tests.unit.plan.test_plan_fit import virtual_run

CHEAP = Wishes(pushes=200, learners=8)

# ------------------------------------------------------------------------------------------- stragglers [Chen16 Fig. 4, 5, 6]

LAMBDA = 40


@pytest.fixture(scope="module")
def heavy(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """hardsync among learners of which now and then one straggles for long."""
    path = tmp_path_factory.mktemp("heavy") / "run"
    return virtual_run(path, HardsyncOptions(), learners=LAMBDA, pushes=12_000, compute=HeavyTailComputeOptions())


@pytest.mark.slow
@pytest.mark.parametrize("from_log", [True, pytest.param(False, marks=pytest.mark.rare)])
def test_some_backup_learners_are_best_and_many_are_not(heavy: Run, from_log: bool) -> None:
    """[Chen16 Fig. 6]: neither none nor many; as many samples are assumed whatever N is."""
    found = collect.collecting(fit(heavy, from_log=from_log), 4000)
    chosen = backup.choices(found, convergence([heavy], None, None))
    assert 1 <= chosen.best.b <= 8
    none, many = chosen.of(0), chosen.of(30)
    assert none is not None
    assert many is not None
    assert none.time > 1.3 * chosen.best.time
    assert many.time > 2 * chosen.best.time


@pytest.mark.slow
def test_seconds_per_update_are_those_of_runs_with_so_many_backup_learners(heavy: Run, tmp_path: Path) -> None:
    """Medians: means of so heavy a tail would need far longer runs. The log's order statistics know nothing of who is late."""
    config = fit(heavy, from_log=True)
    for b in (1, 3, 8):
        protocol = BackupOptions(b=b)
        run = virtual_run(tmp_path / str(b), protocol, learners=LAMBDA, pushes=6000, compute=HeavyTailComputeOptions(), seed=b)
        truth, found = observe(run), predict(replace(config, protocol=protocol), 6000)
        assert truth is not None
        assert np.median(found.intervals) == pytest.approx(np.median(truth.intervals), rel=0.03)
        assert found.seconds_per_update == pytest.approx(truth.seconds_per_update, rel=0.15)


def test_every_number_of_gradients_has_its_seconds() -> None:
    assert collect.chosen(1) == [0]
    assert collect.chosen(5) == [0, 1, 2, 3, 4]
    some = collect.chosen(100)
    assert some[:6] == [0, 1, 2, 3, 4, 6]
    assert some[-1] == 99
    assert len(some) < 20


@pytest.mark.slow
def test_constant_learners_need_no_backup(tmp_path: Path) -> None:
    run = virtual_run(tmp_path / "run", HardsyncOptions(), learners=4, pushes=200, compute=ConstantComputeOptions(0.1))
    made = plan([run.path], tmp_path / "out", CHEAP, Console(file=io.StringIO()))
    assert made.backup.best.b == 0
    assert made.collecting.mean == pytest.approx([0.1] * 4, rel=0.05)


# ----------------------------------------------------------------------------------------------------------------- softsync


@pytest.mark.slow
def test_staleness_of_softsync_is_predicted(tmp_path: Path) -> None:
    straggler = StragglerOptions(delay="exponential", delay_mean_s=0.02)
    source = virtual_run(tmp_path / "source", HardsyncOptions(), straggler=straggler)
    found = softsync.asynchrony(fit(source, from_log=True), 3000)
    assert list(found.by_n) == list(range(1, 9))
    for n in (1, 3, 8):
        truth = observe(virtual_run(tmp_path / str(n), SoftsyncOptions(n=n), straggler=straggler, seed=5))
        assert truth is not None
        assert found.by_n[n].mean_staleness == pytest.approx(truth.mean_staleness, rel=0.05)
        assert found.by_n[n].updates_per_s == pytest.approx(truth.updates_per_s, rel=0.05)
        assert found.by_n[n].beyond == pytest.approx(truth.beyond, abs=0.02)
    assert found.hardsync.gradients_per_s < found.by_n[1].gradients_per_s
    shown = softsync.table(found, 8)
    assert shown.cells("protocol")[:3] == ["hardsync", "1-softsync", "2-softsync"]
    assert shown.cells("c") == [8, 8, 4, 2, 2, 1, 1, 1, 1]


def test_a_selection_of_n_among_many_learners() -> None:
    assert softsync.chosen(1) == [1]
    assert softsync.chosen(8) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert softsync.chosen(30) == [1, 2, 4, 8, 15, 30]


# ------------------------------------------------------------------------------------------------------------------- shards

ANY = Config(
    protocol=SoftsyncOptions(n=1),
    virtual=VirtualOptions(learners=16, gradients=False, parameters=4_000_000),
    compute=ConstantComputeOptions(0.1),
)


@pytest.mark.slow
def test_the_shards_link_is_the_bottleneck_where_it_must_be() -> None:
    """16 MB in and out at 5 GB/s take 6.4 ms, their service 1.6 ms: 125 gradients/s, where 16 learners could do 150."""
    found = shards.points(ANY, 16, 2000)
    one = found[0]
    assert (one.shards, one.bottleneck) == (1, "shard's link")
    assert one.gradients_per_s == pytest.approx(one.bounds.gradients_per_s, rel=0.1)
    assert one.bounds.shard == pytest.approx(1 / (2 * 16e6 / 5e9 + 16e6 * 1e-10 + 16e6 * 5e-10 / 16), rel=0.01)
    enough = shards.enough(found)[16]
    assert enough.shards == 2
    assert enough.bounds.bottleneck == "learners"
    assert all(point.expected <= 1.01 * point.bounds.gradients_per_s for point in found)


def test_gradients_in_half_precision_leave_the_shards_link_sooner() -> None:
    """8 MB in and 16 MB out at 5 GB/s take 4.8 ms."""
    half = replace(ANY, push_format="bfloat16")
    one = shards._point(half, 1000, [])
    assert one.bounds.shard_link == pytest.approx(1 / 4.8e-3, rel=0.01)
    assert one.bounds.learners > bounds(ANY).learners
    assert one.gradients_per_s == pytest.approx(one.bounds.gradients_per_s, rel=0.1)
    assert bounds(replace(half, push_format="topk")).shard_link == pytest.approx(1 / (1.02 * 3.2e-3), rel=0.01)
    one = shards._point(replace(half, pull_format="bfloat16"), 1000, [])
    assert one.bounds.shard_link == pytest.approx(1 / 3.2e-3, rel=0.01)
    assert one.gradients_per_s == pytest.approx(one.bounds.gradients_per_s, rel=0.1)


@pytest.mark.slow
def test_the_update_is_the_bottleneck_where_every_gradient_makes_one() -> None:
    config = replace(ANY, protocol=SoftsyncOptions(n=16), service=ServiceOptions(update_s_per_byte=2e-9))
    one = shards._point(config, 500, [])
    assert one.bottleneck == "shard's update"
    assert one.expected == pytest.approx(1 / (32e-3 + 6.4e-3 + 1.6e-3), rel=0.05)


@pytest.mark.slow
def test_a_nodes_link_is_shared_by_its_shards() -> None:
    """Eight shards packed on one node pass its 1 GB/s; spread, each has one."""
    network = NetworkOptions(node_bandwidth=1e9)
    virtual = VirtualOptions(learners=56, gradients=False, parameters=4_000_000, ranks_per_node=8)
    config = replace(ANY, network=network, virtual=virtual)
    packed, spread = (bounds(replace(config, shards=8, placement=placement)) for placement in ("packed", "spread"))
    assert packed.bottleneck == "node's link"
    assert packed.gradients_per_s == pytest.approx(1e9 / 16e6)
    assert spread.node_link > 5 * packed.node_link
    one, other = (
        predict(replace(config, shards=8, placement=placement), 300).gradients_per_s for placement in ("packed", "spread")
    )
    assert one <= packed.gradients_per_s
    assert other > 1.1 * one


@pytest.mark.slow
def test_what_cannot_be_simulated_is_bounded() -> None:
    found = shards.points(replace(ANY, virtual=VirtualOptions(learners=16, gradients=False, parameters=1000)), 50_000, 200)
    beyond = [point for point in found if point.learners == 50_000]
    assert beyond[0].gradients_per_s is None
    assert 0 < beyond[0].expected <= beyond[0].bounds.gradients_per_s
    assert shards.sizes(16, 50_000)[0] == 16
    assert len(shards.sizes(16, 50_000)) == 4
    assert shards.sizes(16, 16) == [16]
    assert shards.sizes(6, 24) == [6, 12, 24]


def test_order_statistics_of_few_and_many() -> None:
    seconds = np.arange(1.0, 101.0)
    assert order_statistic(seconds, 1, 1) == pytest.approx(50.5)
    assert order_statistic(seconds, 10_000, 10_000) == pytest.approx(100)
    assert order_statistic(seconds, 50, 99) == pytest.approx(50.5)


def test_more_learners_are_like_those_of_the_run() -> None:
    straggler = StragglerOptions(slowdown={1: 8.0}, pause_learner=3)
    config = replace(ANY, straggler=straggler, virtual=VirtualOptions(learners=4, gradients=False))
    more = with_learners(config, 10)
    assert more.straggler.slowdown == {1: 8.0, 5: 8.0, 9: 8.0}
    assert more.virtual.learners == 10
    assert more.protocol == SoftsyncOptions(n=1)
    assert with_learners(config, 2).straggler.pause_learner == -1
    every = replace(config, protocol=SoftsyncOptions(n=4))
    assert with_learners(every, 10).protocol == SoftsyncOptions(n=10), "every gradient is an update"
    assert with_learners(replace(config, protocol=BackupOptions(b=1)), 12).protocol == BackupOptions(b=3)


# -------------------------------------------------------------------------------------------------- what is printed and written


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return virtual_run(tmp_path_factory.mktemp("small") / "run", BackupOptions(b=1), learners=4, pushes=400)


@pytest.fixture(scope="module")
def exact(small: Run) -> Fit:
    return planner.fitted(small)


@pytest.mark.usefixtures("nothing_drawn")
def test_a_plan_is_printed_and_written(small: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([str(small.path), "--pushes", "100", "--learners", "4", "--noise-samples", "100"]) == 0
    assert sorted(path.name for path in (small.path / "plan").iterdir()) == [
        "assumptions.csv",
        "backup.csv",
        "backup.png",
        "costs.csv",
        "local-steps.csv",
        "plan.md",
        "shards.csv",
        "shards.png",
        "softsync.csv",
        "softsync.png",
        "spare.csv",
        "updates.csv",
        "updates.png",
    ]
    said, page = capsys.readouterr().out, (small.path / "plan" / "plan.md").read_text()
    for text in ("Seconds per update", "Time to the target", "n-softsync", "Throughput over shards", "The run was virtual"):
        assert text in said
        assert text in page
    assert "noise scale given" in said
    assert {line.split(",")[0] for line in (small.path / "plan" / "shards.csv").read_text().splitlines()[1:]} == {"4"}
    assert "Backup learners: N =" in page


def off_by(exact: Fit, factor: float) -> Fit:
    assert exact.virtual is not None
    return dataclasses.replace(exact, virtual=dataclasses.replace(exact.virtual, intervals=factor * exact.virtual.intervals))


def test_a_plan_knows_how_well_its_fit_repeats_the_log(exact: Fit) -> None:
    """In per cent, in the table of costs; and in words where it is off by more than 5 %."""
    for factor, said in ((1.04, False), (1.12, True), (0.9, True)):
        costs = planner._costs_table(off := off_by(exact, factor))
        found = dict(zip(costs.cells("what"), costs.cells("value"), strict=True))
        assert found["virtual run beside the log: seconds per update"] == pytest.approx(100 * (factor - 1), abs=0.3)
        assert found["virtual run beside the log: gradients per second"] == pytest.approx(100 * (1 / factor - 1), abs=0.3)
        words = f"does not repeat the log (seconds per update {100 * (factor - 1):+.0f} %"
        assert (words in planner._misfit(off)) == (words in costs.note) == said


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_drawn")
def test_a_plan_says_so_before_all_advice(exact: Fit, small: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "fitted", lambda *_, **__: off_by(exact, 1.12))
    made = plan([small.path], tmp_path / "out", Wishes(pushes=100, learners=4), Console(file=io.StringIO()))
    words = "does not repeat the log (seconds per update +12 %"
    page = (tmp_path / "out" / "plan.md").read_text()
    assert words in made.advice[0] and page.count(words) == 2
    assert "virtual run beside the log: seconds per update" in page
    assert "virtual run beside the log" in (tmp_path / "out" / "costs.csv").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_drawn")
def test_another_network_slows_the_plan(small: Run, tmp_path: Path) -> None:
    wishes = Wishes(pushes=200, learners=4, network={"bandwidth": 1e7})
    made = plan([small.path], tmp_path / "out", wishes, Console(file=io.StringIO()))
    truth = observe(small)
    assert truth is not None
    assert made.collecting.seconds_per_update(3) > 2 * truth.seconds_per_update
    assert made.shards[0].bottleneck == "shard's link"
    assert "Another network: bandwidth = 1e+07." in made.assumptions
    assert sorted(path.name for path in (tmp_path / "out").iterdir())[0] == "assumptions.csv"


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_drawn")
def test_one_learner_has_nothing_to_choose(tmp_path: Path) -> None:
    run = virtual_run(tmp_path / "run", HardsyncOptions(), learners=1, pushes=100)
    made = plan([run.path], wishes=Wishes(pushes=100), console=Console(file=io.StringIO()))
    assert made.advice[0].startswith("There is one learner")
    assert (made.backup.best.b, list(made.softsync.by_n)) == (0, [1])


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_drawn")
def test_a_run_of_dealt_data_is_planned_like_others(tmp_path: Path) -> None:
    dealt, drawn = (
        virtual_run(tmp_path / sampling, SoftsyncOptions(n=2), learners=3, pushes=300, sampling=sampling)
        for sampling in ("dealt", "epoch")
    )
    made = plan([dealt.path], None, Wishes(pushes=100, learners=3), Console(quiet=True))
    assert made.collecting.mean == pytest.approx(collect.collecting(fit(drawn), 100).mean, rel=0.05)


def test_refusals(small: Run, exact: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "fitted", lambda *_, **__: exact)
    with pytest.raises(ConfigError, match="0 runs given"):
        command.main([])
    with pytest.raises(DataError, match="no run directory"):
        command.main([str(tmp_path)])
    with pytest.raises(ConfigError, match=r"--learners 3: expected at least the 4 of the run"):
        shards.points(exact.config, 3, 100)
    with pytest.raises(ConfigError, match=r"--target-error 0\.1: .* never measured"):
        command.main([str(small.path), "--target-error", "0.1"])
    for wrong, said in (("--pushes=1", "--pushes 1"), ("--noise-samples=-1", "--noise-samples -1"), ("--bandwidth=0", "bandwidth")):
        with pytest.raises(ConfigError, match=said):
            command.main([str(small.path), wrong])
    with pytest.raises(ConfigError, match=r"unknown option --group-size: removed; choose --group-size and --micro-batches of a"):
        command.main([str(small.path), "--group-size", "2"])
    with pytest.raises(ConfigError, match="--ranks-per-node 0"):
        Wishes(ranks_per_node=0)
    with pytest.raises(ConfigError, match=r"network\.speed: expected one of"):
        plan([small.path], wishes=Wishes(network={"speed": 1}), console=Console(file=io.StringIO()))
    with pytest.raises(SystemExit) as stopped:
        command.main(["--help"])
    assert stopped.value.code == 0


def test_runs_of_different_models_are_refused(tmp_path: Path) -> None:
    log, protocol = fabricate.backup(), {"name": "backup", "N": 2}
    one = fabricate.write_run(tmp_path / "one", log, protocol, learners=3)
    two = fabricate.write_run(tmp_path / "two", log, protocol, learners=3, environment={"parameter_nbytes": 4})
    with pytest.raises(ConfigError, match=r"parameter_nbytes = 358312 in .*one, but 4 in .*two: expected runs of the same"):
        plan([one, two])
    text = (two / "config.toml").read_text()
    (two / "config.toml").write_text(text.replace('name = "cifar10_full"', 'name = "alexnet"'))
    with pytest.raises(ConfigError, match=r"model = .*cifar10_full.* in .*one, but .*alexnet.* in .*two"):
        plan([one, two])


def test_a_damaged_log_is_refused(tmp_path: Path) -> None:
    run = virtual_run(tmp_path / "run", HardsyncOptions(), learners=2, pushes=100)
    file = run.path / "shard-000.attempt-0.h5"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(DataError, match="shard-000"):
        plan([run.path])


def test_an_empty_log_is_refused(tmp_path: Path) -> None:
    path = fabricate.write_run(tmp_path / "run", fabricate.Log(), {"name": "hardsync"}, learners=2)
    with pytest.raises(DataError, match="holds no pushes"):
        plan([path])


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_drawn")
def test_targets_of_several_runs_are_planned_for(tmp_path: Path) -> None:
    """Two logs with evaluations: 100 updates at N = 4, 130 at N = 3; the plan's time is those times seconds per update."""
    paths = []
    for wanted, updates in ((4, 100), (3, 130)):
        log = fabricate.simulated("backup", learners=4, updates=60, wanted=wanted)
        log.evaluations = fabricate.rows(
            "evaluations",
            [fabricate.row("evaluations", snapshot=at, clock_min=at * updates, error=error) for at, error in ((0, 0.9), (1, 0.1))],
        )
        paths.append(fabricate.write_run(tmp_path / str(wanted), log, {"name": "backup", "N": wanted}, learners=4))
    made = plan(paths, tmp_path / "out", Wishes(target_error=0.1, pushes=100, learners=4), Console(file=io.StringIO()))
    assert [one.updates for one in made.backup.choices] == pytest.approx([100, 130])
    assert all(one.time == pytest.approx(one.updates * one.seconds_per_update) for one in made.backup.choices)
    assert not math.isnan(made.backup.best.time)
    assert made.table("backup").cells("N") == [4, 3]


@pytest.mark.parametrize(
    ("changes", "protocol"),
    [
        ({"modulate": "rate"}, HardsyncOptions()),
        ({"compensation": 0.5}, HardsyncOptions()),
        ({"clip_average": 1.0}, BackupOptions()),
    ],
    ids=str,
)
def test_what_takes_no_second_does_not_hinder_a_prediction(changes: dict[str, Any], protocol: ProtocolOptions) -> None:
    """It goes with the run's own protocol and one shard; not with those that a plan asks about, too."""
    config = Config(virtual=VirtualOptions(learners=4, gradients=False, parameters=1000), protocol=SoftsyncOptions(n=2))
    assert not compatibility.refused(replace(config, **changes), virtual=True)
    other = replace(config, protocol=protocol, shards=2)
    assert compatibility.refused(replace(other, **changes), virtual=True)
    assert predict(replace(other, **changes), 100).gradients_per_s == predict(other, 100).gradients_per_s


def test_shards_that_agree_on_a_norm_are_predicted_to_take_longer() -> None:
    virtual = VirtualOptions(learners=4, gradients=False, parameters=1000)
    config = Config(virtual=virtual, protocol=HardsyncOptions(), shards=2)
    assert predict(replace(config, clip_average=1.0), 100).gradients_per_s < predict(config, 100).gradients_per_s


def test_a_slow_link_stays_with_its_learners() -> None:
    """Learner 1 of 3, on nodes of one rank and of two."""
    network, virtual = NetworkOptions(slow_links={2: 10.0}), VirtualOptions(learners=3, gradients=False)
    config = Config(network=network, virtual=virtual, evaluator=False)
    assert with_learners(config, 3) == config
    assert with_learners(config, 6).network.slow_links == {2: 10.0, 5: 10.0}
    assert with_slow_links(replace(config, shards=3), config).network.slow_links == {4: 10.0}
    pairs = replace(config, virtual=dataclasses.replace(virtual, ranks_per_node=2), network=NetworkOptions(slow_links={1: 10.0}))
    assert with_slow_links(replace(pairs, shards=2), pairs).network.slow_links == {1: 10.0, 2: 10.0}, "they part"


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_drawn")
def test_the_plan_says_what_a_slow_link_costs(tmp_path: Path) -> None:
    slow = NetworkOptions(bandwidth=125e6, node_bandwidth=125e6, slow_links={3: 10.0})
    run = virtual_run(tmp_path / "run", HardsyncOptions(), learners=3, pushes=300, parameters=1_000_000, network=slow)
    found = plan([run.path], None, Wishes(pushes=100, learners=3, from_log=True), Console(quiet=True))
    assert found.advice[-1].startswith("Slow link of node-3 (10 times the seconds): at the rate of the other links, ")
    assert float(found.advice[-1].split()[-6]) > 1.3
    elsewhere = planner._elsewhere(found.fit.config, Wishes(network={"latency_s": 0.0}))
    assert planner._of_slow_links(run, elsewhere, 100) == [], "another cluster has other links"
