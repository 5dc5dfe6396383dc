"""Ranks that train on a file that is larger than their memory may be: none holds it whole.

`python -m tests.bench memory` measures the same with 6 GB.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from mpisgd.models.partition import Partition
from mpisgd.records.log.reader import Run
from mpisgd.replay import replay
from tests.bench import memory, peaks

SAMPLES = 200_000  # of 3 KB


@pytest.mark.slow
def test_no_rank_holds_a_file_whole(tmp_path: Path) -> None:
    memory.write(tmp_path / "data.h5", SAMPLES, 16, True)
    peaks, _ = memory.train(tmp_path, tmp_path / "data.h5", SAMPLES, cache_nbytes=2**24)
    shard, *learners = (each["end"] - each["mpi"] for each in peaks)  # KiB
    assert 0 < shard < min(learners)
    assert max(learners) < 100_000, peaks
    assert replay(tmp_path / "run").holds


class Piece(nn.Module):
    """50 MB of a layer, between two that are small."""

    def __init__(self, partition: Partition) -> None:
        super().__init__()
        self.partition = partition
        self.first = nn.Linear(64, len(partition.share(4096)))
        self.middle = nn.Linear(4096, 3072)
        self.last = nn.Linear(3072, 10, bias=partition.place == 0)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        passed = self.partition.gather(self.first(images.flatten(1)).relu())
        return self.partition.sum(self.last(self.middle(passed).relu()))


@pytest.mark.rare
@pytest.mark.slow
def test_no_rank_holds_the_pieces_of_others(tmp_path: Path) -> None:
    """Beside torch, a rank needs less than the parameters of the whole model alone: weights, a gradient, and one under way."""
    config = {
        "model": {"name": f"{__name__}:Piece"},
        **{"group_form": "partition", "group_size": 6, "shards": 6, "mu": 8, "threads": 1, "epochs": 24 / 1437, "alpha0": 0.01},
        **{"optimizer": {"name": "sgd", "momentum": 0.0}, "evaluation": {"every_epochs": 0.0}},
        **{"out": str(tmp_path / "run"), "log": {"progress": "off"}},
    }
    found = peaks.of_job(tmp_path, 12, config)
    nbytes = Run(tmp_path / "run").environment["parameter_nbytes"]
    assert nbytes > 300e6
    most = max(1024 * (each["end"] - each["mpi"]) for each in found)
    assert most < nbytes, [each["end"] - each["mpi"] for each in found]
