"""Runs that commit 4b8dbc2 wrote, kept as they are in `written_by_4b8dbc2`; each was started once and is never made again.

- `hardsync`: 2 shards and 3 learners on real ranks, momentum; interrupted by SIGUSR1 at clock 13, with a checkpoint.
- `softsync`: 3-softsync with 3 learners, so asynchronous, and batch norm; finished.
- `virtual`: SSP with 5 virtual learners; finished.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

NAMES = ("hardsync", "softsync", "virtual")
_KEPT = Path(__file__).parent / "written_by_4b8dbc2"


def unpack(name: str, into: Path) -> Path:
    """The directory of one of them, as that commit left it."""
    with tarfile.open(_KEPT / f"{name}.tar.xz") as kept:
        if hasattr(tarfile, "data_filter"):  # since 3.11.4
            kept.extractall(into, filter="data")
        else:
            kept.extractall(into)
    return into / name
