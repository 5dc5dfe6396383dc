"""A learner that fires malformed messages at its shards, on real ranks; the whole campaign is `tests.faults.fuzz`."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from mpisgd.launch import mpirun
from tests.faults import fuzz


@pytest.mark.parametrize(("shards", "tolerant"), [(1, False), (2, True)])
def test_four_hundred(tmp_path: Path, shards: int, tolerant: bool) -> None:
    version = subprocess.run([mpirun(1)[0], "--version"], capture_output=True, text=True, check=False).stdout
    if tolerant and "Open MPI" not in version:
        pytest.skip("this MPI does not tell of failures (ULFM)")
    found = fuzz.campaign(400, 2, tmp_path, shards, tolerant)
    assert found["failures"] == []
    assert found["refused"] >= 330
    assert len(found["fired"]) == len(fuzz.Gun(random.Random(1), 4, tolerant).kinds), "each kind was fired"
