"""Compare the package of two commits but for words: `python -m tests.same_code OLD [NEW]`; NEW is the working tree by default.

Docstrings, comments and layout may differ, and names, each old one for the same new one everywhere. Prints the names that were
changed, and where else the code differs; the exit status is 1 then.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_NAMES = {"id", "attr", "name", "arg", "asname", "module", "rest", "kwd_attrs"}
"""Fields of syntax nodes that hold names."""


class Names:
    """The new name of each old one: a name that is used for two is a difference."""

    def __init__(self) -> None:
        self.new: dict[str, str] = {}
        self._old: dict[str, str] = {}

    def match(self, old: str, new: str) -> bool:
        """Note that a name became another; whether that fits all before."""
        if old.count(".") != new.count("."):
            return False
        pairs = zip(old.split("."), new.split("."), strict=True)
        return all(self.new.setdefault(one, other) == other and self._old.setdefault(other, one) == one for one, other in pairs)

    def of(self, text: str) -> str:
        return ".".join(self.new.get(part, part) for part in text.split("."))

    @property
    def changed(self) -> dict[str, str]:
        return {old: new for old, new in self.new.items() if old != new}


def bare(source: str) -> tuple[ast.Module, list[ast.stmt]]:
    """Return the syntax of a module without docstrings and imports, and its imports."""
    tree, imports = ast.parse(source), list[ast.stmt]()
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            body = getattr(node, field, None)
            if isinstance(body, list):
                imports += [each for each in body if isinstance(each, ast.Import | ast.ImportFrom)]
                body[:] = [each for each in body if not (_is_text(each) or isinstance(each, ast.Import | ast.ImportFrom))]
    return tree, imports


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def differences(old: Any, new: Any, names: Names, line: int = 0) -> Iterator[str]:
    """Yield in words where two syntax trees differ; `names` learns what was renamed."""
    if type(old) is not type(new):
        yield f"line {line}: {_shown(old)} became {_shown(new)}"
    elif isinstance(old, ast.AST):
        at = getattr(new, "lineno", line)
        for field in old._fields:
            one, other = getattr(old, field, None), getattr(new, field, None)
            if field in _NAMES and isinstance(one, str) and isinstance(other, str):
                if not names.match(one, other):
                    yield f"line {at}: {one} became {other}, and {names.of(one)} elsewhere"
            elif isinstance(old, ast.Constant) and field == "value" and isinstance(one, str) and isinstance(other, str):
                if one != other and names.of(one) != other:
                    yield f"line {at}: the text {one!r} became {other!r}"
            else:
                yield from differences(one, other, names, at)
    elif isinstance(old, list):
        if len(old) != len(new):
            yield f"line {line}: {len(old)} parts became {len(new)}"
        for one, other in zip(old, new, strict=False):
            yield from differences(one, other, names, line)
    elif old != new:
        yield f"line {line}: {old!r} became {new!r}"


def _shown(node: Any) -> str:
    return ast.unparse(node)[:60] if isinstance(node, ast.AST) else repr(node)[:60]


def _imported(imports: list[ast.stmt], names: Names) -> set[tuple[str, str, str]]:
    return {
        (names.of(getattr(each, "module", None) or ""), names.of(alias.name), names.of(alias.asname or ""))
        for each in imports
        for alias in each.names  # type: ignore[attr-defined]
    }


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def _pairs(old: str, new: str) -> Iterator[tuple[str, str]]:
    """Yield the path of each module in both commits; "" where it is in one alone."""
    for line in _git(
        "diff", "-M30%", "--name-status", "--diff-filter=AMDR", old, *([new] if new else []), "--", "mpisgd"
    ).splitlines():
        kind, *paths = line.split("\t")
        if paths[-1].endswith(".py"):
            yield (paths[0] if kind[0] != "A" else ""), (paths[-1] if kind[0] != "D" else "")


def main(argv: list[str]) -> int:
    old, new = argv[0], argv[1] if len(argv) > 1 else ""
    names, found, imports = Names(), list[str](), list[tuple[str, list[ast.stmt], list[ast.stmt]]]()
    for before, after in _pairs(old, new):
        if not (before and after):
            found.append(f"{before or after}: in one commit alone")
            continue
        one = bare(_git("show", f"{old}:{before}"))
        other = bare(_git("show", f"{new}:{after}") if new else (ROOT / after).read_text("utf-8"))
        found += [f"{after}: {each}" for each in differences(one[0], other[0], names)]
        imports.append((after, one[1], other[1]))
    for path, before_, after_ in imports:
        if lacking := _imported(before_, names) ^ _imported(after_, Names()):
            found.append(f"{path}: imports differ by {sorted(lacking)}")
    for name, now in sorted(names.changed.items()):
        print(f"{name} -> {now}")
    print("\n".join(found) or "the same code")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
