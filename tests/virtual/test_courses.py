"""Courses and curves, by which the figures of results/ are computed: the weights of `simulate`, resumable, shared by processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mpisgd.base.errors import ConfigError
from mpisgd.config.config_file import from_mapping
from mpisgd.records.lock import Lock
from mpisgd.simulate import simulate
from tests.effort import spread
from tests.virtual.test_papers import script

JOB: dict[str, Any] = {
    "model": {"name": "mlp", "hidden": [16]},
    "data": {"name": "synthetic", "shape": [6], "classes": 3, "samples": 240, "test_samples": 60},
    "optimizer": {"name": "sgd", "momentum": 0.9},
    "mu": 4,
    "alpha0": 0.03,
    "epochs": 3,
    "threads": 1,
    "virtual": {"learners": 6},
    "compute": {"name": "normal", "mean_s": 0.01, "deviation_s": 0.002},
    "log": {"progress": "off"},
}
PROTOCOLS: dict[str, dict[str, Any]] = {
    "softsync": {"protocol": {"name": "softsync", "n": 1}},
    "softsync n = 6": {"protocol": {"name": "softsync", "n": 6}, "groups": {"rate": {"*.bias": 2.0}}},
    "hardsync": {"protocol": "hardsync", "averaging": 0.9},
    "backup": {"protocol": {"name": "backup", "b": 2}, "optimizer": {"name": "adam"}},
    "async": {"protocol": "async", "clip_norm": 0.5},
}

IMAGES: dict[str, Any] = {
    "model": {"name": "cifar10_full", "form": "caffe"},
    "data": {"name": "synthetic", "shape": [3, 32, 32], "classes": 10, "samples": 240, "test_samples": 60},
    "optimizer": {"name": "sgd", "momentum": 0.9, "weight_decay": 0.004},
    "groups": {"rate": {"*.bias": 2.0}, "weight_decay": {"ip1.weight": 1.0}},
    "epochs": 1,
}
#: A model that draws numbers for each sample, with weight normalisation, of sequences in a sequence.
DRAWN: dict[str, Any] = {
    "model": {"name": "chen16_fig2:network"},
    "data": {"name": "synthetic", "shape": [1, 28, 28], "classes": 10, "samples": 240, "test_samples": 60},
    "alpha0": 0.003,
    "epochs": 1,
}


def weights_of(course: Any) -> dict[str, torch.Tensor]:
    return {name: view.clone() for name, view in course.model.views(course.update.weights).items()}


@pytest.mark.parametrize("name", spread(PROTOCOLS, 2))
def test_a_course_has_the_weights_of_the_run_also_when_it_was_interrupted(name: str, tmp_path: Path) -> None:
    job = {**JOB, **PROTOCOLS[name]}
    module = script("course")
    run = simulate(from_mapping({**job, "out": str(tmp_path / "run")}))
    expected = torch.load(run.path / "weights.pt")["theta"]
    course = module.Course(job, tmp_path)
    rows = [row for _, row in zip(range(3), course.run(), strict=False)]  # and it is killed before the third epoch is kept
    again = module.Course(job, tmp_path)
    rows = [*again.state.rows, *again.run()]
    assert [row[0] for row in rows] == pytest.approx([0, 1, 2, 3], abs=0.1)
    found = weights_of(again)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert (again.state.clock,) == run.clocks
    for passes in ("same weights", "windows"):
        (folder := tmp_path / passes).mkdir()
        together = module.Course(job, folder, passes=passes)
        next(rows := together.run()), next(rows)
        together = module.Course(job, folder, passes=passes)
        assert len(list(together.run())) == 2
        for key, tensor in weights_of(together).items():
            torch.testing.assert_close(tensor, expected[key], rtol=1e-4, atol=1e-5)


DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model", [{}, IMAGES, DRAWN], ids=["mlp", "images", "drawn"])
@pytest.mark.parametrize("name", ["softsync", "softsync n = 6", "hardsync", "ramp"])
def test_windows_have_the_weights_of_one_by_one(name: str, model: dict[str, Any], device: str, tmp_path: Path) -> None:
    ramp = {"protocol": {"name": "async", "ramp": 30}, "averaging": 0.9, "averaging_bias_correction": True}
    job, found = {**JOB, **PROTOCOLS.get(name, ramp), **model}, []
    for at, passes in ((device, "windows"), ("cpu", "one by one")):
        (tmp_path / passes).mkdir()
        course = script("course").Course(job, tmp_path / passes, at, passes)
        assert (course.windows is not None) == (passes == "windows")
        begun = course.update.weights.clone()
        assert len(list(course.run())) == job["epochs"] + 1
        averaged = course.update.weights if course.update.averaged is None else course.update.averaged
        found.append(torch.cat([course.update.weights - begun, averaged - begun]).cpu())
    assert (found[0] - found[1]).norm() < (1e-4 if device == "cpu" else 1e-3) * found[1].norm()


@pytest.mark.parametrize(("name", "most"), [("softsync", 0.5), ("softsync n = 6", 1.0), ("hardsync", 0.2)])
def test_gradients_of_an_update_at_the_same_weights_take_one_pass(name: str, most: float, tmp_path: Path) -> None:
    job, found = {**JOB, **PROTOCOLS[name], **IMAGES}, []
    for passes in ("one by one", "same weights"):
        (tmp_path / passes).mkdir()
        course = script("course").Course(job, tmp_path / passes, passes=passes)
        begun, count = course.update.weights.clone(), [0]
        course.model.module.conv1.register_forward_hook(lambda *args, count=count: count.append(count.pop() + args[0].training))
        list(course.run())
        found.append(course.update.weights - begun)
        assert count[0] <= (1 if passes == "one by one" else most) * len(course.order)
    assert (found[0] - found[1]).norm() < 1e-4 * found[1].norm()


def test_decay_in_the_gradient_is_the_optimisers_where_no_gradient_is_stale(tmp_path: Path) -> None:
    """Else it is weighted like the gradient: shards' decay made 30-softsync of Fig. 3 end at a training loss of 2.0."""
    fig3 = script("zhang16_fig3")
    found, small = [], {**JOB, **PROTOCOLS["hardsync"], **IMAGES, "alpha0": 0.001, "averaging": 0.0}
    for n in (0, 1):
        settings = fig3.settings_of(fig3.FULL, fig3.Kind(n))
        (tmp_path / str(n)).mkdir()
        course = script("course").Course({**small, **settings, "data": small["data"]}, tmp_path / str(n), passes="same weights")
        begun = course.update.weights.clone()
        list(course.run())
        found.append(course.update.weights - begun)
    assert (found[0] - found[1]).norm() < 1e-5 * found[0].norm()
    assert settings["optimizer"] == {"name": "sgd", "momentum": 0.9} and list(settings["groups"]) == ["rate"]
    job = script("zhang16_stability").job(fig3.FULL, fig3.Kind(15), 0.0, 0.01)
    assert job["optimizer"] == {"name": "sgd", "momentum": 0.0}


def test_windows_know_decay_in_gradients_and_refuse_other_hooks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = {**JOB, **PROTOCOLS["softsync n = 6"], **IMAGES, "model": {"name": "zhang16_fig3:decayed"}, "groups": {}, "alpha0": 0.001}
    found = []
    for passes in ("one by one", "windows"):
        (tmp_path / passes).mkdir()
        course = script("course").Course(job, tmp_path / passes, passes=passes)
        begun = course.update.weights.clone()
        list(course.run())
        found.append(course.update.weights - begun)
    assert (found[0] - found[1]).norm() < 1e-4 * found[0].norm()
    assert "one gradient after the other" not in capsys.readouterr().err
    course.model.module.conv1.bias.register_hook(lambda gradient: gradient)
    assert script("course")._refusal("windows", course.config, course.tensors) == "gradients have hooks"


def test_gradients_that_draw_numbers_are_computed_one_by_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script("course").Course({**JOB, **PROTOCOLS["softsync"], **DRAWN}, tmp_path, passes="same weights")
    assert "one gradient after the other: the network draws numbers" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["softsync", "softsync n = 6", "ramp"])
@pytest.mark.parametrize("windows_first", [False, True])
def test_what_a_gpu_began_a_cpu_ends_and_the_other_way_round(name: str, windows_first: bool, tmp_path: Path) -> None:
    job = {**JOB, **PROTOCOLS.get(name, {"protocol": {"name": "async", "ramp": 30}})}
    first, second = ("windows", "same weights") if windows_first else ("same weights", "windows")
    begun = script("course").Course(job, tmp_path, passes=first)
    for _ in zip(range(2), begun.run(), strict=False):
        pass
    ended = script("course").Course(job, tmp_path, passes=second)
    assert len(list(ended.run())) == 2
    (tmp_path / "whole").mkdir()
    whole = script("course").Course(job, tmp_path / "whole")
    list(whole.run())
    torch.testing.assert_close(ended.update.weights, whole.update.weights, rtol=1e-4, atol=1e-5)


def test_weights_that_no_next_gradient_needs_but_a_later_one_are_kept(tmp_path: Path) -> None:
    """Learner 0 makes the first update and leaves; learner 1 pushes what is stale, pulls, and pushes again before the second."""
    job = {**JOB, **PROTOCOLS["softsync"], "epochs": 12 / 240, "evaluation": {"every_epochs": 4 / 240}, "virtual": {"learners": 2}}
    module = script("course")
    (tmp_path / "other").mkdir()
    order = module.Course(job, tmp_path / "other").order[:3].copy()
    rows = {
        "clock": (0, 1, 1),
        "timestamp": (0, 0, 1),
        "learner_id": (0, 1, 1),
        "seq": (0, 0, 1),
        "samples": 4,
        "gradients": 1,
        "weight": 1.0,
    }
    for column, values in rows.items():
        order[column] = values
    found = []
    for at, ways in enumerate([("one by one",) * 2, ("windows", "one by one"), ("same weights", "windows")]):
        folder = tmp_path / str(at)
        folder.mkdir()
        np.save(folder / "order.npy", order)
        for passes in ways:
            course = module.Course(job, folder, passes=passes)
            for _ in zip(range(2 if course.state.row == 0 else 1), course.run(), strict=False):
                pass
            course._keep()
        assert course.state.clock == 2
        found.append(course.update.weights)
    for each in found[1:]:
        torch.testing.assert_close(each, found[0], rtol=1e-4, atol=1e-6)


REFUSED: dict[str, dict[str, Any]] = {
    "batch norm": {"model": {"name": "mlp", "hidden": [16], "batch_norm": True}},
    "nesterov": {"optimizer": {"name": "sgd", "momentum": 0.9, "nesterov": True}},
    "clipped": {"clip_norm": 0.5},
    "of the rate": {"modulate": "rate"},
}


@pytest.mark.parametrize("passes", ["windows", "same weights"])
@pytest.mark.parametrize("name", spread(REFUSED, 2))
def test_what_windows_cannot_have_is_computed_one_by_one(
    name: str, passes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    course = script("course").Course({**JOB, **PROTOCOLS["softsync"], "epochs": 0.1, **REFUSED[name]}, tmp_path, passes=passes)
    assert course.windows is None
    assert "computed one gradient after the other: " in capsys.readouterr().err
    assert len(list(course.run())) == 2


def test_a_curve_grows_by_a_row_an_epoch_and_goes_on_where_it_was_left(tmp_path: Path) -> None:
    curves = script("curves")
    curve = curves.Curve("one", {**JOB, **PROTOCOLS["softsync"]})
    (tmp_path / ".one").mkdir()
    for _, _row in zip(range(2), curves.Course(curve.job, tmp_path / ".one").run(), strict=False):
        pass
    (tmp_path / ".one" / "job.json").write_text(curves.json.dumps(curve.job))
    lock = Lock(tmp_path / ".one")
    curves.make(tmp_path, [curve])
    assert not curves.there(tmp_path, [curve]), "another process computes it"
    lock.release()
    curves.make(tmp_path, [curve])
    (found,) = curves.there(tmp_path, [curve])
    assert found.done and len(found.rows) == 4
    assert not (tmp_path / ".one").exists(), "what it went on from is not wanted any more"
    assert found.about["mean_staleness"] == pytest.approx(1, abs=0.2)
    written = (tmp_path / "one.csv").read_bytes()
    curves.make(tmp_path, [curve])
    assert (tmp_path / "one.csv").read_bytes() == written
    assert curves.there(tmp_path, [curves.Curve("one", {**curve.job, "alpha0": 0.5})]) == [], "of another job"


def test_what_one_goes_on_from_is_of_the_same_job(tmp_path: Path) -> None:
    curves = script("curves")
    (tmp_path / ".one").mkdir()
    (tmp_path / ".one" / "job.json").write_text(curves.json.dumps({**JOB, "alpha0": 7.0}))
    with pytest.raises(SystemExit, match="is of another job: remove it to begin one anew"):
        curves.make(tmp_path, [curves.Curve("one", JOB)])
    with pytest.raises(ConfigError):
        curves.Course({**JOB, "alpha0": -1}, tmp_path)


@pytest.mark.parametrize(
    ("errors", "losses", "lost"),
    [
        ([0.9, 0.5, 0.4], [2.3, 2.0, 1.0], False),
        ([0.9, 0.9, 0.9], [2.3, 2.0, np.nan], True),
        ([0.9] * 5, [2.3] * 5, False),
        ([0.9] * 6, [2.3] * 6, True),
        ([0.9] * 5 + [0.89], [2.3] * 6, False),
    ],
)
def test_a_curve_that_is_lost_is_given_up(errors: list[float], losses: list[float], lost: bool) -> None:
    curves = script("curves")
    rows = np.array([[at, error, loss, error, loss] for at, (error, loss) in enumerate(zip(errors, losses, strict=True))])
    trained = curves.Trained(curves.Curve("one", JOB), {"job": {"epochs": 140}}, rows)
    assert trained.lost == trained.done == lost
    later = trained.at(np.array([1, 140]), "test_error")
    assert later[0] == errors[1]
    assert later[1] == 0.9 if lost else np.isnan(later[1])
