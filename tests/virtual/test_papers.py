"""The papers' claims about time and staleness, on the virtual cluster: the scripts of results/, with smaller runs."""

from __future__ import annotations

import dataclasses
import importlib
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpisgd.analysis import arrivals
from mpisgd.records.lock import Lock
from tests.effort import thinned
from tests.staged import staged

RESULTS = Path(__file__).parents[2] / "results"


def script(name: str) -> Any:
    """A script of results/, which imports its neighbours as it does when it is run."""
    if str(RESULTS) not in sys.path:
        sys.path.append(str(RESULTS))
    return importlib.import_module(name)


# ---------------------------------------------------------------------------------------------------------- [Zhang16 Fig. 1]


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 30])
def test_staleness_is_about_n_and_never_above_twice_n(n: int) -> None:
    fig1 = script("zhang16_fig1")
    found, histogram = fig1.measured(n, fig1.SPREAD, 20_000)
    assert found.gradients == histogram.sum() >= 20_000
    assert found.mean == pytest.approx(n, rel=0.05)
    assert found.beyond < 0.0001
    if n == 1:
        assert (found.minimum, found.maximum) == (0, 2)


@pytest.mark.slow
def test_that_needs_learners_that_are_alike() -> None:
    fig1 = script("zhang16_fig1")
    found, _ = fig1.measured(30, fig1.OTHERS["log-normal, σ = 0.5"], 10_000)
    assert found.mean == pytest.approx(29, rel=0.02), "whoever is fast"
    assert found.beyond > 0.01


# ---------------------------------------------------------------------------------------------------------- [Zhang16 Fig. 2]


@pytest.mark.slow
@pytest.mark.parametrize("benchmark", thinned(range(3), 9))
def test_30_learners_are_22_to_28_times_as_fast_and_softsync_half_as_fast_again_as_hardsync(benchmark: int) -> None:
    fig2 = script("zhang16_fig2")
    what = fig2.BENCHMARKS[benchmark]
    hardsync, *softsync = (fig2.speed_up(what, protocol, 30, rounds=50) for protocol in fig2.PROTOCOLS)
    for each in softsync:
        assert 22 < each < 28
        assert 1.3 < each / hardsync < 1.8


@pytest.mark.slow
@pytest.mark.rare
def test_speed_up_grows_with_the_learners() -> None:
    fig2 = script("zhang16_fig2")
    for protocol in fig2.PROTOCOLS:
        found = [fig2.speed_up(fig2.BENCHMARKS[1], protocol, lambda_, rounds=50) for lambda_ in fig2.LAMBDAS]
        assert found[0] == pytest.approx(1, rel=0.05)
        assert found == sorted(found)
        assert all(each < 1.05 * lambda_ for each, lambda_ in zip(found, fig2.LAMBDAS, strict=True))


# ---------------------------------------------------------------------------------------------------------- [Zhang16 Fig. 3]


@pytest.mark.slow
def test_stale_gradients_do_not_learn_at_a_rate_at_which_hardsync_does_unless_weighted(tmp_path: Path) -> None:
    """The quick form: the script as it is, but with digits, and shorter."""
    fig3 = script("zhang16_fig3")
    scale = dataclasses.replace(fig3.QUICK, epochs=4)
    kinds = [(0, "none"), (30, "none"), (30, "inverse")]
    curves = [curve for curve in fig3.CURVES if (curve.n, curve.modulation) in kinds and curve.seed == 1]
    fig3.make(tmp_path, scale, curves)
    found = {(each.curve.n, each.curve.modulation): each for each in fig3.there(tmp_path, scale)}
    hardsync, stale, weighted = (found[kind] for kind in kinds)
    assert hardsync.error < 40
    assert stale.error > 80
    assert weighted.error < 40
    assert hardsync.about["max_staleness"] == 0
    assert weighted.about["mean_staleness"] == pytest.approx(29, rel=0.05)
    for each in found.values():
        assert each.rows[:, 0] == pytest.approx([0, 1, 2, 3, 4], abs=0.02)
        assert np.isnan(each.rows[0, 3])
        assert np.isfinite(each.rows[1:]).all()
        assert each.about["not_finite_after_epochs"] is None
    assert hardsync.rows[-1, 3] < hardsync.rows[1, 3], "the training loss falls"
    assert {row[0] for row in fig3.table(list(found.values())).rows} == {"hardsync", "30-softsync"}
    assert len(fig3.figure_of(list(found.values()), scale).axes) == 2


@pytest.mark.slow
def test_of_a_run_that_diverges_only_the_first_epoch_is_computed() -> None:
    fig3 = script("zhang16_fig3")
    curve = fig3.Curve(30, "none", 1)
    lost = fig3.trained(dataclasses.replace(fig3.QUICK, epochs=4, alpha0=3.0), curve)
    assert lost.about["not_finite_after_epochs"] == 1
    assert lost.about["gradients"] == pytest.approx(360, abs=1)
    assert lost.rows[:, 0] == pytest.approx([0, 1, 2, 3, 4], abs=0.02)
    assert lost.rows[1:, 1] == pytest.approx(0.9, abs=0.02)
    assert np.isnan(lost.rows[1:, 2:]).all()


def test_curves_that_are_there_are_not_made_again_unless_the_settings_are_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fig3 = script("zhang16_fig3")
    made: list[str] = []

    def trained(scale: Any, curve: Any) -> Any:
        made.append(curve.name)
        return fig3.Trained(curve, {"job": fig3.job(scale, curve), "wall_s": 0}, np.array([[0.0, 0.9, 2.3, np.nan]]))

    monkeypatch.setattr(fig3, "trained", trained)
    curves, names = fig3.CURVES[:3], [curve.name for curve in fig3.CURVES[:3]]
    claimed = tmp_path / f".{names[1]}"
    claimed.mkdir()
    lock = Lock(claimed)
    fig3.make(tmp_path, fig3.QUICK, curves)
    assert made == [names[0], names[2]], "another process makes the second"
    lock.release()
    fig3.make(tmp_path, fig3.QUICK, curves)
    assert made[2:] == [names[1]]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"{name}.csv" for name in names)
    other = dataclasses.replace(fig3.QUICK, alpha0=0.5)
    assert fig3.there(tmp_path, other) == []
    fig3.make(tmp_path, other, curves[:1])
    assert made[3:] == [names[0]]
    assert [each.curve.name for each in fig3.there(tmp_path, other)] == [names[0]]


@pytest.mark.slow
def test_mini_batches_of_the_full_form_are_of_cifar10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPISGD_DATA", staged("cifar10"))
    monkeypatch.setenv("MPISGD_CACHE", str(tmp_path / "cache"))
    fig3 = script("zhang16_fig3")
    run = fig3.logged({**fig3.job(fig3.FULL, fig3.CURVES[0]), "epochs": 0.0048, "evaluation": {"every_epochs": 0}})
    assert (run.environment["train_samples"], run.environment["test_samples"]) == (50_000, 10_000)
    assert len(run.updates) == 2
    assert run.pushes["loss"] == pytest.approx(np.log(10), abs=0.2), "nothing is known yet"
    shutil.rmtree(tmp_path / "cache")  # 184 MB


def test_the_kept_curves_are_those_of_the_table() -> None:
    fig3 = script("zhang16_fig3")
    folder = RESULTS / fig3.FULL.name
    found = fig3.there(folder, fig3.FULL)
    assert len(found) == len(list(folder.glob("*.csv"))) >= 7, "all of the settings that the script has"
    page = {_without_spaces(line) for line in (RESULTS / "README.md").read_text(encoding="utf-8").splitlines()}
    rows = [line for line in fig3.table(found).markdown().splitlines() if line.startswith("|")]
    assert [row for row in rows if not row.startswith("| -") and _without_spaces(row) not in page] == []


def _without_spaces(line: str) -> str:
    return line.replace(" ", "")


# ------------------------------------------------------------------------------------------------------ [Chen16 Table 1, Fig. 2]


@pytest.mark.slow
def test_40_asynchronous_learners_are_39_updates_stale_and_do_not_learn_at_a_rate_at_which_one_does() -> None:
    table1 = script("chen16_table1")
    alone, forty = (table1.trained(lambda_, max(table1.ALPHAS), epochs=3) for lambda_ in (1, 40))
    assert (alone.mean, alone.largest) == (0, 0)
    assert forty.mean == pytest.approx(39, abs=0.2)
    assert alone.error < 0.15
    assert forty.error > 3 * alone.error
    assert forty.loss > 3 * alone.loss


# -------------------------------------------------------------------------------------------------------- [Chen16 Fig. 3 to 6]


@pytest.mark.slow
def test_the_last_gradients_of_100_take_long() -> None:
    fig3 = script("chen16_fig3_4")
    run = fig3.logged(fig3.job(fig3.LAMBDA, 150))
    found = arrivals.collected(run)
    assert (found.clocks == 150).all()
    assert (np.diff(found.mean) > 0).all()
    assert ((found.mean[1:96] > 1.35) & (found.mean[1:96] < 1.85)).all(), "between 1.4 and 1.8 s"
    assert 2.0 < found.median[-1] < 3.2
    assert found.mean[-1] > 2 * found.mean[-5]
    assert fig3.within(run, 98) > 0.8
    assert 0.2 < fig3.within(run, 100) < 0.4, "30 % of the last within 2 s"


@pytest.mark.slow
def test_some_backup_learners_are_best() -> None:
    """More than none, and less than a third; by the paper's estimate, and by running the protocol."""
    fig6 = script("chen16_fig5_6")
    measured, ns, lambda_ = (60, 100), (60, 90, 95, 98, 100), 100
    count = fig6.mean_iterations(measured, seeds=(1,))
    assert (np.diff(count) < 0).all(), "more gradients per update, fewer updates"
    between = np.interp(ns, measured, count)
    for seconds in (fig6.collecting_s(lambda_, ns, clocks=60), fig6.updating_s(lambda_, ns, clocks=60)):
        assert (np.diff(seconds) > 0).all(), "but each takes longer"
        assert 0 < lambda_ - fig6.best(ns, between * seconds) < lambda_ / 3


# --------------------------------------------------------------------------------------------------------- [Chen16 Alg. 3, 4]


def test_a_learner_that_is_late_once_is_late_for_ever_unless_told_or_used() -> None:
    late = script("late_learners")
    dropped, abort, applied = (late.measured(way, "late once") for way in late.WAYS)
    assert dropped.last_share == 0
    assert abort.last_share == pytest.approx(0.25, abs=0.05)
    assert applied.last_share == pytest.approx(0.25, abs=0.01)
    assert dropped.wasted == pytest.approx(0.25, abs=0.01)
    assert applied.wasted == 0


@pytest.mark.slow
@pytest.mark.rare
def test_spans_given_up_are_as_many_as_their_events_and_follow_each_other() -> None:
    shared, late = script("virtual_runs"), script("late_learners")
    learner_id, start_s, end_s = shared.given_up(shared.logged(late.job("abort", "late by chance")))
    assert len(learner_id) > 500
    assert np.all(end_s > start_s)
    same = learner_id[1:] == learner_id[:-1]
    assert np.all(start_s[1:][same] >= end_s[:-1][same])


# ----------------------------------------------------------------------------------------------------- [Chen16 Table 1, layers]


@pytest.mark.slow
def test_staleness_rises_from_the_top_layer_to_the_lowest() -> None:
    layers = script("chen16_table1_layers")
    mean = [layer.mean for layer in layers.by_layer("layerwise", 5e9, pushes=1000)]
    assert (np.diff(mean) < -1).all()
    assert mean[0] == pytest.approx(39, abs=1)
    assert mean[-1] < 4
