"""Where real data files are staged, for tests that skip cleanly where they are not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def staged(file: str) -> str:
    """The data directory that holds `file`: MPISGD_DATA, or a folder `data` beside the checkout; else the test is skipped."""
    beside = Path(__file__).resolve().parents[2].glob("*/data")
    for folder in [Path(os.environ["MPISGD_DATA"])] if "MPISGD_DATA" in os.environ else sorted(beside):
        if (folder / file).exists():
            return str(folder)
    pytest.skip(f"{file} is not staged: name the data directory by MPISGD_DATA")
