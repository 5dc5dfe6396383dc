"""Parameter-server SGD for supercomputers; see README.md."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mpisgd.base.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DivergenceError,
    LaunchError,
    MpisgdError,
    RunInterrupted,
    StorageError,
)
from mpisgd.base.version import __version__
from mpisgd.liveness.absent import tell_if_absent

__all__ = [
    "CheckpointError",
    "Config",
    "ConfigError",
    "DataError",
    "DivergenceError",
    "LaunchError",
    "MpisgdError",
    "RunInterrupted",
    "StorageError",
    "__version__",
    "launch",
    "open_run",
    "train",
]

if TYPE_CHECKING:
    from mpisgd.analysis.opened import open_run
    from mpisgd.api import train
    from mpisgd.config import Config
    from mpisgd.launching.function import launch

#: Names loaded on first use, and their modules: `import mpisgd` alone imports neither torch nor MPI.
_LATER = {
    "train": "mpisgd.api",
    "Config": "mpisgd.config",
    "launch": "mpisgd.launching.function",
    "open_run": "mpisgd.analysis.opened",
}


tell_if_absent()


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module 'mpisgd' has no attribute {name!r}")
