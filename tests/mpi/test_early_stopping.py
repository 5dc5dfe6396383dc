"""Real ranks end when evaluations are no better, keep the best weights, and replay proves it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mpisgd import open_run, replay
from mpisgd.analysis.books import imbalances
from mpisgd.config import Part
from mpisgd.records import weights
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Event

from .conftest import Launched, execute

#: Nothing is better than the initial weights by so much: it is over at snapshot 2 of 400.
JOB = (
    *("train", "--shards", "2", "--data", "synthetic", "--data.samples", "120", "--data.classes", "3"),
    *("--mu", "4", "--epochs", "200", "--alpha0", "0.002", "--threads", "1", "--model.hidden", "8", "--evaluator"),
    *(
        "--evaluation.every-epochs",
        "0.5",
        "--evaluation.patience",
        "2",
        "--evaluation.min-delta",
        "99",
    ),
    *("--straggler.delay", "constant", "--straggler.delay-mean-s", "0.005"),
)


PROTOCOLS = {
    "hardsync": ("--evaluation.best", "loss"),
    "softsync": ("--protocol.n", "2", "--data.validation", "20", "--evaluation.best", "validation_loss"),
}
"""By test data, and by training samples that were set aside."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Launched]]:
    """Two shards, two learners, an evaluator."""
    top = tmp_path_factory.mktemp("early")
    commands = [(5, top, (*JOB, "--protocol", name, *words, "--out", name)) for name, words in PROTOCOLS.items()]
    return top, dict(zip(PROTOCOLS, execute(top, commands, ranks=5), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_it_ends_in_order_and_keeps_the_best(ended: tuple[Path, dict[str, Launched]], protocol: str) -> None:
    """Of softsync, what is under way makes updates still."""
    top, launched = ended
    trained = launched[protocol]
    assert trained.status == 0, trained.text
    by, part = ("loss", Part.TEST) if protocol == "hardsync" else ("validation_loss", Part.VALIDATION)
    assert f"snapshot 2: {by} no better for 2 evaluations: training ends" in trained.text
    assert ", stopped early, test " in trained.text
    run = Run(top / protocol)
    assert run.done is not None
    assert max(run.done["samples"]) < 100 * 120
    assert len(set(run.done["clock"])) == 1 or protocol == "softsync"
    told = run.events[run.events["kind"] == Event.ENOUGH]
    assert sorted(told["shard"].tolist()) == [0, 1]
    for shard, over_s in told[["shard", "time_s"]].tolist():
        assert not (run.pushes["answer_s"][run.pushes["shard"] == shard] > over_s).any()
    assert not imbalances(run)
    kept = weights.read_best(run.path / "best.pt")["evaluation"]
    judged = run.evaluations[run.evaluations["train"] == part]
    best = judged[judged["loss"].argmin()]
    assert (kept["value"], kept["snapshot"]) == (best["loss"], best["snapshot"])
    assert all(isinstance(each, torch.Tensor) for each in open_run(run.path).weights(best=True).values())
    proof = replay.replay(run.path)
    assert proof.holds, proof.reason
