"""Virtual jobs whose learners push the largest elements alone: serial SGD, bytes, laws, replay, and what is refused."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mpisgd import replay
from mpisgd.base.errors import ConfigError
from mpisgd.gradient.rounding import Largest
from mpisgd.records.log.schema import Event
from mpisgd.vectors.flat import slice_bounds
from tests.effort import spread
from tests.virtual.jobs import SIZES, TENSORS, not_finite_leaves_no_trace, simulated
from tests.virtual.test_laws import drawn_jobs, obeys
from tests.virtual.test_one_learner import ALONE, ALPHA, ByHand, weights
from tests.virtual.test_told import reported

FEW = {"push_format": "topk", "topk_share": 0.1}


@pytest.mark.parametrize("name", spread(ALONE, 8))
def test_with_one_learner_it_is_serial_sgd_with_error_feedback(name: str, tmp_path: Path) -> None:
    """Of each shard's slice the largest; and replay has the bits. In an allreduce the learner is the shard."""
    shards = 1 if name == "allreduce" else 2
    by_hand = ByHand(tmp_path / "by_hand")
    theta = by_hand.weights()
    remainder = torch.zeros_like(theta)
    for seq in range(by_hand.mini_batches):
        wanted = by_hand.gradient(theta, seq) + remainder
        sent = torch.zeros_like(wanted)
        for start, end in slice_bounds(len(theta), shards):
            chosen = start + torch.topk(wanted[start:end].abs(), math.ceil((end - start) * 0.1)).indices
            sent[chosen] = wanted[chosen]
        remainder = wanted - sent
        theta = theta - ALPHA * sent
    found = weights(tmp_path / "run", ALONE[name], **FEW, **({} if name == "allreduce" else {"shards": shards}))
    torch.testing.assert_close(found, theta, rtol=1e-5, atol=1e-6)
    assert replay.check(tmp_path / "run", trust=True) == ""


@pytest.mark.slow
@drawn_jobs(max_examples=5, most_learners=4, step=5)
def test_any_such_job_obeys(directory: Path, changes: dict[str, Any], jitter_s: float) -> None:
    job = {**changes, **FEW, "alpha0": 0.001}
    job["way"] = job["way"].replace("streamed", "whole")  # which cuts vectors elsewhere
    job.pop("compensation", None)
    run = obeys(directory / "run", TENSORS, job, jitter_s).run
    rounded = run.pushes["rounded"]
    assert ((rounded > 0) & (rounded < 1)).all()


@pytest.mark.parametrize("shards", [1, 3])
def test_a_push_is_of_eight_bytes_for_each_element_that_it_has(shards: int, tmp_path: Path) -> None:
    """Of 1,000 elements a tenth, of slices of 334 and 333 elements 34, at 1,000 bytes/s on the learner's link."""
    network = {"latency_s": 0.0, "overhead_s": 0.0, "bandwidth": 1e3, "node_bandwidth": 1e3, "local_bandwidth": 1e3}
    run = simulated(tmp_path / "run", SIZES, virtual={"learners": 1}, protocol="hardsync", network=network, shards=shards, **FEW)
    seconds = 0.8 if shards == 1 else 8 * 3 * 34 / 1e3
    assert run.pushes["push_s"][run.pushes["seq"] > 0] == pytest.approx(seconds)


@pytest.mark.slow
def test_training_ends_nearly_as_well_as_with_all_of_the_gradient(tmp_path: Path) -> None:
    digits = {"data": "digits", "model": {"name": "mlp", "hidden": [32]}, "mu": 8, "epochs": 6, "alpha0": 0.02}
    run = simulated(tmp_path / "run", TENSORS, **digits, **FEW, protocol={"name": "softsync", "n": 4}, shards=2)
    assert run.evaluations["error"][0] > 0.7
    assert run.evaluations["error"][-1] < 0.1


@pytest.mark.parametrize("nonfinite", ["drop", "continue"])
def test_a_gradient_that_is_not_finite_leaves_no_trace(nonfinite: str, tmp_path: Path) -> None:
    not_finite_leaves_no_trace(tmp_path / "run", nonfinite, FEW)


def test_a_push_whose_indices_cannot_be_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shard lives on, and applies nothing of it."""
    calls, take_out = [0], Largest._take_out

    def once_wrong(self: Largest, left: np.ndarray, words: np.ndarray) -> None:
        take_out(self, left, words)
        calls[0] += 1
        if calls[0] == 5:
            words[0, -1] = len(left)

    monkeypatch.setattr(Largest, "_take_out", once_wrong)
    run = simulated(tmp_path / "run", TENSORS, **FEW, protocol="async")
    assert np.count_nonzero(run.events["kind"] == Event.REFUSED) == 1
    assert "a message was refused: learner" in (said := capsys.readouterr().err)
    assert re.search(r"pushed indices from \d+ to 83: expected 0 \.\.\. 82, ascending", said)
    assert len(run.pushes) == calls[0] - 1


def test_the_report_says_how_much(tmp_path: Path) -> None:
    simulated(tmp_path / "run", TENSORS, **FEW)
    said = reported(tmp_path / "run")["gradients pushed"]
    assert said.startswith("as topk; the part left out was added to the next gradient: ")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"protocol": "async", "compensation": 0.1}, "push_format = 'topk': .* beside compensation > 0: a gradient is squared"),
        ({"push_format": "bfloat16"}, "topk_share = 0.1: expected 0.01 beside a push_format other than 'topk'"),
        ({"topk_share": 0}, r"topk_share = 0\.0: expected a number above 0"),
        ({"topk_share": 1.5}, "topk_share = 1.5: expected a number above 0, at most 1"),
        ({"topk_share": math.nan}, "topk_share"),
    ],
    ids=["compensation", "not-topk", "zero", "more", "nan"],
)
def test_what_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        simulated(tmp_path / "run", SIZES, **{**FEW, **changes})
    assert not (tmp_path / "run").exists()
