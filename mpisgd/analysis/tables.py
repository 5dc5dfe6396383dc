"""A small table with units, for terminals (rich), Markdown and CSV."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import rich.box
import rich.table
from rich.console import Console
from rich.text import Text

from mpisgd.base.terminal import visible

#: Content of a cell; None is an en dash, and empty in CSV.
Cell = str | int | float | bool | None

_MARKUP = re.compile(r"[|<]|\]\(|!\[")
_FORMULA = re.compile(r"[=+\-@](?![\d.]+( %)?$)")
"""Begin of a spreadsheet's formula, not of a number."""

#: Most rows shown on the terminal and in Markdown; CSV has all rows.
SHOWN_ROWS = 40


@dataclass(frozen=True)
class Column:
    """Heading, unit and number format (Python's; "" = four significant digits)."""

    name: str
    unit: str = ""
    spec: str = ""

    @property
    def heading(self) -> str:
        return f"{self.name} [{self.unit}]" if self.unit else self.name


def columns_of(headings: str) -> tuple[Column, ...]:
    """Parse headings: `"clock | error [%] | rate [1/s] :.2f"`."""
    columns = []
    for text in headings.split(" | "):
        heading, _, spec = text.partition(" :")
        name, _, unit = heading.partition(" [")
        columns.append(Column(name, unit.removesuffix("]"), spec))
    return tuple(columns)


@dataclass(frozen=True)
class Table:
    """Rows with a cell per column, else ValueError; `key` names the CSV file."""

    key: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    _numeric: tuple[bool, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"table {self.key}: a row has {len(row)} cells, expected {len(self.columns)}")
        columns = [[row[at] for row in self.rows] for at in range(len(self.columns))]
        numeric = [not cells or any(not isinstance(cell, str | None) for cell in cells) for cells in columns]
        object.__setattr__(self, "_numeric", tuple(numeric))

    def cells(self, column: str) -> list[Cell]:
        names = [known.name for known in self.columns]
        if column not in names:
            raise KeyError(f"table {self.key} has no column {column!r}, but {', '.join(names)}")
        return [row[names.index(column)] for row in self.rows]

    def text(self, width: int = 240, limit: int = SHOWN_ROWS) -> str:
        sink = io.StringIO()
        self.print_to(Console(file=sink, width=width, color_system=None), limit)
        return sink.getvalue()

    def print_to(self, console: Console, limit: int = SHOWN_ROWS) -> None:
        """Print, with `⋮` for the middle of long tables."""
        shown = rich.table.Table(box=rich.box.SIMPLE_HEAD, title=Text(visible(self.title), style="bold"), title_justify="left")
        for column, numeric in zip(self.columns, self._numeric, strict=True):
            shown.add_column(Text(visible(column.heading)), justify="right" if numeric else "left", overflow="fold")
        for cells in self._shortened(limit):
            shown.add_row(*(Text(cell) for cell in cells))
        console.print(shown)
        for line in self._remarks():
            console.print(Text(f"  {visible(line)}"))

    def markdown(self, limit: int = SHOWN_ROWS) -> str:
        headings = [escaped(column.heading) for column in self.columns]
        rows = [[escaped(cell) for cell in cells] for cells in self._shortened(limit)]
        widths = [max(3, *(len(row[at]) for row in [headings, *rows])) for at in range(len(headings))]
        rule = ["-" * (width - 1) + ":" if numeric else "-" * width for width, numeric in zip(widths, self._numeric, strict=True)]
        lines = [_pipes(headings, widths, self._numeric), _pipes(rule, widths, self._numeric)]
        lines += [_pipes(row, widths, self._numeric) for row in rows]
        return "\n".join([f"## {escaped(self.title)}", "", *lines, *(f"\n{escaped(line)}" for line in self._remarks()), ""])

    def csv(self) -> str:
        """Return all rows; floats in full precision, missing cells empty."""
        sink = io.StringIO()
        writer = csv.writer(sink, lineterminator="\n")
        writer.writerow([_harmless(column.heading) for column in self.columns])
        writer.writerows(["" if cell is None else _harmless(cell) for cell in row] for row in self.rows)
        return sink.getvalue()

    def write_csv(self, folder: Path) -> Path:
        path = folder / f"{self.key}.csv"
        path.write_text(self.csv(), encoding="utf-8")
        return path

    def _shortened(self, limit: int) -> list[list[str]]:
        if len(self.rows) <= limit:
            return [self._formatted(row) for row in self.rows]
        half = limit // 2
        return [
            *(self._formatted(row) for row in self.rows[:half]),
            ["⋮"] * len(self.columns),
            *(self._formatted(row) for row in self.rows[-half:]),
        ]

    def _formatted(self, row: Iterable[Cell]) -> list[str]:
        return [show(cell, column.spec) for cell, column in zip(row, self.columns, strict=True)]

    def _remarks(self) -> list[str]:
        empty = [] if self.rows else ["(no rows)"]
        return [*empty, *([self.note] if self.note else [])]


def show(cell: Cell, spec: str = "") -> str:
    """Format a cell: four significant digits, without exponent if short."""
    if cell is None:
        return "–"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, str | int):
        return visible(str(cell))
    if spec or not math.isfinite(cell):
        return format(cell, spec)
    if 1e4 <= abs(cell) < 1e9:
        return f"{cell:.0f}"
    return f"{cell:.4g}"


def _pipes(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    padded = (cell.rjust(width) if flush else cell.ljust(width) for cell, width, flush in zip(cells, widths, right, strict=True))
    return f"| {' | '.join(padded)} |"


def escaped(text: str) -> str:
    """Escape ends of cells, HTML and links for Markdown."""
    return _MARKUP.sub(lambda found: "&lt;" if found[0] == "<" else f"\\{found[0]}", visible(text))


def _harmless(cell: Cell) -> Cell:
    """Disarm spreadsheet formulas and terminal commands."""
    return cell if not isinstance(cell, str) else f"'{visible(cell)}" if _FORMULA.match(cell) else visible(cell)
