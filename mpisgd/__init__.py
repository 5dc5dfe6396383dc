"""Parameter-server SGD for supercomputers; see README.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpisgd.base.version import __version__

__all__ = ["Config", "__version__", "open_run", "train"]

if TYPE_CHECKING:
    from mpisgd.analysis.opened import open_run
    from mpisgd.api import train
    from mpisgd.config import Config


def __getattr__(name: str) -> Any:
    """The names of `__all__`, loaded when they are used: `import mpisgd` alone imports neither torch nor MPI."""
    if name == "train":
        from mpisgd.api import train

        return train
    if name == "open_run":
        from mpisgd.analysis.opened import open_run

        return open_run
    if name == "Config":
        from mpisgd.config import Config

        return Config
    raise AttributeError(f"module 'mpisgd' has no attribute {name!r}")
