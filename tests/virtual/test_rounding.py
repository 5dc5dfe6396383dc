"""Virtual jobs whose gradients travel as bfloat16: serial SGD with error feedback, bytes, laws, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mpisgd.analysis import about
from mpisgd.base.errors import ConfigError
from tests.effort import spread
from tests.virtual.jobs import SIZES, TENSORS, not_finite_leaves_no_trace, simulated
from tests.virtual.test_laws import drawn_jobs, obeys
from tests.virtual.test_one_learner import ALONE, ALPHA, ByHand, weights
from tests.virtual.test_told import reported

HALF = {"push_format": "bfloat16"}


@pytest.mark.parametrize("name", spread(ALONE, 8))
def test_with_one_learner_it_is_serial_sgd_with_error_feedback(name: str, tmp_path: Path) -> None:
    by_hand = ByHand(tmp_path / "by_hand")
    theta = by_hand.weights()
    remainder = torch.zeros_like(theta)
    for seq in range(by_hand.mini_batches):
        wanted = by_hand.gradient(theta, seq) + remainder
        sent = wanted.to(torch.bfloat16).float()
        remainder = wanted - sent
        theta = theta - ALPHA * sent
    found = weights(tmp_path / "run", ALONE[name], **HALF)
    torch.testing.assert_close(found, theta, rtol=1e-5, atol=1e-6)
    exact = weights(tmp_path / "exact", ALONE[name])
    assert not torch.equal(found, exact)
    torch.testing.assert_close(found, exact, rtol=0.01, atol=2e-3)


@pytest.mark.slow
@drawn_jobs(max_examples=4, most_learners=4, step=5)
def test_any_such_job_obeys(directory: Path, changes: dict[str, Any], jitter_s: float) -> None:
    job = {**changes, **HALF, "alpha0": 0.001}
    run = obeys(directory / "run", TENSORS, job, jitter_s).run
    rounded = run.pushes["rounded"]
    assert ((rounded > 0) & (rounded < 1 / 256)).all()


@pytest.mark.parametrize("protocol", ["hardsync", {"name": "softsync", "n": 1}], ids=["hardsync", "softsync"])
def test_a_push_is_half_as_long_and_a_pull_is_not(protocol: Any, tmp_path: Path) -> None:
    """One learner, 4,000 bytes at 1,000 bytes/s: a push takes 4 seconds, or 2."""
    network = {"latency_s": 0.0, "overhead_s": 0.0, "bandwidth": 1e3, "node_bandwidth": 1e3, "local_bandwidth": 1e3}
    changes: dict[str, Any] = {"virtual": {"learners": 1}, "protocol": protocol, "network": network}
    runs = {format: simulated(tmp_path / format, SIZES, **changes, push_format=format) for format in ("float32", "bfloat16")}
    for format, seconds in (("float32", 4.0), ("bfloat16", 2.0)):
        pushes = runs[format].pushes[1:]
        assert pushes["push_s"] == pytest.approx(seconds)
        assert pushes["pull_s"] == pytest.approx(4.0)
    assert not runs["float32"].pushes["rounded"].any()


def test_batched_learners_have_a_remainder_each(tmp_path: Path) -> None:
    """As they have one by one."""
    one, all_ = (simulated(tmp_path / f"{batched}", TENSORS, **HALF, virtual={"batched": batched}) for batched in (False, True))
    assert one.pushes["loss"] == pytest.approx(all_.pushes["loss"], rel=1e-3)
    assert one.pushes["rounded"] == pytest.approx(all_.pushes["rounded"], rel=0.2)


@pytest.mark.parametrize("nonfinite", ["drop", "continue"])
def test_a_gradient_that_is_not_finite_leaves_no_trace(nonfinite: str, tmp_path: Path) -> None:
    not_finite_leaves_no_trace(tmp_path / "run", nonfinite, HALF)


def test_the_report_says_how_much(tmp_path: Path) -> None:
    run = simulated(tmp_path / "run", TENSORS, **HALF)
    said = reported(tmp_path / "run")["gradients pushed"]
    median = np.median(run.pushes["rounded"])
    assert 0.0005 < median < 0.003
    assert said.startswith(f"as bfloat16; the part rounded off was added to the next gradient: {median:.2%} of the norm (median; ")
    simulated(tmp_path / "sizes", SIZES, **HALF, epochs=0.2)
    assert reported(tmp_path / "sizes")["gradients pushed"] == "as bfloat16; the part rounded off was added to the next gradient"
    assert about.header(run, about.status(run), "").cells("what").count("gradients pushed") == 1
    simulated(tmp_path / "exact", SIZES, epochs=0.2)
    assert "gradients pushed" not in reported(tmp_path / "exact")


def test_another_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="push_format"):
        simulated(tmp_path / "run", SIZES, push_format="float16")
