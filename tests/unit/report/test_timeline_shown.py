"""A timeline as a figure, in the report, and on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mpisgd.analysis.cycles import COMPUTE
from mpisgd.analysis.timeline import look
from mpisgd.base.errors import ConfigError, DataError
from mpisgd.cli.reading import timeline as command
from mpisgd.records.log.schema import Event, Reason, Verdict
from mpisgd.report import figures_timeline
from mpisgd.report import single as report
from mpisgd.report.look import WIDTH_IN
from tests.unit import fabricate
from tests.unit.fabricate import Log, evaluated, make, row, rows

# -------------------------------------------------------------------------------------------------------------- figure


def test_the_figure_of_a_small_run(tmp_path: Path) -> None:
    log = evaluated(fabricate.softsync(2))
    log.pushes["verdict"][4], log.pushes["reason"][4] = Verdict.DROP, Reason.STALE
    log.events = rows("events", [row("events", kind=Event.DEPARTED, learner_id=1, time_s=9.0)])
    run = make(tmp_path, log, 2, shards=2, evaluator=True, environment={"evaluator_rank": 4})
    drawing = figures_timeline.drawing(run)
    assert drawing.key == "timeline"
    assert drawing.figure is not None
    (axes,) = drawing.figure.axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["shard 0", "shard 1", "evaluator", "learner 0", "learner 1"]
    assert axes.get_ylim() == (5, 0)  # shards on top
    assert axes.get_xlabel() == "time since the start barrier [s]"
    bars = {str(found.get_label()): found.get_paths() for found in axes.collections}
    assert set(bars) == {"wait", "pull", "compute", "injected delay", "push", "update", "evaluate"}
    corners = bars["compute"][0].vertices
    found = look(run)
    assert corners[:, 0].min() == pytest.approx(found.cycles.edges[0, COMPUTE] / 1e9)
    assert corners[:, 0].max() == pytest.approx(found.cycles.edges[0, COMPUTE + 1] / 1e9)
    assert (corners[:, 1].min(), corners[:, 1].max()) == pytest.approx((3.1, 3.9))
    assert len(bars["update"]) == 8
    labels = [text.get_text() for legend in drawing.figure.legends for text in legend.get_texts()]
    assert labels[-5:] == ["push arrives, applied", "dropped", "late", "departed", "staleness τ; × = dropped"]
    assert [text.get_text() for text in axes.texts] == ["0", "1", "0", "1×", "0", "0", "0", "0", "3", "1"]
    (departed,) = [line for line in axes.lines if line.get_label() == "departed"]
    assert (np.asarray(departed.get_xdata()).tolist(), np.asarray(departed.get_ydata()).tolist()) == ([9.0], [4.5])


def test_nothing_of_the_figure_is_cut(tmp_path: Path) -> None:
    run = make(tmp_path, fabricate.simulated("backup", learners=20, wanted=18, updates=10), 20)
    figure = figures_timeline.drawing(run).figure
    assert figure is not None
    figure.draw_without_rendering()
    (axes,), whole = figure.axes, figure.bbox
    assert figure.get_size_inches()[0] == WIDTH_IN
    for box in [axes.get_tightbbox(), *(legend.get_window_extent() for legend in figure.legends)]:
        assert box is not None
        assert box.x0 >= whole.x0 - 1
        assert box.y0 >= whole.y0 - 1
        assert box.x1 <= whole.x1 + 1
        assert box.y1 <= whole.y1 + 1


def test_no_figure_of_what_could_not_be_read(tmp_path: Path) -> None:
    many = make(tmp_path / "many", fabricate.simulated("hardsync", learners=60, wanted=60, updates=1), 60)
    drawing = figures_timeline.drawing(many)
    assert drawing.figure is None
    assert drawing.missing == f"61 ranks, of which 40 can be told apart; see mpisgd timeline {many.path} --learners 39"
    assert figures_timeline.drawing(many, look(many, learners=39)).figure is not None

    long = make(tmp_path / "long", fabricate.simulated("softsync", learners=2, wanted=1, updates=300), 2)
    drawing = figures_timeline.drawing(long)
    assert drawing.figure is None
    start, hint = drawing.missing.split("; see mpisgd timeline ")
    assert start.endswith(", of which 100 can be told apart")
    assert hint.startswith(f"{long.path} --from-s 0 --to-s ")
    to_s = float(hint.split()[-1])
    assert figures_timeline.drawing(long, look(long, to_s=to_s)).figure is not None
    assert figures_timeline.drawing(long, look(long, to_s=0.0)).missing == "no gradient was pushed in this window"
    assert figures_timeline.drawing(make(tmp_path / "none", Log(), 2)).missing == "no gradient was pushed"


@pytest.mark.usefixtures("nothing_drawn")
def test_the_report_shows_it_for_small_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = make(tmp_path, fabricate.softsync(), 2)
    report.report(small.path)
    assert (small.path / "report" / "timeline.png").is_file()
    large = make(tmp_path / "large", fabricate.simulated("hardsync", learners=60, wanted=60, updates=1), 60)
    report.report(large.path)
    assert "no figure timeline: 61 ranks, of which 40 can be told apart" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------- the command


def test_the_command_writes_trace_and_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(tmp_path, fabricate.softsync(), 2, ended=False)
    assert command.main([str(run.path)]) == 0
    read = json.loads((run.path / "report" / "timeline.json").read_text(encoding="utf-8"))
    assert read["otherData"]["run"].startswith("run\nsoftsync n=1")
    assert (run.path / "report" / "timeline.png").read_bytes().startswith(b"\x89PNG")
    told = capsys.readouterr().out
    assert f"{len(read['traceEvents'])} events; open the trace in https://ui.perfetto.dev or chrome://tracing" in told
    assert "learners' spans are drawn as early as the log allows" in told

    out = tmp_path / "deep" / "er" / "a.json"
    options = ["--out", str(out), "--from-s", "3.5", "--to-s", "5.5", "--learners", "1", "--no-figure"]
    assert command.main([str(run.path), *options]) == 0
    assert [path.name for path in out.parent.iterdir()] == ["a.json"]
    told = capsys.readouterr().out
    assert "shown: learners 0 to 0 of 2" in told
    assert "figure" not in told


def test_the_command_says_why_there_is_no_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(tmp_path, fabricate.simulated("hardsync", learners=60, wanted=60, updates=1), 60)
    assert command.main([str(run.path)]) == 0
    assert "no figure timeline: 61 ranks, of which 40 can be told apart" in capsys.readouterr().out
    assert [path.name for path in (run.path / "report").iterdir()] == ["timeline.json"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--from-s", "3", "--to-s", "2.5"], "--from-s 3 --to-s 2.5: expected an end no earlier than the start"),
        (["--from-s", "nan", "--to-s", "2"], "--from-s nan --to-s 2: expected an end"),
        (["--to-s", "nan"], "--from-s 0 --to-s nan: expected an end"),
        (["--to-s=-1"], "--from-s 0 --to-s -1: expected an end"),
        (["--from-s", "nan"], "--from-s nan: expected a number up to 10, the end of the log"),
        (["--from-s", "100"], "--from-s 100: expected a number up to 10"),
        (["--learners", "0"], "--learners 0: expected at least 1"),
        (["--out", "a.png"], "--out a.png: expected the name of a trace"),
    ],
)
def test_what_the_user_cannot_mean(tmp_path: Path, options: list[str], why: str) -> None:
    run = make(tmp_path, fabricate.softsync(), 2)
    with pytest.raises(ConfigError, match=why):
        command.main([str(run.path), *options])
    assert not (run.path / "report").exists()


def test_no_run_no_pushes_no_place(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no run directory of mpisgd"):
        command.main([str(tmp_path)])
    with pytest.raises(DataError, match="no timeline: no gradient was pushed by learners 0 to 1"):
        command.main([str(make(tmp_path / "empty", Log(), 2).path)])
    run = make(tmp_path, fabricate.softsync(), 2)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="expected a writable file"):
        command.main([str(run.path), "--out", str(tmp_path / "file" / "below.json")])
    damaged = run.path / "shard-000.attempt-0.h5"
    damaged.write_bytes(damaged.read_bytes()[:1000])
    with pytest.raises(DataError, match=r"shard-000\.attempt-0\.h5"):
        command.main([str(run.path)])


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.main(["--help"])
    assert stopped.value.code == 0
    assert "usage: mpisgd timeline" in capsys.readouterr().out
