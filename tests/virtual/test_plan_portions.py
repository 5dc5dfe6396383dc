"""`mpisgd plan` of a run of sandblaster: which portion, from one log; predicted seconds beside those of virtual runs."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mpisgd.base.errors import ConfigError, DataError
from mpisgd.cli.plan import main
from mpisgd.plan.portions import PortionPlan, measured, plan_portions
from mpisgd.records.log.reader import Run
from mpisgd.simulate.job import simulate
from tests.effort import spread
from tests.virtual.test_sandblaster import job

SAMPLES, LEARNERS = 1024, 8
SAMPLE_S = 2.5e-4


def ran(out: Path, mu: int, **protocol: Any) -> Run:
    """One learner is five times slower, and a push takes as long as three samples."""
    config = job(
        out,
        learners=LEARNERS,
        mu=mu,
        threads=1,
        shards=2,
        data={"name": "synthetic", "samples": SAMPLES, "test_samples": 8, "shape": [6], "classes": 4},
        protocol={"iterations": 6, **protocol},
        compute={"name": "lognormal", "mean_s": SAMPLE_S * mu, "sigma": 0.3},
        straggler={"slowdown": {3: 5.0}},
        network={"latency_s": 1e-4, "bandwidth": 2e5, "local_bandwidth": 2e5, "node_bandwidth": 2e5},
        service={"gradient_s": 1e-4, "update_s": 1e-3},
    )
    simulate(config)
    return Run(out)


def evaluation_s(run: Run) -> float:
    rows = run.of_coordinator("iterations")
    return float(rows["evaluating_s"].sum() / rows["evaluations"].sum())


def planned(run: Run) -> PortionPlan:
    return plan_portions(run, console=Console(file=io.StringIO()))


@pytest.mark.slow
@pytest.mark.parametrize("protocol", spread([{"push_every": 3}, {"order": "portions"}], 2), ids=str)
def test_seconds_of_other_portions_are_predicted(protocol: dict[str, Any], tmp_path: Path) -> None:
    found = planned(ran(tmp_path / "run", 32, **protocol))
    assert found.repeated_s == pytest.approx(found.logged_s, rel=0.1)
    by_size = {each.mu: each for each in found.choices}
    assert list(by_size) == [128, 64, 32, 16, 8, 4, 2, 1]
    for mu in (128, 8):
        assert by_size[mu].evaluation_s == pytest.approx(evaluation_s(ran(tmp_path / "other", mu, **protocol)), rel=0.15), mu


@pytest.mark.slow
def test_the_best_is_between_what_is_waited_for_and_what_messages_cost(tmp_path: Path) -> None:
    found = planned(ran(tmp_path / "run", 64))
    assert 8 <= found.best.mu < 128
    largest, smallest = found.choices[0], found.choices[-1]
    assert min(largest.evaluation_s, smallest.evaluation_s) > 1.3 * found.best.evaluation_s
    assert largest.once_s > 1.5 * largest.evaluation_s
    assert f"mu = {found.best.mu}" in found.advice
    assert (tmp_path / "run" / "plan" / "portions.csv").read_text().count("\n") == 1 + len(found.choices)


def test_costs_are_those_of_the_configuration(tmp_path: Path) -> None:
    costs = measured(ran(tmp_path / "run", 32))
    means = [float(each.mean()) for each in costs.sample_s]
    assert means[3] == pytest.approx(5 * SAMPLE_S, rel=0.3)
    assert sorted(means)[3] == pytest.approx(SAMPLE_S, rel=0.15)
    nbytes = 4 * (6 * 4 + 4)
    assert costs.asking_s == pytest.approx(2e-4, rel=0.1)
    assert costs.pushing_s == pytest.approx(nbytes / 2e5, rel=0.5)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return ran(tmp_path_factory.mktemp("short") / "run", 128, iterations=1)


@pytest.mark.parametrize(
    ("options", "said"), [(["--target-error", "0.1"], "--target-error 0.1"), (["--learners", "9"], "--learners 9"), ([], "2 runs")]
)
def test_what_is_not_planned_is_refused(options: list[str], said: str, short: Run) -> None:
    runs = [str(short.path)] * (1 if options else 2)
    with pytest.raises(
        ConfigError, match=rf"{said}: .* is a run of sandblaster, of which alone the size of its portions is planned"
    ):
        main([*runs, *options])


def test_the_command_plans(short: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(short.path), "--out", str(tmp_path / "plan")]) == 0
    assert "Portions: mu = " in capsys.readouterr().out
    assert (tmp_path / "plan" / "plan.md").exists()


def test_a_log_without_an_iteration_is_refused(short: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Run.of_coordinator
    monkeypatch.setattr(Run, "of_coordinator", lambda self, name: whole(self, name)[:0])
    with pytest.raises(DataError, match="holds no whole iteration: there is nothing to plan from"):
        planned(Run(short.path))
