"""Tables and figures on a terminal and in a folder."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from mpisgd.analysis.tables import Table, escaped
from mpisgd.base.errors import ConfigError
from mpisgd.base.terminal import visible
from mpisgd.report.look import present

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Drawing:
    """A figure, or why there is none; `key` names the file."""

    key: str
    caption: str
    figure: Figure | None
    missing: str


def terminal() -> Console:
    """Return standard output; a batch job's file is not wrapped at 80 columns."""
    return Console() if sys.stdout.isatty() else Console(width=240, color_system=None)


def say(console: Console, line: str, style_: str = "") -> None:
    """Print a line without wrapping or markup."""
    console.print(Text(visible(line, kept="\n"), style=style_), soft_wrap=True)


def write(page_path: Path, title: str, lines: Sequence[str], tables: Sequence[Table], drawings: Sequence[Drawing]) -> list[Path]:
    """Write a Markdown page, CSV and figures. Raises ConfigError: an unwritable folder."""
    from mpisgd.report import style

    folder = page_path.parent
    page = [f"# {escaped(title)}", "", *(f"{escaped(line)}\n" for line in lines)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files = [table.write_csv(folder) for table in tables]
        page += [f"{table.markdown()}\nAll rows: [{table.key}.csv]({table.key}.csv)\n" for table in tables]
        page.append("## Figures\n")
        for drawing in drawings:
            if drawing.figure is None:
                page.append(f"{drawing.caption}: no figure, {drawing.missing}.\n")
                continue
            drawn = style.save(drawing.figure, folder / drawing.key)
            page.append(_shown(drawing.caption, [path.name for path in drawn]))
            files += drawn
        files.append(page_path)
        page_path.write_text("\n".join(page), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {folder}: expected a writable folder: {error}") from error
    return files


def _shown(caption: str, names: Sequence[str]) -> str:
    image = next((name for name in names if not name.endswith(".pdf")), "")
    others = " ".join(f"[{name}]({name})" for name in names if name != image)
    text = f"*{caption}*{others and ': '}{others}\n"
    return f"![{caption}]({image})\n\n{text}" if image else text


def tell(console: Console, folder: Path, drawings: Sequence[Drawing]) -> None:
    for drawing in drawings:
        if drawing.figure is None:
            say(console, f"no figure {drawing.key}: {drawing.missing}")
    drawn = [f"{drawing.key}.{each}" for drawing in drawings if drawing.figure is not None for each in present().format]
    say(console, f"written to {folder}: tables (CSV), the whole text (Markdown), {', '.join(drawn) or 'no figures'}")
