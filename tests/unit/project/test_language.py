"""The language of docstrings and messages is a gauge that may only fall; `tests/same_code.py` finds changes of code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import mpisgd
from tests.language import Text, docstrings, measure, messages
from tests.same_code import Names, bare, differences

MOST_WORDS, MOST_SHARE, MOST_HIDDEN, MOST_SHARE_OF_MESSAGES = 60_000, 0.025, 0, 0.015
"""Lower these as the language becomes lighter: 60,000 words at most."""


def test_the_language_of_the_package_becomes_no_heavier() -> None:
    found = measure(docstrings(Path(mpisgd.__file__).parent))
    assert found.words <= MOST_WORDS
    assert found.share <= MOST_SHARE
    assert found.hidden <= MOST_HIDDEN
    assert measure(messages(Path(mpisgd.__file__).parent)).share <= MOST_SHARE_OF_MESSAGES


def test_what_is_measured(tmp_path: Path) -> None:
    source = '"""Those of it."""\nclass A:\n    """Return a sum."""\n    x: int\n    """Whose sum."""\n    y = "it"\n'
    (tmp_path / "a.py").write_text(source)
    found = list(docstrings(tmp_path))
    assert [each.line for each in found] == [1, 3, 5]
    assert measure(iter(found)) == (8, 3, 2)
    assert Text(tmp_path, 1, "Of the sum.").hides_its_subject


def test_what_is_measured_of_messages(tmp_path: Path) -> None:
    source = (
        'def f(x):\n    """Those of it, which are one."""\n    raise E(f"{x!r}: it is one of those {x}s", "too short a text")\n'
    )
    (tmp_path / "a.py").write_text(source)
    assert [each.text for each in messages(tmp_path)] == [" : it is one of those  s"]
    assert measure(messages(tmp_path)) == (6, 3, 0)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('"""A."""\ndef f(x):\n    """B."""\n    return x', "def g(y):\n    # C.\n    return y", ""),
        ("def f(x):\n    return x", "def f(x):\n    return x + 1", "became"),
        ("a = f\nb = f", "a = g\nb = h", "f became h, and g elsewhere"),
        ("a = f\nb = h", "a = g\nb = g", "h became g"),
        ("a = 'x'", "a = 'y'", "the text 'x' became 'y'"),
        ("f()\ng()", "f()", "2 parts became 1"),
    ],
)
def test_code_is_the_same_but_for_words(old: str, new: str, why: str) -> None:
    found = list(differences(bare(old)[0], bare(new)[0], Names()))
    assert bool(found) == bool(why)
    assert why in "\n".join(found)


def test_imports_are_taken_out() -> None:
    tree, imports = bare("import a\nif x:\n    from b import c\n    d()")
    assert [type(each) for each in imports] == [ast.Import, ast.ImportFrom]
    assert ast.unparse(tree) == "if x:\n    d()"
