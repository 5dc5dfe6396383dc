"""Runs that differ in the seed alone are one row and one curve of a comparison."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from rich.console import Console

from mpisgd.analysis import staleness
from mpisgd.analysis.training import Curve, Target
from mpisgd.config import Part
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import CONFIG
from mpisgd.report import compare as module
from mpisgd.report import figures, seeds
from mpisgd.report.compare import Comparison, compare
from tests.unit import fabricate

pytestmark = pytest.mark.usefixtures("nothing_drawn")
BACKUP = {"name": "backup", "N": 2, "b": 1}


def make(path: Path, seed: int, error: float, fields: dict[str, Any] | None = None, **more: Any) -> Path:
    """A run that ends with this error."""
    log = fabricate.backup()
    rows = [fabricate.evaluation(snapshot, float(snapshot), each) for snapshot, each in enumerate((0.9, error))]
    log.evaluations = fabricate.rows("evaluations", rows)
    fabricate.write_run(path, log, BACKUP, learners=3, **more)
    config = {**Run(path).config, "seed": seed, "out": str(path), **(fields or {})}
    (path / CONFIG).write_text(tomli_w.dumps(config), encoding="utf-8")
    return path


def quiet(paths: list[Path], out: Path) -> Comparison:
    return compare(paths, out, Console(file=io.StringIO(), width=240))


def test_one_row_with_mean_and_range(tmp_path: Path) -> None:
    paths = [make(tmp_path / f"run-{seed}", seed, error) for seed, error in ((1, 0.1), (2, 0.2), (3, 0.6))]
    paths.append(make(tmp_path / "other", 1, 0.5, {"mu": 8}))
    found = quiet(paths, tmp_path / "out")
    assert found.table.cells("run") == ["run-*", "other"]
    assert found.table.cells("seeds") == [3, 1]
    assert found.table.cells("error theta") == ["30.00 (10.00..60.00)", 50.0]
    assert found.table.cells("training") == [4.5, 4.5], "what all have alike is shown as of one"
    assert "mean (least..largest)" in found.table.note
    lines = (tmp_path / "out" / "runs.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines[1:]] == ["run-1", "run-2", "run-3", "other"], "each by itself, too"
    labels = [
        text.get_text() for each in found.drawings if each.figure for legend in each.figure.legends for text in legend.get_texts()
    ]
    assert "run-* (backup N=2 b=1 · λ=3 · μ=4 · 3 seeds)" in labels


def test_what_it_took_to_reach_a_target(tmp_path: Path) -> None:
    """Linear from 0.9 at the start to the error after an epoch of 10 s."""
    paths = [make(tmp_path / f"run-{seed}", seed, error) for seed, error in ((1, 0.1), (2, 0.2), (3, 0.6))]
    paths += [make(tmp_path / "other", 1, 0.5, {"mu": 8}), make(tmp_path / "alone", 1, 0.1, {"mu": 16})]
    sink = io.StringIO()
    compare(paths, tmp_path / "out", Console(file=sink, width=240), target=Target("error", 0.25))
    with (tmp_path / "out" / "target.csv").open() as file:
        rows = list(csv.reader(file))[1:]
    assert [row[:3] for row in rows] == [["run-*", "theta", "2 of 3"], ["other", "theta", "never"], ["alone", "theta", "1 of 1"]]
    assert rows[0][3] == "0.87 (0.81..0.93)"
    assert rows[0][5] == "8.705 (8.125..9.286)"
    assert rows[1][3:] == [""] * 4
    assert [float(cell) for cell in rows[2][3:6]] == pytest.approx([0.8125, 0, 8.125])
    assert "Until test error 25 %" in sink.getvalue()
    assert "Until test error 25 %" in (tmp_path / "out" / "compare.md").read_text()


def test_a_target_of_thetabar_is_another(tmp_path: Path) -> None:
    log = fabricate.backup()
    curves = ((False, (0.9, 0.5)), (True, (0.9, 0.1)))
    log.evaluations = fabricate.rows(
        "evaluations",
        [fabricate.evaluation(at, float(at), each, averaged) for averaged, curve in curves for at, each in enumerate(curve)],
    )
    path = fabricate.write_run(tmp_path / "run", log, BACKUP, learners=3)
    compare([path], tmp_path / "out", Console(file=io.StringIO()), target=Target("error", 0.5))
    with (tmp_path / "out" / "target.csv").open() as file:
        rows = list(csv.reader(file))[1:]
    assert [row[1:4] for row in rows] == [["theta", "1 of 1", "1.0"], ["thetabar", "1 of 1", "0.5"]]


@pytest.mark.parametrize(
    ("seed", "fields", "more"),
    [
        (1, {}, {}),
        (2, {"alpha0": 0.3}, {}),
        (2, {}, {"diverged": True}),
        (2, {}, {"done": False}),
        (2, {"mu": 8}, {}),
    ],
)
def test_what_differs_in_more_or_not_at_all_stays_apart(
    seed: int, fields: dict[str, Any], more: dict[str, Any], tmp_path: Path
) -> None:
    runs = [Run(make(tmp_path / "a", 1, 0.1)), Run(make(tmp_path / "b", seed, 0.1, fields, **more))]
    assert seeds.grouped(runs) == [[0], [1]]


def test_where_a_run_lies_and_what_it_logs_does_not_tell_it_apart(tmp_path: Path) -> None:
    log = {"log": {"progress": "off"}, "loggers": ["wandb"], "overwrite": True}
    places = [(1, {}), (2, log), (1, {}), (2, {}), (3, {})]
    runs = [Run(make(tmp_path / str(at), seed, 0.1, fields)) for at, (seed, fields) in enumerate(places)]
    assert seeds.grouped(runs) == [[0, 1, 4], [2, 3]], "two of one seed are no two seeds"


def test_words_that_differ_are_all_shown(tmp_path: Path) -> None:
    paths = [make(tmp_path / "a1", 1, 0.1), make(tmp_path / "a2", 2, 0.1, pushed={0: 7})]
    assert quiet(paths, tmp_path / "out").table.cells("status") == ["finished; finished, BOOKS DO NOT BALANCE"]


def curve(error: list[float], epochs: list[float]) -> Curve:
    at = np.array(epochs)
    return Curve(False, Part.TEST, at, 10 * at, np.array(error) * 2, np.array(error), 100 * at)


def test_a_curve_is_the_mean_of_each_snapshot_with_a_band() -> None:
    (mean,) = seeds.curves([[curve([0.8, 0.4, 0.3], [0.0, 1.0, 2.0])], [curve([0.6, 0.2], [0.0, 1.2])]])
    np.testing.assert_allclose(mean.error, [0.7, 0.3])
    np.testing.assert_allclose(mean.epochs, [0.0, 1.1])
    np.testing.assert_allclose(mean.seconds, [0.0, 11.0])
    figure = figures.error("t", [("a", [mean]), ("b", [curve([0.5], [1.0])])], "epochs")
    assert figure is not None
    (band,) = figure.axes[0].collections
    (path,) = band.get_paths()
    edges = np.asarray(path.vertices)
    assert (edges[:, 1].min(), edges[:, 1].max()) == (20.0, 80.0)
    assert figure.axes[0].get_ylim()[1] > 80.0


def test_histograms_are_summed() -> None:
    assert staleness.summed([np.array([1, 2]), np.array([3, 0, 5])]).tolist() == [4, 2, 5]


def test_without_seeds_nothing_changes(tmp_path: Path) -> None:
    found = quiet([make(tmp_path / "a", 1, 0.1), make(tmp_path / "b", 1, 0.2)], tmp_path / "out")
    assert found.table.key == "runs"
    assert not (tmp_path / "out" / "seeds.csv").exists()
    assert len(module.COLUMNS.split(" | ")) - 1 <= len(found.table.columns)
