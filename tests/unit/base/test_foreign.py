"""Text that somebody else wrote does nothing to a terminal, a spreadsheet or a page."""

from __future__ import annotations

import csv
import io
import shutil
import tomllib
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from mpisgd.__main__ import main
from mpisgd.analysis.tables import Column, Table
from mpisgd.base.errors import ConfigError, DataError
from mpisgd.base.terminal import all_visible, check_visible, visible
from mpisgd.config import Config, GroupOptions
from mpisgd.config.config_file import dumps
from mpisgd.records.log.reader import Run
from tests.forge import unsealed
from tests.virtual.jobs import TENSORS, simulated

ESCAPE = "\x1b]0;owned\x07\x1b[2K"


def test_no_letter_that_is_left_is_a_command() -> None:
    every = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x11000), 0xE0041]))
    left = visible(every)
    assert {unicodedata.category(letter) for letter in left} & {"Cc", "Zl", "Zp", "Cs"} == set()
    assert not set("\u202e\u2066\u200f\ufeff\u061c") & set(left)
    assert visible("Zoë's α₀/τ, 30 °C — 东") == "Zoë's α₀/τ, 30 °C — 东"
    assert visible(ESCAPE) == r"\x1b]0;owned\x07\x1b[2K"
    assert visible("a\nb\tc", kept="\n") == "a\nb\\tc"
    assert visible(visible(every)) == left
    assert all_visible({"hosts": ["a\x07", 1], "b\n": None}) == {"hosts": ["a\\x07", 1], r"b\n": None}


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("foreign") / "run"
    simulated(path, TENSORS, protocol={"name": "softsync", "n": 2})
    return path


@pytest.fixture
def forged(honest: Path, tmp_path: Path) -> Callable[..., Path]:
    """A run whose config.toml says something else."""

    def make(change: Callable[[dict[str, Any]], object]) -> Path:
        path = Path(shutil.copytree(honest, tmp_path / "run"))
        table = tomllib.loads(unsealed((path / "config.toml").read_text()))
        change(table)
        (path / "config.toml").write_text(tomli_w.dumps(table))
        return path

    return make


FORGED: dict[str, Callable[[dict[str, Any]], object]] = {
    "hosts": lambda table: table["environment"].update(hosts=[ESCAPE]),
    "a version": lambda table: table["environment"]["versions"].update(torch=f"2{ESCAPE}"),
    "a name": lambda table: table["environment"]["versions"].update({ESCAPE: "1"}),
    "the loss": lambda table: table.update(loss=f"mse{ESCAPE}"),
    "the factory": lambda table: table.update(model={"name": "custom", "factory": f"a:b{ESCAPE}", "kwargs": {}}),
    "the other direction": lambda table: table.update(loss="mse\u202e"),
    "a second line": lambda table: table["environment"].update(directory="/x\nidentical: theta, bit for bit"),
}


@pytest.mark.parametrize("what", FORGED)
@pytest.mark.parametrize("command", ["report", "replay", "compare", "timeline", "plan", "export"])
def test_nothing_of_a_runs_configuration_moves_the_cursor(
    command: str, what: str, forged: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(forged(FORGED[what]))
    more = {"compare": [path], "export": [str(tmp_path / "weights.pt")]}.get(command, [])
    assert main([command, path, *more]) == 2
    said = "".join(capsys.readouterr())
    assert "control characters" in said
    assert said == visible(said, kept="\n")
    assert not any(line.startswith("identical") for line in said.splitlines())


def test_arguments_of_factories_are_free(honest: Path, forged: Callable[..., Path]) -> None:
    path = forged(lambda table: table.update(model={"name": "custom", "factory": "a:b", "kwargs": {"text": "two\nlines"}}))
    assert Run(path).config["model"]["kwargs"] == {"text": "two\nlines"}
    with pytest.raises(DataError, match="control characters"):
        check_visible("config.toml", {"other": {"kwargs": "x", "text": "\x1b"}}, free="kwargs")


def test_a_run_writes_no_control_characters_itself() -> None:
    with pytest.raises(ConfigError, match=r"loss = 'mse\\\\x1b'.*expected a text without control characters"):
        Config(loss="mse\x1b")
    with pytest.raises(ConfigError, match=r"rate = '\*\\\\x1b'"):
        Config(groups=GroupOptions(rate={"*\x1b": 2.0}))
    assert Config(out="run \U0001f469\u200d\U0001f4bb").out.startswith("run"), "letters that are joined are letters"
    assert "a\\\\nb" in dumps(Config(), {"directory": "/a\nb"})


@pytest.mark.parametrize("cell", ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", '=HYPERLINK("http://x")'])
def test_a_spreadsheet_calculates_nothing(cell: str) -> None:
    table = Table("t", "T", (Column(cell),), ((cell,), (-1.5,), ("-17 %",), ("+3",), ("a\r\x1b",)))
    rows = list(csv.reader(io.StringIO(table.csv())))
    assert rows == [[f"'{cell}"], [f"'{cell}"], ["-1.5"], ["-17 %"], ["+3"], [r"a\r\x1b"]]


def test_a_page_shows_text_as_text() -> None:
    cell = "a|b <img src=x onerror=alert(1)> ![x](http://x) [x](javascript:1)\n| forged | row |"
    page = Table("t", cell, (Column(cell),), ((cell,),), cell).markdown()
    assert "<img" not in page and "](" not in page.replace("\\](", "") and "![" not in page.replace("\\![", "")
    assert len([line for line in page.splitlines() if line.startswith("| ")]) == 3, "a heading, a rule and a row"
    assert all(line.replace("\\|", "").count("|") == 2 for line in page.splitlines() if line.startswith("| "))


def test_a_terminal_is_told_text_as_text() -> None:
    cell = f"a{ESCAPE}\r\nb"
    told = Table("t", cell, (Column(cell),), ((cell,),), cell).text()
    assert told == visible(told, kept="\n")
