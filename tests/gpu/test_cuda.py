"""On a GPU: gradients and updates of a CPU to float tolerance, one wait for the GPU in a mini-batch, whole runs on real ranks.

All are skipped where torch finds no CUDA device; `make gpu-check` says so aloud.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn

from mpisgd import models, replay
from mpisgd.comm.mpi.launch import environment, mpirun
from mpisgd.config import (
    AdagradOptions,
    AdamOptions,
    Cifar10FullOptions,
    LambOptions,
    LarsOptions,
    MlpOptions,
    ModelOptions,
    OptimizerOptions,
    RmspropOptions,
    SgdOptions,
    SyntheticOptions,
)
from mpisgd.data import load, sampling
from mpisgd.gradient.gradient import Gradient
from mpisgd.records.log.reader import Run
from mpisgd.update.average import Average
from mpisgd.update.device_update import DeviceUpdate, StagedUpdate
from mpisgd.update.slice_update import SliceUpdate
from mpisgd.vectors.flat import FlatModel
from mpisgd.vectors.skipped import NOTHING

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")

DATA = SyntheticOptions(shape=(3, 32, 32), classes=10, samples=256, test_samples=10)
MODELS: list[ModelOptions] = [MlpOptions(hidden=(200, 100)), Cifar10FullOptions()]
Autocast = Literal["off", "bfloat16", "float16"]
AUTOCASTS: tuple[Autocast, ...] = ("bfloat16", "float16")


def gradient_on(device: str, model: ModelOptions, autocast: Autocast = "off", **special: Any) -> Gradient:
    data = load(DATA, seed=1)
    module = models.make(model, input_shape=data.input_shape, classes=data.classes, seed=1)
    dealt = sampling.make("epoch", size=DATA.samples, mu=16, lambda_=1, seed=1)
    flat = FlatModel(module, "channels_last", device, autocast)
    memory = flat.memory if device == "cpu" else flat.memory.pinned()
    return Gradient(flat, nn.functional.cross_entropy, data.train, dealt, memory, seed=1, learner_id=0, **special)


CONVOLUTIONS = ["--model", "cifar10_full", "--data", "synthetic", "--data.shape", "3", "32", "32", "--data.samples", "512"]


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions in float32: torch's own choice on a GPU is TF32, of which a gradient differs in its third digit."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("special", [{}, {"clip_norm": 0.1, "tell_nonfinite": True}])
def test_the_gradient_is_that_of_a_cpu(model: ModelOptions, special: dict[str, Any]) -> None:
    theirs, ours = gradient_on("cpu", model, **special), gradient_on("cuda", model, **special)
    generator = np.random.default_rng(1)
    for seq in range(5):
        theirs.memory.weights[:] += 0.01 * generator.standard_normal(len(theirs.memory.weights), np.float32)
        ours.memory.weights[:] = theirs.memory.weights
        assert ours.compute(seq) == pytest.approx(theirs.compute(seq), rel=1e-4)
        np.testing.assert_allclose(ours.memory.gradients, theirs.memory.gradients, rtol=1e-3, atol=1e-5)
        theirs.prepare(seq + 1)
        ours.prepare(seq + 1)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("loss_factor", [1.0, 2.0**-20, 2.0**10], ids=["usual", "tiny", "overflows"])
@pytest.mark.parametrize("autocast", AUTOCASTS)
@pytest.mark.parametrize("model", MODELS)
def test_a_pass_under_autocast_is_torchs(model: ModelOptions, autocast: Autocast, loss_factor: float) -> None:
    """As torch's own loop has it, with the scale that was found; float16 would lose tiny gradients, and overflow, without one."""
    ours, exact = gradient_on("cuda", model, autocast), gradient_on("cuda", model)
    for each in (ours, exact):
        each.objective = lambda output, target: loss_factor * nn.functional.cross_entropy(output, target)
    module = exact._model.module
    for seq in range(3):
        exact.compute(seq)
        loss, scale = ours.compute(seq), ours.scaled.by
        assert (scale == 1.0) == (autocast == "bfloat16")
        exact._model.zero_gradients()
        with torch.autocast("cuda", torch.float16 if autocast == "float16" else torch.bfloat16):
            theirs = exact.forward(seq)
        (theirs * scale).backward()  # type: ignore[no-untyped-call]
        expected = (exact._model.gradients / scale).cpu().numpy()
        assert np.isfinite(expected).all() and np.abs(expected).max() > 0
        assert loss == pytest.approx(theirs.item(), rel=1e-3)
        np.testing.assert_allclose(ours.memory.gradients, expected, rtol=1e-2, atol=1e-3 * np.abs(expected).max())
        assert all(parameter.dtype == torch.float32 for parameter in module.parameters())
        for each in (ours, exact):
            each.prepare(seq + 1)


def test_what_is_sent_lies_in_pinned_memory_and_a_mini_batch_waits_once() -> None:
    gradient = gradient_on("cuda", MODELS[0])
    assert all(torch.from_numpy(each).is_pinned() for each in (gradient.memory.weights, gradient.memory.gradients))
    gradient.compute(0)
    gradient.prepare(1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            gradient.compute(1)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [f"{each.filename}: {each.message}" for each in told if "called a synchronizing" in str(each.message)]
    assert len(waits) == 1 and "streams.py" in waits[0], "it waits for the stream, and no copy waits besides"


HARDSYNC, ALLREDUCE = ["--protocol", "hardsync"], ["--protocol", "allreduce"]
IN_PLACE = [HARDSYNC, [*HARDSYNC, *CONVOLUTIONS], ALLREDUCE]


@pytest.mark.parametrize("shards", [1, 2])
def test_a_round_on_one_gpu_has_the_bits_of_messages(shards: int, tmp_path: Path) -> None:
    """Copies through the host, sums in memory that all share: the weights are the same, and those of a replay."""
    ends = []
    for travel in ("messages", "in-place", ""):
        out = tmp_path / f"run-{travel}"
        command = [*mpirun(shards + 2), sys.executable, "-m", "mpisgd", "train", "--out", str(out), "--epochs", "1", *HARDSYNC]
        command += ["--device", "cuda", "--shard-device", "cuda", "--shards", str(shards), "--averaging", "0.9", "--deterministic"]
        env = environment() | {"MPISGD_GPU_MEMORY": "staged"} | ({"MPISGD_TRAVEL": travel} if travel else {})
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert Run(out).environment["way"] == {"messages": "whole", "in-place": "in-place", "": "on-gpu"}[travel]
        ends.append(torch.load(out / "weights.pt", weights_only=True)["theta"])
        proof = replay.replay(out, device="cuda")
        assert proof.holds and not proof.why_tolerant
    for other in ends[1:]:
        assert all(torch.equal(other[name], tensor) for name, tensor in ends[0].items())


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (3, HARDSYNC),
        (4, ["--protocol", "softsync", "--protocol.n", "2", "--evaluator"]),
        (3, [*HARDSYNC, *CONVOLUTIONS]),
        (3, ["--protocol", "hardsync", "--aggregation", "node"]),
        (2, ALLREDUCE),
        (3, ["--protocol", "hardsync", "--push-format", "bfloat16", "--optimizer", "adam"]),
        (3, ["--protocol", "hardsync", "--autocast", "bfloat16"]),
        (3, ["--protocol", "hardsync", "--autocast", "float16"]),
        (4, ["--protocol", "softsync", "--protocol.n", "3", "--autocast", "float16", "--clip-norm", "1"]),
        (3, ["--protocol", "async", "--ahead", "2"]),
        (3, ["--protocol", "async", "--per-layer"]),
    ],
)
@pytest.mark.parametrize("devices", [("cuda", "cpu"), ("cuda", "cuda"), ("cpu", "cuda")])
@pytest.mark.parametrize("memory", ["staged", "direct", "messages"])
def test_a_run(ranks: int, words: list[str], devices: tuple[str, str], memory: str, tmp_path: Path) -> None:
    """`memory`: as MPISGD_GPU_MEMORY; messages: staged, where vectors would stay in place."""
    from mpisgd.comm.mpi.library import cuda_aware  # begins MPI

    if memory == "direct" and not cuda_aware():
        pytest.skip("this MPI is not CUDA-aware")
    out = tmp_path / "run"
    command = [*mpirun(ranks), sys.executable, "-m", "mpisgd", "train", "--out", str(out), "--epochs", "1"]
    command += ["--device", devices[0], "--shard-device", devices[1], *words]
    env = environment() | {"MPISGD_GPU_MEMORY": memory, "NVIDIA_TF32_OVERRIDE": "0"}
    if memory == "messages":
        if words not in IN_PLACE:
            pytest.skip("sent in messages anyway")
        env |= {"MPISGD_GPU_MEMORY": "staged", "MPISGD_TRAVEL": "messages"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(books.balanced for books in Run(out).books())
    if words in IN_PLACE and memory != "direct":
        on_gpu = "on-gpu" if devices == ("cuda", "cuda") else "in-place"
        assert Run(out).environment["way"] == ("whole" if memory == "messages" else on_gpu)
    proof = replay.replay(out)
    assert not proof.reason and "cuda" in proof.why_tolerant


def of_torch(vector: Any) -> torch.Tensor:
    return vector if isinstance(vector, torch.Tensor) else torch.from_numpy(vector)


@pytest.mark.parametrize("size", [1_000, 3_000_000])
@pytest.mark.parametrize("kind", [DeviceUpdate, StagedUpdate])
@pytest.mark.parametrize(
    "options",
    [SgdOptions(), SgdOptions(0.9, True, 0.01), AdagradOptions(), RmspropOptions(), AdamOptions(), LarsOptions(), LambOptions()],
)
def test_an_update_is_that_of_a_cpu(options: OptimizerOptions, kind: type[DeviceUpdate], size: int) -> None:
    """Chunk by chunk, and back from a checkpoint."""
    generator = np.random.default_rng(1)
    start = torch.from_numpy(generator.standard_normal(size, np.float32))

    def make(of: type[SliceUpdate], weights: torch.Tensor) -> SliceUpdate:
        average = Average.of(weights, 0.9)
        return of(weights, options, learning_rate=0.01, schedule=lambda _: 1.0, train_samples=10, average=average)

    theirs, ours = make(SliceUpdate, start.clone()), make(kind, start.to("cuda"))
    for number in range(6):
        if number == 3:
            state = {name: tensor.cpu().clone() for name, tensor in ours.state().items()}
            ours = make(kind, start.to("cuda"))
            ours.restore(state, theirs.samples)
        for update in (theirs, ours):
            update.checks_sums = True
        for last in (False, True):
            gradient = torch.from_numpy(generator.standard_normal(size, np.float32))
            for update in (theirs, ours):
                body = update.bodies.take()
                of_torch(body.memory).copy_(gradient)
                torch.cuda.synchronize()
                assert body.arrive(NOTHING) == ""
                update.accumulate(body, 0.7, 1, last=last)
        sent = []
        for update in (theirs, ours):
            update.begin_step()
            sent.append(torch.cat([of_torch(chunk).cpu() for chunk in update.chunks()]))
            assert update.sum_is_finite()
        torch.testing.assert_close(sent[1], sent[0], rtol=1e-4, atol=1e-5)
    assert ours.averaged is not None
    torch.testing.assert_close(ours.averaged.cpu(), theirs.averaged, rtol=1e-4, atol=1e-5)


def test_bench_train(tmp_path: Path) -> None:
    words = [
        "bench",
        "train",
        "--device",
        "cuda",
        "--shard-device",
        "cuda",
        "--repetitions",
        "1",
        "--cases",
        "cnn-64",
        "--ways",
        "hardsync",
        "softsync",
    ]
    command = [*mpirun(3), sys.executable, "-m", "mpisgd", *words, "--out", str(tmp_path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads((tmp_path / "train.json").read_text())["rows"]
    assert row["device"] == row["shard_device"] == "cuda" and row["images_per_s"]["hardsync"]["median"] > 0
