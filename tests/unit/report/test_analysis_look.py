"""Figures as they were asked for: formats, width and title, of report, compare and timeline alike."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mpisgd.base.errors import ConfigError
from mpisgd.cli.reading import compare, report, timeline
from mpisgd.records.log.reader import Run
from mpisgd.report.look import WIDTH_IN, Look, applied, present
from mpisgd.report.single import draw
from tests.unit import fabricate

BEGINS = {"png": b"\x89PNG", "pdf": b"%PDF-", "svg": b"<?xml"}
KEYS = ("collect", "learner_time", "staleness_distribution", "staleness_over_clock", "arrivals", "timeline")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return fabricate.write_run(tmp_path / "run", fabricate.backup(), {"name": "backup", "N": 2, "b": 1}, learners=3)


@pytest.mark.usefixtures("nothing_drawn")
@pytest.mark.parametrize("formats", [("pdf",), ("png", "pdf", "svg")])
def test_a_report_has_each_figure_in_each_format(formats: tuple[str, ...], path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([str(path), "--format", *formats]) == 0
    folder = path / "report"
    assert {file.suffix[1:] for file in folder.iterdir()} == {"csv", "md", *formats}
    page = (folder / "report.md").read_text()
    told = capsys.readouterr().out
    for name in (f"{key}.{each}" for key in KEYS for each in formats):
        assert (folder / name).is_file(), name
        assert f"({name})" in page, name
        assert name in told, name
    images = set(re.findall(r"!\[.*\]\(.*\.(\w+)\)", page))
    assert images == {"pdf": set(), "png": {"png"}}[formats[0]], "a page shows no pdf"


@pytest.mark.slow
def test_each_figure_can_be_drawn_in_each_format(path: Path) -> None:
    assert report.main([str(path), "--format", *BEGINS]) == 0
    for name in (f"{key}.{each}" for key in KEYS for each in BEGINS):
        assert (path / "report" / name).read_bytes().startswith(BEGINS[name[-3:]]), name


def test_a_comparison_too(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert compare.main([str(path), "--out", str(out), "--format", "svg", "--width", "3.5", "--title", "Mine & yours"]) == 0
    text = (out / "collect.svg").read_text()
    assert f'width="{72 * 3.5:g}pt"' in text
    assert "Mine &amp; yours" in text or "Mine &#38; yours" in text
    assert not list(out.glob("*.png"))


def test_a_timeline_too(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert timeline.main([str(path), "--out", str(tmp_path / "a.json"), "--format", "pdf", "svg"]) == 0
    assert sorted(file.name for file in tmp_path.glob("a.*")) == ["a.json", "a.pdf", "a.svg"]
    for each in ("pdf", "svg"):
        assert (tmp_path / f"a.{each}").read_bytes().startswith(BEGINS[each])
    assert f"written to {tmp_path / 'a.pdf'}" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="expected the name of a trace"):
        timeline.main([str(path), "--out", str(tmp_path / "a.svg")])


@pytest.mark.parametrize(("title", "shown"), [("Mine\nof today", "Mine\nof today"), ("", ""), (None, "run\nbackup N=2 b=1")])
def test_a_title_is_that_of_all_figures(title: str | None, shown: str, path: Path) -> None:
    with applied(Look(title=title)):
        drawings = draw(Run(path))
    found = {drawing.figure.axes[0].get_title() for drawing in drawings if drawing.figure is not None}
    assert found == {shown} if title is not None else all(each.startswith(shown) for each in found)


def test_it_holds_no_longer_than_it_is_asked_for(path: Path) -> None:
    with pytest.raises(ZeroDivisionError), applied(Look(width=4.0)):
        assert present().width == 4.0
        _ = 1 / 0
    assert present() == Look() == Look(format=("png",), width=WIDTH_IN, title=None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": ("gif",)}, "format = 'gif': expected some of png, pdf, svg"),
        ({"format": ()}, "format = '': expected some of png, pdf, svg"),
        ({"width": 2.0}, "width = 2.0: expected inches, 3 to 40"),
        ({"width": float("nan")}, "width = nan: expected inches, 3 to 40"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Look(**fields)


@pytest.mark.parametrize("command", [report, compare, timeline])
def test_the_commands_refuse_it_before_they_write(command: Any, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.main([str(path), "--format", "gif"])
    assert stopped.value.code == 2
    assert "gif" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="width = 99"):
        command.main([str(path), "--width", "99"])
    assert not (path / "report").exists()
