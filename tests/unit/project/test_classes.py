"""No god class: of public methods, properties included, a class of the package has at most 15. No crowd of special ends, either."""

from __future__ import annotations

import ast
from pathlib import Path

import mpisgd
from tests.language import modules

MOST = 15
PACKAGE = Path(mpisgd.__file__).parent


def wide(root: Path) -> dict[str, int]:
    found = {}
    for path, tree in modules(root):
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
                found[f"{module}.{node.name}"] = sum(not name.startswith("_") for name in methods)
    return {name: count for name, count in found.items() if count > MOST}


def test_no_class_of_the_package_has_more() -> None:
    assert wide(PACKAGE) == {}


def test_channels_and_updates_are_few() -> None:
    """Another way of exchange is a row of `exchange/rounds.py`; where a slice lies is told by its memory."""
    names = [node.name for _, tree in modules(PACKAGE) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    ends = {name for name in names if name.endswith(("Channel", "Update"))} - {"Channel", "OnUpdate", "Update"}  # of other things
    assert len(ends) <= MOST, sorted(ends)


def test_one_that_has_more_is_found(tmp_path: Path) -> None:
    methods = "".join(f"    def do_{number}(self): ...\n" for number in range(MOST + 1))
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "god.py").write_text(f"class God:\n    def __init__(self): ...\n{methods}")
    (tmp_path / "room" / "fine.py").write_text(f"class Fine:\n    def _helps(self): ...\n{methods.partition('    def do_15')[0]}")
    assert wide(tmp_path) == {"room.god.God": MOST + 1}
