"""Several runs side by side."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from mpisgd.base.errors import ConfigError, DataError
from mpisgd.cli.reading import compare as command
from mpisgd.report.compare import compare, distinct_names
from tests.unit import fabricate

pytestmark = pytest.mark.usefixtures("nothing_drawn")
SOFTSYNC = {"name": "softsync", "n": 1, "modulation": "inverse"}
BACKUP = {"name": "backup", "N": 2, "b": 1}


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    evaluated = fabricate.backup()
    evaluated.evaluations = fabricate.rows(
        "evaluations", [fabricate.evaluation(1, 1.0, 0.5), fabricate.evaluation(1, 1.0, 0.25, averaged=True)]
    )
    return [
        fabricate.write_run(tmp_path / "soft", fabricate.softsync(2), SOFTSYNC, learners=2, shards=2, ended=False),
        fabricate.write_run(tmp_path / "back", evaluated, BACKUP, learners=3),
    ]


def test_one_row_per_run(paths: list[Path], tmp_path: Path) -> None:
    sink = io.StringIO()
    found = compare(paths, tmp_path / "out", Console(file=sink, width=240))
    first, second = found.table.rows
    assert first[:6] == ("soft", "softsync n=1 modulation=inverse", 2, 2, 4, 32 / 1000)
    assert first[6:] == (None, None, 5 / 8, 3, 0.0, 32 / 8.05, 8.05, 8.05 / 4, "UNFINISHED")
    assert second[:6] == ("back", "backup N=2 b=1", 3, 1, 4, 16 / 1000)
    assert second[6:] == (50.0, 25.0, 0.0, 0, 100 / 6, 16 / 4.5, 4.5, 2.25, "finished")
    assert "Runs side by side" in sink.getvalue()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "collect.png",
        "compare.md",
        "error_epochs.png",
        "error_seconds.png",
        "runs.csv",
        "staleness_distribution.png",
    ]


def test_a_figure_is_named_after_the_runs_that_it_shows(paths: list[Path], tmp_path: Path) -> None:
    """Of these two one alone is synchronous."""
    found = compare(paths, tmp_path / "out", Console(file=io.StringIO()))
    titles = {each.key: title_of(each.figure) for each in found.drawings if each.figure is not None}
    assert titles["collect"] == "Comparison of back"
    assert titles["staleness_distribution"].startswith("Comparison of 2 runs")


def title_of(figure: Figure) -> str:
    return " ".join([figure.get_suptitle(), *(axes.get_title() for axes in figure.axes)]).strip()


def test_nothing_in_common(tmp_path: Path) -> None:
    path = fabricate.write_run(tmp_path / "soft", fabricate.Log(), SOFTSYNC, learners=2)
    sink = io.StringIO()
    found = compare([path], tmp_path / "out", Console(file=sink, width=240))
    assert all(drawing.figure is None for drawing in found.drawings)
    assert "no figure collect: no run with a synchronous protocol" in sink.getvalue()
    assert found.table.rows[0][6:14] == (None, None, None, None, None, None, 0.0, None)


def test_unbalanced_and_diverged_runs_are_marked(tmp_path: Path) -> None:
    path = fabricate.write_run(tmp_path / "run", fabricate.backup(), BACKUP, 3, pushed={0: 7}, diverged=True)
    found = compare([path], tmp_path / "out", Console(file=io.StringIO()))
    assert found.table.rows[0][-1] == "finished, DIVERGED, BOOKS DO NOT BALANCE"


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["/r/a", "/r/b"], ["a", "b"]),
        (["/r/1/run", "/r/2/run", "/r/2/other"], ["1/run", "2/run", "other"]),
        (["/r/a", "/r/a"], ["a", "a"]),
        (["/a", "/r/a"], ["//a", "r/a"]),
    ],
)
def test_names_tell_runs_apart(paths: list[str], names: list[str]) -> None:
    assert distinct_names([Path(path) for path in paths]) == names


def test_command(paths: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([*map(str, paths), "--out", str(tmp_path / "there")]) == 0
    assert (tmp_path / "there" / "compare.md").is_file()
    assert "backup N=2 b=1" in capsys.readouterr().out
    assert command.main([*map(str, paths), "--out", str(tmp_path / "there"), "--target-error", "0.6"]) == 0
    assert "Until test error 60 %" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--target-error 60: expected a share between 0 and 1"):
        command.main([*map(str, paths), "--target-error", "60"])
    with pytest.raises(ConfigError, match="0 runs given"):
        command.main([])
    with pytest.raises(DataError, match="no run directory"):
        command.main([str(tmp_path)])
    with pytest.raises(SystemExit) as stopped:
        command.main(["--help"])
    assert stopped.value.code == 0
    assert "usage: mpisgd compare" in capsys.readouterr().out
