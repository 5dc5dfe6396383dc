"""Each module imports only downward (DESIGN 3): what lets the protocols and the virtual cluster be tested without MPI."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mpisgd

PACKAGE = Path(mpisgd.__file__).parent

#: Top-level module -> floor, and what the package itself hands out: its version, and `train` from the top.
FLOORS = {
    name: floor
    for floor, names in enumerate(
        [
            "config config_virtual checks durable errors config_file compatibility contained hints without_gc protocols imports"
            " trust __version__",
            "flat chunks crossing roles models data draws schedule streams compiled installed launch",
            "optimizer update device_update compensation footprint norms"
            " gradient layerwise_gradient computing local_steps rounding measure straggler divergence",
            "messages communicator channel exchange team_channel evaluator_channel tolerant_channel layerwise wire politeness"
            " outbox tolerant ulfm siblings vigil usher pulse mpi world survey guard signals records virtual",
            "shard answering refusals finiteness snapshot_desk faults succession learner allreduce shared_team aggregate"
            " evaluator analysis",
            "run tolerance parts placement alike simulate replay plan finish resume interruption watchdog provenance naming git api"
            " cli __main__ doctor bench demo submit",
        ]
    )
    for name in names.split()
} | {"": 5}
TOP = max(FLOORS.values())

FORBIDDEN = {"protocols": {"torch", "h5py", "time", "mpi4py"}, "analysis": {"torch", "mpi4py"}}


def modules(root: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        yield ".".join(part for part in parts if part != "__init__"), path


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute name), wherever in the file they stand, also under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def violations(root: Path) -> list[str]:
    found = []
    for name, path in modules(root):
        top = name.partition(".")[0]
        if top not in FLOORS:
            found.append(f"{name or 'mpisgd'} is on no floor: place it here and in the design")
            continue
        for line, target in imports(path):
            package, _, rest = target.partition(".")
            if package == "mpi4py" and name != "mpi":
                found.append(f"{name}:{line} imports mpi4py, which mpisgd/mpi.py alone may")
            if package in FORBIDDEN.get(top, ()):
                found.append(f"{name}:{line} imports {package}")
            if package == "mpisgd" and FLOORS.get(rest.partition(".")[0], TOP) > FLOORS[top]:
                found.append(f"{name or 'mpisgd'}:{line} imports {target}, upward")
    return found


def test_no_arrow_runs_upward() -> None:
    assert violations(PACKAGE) == []


PLANTED = [
    ("flat.py", "from mpisgd.channel import LearnerChannel", "flat:.* imports mpisgd.channel.LearnerChannel, upward"),
    ("update.py", "from mpisgd import shard", "update:.* imports mpisgd.shard, upward"),
    ("records/reader.py", "def f():\n    import mpisgd.run", "records.reader:.* imports mpisgd.run, upward"),
    ("roles.py", "if TYPE_CHECKING:\n    from mpisgd import train", "roles:.* imports mpisgd.train, upward"),
    ("wire.py", "import mpi4py.util", "wire:.* imports mpi4py, which mpisgd/mpi.py alone may"),
    ("protocols/softsync.py", "from time import monotonic", "protocols.softsync:.* imports time"),
    ("analysis/books.py", "import torch", "analysis.books:.* imports torch"),
    ("master.py", "", "master is on no floor.*"),
]


def test_the_walk_sees_planted_violations(tmp_path: Path) -> None:
    copy = tmp_path / "mpisgd"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    before = violations(copy)
    for module, line, _ in PLANTED:
        with (copy / module).open("a") as file:
            file.write(f"\n{line}\n")
    found = sorted(set(violations(copy)) - set(before))
    assert len(found) == len(PLANTED)
    for text, complaint in zip(found, sorted(complaint for _, _, complaint in PLANTED), strict=True):
        assert re.fullmatch(complaint, text)


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("mpisgd", {"torch", "mpi4py", "matplotlib"}),
        ("mpisgd.cli.options", {"torch", "mpi4py", "matplotlib"}),
        ("mpisgd.protocols", {"torch", "mpi4py", "h5py"}),
        ("mpisgd.analysis.report", {"torch", "mpi4py"}),
    ],
)
def test_importing_costs_nothing_heavy(module: str, heavy: set[str]) -> None:
    """Also not by a detour: what a misspelt option, or a report, would wait seconds for."""
    code = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert heavy.isdisjoint(loaded.split())
