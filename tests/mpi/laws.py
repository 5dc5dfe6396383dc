"""What the log of any run on real ranks must prove (DESIGN 4)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Verdict


def hold(run: Run, *, again: bool = False, own_steps: bool = False, ahead: int = 1) -> None:
    """`again`: a mini-batch may be computed again. `own_steps`: weights are pulled only after some of the pushes. `ahead`: they may
    lack the last pushes but those so many before: 2 with `ahead` = 1, 3 with `ahead` = 2."""
    pushes, done = run.pushes, json.loads((run.path / "DONE").read_text())
    for books, clock in zip(run.books(), done["clock"], strict=True):
        assert books.balanced
        assert books.applied > 0
        rows = pushes[pushes["shard"] == books.shard]
        applied = rows[(rows["verdict"] == Verdict.APPLY) & (rows["clock"] < clock)]
        updates = run.updates[run.updates["shard"] == books.shard]
        assert np.array_equal(updates["clock"], np.arange(1, clock + 1))
        divisors = np.bincount(applied["clock"], weights=applied["gradients"], minlength=clock)
        assert np.array_equal(updates["gradients"], divisors), "divisor counted"
        assert updates["samples"][-1] == applied["samples"].sum()
    assert (pushes["staleness"] >= 0).all()
    assert np.array_equal(pushes["staleness"], pushes["clock"] - pushes["timestamp"])
    for learner_id in range(run.lambda_):
        for shard in range(run.shards):
            rows = pushes[(pushes["learner_id"] == learner_id) & (pushes["shard"] == shard)]
            pulled = ~np.isnan(rows["answer_s"][:-1])
            assert pulled.all() or own_steps
            in_turn = rows["timestamp"][ahead:] >= rows["clock"][:-ahead]
            assert in_turn[pulled[ahead - 1 :]].all(), "a pull never overtakes a push that had left"
            seqs = rows["seq"]
            if again:
                assert np.isin(np.diff(seqs), (0, 1)).all()
                seqs = seqs[rows["verdict"] == Verdict.APPLY]
            assert np.array_equal(seqs, np.arange(len(seqs))), "every mini-batch in order, none lost or doubled"


def same_bits(cut: Path, whole: Path) -> set[str]:
    """A run that was interrupted ends with the weights, the updates and the evaluations of one that was not; which weights."""
    ours, theirs = (torch.load(path / schema.WEIGHTS, weights_only=True) for path in (cut, whole))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[kind][key], theirs[kind][key]) for kind in ours for key in ours[kind])
    one, other = Run(cut), Run(whole)
    same = ["snapshot", "clock_min", "clock_max", "samples", "averaged", "train", "loss", "error"]
    assert one.evaluations[same].tolist() == other.evaluations[same].tolist()
    same = ["shard", "clock", "gradients", "samples", "learning_rate", "mean_loss"]
    assert one.updates[same].tolist() == other.updates[same].tolist()
    return set(ours)
