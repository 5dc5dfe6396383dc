"""Bodies that cross to other nodes in pieces: nothing else is different."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from mpisgd.comm import pieces
from mpisgd.exchange.roles import Roles
from mpisgd.job.roles.channels import in_pieces
from mpisgd.records.log import schema
from tests.effort import spread
from tests.virtual.jobs import TENSORS, simulated

NBYTES = 16
"""Of a piece, in place of 60 KiB: a slice has some ten."""


@pytest.mark.parametrize(
    ("changes", "ranks_per_node"),
    spread(
        itertools.product(
            [
                {"ahead": 1},
                {"ahead": 2, "protocol": {"name": "async"}},
                {"ahead": 1, "way": "gathered", "shards": 3},
                {"ahead": 2, "way": "gathered"},
                {"ahead": 1, "push_format": "topk", "topk_share": 0.3, "pull_format": "bfloat16"},
            ],
            [1, 2],
        ),
        7,
        unpack=True,
    ),
)
def test_a_run_is_the_same(changes: dict[str, Any], ranks_per_node: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = {**TENSORS, "protocol": {"name": "softsync", "n": 2}, "shards": 2}
    base["virtual"] = {"learners": 4, "ranks_per_node": ranks_per_node}
    whole = simulated(tmp_path / "whole", base, **changes)
    most, bodies = [1], pieces.bodies

    def counted(vectors: Any) -> tuple[Any, ...]:
        found = bodies(vectors)
        most.append(len(found))
        return found

    monkeypatch.setattr(pieces, "bodies", counted)
    monkeypatch.setattr(pieces, "NBYTES", NBYTES)
    cut = simulated(tmp_path / "cut", base, **changes)
    assert max(most) > 5, "else this shows nothing"
    for table in ("pushes", "updates"):
        assert cut.table(table).tobytes() == whole.table(table).tobytes()
    weights = [torch.load(run.path / schema.WEIGHTS, weights_only=True)["theta"] for run in (whole, cut)]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


@pytest.mark.parametrize(("learners", "shards", "fits"), [(4, 1, True), (5, 1, False), (8, 2, True), (9, 2, False)])
def test_what_mpi_would_keep_is_bounded(learners: int, shards: int, fits: bool) -> None:
    ranks = range(shards, shards + learners)
    assert in_pieces(Roles(tuple(range(shards)), tuple(ranks), shards)) == fits
