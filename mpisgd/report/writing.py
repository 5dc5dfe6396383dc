"""Tables and figures onto the terminal and into a folder: CSV, PNG, and one Markdown page that shows them all."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from mpisgd.analysis.tables import Table
from mpisgd.base.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Drawing:
    """A figure, or the reason why there is none; `key` is the name of its PNG file."""

    key: str
    caption: str
    figure: Figure | None
    missing: str


def terminal() -> Console:
    """Standard output; where it is no terminal (a batch job's file), lines are not wrapped at 80 columns."""
    return Console() if sys.stdout.isatty() else Console(width=240, color_system=None)


def say(console: Console, line: str, style_: str = "") -> None:
    """Print a line as it is, never wrapped, without markup."""
    console.print(Text(line, style=style_), soft_wrap=True)


def write(page_path: Path, title: str, lines: Sequence[str], tables: Sequence[Table], drawings: Sequence[Drawing]) -> list[Path]:
    """Write the Markdown page, which begins with `lines`, and beside it CSV and PNG; makes the folder; returns the files.

    Raises ConfigError where the folder cannot be written.
    """
    from mpisgd.report import style

    folder = page_path.parent
    page = [f"# {title}", "", *(f"{line}\n" for line in lines)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files = [table.write_csv(folder) for table in tables]
        page += [f"{table.markdown()}\nAll rows: [{table.key}.csv]({table.key}.csv)\n" for table in tables]
        page.append("## Figures\n")
        for drawing in drawings:
            if drawing.figure is None:
                page.append(f"{drawing.caption}: no figure, {drawing.missing}.\n")
                continue
            files.append(folder / f"{drawing.key}.png")
            style.save(drawing.figure, files[-1])
            page.append(f"![{drawing.caption}]({drawing.key}.png)\n\n*{drawing.caption}*\n")
        files.append(page_path)
        page_path.write_text("\n".join(page), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {folder}: expected a folder that can be written: {error}") from error
    return files


def tell(console: Console, folder: Path, drawings: Sequence[Drawing]) -> None:
    """Print what was written, and which figures were not, and why."""
    for drawing in drawings:
        if drawing.figure is None:
            say(console, f"no figure {drawing.key}: {drawing.missing}")
    drawn = [f"{drawing.key}.png" for drawing in drawings if drawing.figure is not None]
    say(console, f"written to {folder}: tables (CSV), all of it (Markdown), {', '.join(drawn) or 'no figures'}")
