"""Whether the compiled form of the virtual cluster is loaded (`make compiled`), and whether it is older than its sources.

The same files in two forms, with the same results: Python takes the library that lies beside a source, where there is one, and
does not look whether the source was edited since.
"""

from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from mpisgd.base.version import __version__

PACKAGE = Path(__file__).parents[2]
#: An installer unpacks sources and libraries in any order.
_UNPACKING_S = 5.0


def libraries(package: Path = PACKAGE) -> list[Path]:
    """The compiled modules that Python takes in place of the sources beside them."""
    found = [path for suffix in EXTENSION_SUFFIXES for path in package.rglob(f"*{suffix}") if source_of(path).exists()]
    return sorted(set(found))


def source_of(library: Path) -> Path:
    return library.with_name(library.name.partition(".")[0] + ".py")


def is_compiled(package: Path = PACKAGE) -> bool:
    return bool(libraries(package))


def stale(package: Path = PACKAGE) -> list[str]:
    """The sources that were edited after they were compiled: what runs is what they were."""
    pairs = [(source_of(library), library) for library in libraries(package)]
    late = [source for source, library in pairs if source.stat().st_mtime > library.stat().st_mtime + _UNPACKING_S]
    return [str(source.relative_to(package)) for source in late]


def form(package: Path = PACKAGE) -> str:
    """`"interpreted"` or `"compiled"`; of a compiled form that is older than its sources, also that."""
    if not is_compiled(package):
        return "interpreted"
    old = stale(package)
    return f"compiled{f' before {old[0]} was edited' if old else ''}"


def version() -> str:
    """mpisgd's, and which form of it this is: `"0.1.0"`, `"0.1.0, compiled"`."""
    return f"{__version__}, {form()}" if is_compiled() else __version__
