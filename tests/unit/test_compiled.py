"""The compiled form says that it is there, and whether it is what the sources say."""

from __future__ import annotations

import os
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

import mpisgd
from mpisgd.comm.virtual import compiled, wire


def test_what_runs_is_what_the_sources_say() -> None:
    assert compiled.stale() == [], "edited after they were compiled: make compiled, or make interpreted"


def test_it_is_known_which_form_is_loaded() -> None:
    assert compiled.is_compiled() == wire.__file__.endswith(tuple(EXTENSION_SUFFIXES))
    assert compiled.version() == f"{mpisgd.__version__}{', compiled' if compiled.is_compiled() else ''}"


@pytest.mark.parametrize("suffix", EXTENSION_SUFFIXES)
def test_an_edit_after_the_compilation_is_found(suffix: str, tmp_path: Path) -> None:
    package = tmp_path / "mpisgd"
    (package / "virtual").mkdir(parents=True)
    source = package / "virtual" / "wire.py"
    source.touch()
    assert not compiled.is_compiled(package)
    (package / f"compiled__mypyc{suffix}").touch()  # holds the code of all, and has no source
    assert not compiled.is_compiled(package)
    assert compiled.form(package) == "interpreted"
    library = package / "virtual" / f"wire{suffix}"
    library.touch()
    assert compiled.is_compiled(package)
    assert compiled.stale(package) == []
    assert compiled.form(package) == "compiled"
    edited_s = library.stat().st_mtime + 60
    os.utime(source, (edited_s, edited_s))
    assert compiled.stale(package) == [str(Path("virtual") / "wire.py")]
    assert compiled.form(package) == f"compiled before {Path('virtual') / 'wire.py'} was edited"
