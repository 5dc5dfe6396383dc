"""One table, three renderings."""

from __future__ import annotations

import csv
import io

import pytest

from mpisgd.analysis.tables import Column, Table, show

TABLE = Table(
    "some",
    "Some [numbers]",
    (Column("name"), Column("count"), Column("time", "s"), Column("ok"), Column("share", "%", ".1f")),
    (("a|b", 1, 0.125, True, 12.34), ("mean", 20, None, False, float("nan"))),
    "A [note].",
)


@pytest.mark.parametrize(
    ("cell", "spec", "text"),
    [
        (None, ".1f", "–"),
        (True, "", "yes"),
        (False, "", "no"),
        (3, ".1f", "3"),
        ("x", ".1f", "x"),
        (0.0, "", "0"),
        (1 / 3, "", "0.3333"),
        (12345.6, "", "12346"),
        (1e10, "", "1e+10"),
        (2.5, ".2f", "2.50"),
        (float("nan"), "", "nan"),
        (float("inf"), ".1f", "inf"),
    ],
)
def test_show(cell: str | int | float | bool | None, spec: str, text: str) -> None:
    assert show(cell, spec) == text


def test_text_is_aligned_and_takes_brackets_as_they_are() -> None:
    text = TABLE.text()
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    assert lines[0] == "Some [numbers]"
    assert lines[1].split() == ["name", "count", "time", "[s]", "ok", "share", "[%]"]
    assert lines[3].split() == ["a|b", "1", "0.125", "yes", "12.3"]
    assert lines[4].split() == ["mean", "20", "–", "no", "nan"]
    assert lines[5] == "  A [note]."
    assert lines[3].index(" 1 ") + 1 == lines[1].index("count") + 4  # numbers are flush right


def test_markdown() -> None:
    assert TABLE.markdown().splitlines() == [
        "## Some [numbers]",
        "",
        "| name | count | time [s] |  ok | share [%] |",
        "| ---- | ----: | -------: | --: | --------: |",
        "| a\\|b |     1 |    0.125 | yes |      12.3 |",
        "| mean |    20 |        – |  no |       nan |",
        "",
        "A [note].",
    ]


def test_csv() -> None:
    rows = list(csv.reader(io.StringIO(TABLE.csv())))
    assert rows == [
        ["name", "count", "time [s]", "ok", "share [%]"],
        ["a|b", "1", "0.125", "True", "12.34"],
        ["mean", "20", "", "False", "nan"],
    ]


def test_the_middle_of_a_long_table_is_left_out_but_not_in_csv() -> None:
    table = Table("long", "Long", (Column("at"),), tuple((at,) for at in range(100)))
    shown = [line.strip() for line in table.text(limit=4).splitlines()]
    assert [line for line in shown if line.isdigit() or line == "⋮"] == ["0", "1", "⋮", "98", "99"]
    assert table.markdown(limit=4).count("\n|") == 7
    assert len(table.csv().splitlines()) == 101


def test_no_rows() -> None:
    table = Table("none", "None", (Column("at"),), ())
    assert "(no rows)" in table.text()
    assert "(no rows)" in table.markdown()
    assert table.csv() == "at\n"


def test_cells_of_a_column() -> None:
    assert TABLE.cells("count") == [1, 20]
    with pytest.raises(KeyError, match="has no column 'missing', but name, count"):
        TABLE.cells("missing")


def test_rows_must_fit() -> None:
    with pytest.raises(ValueError, match="a row has 1 cells, expected 2"):
        Table("bad", "Bad", (Column("a"), Column("b")), ((1,),))
