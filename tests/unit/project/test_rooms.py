"""Each room imports only downward (DESIGN 3): what lets the protocols and the virtual cluster be tested without MPI."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import mpisgd
from tests.language import modules

PACKAGE = Path(mpisgd.__file__).parent

#: The rooms, from the bottom to the top; a module that is no package is a room of its own, "" is the package's `__init__`.
ROOMS = [
    *("base", "rules", "protocols", "config", "vectors", "comm", "comm.mpi", "comm.virtual", "models", "data", "update"),
    *("gradient", "gradient.by_layers"),
    *(
        "records.log",
        "records.checkpoint",
        "records",
        "exchange",
        "exchange.collectives",
        "pipeline",
        "serving",
        "learner",
        "shard",
        "evaluator",
        "sandblaster",
    ),
    *("liveness", "job", "job.roles", "job.run", "simulate"),
    *("analysis", "report", "replay.checks", "replay.rerun", "replay", "plan.costs", "plan", "site", "site.scripts"),
    *("launching", "bench.parts", "bench", "api"),
    *(".", "cli.reading", "cli"),
    "__main__",
]

FORBIDDEN = {
    "rules": {"torch", "numpy", "h5py", "time", "mpi4py"},
    "protocols": {"torch", "h5py", "time", "mpi4py"},
    "analysis": {"torch", "mpi4py"},
}


def room_of(module: str) -> str:
    """The longest name in the list that the module begins with; "" where there is none."""
    parts = module.split(".") if module else ["."]
    names = (".".join(parts[:end]) or "." for end in range(len(parts), 0, -1))
    return next((name for name in names if name in ROOMS), "")


def imports(path: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, absolute name), wherever in the file they stand, also late ones and those under TYPE_CHECKING."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def violations(root: Path) -> list[str]:
    found = []
    for path, tree in modules(root):
        name = ".".join(part for part in path.relative_to(root).with_suffix("").parts if part != "__init__")
        room = room_of(name)
        if not room:
            found.append(f"{name} is in no room: place it in the list above")
            continue
        for line, target in imports(path, tree):
            package, _, rest = target.partition(".")
            if package == "mpi4py" and name != "comm.mpi.library":
                found.append(f"{name}:{line} imports mpi4py, which mpisgd/comm/mpi/library.py alone may")
            if package in FORBIDDEN.get(room, ()):
                found.append(f"{name}:{line} imports {package}")
            if package == "mpisgd":
                entered = room_of(rest) or "."
                if ROOMS.index(entered) > ROOMS.index(room):
                    found.append(f"{name or 'mpisgd'}:{line} imports {target}, upward")
    return found


def test_no_arrow_runs_upward() -> None:
    assert violations(PACKAGE) == []


PLANTED = [
    (
        "vectors/flat.py",
        "from mpisgd.exchange.learner_channel import LearnerChannel",
        "vectors.flat:.* imports .*LearnerChannel, upward",
    ),
    ("update/slice_update.py", "from mpisgd import shard", "update.slice_update:.* imports mpisgd.shard, upward"),
    ("records/log/reader.py", "def f():\n    import mpisgd.job.run", "records.log.reader:.* imports mpisgd.job.run, upward"),
    ("exchange/roles.py", "if TYPE_CHECKING:\n    from mpisgd import train", "exchange.roles:.* imports mpisgd.train, upward"),
    ("comm/mpi/wire.py", "import mpi4py.util", "comm.mpi.wire:.* imports mpi4py, which .* alone may"),
    ("protocols/softsync.py", "from time import monotonic", "protocols.softsync:.* imports time"),
    ("analysis/books.py", "import torch", "analysis.books:.* imports torch"),
    ("master.py", "", "master is in no room.*"),
]


def test_the_walk_sees_planted_violations(tmp_path: Path) -> None:
    for module, line, _ in PLANTED:
        (tmp_path / module).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / module).write_text(f"{line}\n")
    found = sorted(violations(tmp_path))
    assert len(found) == len(PLANTED)
    for text, complaint in zip(found, sorted(complaint for _, _, complaint in PLANTED), strict=True):
        assert re.fullmatch(complaint, text)


def test_each_room_says_what_lives_there() -> None:
    """In one sentence, and holds 2 to 12 files."""
    for folder in {path.parent for path in PACKAGE.rglob("*.py")} - {PACKAGE}:
        text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
        assert text, f"{folder}: its __init__.py has no docstring"
        files = [each for each in folder.iterdir() if each.suffix == ".py" or (each / "__init__.py").exists()]
        assert 2 <= len(files) - 1 <= 12, f"{folder} holds {len(files) - 1} files"


def test_the_root_holds_the_loops_and_the_ways_in() -> None:
    assert {path.stem for path in PACKAGE.glob("*.py")} == {"__init__", "__main__", "api", "learner", "shard", "evaluator"}
