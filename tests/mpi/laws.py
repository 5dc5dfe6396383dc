"""What the log of any run on real ranks must prove (DESIGN 4)."""

from __future__ import annotations

import json

import numpy as np

from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Verdict


def hold(run: Run, *, again: bool = False, own_steps: bool = False, ahead: int = 1) -> None:
    """`again`: a mini-batch may be computed again. `own_steps`: weights are pulled only after some of the pushes. `ahead`: they may
    lack the last pushes but those so many before: 2 with `duplex`, 3 with `prefetch`."""
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
