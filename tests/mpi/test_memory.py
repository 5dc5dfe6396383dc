"""Ranks that train on a file that is larger than their memory may be: none holds it whole.

`python -m tests.bench memory` measures the same with 6 GB.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mpisgd.replay import replay
from tests.bench import memory

SAMPLES = 200_000  # of 3 KB


@pytest.mark.slow
def test_no_rank_holds_a_file_whole(tmp_path: Path) -> None:
    memory.write(tmp_path / "data.h5", SAMPLES, 16, True)
    peaks, _ = memory.train(tmp_path, tmp_path / "data.h5", SAMPLES, cache_nbytes=2**24)
    shard, *learners = (each["end"] - each["mpi"] for each in peaks)  # KiB
    assert 0 < shard < min(learners)
    assert max(learners) < 100_000, peaks
    assert replay(tmp_path / "run").holds
