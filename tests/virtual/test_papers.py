"""The papers' claims about time and staleness, on the virtual cluster: the scripts of results/, with smaller runs."""

from __future__ import annotations

import dataclasses
import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mpisgd.analysis import arrivals
from mpisgd.analysis.staleness import of_histogram
from mpisgd.analysis.tables import Column, Table
from mpisgd.base.streams import Domain, stream
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
    found = of_histogram(fig1.measured(n, fig1.SPREAD, 20_000), 0, n)
    assert found.gradients >= 20_000
    assert found.beyond is not None
    assert found.mean == pytest.approx(n, rel=0.05)
    assert found.beyond < 0.0001
    if n == 1:
        assert (found.minimum, found.maximum) == (0, 2)


@pytest.mark.slow
def test_that_needs_learners_that_are_alike() -> None:
    fig1 = script("zhang16_fig1")
    found = of_histogram(fig1.measured(30, fig1.OTHERS["log-normal, σ = 0.5"], 10_000), 0, 30)
    assert found.beyond is not None
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
    scale = dataclasses.replace(fig3.QUICK, long=4, short=2)
    kinds = [fig3.Kind(0), fig3.Kind(30, "none"), fig3.Kind(30)]
    curves = [fig3.curve(scale, kind, scale.long, 1) for kind in kinds]
    script("curves").make(tmp_path, curves)
    hardsync, stale, weighted = found = script("curves").there(tmp_path, curves)
    assert hardsync.error < 40
    assert stale.error > 80
    assert weighted.error < 40
    assert hardsync.about["max_staleness"] == 0
    assert weighted.about["mean_staleness"] == pytest.approx(29, rel=0.05)
    for each in found:
        assert each.done
        assert each.rows[:, 0] == pytest.approx([0, 1, 2, 3, 4], abs=0.09)
        assert np.isfinite(each.rows).all()
    assert hardsync.rows[-1, 4] < hardsync.rows[1, 4], "the training loss falls"
    assert [row[1] for row in fig3.table(scale, found).rows] == ["30-softsync", "hardsync", "30-softsync"]
    assert len(fig3.figure_of(scale, found).axes) == 3, "no curve is short"


@pytest.mark.slow
def test_the_full_form_is_of_cifar10_and_in_caffes_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPISGD_DATA", staged("cifar10"))
    monkeypatch.setenv("MPISGD_CACHE", str(tmp_path / "cache"))
    fig3, course = script("zhang16_fig3"), script("course")
    job = {**fig3.job(fig3.FULL, fig3.Kind(1), 140, 1), "epochs": 0.0048}
    computed = course.Course(job, tmp_path)
    assert [name for name, _ in computed.model.module.named_children()][3] == "norm1"
    (_, error, loss, _, training), last = computed.run()
    assert (error, loss, training) == pytest.approx((0.9, np.log(10), np.log(10)), abs=0.03), "nothing is known yet"
    assert (last[0], computed.state.clock) == (pytest.approx(0.0048), 2)
    shutil.rmtree(tmp_path / "cache")  # 184 MB


def test_the_kept_curves_are_those_of_the_table() -> None:
    fig3 = script("zhang16_fig3")
    folder = RESULTS / fig3.FULL.name
    found = [each for each in script("curves").there(folder, fig3.curves(fig3.FULL)) if each.done]
    assert len(found) == len(list(folder.glob("*.csv"))), "all of the settings that the script has"
    page = {_without_spaces(line) for line in (RESULTS / "README.md").read_text(encoding="utf-8").splitlines()}
    rows = [line for line in fig3.table(fig3.FULL, found).markdown().splitlines() if line.startswith("|") and found]
    assert [row for row in rows if not row.startswith("| -") and _without_spaces(row) not in page] == []


@pytest.mark.parametrize(
    ("staleness", "momentum", "modulation", "limit"),
    [
        ([1], 0.9, "none", 3.8),
        ([1], 0.0, "none", 2.0),
        ([0, 1], 0.9, "none", 0.1),
        ([0, 1], 0.0, "none", 1.0),
        ([0, 0, 1], 0.0, "none", (5**0.5 - 1) / 2),
        ([0, 0, 1], 0.0, "inverse", 5**0.5 - 1),
        ([0] * 29 + [1], 0.9, "inverse", None),
    ],
)
def test_stability_ends_where_a_simulated_quadratic_begins_to_grow(
    staleness: list[int], momentum: float, modulation: str, limit: float | None
) -> None:
    """z^2 - z + x has its roots on the unit circle at x = 1, and so on."""
    found = script("zhang16_stability").limit(np.array(staleness), momentum, modulation)
    if limit is not None:
        assert found == pytest.approx(limit, rel=1e-4)
    tau = len(staleness) - 1
    weight = 1 / tau if tau and modulation == "inverse" else 1.0
    for factor, grows in ((0.98, False), (1.02, True)):
        x, velocity = [1.0] * (tau + 2), 0.0
        for _ in range(6000):
            velocity = momentum * velocity + factor * found * weight * x[-1 - tau]
            x.append(x[-1] - velocity)
            if abs(x[-1]) > 1e9:
                break
        third = len(x) // 3
        assert (max(map(abs, x[-third:])) > max(map(abs, x[third:-third]))) == grows


def test_power_iteration_finds_the_largest_eigenvalue(tmp_path: Path) -> None:
    """Of softmax regression, whose Hessian numpy can have whole, with rates and weight decays of single parameters."""
    module, course = script("zhang16_stability"), script("course")
    job = {
        **{"model": {"name": "softmax"}, "data": {"name": "synthetic", "shape": [4], "classes": 3, "samples": 60}},
        **{"optimizer": {"name": "sgd", "weight_decay": 0.3}, "virtual": {"learners": 1}, "mu": 10, "threads": 1, "epochs": 1},
        "groups": {"rate": {"*.bias": 2.0}, "weight_decay": {"*.bias": 0.0}},
    }
    computed = course.Course(job, tmp_path)
    model, data = computed.model, computed.tensors.data
    inputs, targets = data.train.batch(np.arange(60))

    def loss(weights: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(torch.func.functional_call(model.module, model.views(weights), (inputs,)), targets)

    hessian = torch.autograd.functional.hessian(loss, computed.update.weights.clone())
    names = np.concatenate([[name.endswith("bias")] * view.numel() for name, view in model.views(model.weights).items()])
    rates, decays = torch.tensor(np.where(names, 2.0, 1.0)), torch.tensor(np.where(names, 0.0, 0.3))
    scaled = rates.sqrt()[:, None] * (hessian.double() + torch.diag(decays)) * rates.sqrt()[None, :]
    largest = float(torch.linalg.eigvalsh(scaled)[-1])
    assert module.power_iteration(computed)[-1] == pytest.approx(largest, rel=0.02)


@pytest.mark.slow
@pytest.mark.rare
def test_the_quick_form_of_the_rates_is_drawn(tmp_path: Path) -> None:
    module = script("zhang16_stability")
    scale = dataclasses.replace(module.QUICK, long=1)
    few = [module.named(scale, kind, 0.9, 0.03) for kind in module.KINDS[:2]]
    script("curves").make(tmp_path, few)
    found, bounds = script("curves").there(tmp_path, few), module.limits()
    assert len(module.figure_of(scale, found, 1.0, bounds).axes) == 4
    known = [row for row in module.table(scale, found, 1.0, bounds).rows if row[5] is not None]
    assert [row[1] for row in known] == ["hardsync", "1-softsync"]


# ------------------------------------------------------------------------------------------------------- [Zhang16 Theorem 1]


@pytest.mark.parametrize("number", [0, 1])
def test_gradients_that_are_written_out_are_those_of_the_loss(number: int) -> None:
    theorem = script("zhang16_theorem1")
    problem, (inputs, targets) = theorem.PROBLEMS[number], theorem.samples()
    weights = torch.from_numpy(theorem.start_of(problem, 3)).requires_grad_()
    problem.loss(weights, inputs[:50], targets[:50]).backward()
    found = problem.gradient(weights.detach().numpy(), inputs[:50].numpy(), targets[:50].numpy())
    assert weights.grad is not None
    np.testing.assert_allclose(found, weights.grad.numpy(), rtol=1e-9, atol=1e-12)


def test_the_curvature_of_softmax_regression_is_that_of_its_hessian() -> None:
    theorem = script("zhang16_theorem1")
    problem, batch = theorem.PROBLEMS[0], theorem.samples()
    weights = torch.from_numpy(theorem.start_of(problem, 1))
    hessian = torch.autograd.functional.hessian(lambda at: problem.loss(at, *batch), weights)
    assert theorem.largest_eigenvalue(problem, weights.numpy()) == pytest.approx(
        float(torch.linalg.eigvalsh(hessian)[-1]), rel=0.02
    )


def test_a_run_of_the_theorem_goes_by_its_order() -> None:
    """Two learners: updates of one gradient each, of staleness 0, 1, 2."""
    theorem = script("zhang16_theorem1")
    problem, (inputs, targets) = theorem.PROBLEMS[0], (each.numpy() for each in theorem.samples())
    told = theorem.Order(np.array([0, 1, 2]), np.array([0, 0, 0]))
    assert told.z.tolist() == [1, 1, 0.5]
    assert told.unevenness == pytest.approx((3 * 2.25) ** 0.5 / 2.5)
    *_, last = theorem.way(problem, told, 0.5, 1, 4)
    drawn = stream(Domain.REPLACEMENT, 1).integers(len(targets), size=(3, 4))
    first = theorem.start_of(problem, 1)
    gradients = [problem.gradient(first, inputs[each], targets[each]) for each in drawn]
    np.testing.assert_allclose(last, first - 0.5 * (gradients[0] + gradients[1] + 0.5 * gradients[2]), rtol=1e-12)


@pytest.mark.slow
@pytest.mark.rare
def test_the_bound_holds() -> None:
    theorem = script("zhang16_theorem1")
    row = theorem.compare(theorem.PROBLEMS[0], 6, 6, 500)
    assert row.reached < row.bound
    assert row.gradients >= 500
    assert row.mean_tau == pytest.approx(5, rel=0.1)


@pytest.mark.slow
@pytest.mark.rare
def test_more_staleness_wants_a_lower_rate(tmp_path: Path) -> None:
    """The quick form of chen16_fig2.py, one seed."""
    fig2 = script("chen16_fig2")
    curves = [fig2.curve(fig2.QUICK, kind, 1) for kind in fig2.kinds(fig2.QUICK)]
    script("curves").make(tmp_path, curves)
    found = script("curves").there(tmp_path, curves)
    fresh, stale, lower, _ = (fig2.averaged(each) for each in found)
    assert fresh < 6
    assert stale > 80
    assert lower < 20
    assert found[1].about["mean_staleness"] == pytest.approx(20, rel=0.35), "it is reached slowly"
    assert found[1].about["max_staleness"] == 20
    assert fig2.best(fig2.QUICK, found, 20)[0].rate < 0.1
    assert len(fig2.figure_of(fig2.QUICK, found).axes) == 2
    assert len(fig2.table(fig2.QUICK, found).rows) == 4


def test_images_are_rotated_and_zoomed_in_training_alone() -> None:
    moved = script("chen16_fig2").Moved(10.0, 0.1)
    image = torch.zeros(64, 1, 28, 28)
    image[:, :, 10:18, 4:24] = 1.0
    assert torch.equal(moved.eval()(image), image)
    changed = moved.train()(image)
    areas = changed.sum(dim=(1, 2, 3)) / 160
    assert 0.8 < float(areas.min()) < 0.95, "zooms of up to 10 %"
    assert 1.05 < float(areas.max()) < 1.25
    upper = changed[:, 0, :10].sum(dim=(1, 2))
    assert float(upper.max()) > 2, "turned"
    assert len({float(each) for each in areas}) == 64


@pytest.mark.slow
@pytest.mark.rare
def test_protocols_are_tuned_by_samples_set_aside(tmp_path: Path) -> None:
    tuned = script("protocols_tuned")
    scale = tuned.QUICK
    setting = tuned.tune(tmp_path, scale, "hardsync", make=True)
    tried = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("tuning-*.json")}
    assert len(tried) == 4
    least = min(tried.values(), key=lambda each: each["run"]["validation"][-1])["run"]["job"]
    assert (setting.rate, setting.momentum) == (least["alpha0"], least["optimizer"]["momentum"])
    assert least["seed"] not in scale.seeds
    wanted = tuned.job(scale, "hardsync", setting, "one slow", 1, 2.0)
    slow = tuned.run(tmp_path, "slow", wanted)
    equal = tuned.run(tmp_path, "equal", {**wanted, **tuned.SCENES["equal"], "virtual": {"learners": tuned.LAMBDA}})
    assert slow.error == equal.error, "hardsync waits, and computes the same"
    assert slow.seconds[-1] == pytest.approx(3 * equal.seconds[-1], rel=0.2)
    assert tuned.kept(tmp_path, "slow", {**wanted, "seed": 2}) is None


def test_tables_of_the_page_are_those_of_the_kept_numbers() -> None:
    made, text = script("made"), (RESULTS / "README.md").read_text(encoding="utf-8")
    assert made.page(text) == text, "make results"
    changed = text.replace(" 38.67 ", " 38.68 ")
    assert changed != text == made.page(changed)


NUMBERS = [path for path in sorted((RESULTS / "figures").glob("*.json")) if "numbers" in json.loads(path.read_text("utf-8"))]


def _rounded(number: str) -> float:
    """The last bits of a mean are another processor's."""
    return float(f"{float(number):.12g}")


@pytest.mark.parametrize("path", NUMBERS, ids=lambda path: path.stem)
def test_kept_numbers_draw_the_kept_tables(path: Path) -> None:
    shared, drawing = script("virtual_runs"), script(path.stem.replace("-", "_"))
    tables, figure = drawing.draw(shared.kept(path)["numbers"])
    told = json.loads(path.read_text("utf-8"), parse_float=_rounded)["tables"]
    drawn = json.dumps(shared._plain([dataclasses.asdict(table) for table in tables]))
    assert json.loads(drawn, parse_float=_rounded) == told, "make results-quick"
    assert all(axes.has_data() or not axes.axison or axes.patches for axes in figure.axes)


def test_a_script_keeps_numbers_and_draws_them_again_without_computing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = script("virtual_runs")
    table = lambda numbers: Table("doubled", "Doubled", (Column("x"),), ((2 * numbers["x"],),))  # noqa: E731
    draw = lambda numbers: ([table(numbers)], shared.panels("x", [("", "y")])[0])  # noqa: E731
    compute, quick = (lambda: {"x": np.int64(4_294_967), "nan": np.array([np.nan, 1.0])}), lambda: {"x": 1}
    for words in ([], ["--quick"], ["--draw"]):
        monkeypatch.setattr(sys, "argv", ["a script", "--out", str(tmp_path), *words])
        shared.main("doubled", "", compute, draw, quick)
        compute = pytest.fail if words == ["--quick"] else compute  # --draw must not compute
    assert capsys.readouterr().out.count("8589934") == 2
    kept = json.loads((tmp_path / "doubled.json").read_text("utf-8"))
    assert kept["numbers"] == {"x": 4_294_967, "nan": [None, 1.0]}
    assert {path.name for path in tmp_path.glob("*.json")} == {"doubled.json", "doubled-quick.json"}


def test_what_was_made_when_is_told_of_each_script() -> None:
    made = script("made")
    assert {"zhang16_fig3", "chen16_table1_layers"} <= set(made.experiments())
    (kept,) = made.files_of("chen16_table1_layers")
    assert (kept.path.name, len(kept.commit)) == ("chen16-table1-layers.json", 40)
    assert kept.seconds > 0
    imported = made.imported_by("chen16_table1_layers")
    assert {"results/inception_v3.py", "mpisgd/simulate/passes.py"} <= set(imported)
    assert "mpisgd/launching/function.py" not in imported
    assert made.row("chen16_table1_layers")[:3] == ("chen16_table1_layers", 1, kept.date)


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
    assert fig3.within(arrivals.times_to(run, 98)) > 0.8
    assert 0.2 < fig3.within(arrivals.times_to(run, 100)) < 0.4, "30 % of the last within 2 s"


@pytest.mark.slow
def test_some_backup_learners_are_best() -> None:
    """More than none, and less than a third; by the paper's estimate, and by running the protocol."""
    fig6 = script("chen16_fig5_6")
    measured, ns, lambda_ = (60, 100), (60, 90, 95, 98, 100), 100
    count = np.array([fig6.iterations(wanted) for wanted in measured])
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
    """By as much as its weights are in use, with the sizes and seconds of Inception-v3."""
    layers = script("chen16_table1_layers")
    mean = [of_histogram(np.array(layer), 0).mean for layer in layers.by_layer(5e9, pushes=1000)]
    assert (np.diff(mean) < 0).all()
    assert mean == pytest.approx(layers.in_use(), abs=1.2)
    assert layers.in_use()[0] == 39
