"""The tables of results/faults/README.md, from the kept files beside it.

`python -m tests.faults.summary results/faults` writes them anew, below the line MADE; what stands above it is by hand.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.faults.dying import POINTS
from tests.faults.starts import ROLES

MADE = "<!-- From here on made by `python -m tests.faults.summary results/faults`. -->"
_KILLED = "killed: "


def kept(directory: Path) -> dict[str, dict[str, Any]]:
    """Campaign -> what its file says."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))}


def of_campaigns(campaigns: dict[str, dict[str, Any]]) -> list[str]:
    lines = ["| campaign | runs | seed | failures | minutes | commit | date |", "|---|---:|---:|---:|---:|---|---|"]
    for name, table in campaigns.items():
        minutes = table["seconds"] / 60 if "seconds" in table else table["count"]
        cells = (table["count"], table["seed"], len(table["failures"]), f"{minutes:.0f}", table["commit"][:8], table["date"])
        lines.append(f"| [{name}]({name}.json) | {' | '.join(map(str, cells))} |")
    return lines


def of_kills(campaigns: dict[str, dict[str, Any]]) -> list[str]:
    """Who was killed when, over all campaigns that count it; "." = nobody: most of these ranks never come there."""
    cells: dict[str, int] = {}
    for table in campaigns.values():
        for name, times in table.get("totals", {}).items():
            if name.startswith(_KILLED):
                cells[name[len(_KILLED) :]] = cells.get(name[len(_KILLED) :], 0) + times
    lines = [f"| point | {' | '.join(ROLES)} |", f"|---{'|---:' * len(ROLES)}|"]
    for point in POINTS:
        counts = (str(cells.get(f"{point} / {role}", ".")) for role in ROLES)
        lines.append(f"| {point} | {' | '.join(counts)} |")
    total = sum(times for name, times in cells.items() if " / " in name)
    return [*lines, "", f"In all {total} kills, {cells.get('during --resume', 0)} of them during `--resume`."]


def of_seconds(campaigns: dict[str, dict[str, Any]]) -> list[str]:
    lines = ["| campaign | seconds | median | 99 % | worst | number |", "|---|---|---:|---:|---:|---:|"]
    for name, table in campaigns.items():
        for what, found in table.items():
            if isinstance(found, dict) and "99 %" in found:
                lines.append(f"| {name} | {what} | {' | '.join(f'{found[each]:g}' for each in found)} |")
    return lines


def of_totals(campaigns: dict[str, dict[str, Any]]) -> list[str]:
    lines = ["| campaign | of all its runs |", "|---|---|"]
    for name, table in campaigns.items():
        totals = {what: times for what, times in table.get("totals", {}).items() if not what.startswith((_KILLED, "fired: "))}
        if totals:
            lines.append(f"| {name} | {'; '.join(f'{what} {times:,}' for what, times in totals.items())} |")
    return lines


def page(text: str, directory: Path) -> str:
    """The page with its tables made anew."""
    campaigns = kept(directory)
    parts = [text.partition(MADE)[0] + MADE, "## What was run", "\n".join(of_campaigns(campaigns))]
    parts += ["\n".join(of_totals(campaigns)), "\n".join(of_seconds(campaigns))]
    parts += ["## Who was killed, and when", "\n".join(of_kills(campaigns))]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    place = Path(sys.argv[1])
    (place / "README.md").write_text(page((place / "README.md").read_text(), place))
