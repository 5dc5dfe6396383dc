"""Learners on a GPU: the gradients of a CPU to float tolerance, one wait for the GPU in a mini-batch, and whole runs on real ranks.

All are skipped where torch finds no CUDA device; `make gpu-check` says so aloud.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mpisgd import models, replay
from mpisgd.config import Cifar10FullOptions, MlpOptions, ModelOptions, SyntheticOptions
from mpisgd.data import load, sampling
from mpisgd.flat import FlatModel
from mpisgd.gradient import Gradient
from mpisgd.launch import environment, mpirun
from mpisgd.records.reader import Run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")

DATA = SyntheticOptions(shape=(3, 32, 32), classes=10, samples=256, test_samples=10)
MODELS = [MlpOptions(hidden=(200, 100)), Cifar10FullOptions()]


def gradient_on(device: str, model: ModelOptions, **special: Any) -> Gradient:
    data = load(DATA, seed=1)
    module = models.make(model, input_shape=data.input_shape, classes=data.classes, seed=1)
    dealt = sampling.make("epoch", size=DATA.samples, mu=16, lambda_=1, seed=1)
    flat = FlatModel(module, "channels_last", device)
    return Gradient(flat, nn.functional.cross_entropy, data.train, dealt, seed=1, learner_id=0, **special)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("special", [{}, {"clip_norm": 0.1, "tell_nonfinite": True}])
def test_the_gradient_is_that_of_a_cpu(model: ModelOptions, special: dict[str, Any]) -> None:
    theirs, ours = gradient_on("cpu", model, **special), gradient_on("cuda", model, **special)
    generator = np.random.default_rng(1)
    for seq in range(5):
        theirs.wire_weights += 0.01 * generator.standard_normal(len(theirs.wire_weights), np.float32)
        ours.wire_weights[:] = theirs.wire_weights
        assert ours.compute(seq) == pytest.approx(theirs.compute(seq), rel=1e-4)
        np.testing.assert_allclose(ours.wire_gradients, theirs.wire_gradients, rtol=1e-3, atol=1e-5)
        theirs.prepare(seq + 1)
        ours.prepare(seq + 1)


def test_what_is_sent_lies_in_pinned_memory_and_a_mini_batch_waits_once(recwarn: pytest.WarningsRecorder) -> None:
    gradient = gradient_on("cuda", MODELS[0])
    assert gradient._weights.is_pinned() and gradient._gradients.is_pinned()
    gradient.compute(0)
    gradient.prepare(1)
    recwarn.clear()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        gradient.compute(1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    implicit = [str(each.message) for each in recwarn if "synchronizing" in str(each.message)]
    assert implicit == [], "the one wait is said, not hidden in a copy"


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (3, ["--protocol", "hardsync"]),
        (4, ["--protocol", "softsync", "--protocol.n", "3", "--evaluator"]),
        (3, ["--protocol", "hardsync", "--aggregation", "node"]),
        (2, ["--protocol", "allreduce", "--aggregation", "node"]),
    ],
)
def test_a_run(ranks: int, words: list[str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [*mpirun(ranks), sys.executable, "-m", "mpisgd", "train", "--out", str(out), "--device", "cuda", "--epochs", "1"]
    done = subprocess.run([*command, *words], env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(books.balanced for books in Run(out).books())
    proof = replay.replay(out)
    assert not proof.reason and "cuda" in proof.why_tolerant


def test_bench_train(tmp_path: Path) -> None:
    words = ["bench", "train", "--device", "cuda", "--repetitions", "1", "--cases", "cnn-64", "--ways", "hardsync", "softsync"]
    command = [*mpirun(3), sys.executable, "-m", "mpisgd", *words, "--out", str(tmp_path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads((tmp_path / "train.json").read_text())["rows"]
    assert row["device"] == "cuda" and row["images_per_s"]["hardsync"]["median"] > 0
