"""When each experiment here was made: `make results` prints a line for each script, from the files of numbers that it keeps, and
writes the tables of README.md anew that stand below a comment <!-- FILE: TABLE -->, from figures/FILE.json. `--draw` draws all
figures from kept numbers before.

A script has the files figures/NAME.json, those of the folder NAME, its own name with hyphens, and those of BENCH. Changed since: so
many of the files of this repository that it imports are others now than in the commit by which the oldest of its numbers were made.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpisgd.analysis.tables import Column, Table

HERE = Path(__file__).parent
ROOT = HERE.parent
SHARED = ("virtual_runs", "course", "curves", "inception_v3", "made")
"""Modules that are no experiment."""
ON_RANKS = ("one_slow_learner", "links_timeline")
"""Experiments on real ranks that draw no kept numbers."""
BENCH = {
    "speed": ("wire", "train", "peers", "oversubscribed", "oversubscribed-mpich", "log", "faults"),
    "links": ("nodes",),
    "one_slow_learner": ("slow-learner",),
}
"""Of a script, what benches have measured for it: files of bench/."""


@dataclass(frozen=True)
class Made:
    """One file of numbers: what it says of itself. `seconds` is None where it does not say."""

    path: Path
    date: str
    commit: str
    seconds: float | None


def experiments() -> list[str]:
    return [path.stem for path in sorted(HERE.glob("*.py")) if path.stem not in SHARED]


def files_of(script: str) -> Iterator[Made]:
    name = script.replace("_", "-")
    own = sorted([*(HERE / "figures").glob(f"{name}.json"), *(HERE / name).glob("*.csv"), *(HERE / name).glob("*.json")])
    for path in [*own, *(HERE / "bench" / f"{bench}.json" for bench in BENCH.get(script, ()))]:
        first = path.read_text("utf-8") if path.suffix == ".json" else path.read_text("utf-8").partition("\n")[0].removeprefix("# ")
        try:
            about: dict[str, Any] = json.loads(first)
        except ValueError:
            continue
        about = about.get("machine", about)
        commit = (about.get("commits") or [about.get("commit", about.get("git_commit", ""))])[0]
        if commit or "date" in about:
            yield Made(path, about.get("date") or _git("show", "-s", "--format=%cs", commit), commit, about.get("seconds"))


def imported_by(script: str) -> list[str]:
    """Files of this repository that a script imports, the script too, below the root."""
    code = (
        f"import sys; sys.path.insert(0, {str(HERE)!r}); import {script}\n"
        "print('\\n'.join(str(m.__file__) for m in list(sys.modules.values()) if getattr(m, '__file__', None)))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    paths = (Path(line) for line in told.splitlines())
    return sorted(str(path.relative_to(ROOT)) for path in paths if path.is_relative_to(ROOT) and ".venv" not in path.parts)


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def _ago(commit: str) -> int:
    return int(_git("rev-list", "--count", f"{commit}..HEAD") or 0) if commit else 0


def row(script: str) -> tuple[str, int, str, str | None, int | None, int | None, float | None]:
    """One script: its name, files, oldest date and commit, how many commits ago, how many of its imports changed, core-hours."""
    made = list(files_of(script))
    if not made:
        return script, 0, "", None, None, None, None
    oldest = min(made, key=lambda each: (each.date, -_ago(each.commit)))
    if not oldest.commit:
        return script, len(made), oldest.date, "", None, None, None
    changed = _git("diff", "--name-only", oldest.commit, "HEAD", "--", *imported_by(script)).splitlines()
    hours = sum(each.seconds or 0.0 for each in made) / 3600
    return script, len(made), oldest.date, oldest.commit[:8], _ago(oldest.commit), len(changed), hours


def table() -> Table:
    columns = (
        Column("script"),
        Column("files"),
        Column("oldest"),
        Column("commit"),
        Column("commits ago"),
        Column("of its files changed since"),
        Column("made in", "h", ".2f"),
    )
    note = "A script without files of numbers has its numbers in README.md alone, or in files of another kind."
    return Table("made", "When the results were made", columns, tuple(row(script) for script in experiments()), note)


def page(text: str) -> str:
    """A page whose tables below <!-- FILE: TABLE --> are those of the files."""
    return re.sub(r"(<!-- ([\w-]+): ([\w-]+) -->\n)(?:\|.*\n)*", lambda found: found[1] + _kept(found[2], found[3]), text)


def _kept(file: str, key: str) -> str:
    (kept,) = (each for each in json.loads((HERE / "figures" / f"{file}.json").read_text("utf-8"))["tables"] if each["key"] == key)
    columns = tuple(Column(**each) for each in kept["columns"])
    lines = Table(key, "", columns, tuple(map(tuple, kept["rows"]))).markdown().splitlines()
    return "".join(f"{line}\n" for line in lines if line.startswith("|"))


def draw() -> None:
    """Draw the figures of all scripts that keep numbers."""
    for script in (each for each in experiments() if each not in ON_RANKS and any(files_of(each))):
        done = subprocess.run([sys.executable, str(HERE / f"{script}.py"), "--draw"], capture_output=True, text=True, check=False)
        print(f"{script}: {(done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()[-1]}", flush=True)


if __name__ == "__main__":
    if "--draw" in sys.argv[1:]:
        draw()
    (HERE / "README.md").write_text(page((HERE / "README.md").read_text("utf-8")), "utf-8")
    print(table().text(width=140))
