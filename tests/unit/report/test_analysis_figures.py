"""What the figures show: axes with units, the numbers drawn, nothing drawn where there is nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from mpisgd.analysis import arrivals, staleness, throughput, training
from mpisgd.analysis.arrivals import Collected
from mpisgd.analysis.training import Curve
from mpisgd.config import Part
from mpisgd.records.log.reader import Run
from mpisgd.report import figures, style
from mpisgd.report.look import WIDTH_IN, Look, applied
from mpisgd.report.single import draw
from tests.effort import spread
from tests.unit import fabricate


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    log = fabricate.simulated("backup", learners=6, wanted=5, updates=60)
    log.evaluations = fabricate.learning(log)
    environment = {"gradients_per_update": 5}
    path = tmp_path_factory.mktemp("figures") / "_a_$run$"
    return Run(fabricate.write_run(path, log, {"name": "backup", "b": 1}, 6, environment=environment))


def curve(error: list[float], averaged: bool = False) -> Curve:
    at = np.arange(len(error), dtype=float)
    return Curve(averaged, Part.TEST, at, 10 * at, np.array(error), np.array(error), 100 * at)


def xs(line: Line2D) -> np.ndarray:
    return np.asarray(line.get_xdata())


def ys(line: Line2D) -> np.ndarray:
    return np.asarray(line.get_ydata())


def bars(figure: Figure) -> list[Rectangle]:
    return [patch for patch in figure.axes[0].patches if isinstance(patch, Rectangle)]


def texts(figure: Figure | None) -> list[str]:
    """Of all legends."""
    assert figure is not None
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


@pytest.mark.slow
def test_all_figures_of_a_run(run: Run, tmp_path: Path) -> None:
    drawings = draw(run)
    assert [drawing.key for drawing in drawings] == [
        "staleness_distribution",
        "staleness_over_clock",
        "error_epochs",
        "error_seconds",
        "arrivals",
        "collect",
        "learner_time",
    ]
    for drawing in drawings:
        assert drawing.figure is not None
        (axes,) = drawing.figure.axes
        assert axes.get_title() == "_a_$run$\nbackup N=5 b=1 · λ=6 · shards=1 · μ=4"
        assert axes.get_xlabel()
        assert axes.get_ylabel()
        assert "[" in axes.get_ylabel() or drawing.key == "arrivals"
        assert style.save(drawing.figure, tmp_path / "figure") == [tmp_path / "figure.png"]
        data = (tmp_path / "figure.png").read_bytes()
        assert data.startswith(b"\x89PNG")
        assert len(data) > 10_000
        width = int.from_bytes(data[16:20], "big")
        assert width == round(WIDTH_IN * style.DPI)


@pytest.mark.parametrize("width", spread([3.4, WIDTH_IN, 12.0], 3))
def test_nothing_is_cut_or_overlaps_the_axes(width: float, run: Run) -> None:
    with applied(Look(width=width)):
        drawings = draw(run)
    for drawing in drawings:
        assert drawing.figure is not None
        drawing.figure.draw_without_rendering()
        assert drawing.figure.get_size_inches()[0] == width
        whole = drawing.figure.bbox
        (axes,) = drawing.figure.axes
        tight, below = axes.get_tightbbox(), axes.xaxis.get_tightbbox()
        assert tight is not None
        for box in [tight, *(legend.get_window_extent() for legend in drawing.figure.legends)]:
            assert box.x0 >= whole.x0 - 1, drawing.key
            assert box.y0 >= whole.y0 - 1, drawing.key
            assert box.x1 <= whole.x1 + 1, drawing.key
            assert box.y1 <= whole.y1 + 1, drawing.key
        for legend in drawing.figure.legends:
            assert below is not None
            assert legend.get_window_extent().y1 <= below.y0 + 1, drawing.key


def test_distribution_bars_are_shares() -> None:
    figure = figures.staleness_distribution("run", [("run", np.array([1, 2, 0, 1]))], 1)
    assert figure is not None
    assert [bar.get_height() for bar in bars(figure)] == [25, 50, 0, 25]
    assert texts(figure) == ["mean = 1.25", "2n = 2"]


def test_distributions_of_several_runs_are_lines() -> None:
    runs = [("a", np.array([1])), ("b", np.array([1, 3])), ("c", np.array([]))]
    figure = figures.staleness_distribution("runs", runs, None)
    assert figure is not None
    assert [ys(line).tolist() for line in figure.axes[0].lines] == [[100], [25, 75]]
    assert texts(figure) == ["a", "b"]


def test_a_long_tail_is_cut_and_said() -> None:
    counts = np.zeros(901, np.int64)
    counts[:10], counts[900] = 1000, 1
    figure = figures.staleness_distribution("run", [("run", counts)], None)
    assert figure is not None
    assert figure.axes[0].get_xlabel() == "staleness τ [updates]; largest, not shown: 900"
    assert figure.axes[0].get_xlim()[1] < 20
    times = np.concatenate([np.linspace(0.1, 0.2, 500), [310.0]])
    figure = figures.arrival_cdf("run", [("all", times)], "time")
    assert figure is not None
    assert figure.axes[0].get_xlabel() == "time [ms]; longest, not shown: 3.1e+05 ms"


def test_staleness_over_clock_is_binned_where_updates_are_many() -> None:
    clock = np.arange(1, 1001)
    tau = clock % 2
    found = staleness.OverClock(clock, tau.astype(float), tau, tau)
    figure = figures.staleness_over_clock("run", found)
    assert figure is not None
    line = figure.axes[0].lines[0]
    assert xs(line)[:2].tolist() == [2, 5]  # means of clocks 1, 2, 3 and 4, 5, 6
    assert ys(line)[:2] == pytest.approx([2 / 3, 1 / 3])
    assert texts(figure) == ["range over 3 updates", "mean over 3 updates"]


@pytest.mark.parametrize(("against", "right"), [("epochs", 2.0), ("seconds", 20.0)])
def test_error_in_per_cent(against: Literal["epochs", "seconds"], right: float) -> None:
    curves = [curve([0.9, 0.5, np.nan]), curve([0.9, 0.4, 0.3], averaged=True)]
    figure = figures.error("run", [("run", curves)], against)
    assert figure is not None
    first, second = figure.axes[0].lines
    assert ys(first)[:2].tolist() == [90, 50]
    assert ys(second) == pytest.approx([90, 40, 30])
    assert xs(second)[-1] == right
    assert texts(figure) == ["theta test", "thetabar test"]
    looks = {(line.get_color(), line.get_linestyle(), line.get_marker()) for line in (first, second)}
    assert len(looks) == 2


def test_a_single_point_has_a_marker_inside_the_axes() -> None:
    figure = figures.error("run", [("run", [curve([0.25])])], "epochs")
    assert figure is not None
    axes = figure.axes[0]
    assert axes.lines[0].get_marker() not in ("", "None", None)
    assert axes.get_ylim()[0] < 25 < axes.get_ylim()[1]


def test_several_runs_share_a_legend_of_theta_and_thetabar() -> None:
    both = [curve([0.9, 0.5]), curve([0.9, 0.4], averaged=True)]
    figure = figures.error("runs", [("_first", both), ("second", both[:1])], "epochs")
    assert texts(figure) == [" _first", "second", "theta", "thetabar"]


def test_cdf_rises_from_0_to_1() -> None:
    figure = figures.arrival_cdf("run", [("all", np.array([1.0, 2.0, 4.0, 5.0])), ("none", np.array([]))], "time")
    assert figure is not None
    (line,) = figure.axes[0].lines
    assert xs(line).tolist() == [1, 1, 2, 4, 5]
    assert ys(line).tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert figure.axes[0].get_xlabel() == "time [s]"
    long = np.sort(np.random.default_rng(1).random(50_000))
    figure = figures.arrival_cdf("run", [("all", long)], "time")
    assert figure is not None
    assert len(xs(figure.axes[0].lines[0])) == style.POINTS + 1
    assert ys(figure.axes[0].lines[0])[-1] == 1


def test_collect_shows_mean_median_and_what_is_wanted(run: Run) -> None:
    found = arrivals.collected(run)
    figure = figures.collect("run", [("run", found)], 6, 5)
    assert figure is not None
    mean, median, wanted = figure.axes[0].lines
    assert ys(mean) == pytest.approx(1e3 * found.mean)
    assert ys(median) == pytest.approx(1e3 * found.median)
    assert xs(wanted)[0] == 5
    assert texts(figure) == ["mean", "median", "N = 5 wanted"]


def test_stacks_reach_what_the_table_says(run: Run) -> None:
    spent = throughput.learner_time(run)
    figure = figures.time_spent("run", spent)
    assert figure is not None
    tops: dict[float, float] = {}
    for bar in bars(figure):
        middle = round(bar.get_x() + bar.get_width() / 2, 6)
        tops[middle] = max(tops.get(middle, 0.0), bar.get_y() + bar.get_height())
    assert [tops[at] for at in range(6)] == pytest.approx(spent.elapsed)
    assert tops[7] == pytest.approx(spent.elapsed.mean())
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()][-1] == "mean"


def test_many_learners_become_an_area(tmp_path: Path) -> None:
    log = fabricate.simulated("softsync", learners=100, wanted=100, updates=5)
    run = Run(fabricate.write_run(tmp_path / "run", log, {"name": "softsync", "n": 1}, 100))
    figure = figures.time_spent("run", throughput.learner_time(run))
    assert figure is not None
    assert len(figure.axes[0].patches) < 10


def test_nothing_to_draw() -> None:
    none = np.empty(0)
    assert figures.staleness_distribution("", [("a", np.zeros(0, np.int64))], 1) is None
    assert figures.staleness_over_clock("", staleness.OverClock(none, none, none, none)) is None
    assert figures.error("", [("a", []), ("b", [curve([np.nan])])], "epochs") is None
    assert figures.arrival_cdf("", [("a", none)], "time") is None
    assert figures.collect("", [("a", Collected(none, none, none, none, none))], 3, None) is None
    idle = throughput.LearnerTime(np.zeros(2, np.int64), {}, np.zeros(2))
    assert figures.time_spent("", idle) is None


def test_series_differ_in_more_than_colour() -> None:
    looks = [str({**style.line(at), "color": ""}) for at in range(len(style.DASHES) * len(style.MARKERS))]
    assert len(set(looks)) == len(looks)


def test_curves_of_a_run_are_drawn_for_each_kind_of_weights(run: Run) -> None:
    assert len(training.curves(run)) == 4
    drawing = next(drawing for drawing in draw(run) if drawing.key == "error_seconds")
    assert texts(drawing.figure) == ["theta test", "thetabar test", "theta training", "thetabar training"]
