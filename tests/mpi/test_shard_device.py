"""Shards on a GPU, a pretended one, on real ranks: the bits of a CPU's, whether MPI is given its memory, the host's, or none."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mpisgd import replay
from mpisgd.base.errors import EXIT_OK, ConfigError
from mpisgd.cli.reading import plan
from mpisgd.config import Config
from mpisgd.job import parts
from mpisgd.records.log.reader import Run
from mpisgd.replay import prove
from mpisgd.replay.checks.record import Record
from mpisgd.update import optimizer
from mpisgd.update.slice_update import SliceUpdate
from tests.pretend_gpu import pretend_gpu

from . import laws
from .conftest import Shared, launch

pytestmark = pytest.mark.slow

ON_GPU = ("staged", "direct")
MODES = {"in-place": ("staged",), "in-place-each": ("several",)}
#: name -> (ranks, what differs from COMMON)
RUNS = {
    "hardsync": (4, {"protocol": "hardsync", "averaging": 0.9, "checkpoint": {"every_updates": 20}}),
    "softsync-S2": (6, {"protocol": {"name": "softsync", "n": 3}, "shards": 2, "evaluator": True, "nonfinite": "drop"}),
    "bfloat16-adam": (4, {"protocol": {"name": "backup", "b": 1}, "optimizer": "adam", "push_format": "bfloat16"}),
    "chunks": (3, {"protocol": "hardsync", "model": {"name": "mlp", "hidden": [1200, 1000]}, "mu": 64, "epochs": 0.5}),
    "team": (3, {"protocol": "hardsync", "aggregation": "node"}),
    "allreduce": (2, {"protocol": "allreduce", "way": "whole"}),
    "allreduce-node": (2, {"protocol": "allreduce"}),
    "topk": (3, {"protocol": "softsync", "push_format": "topk", "topk_share": 0.3}),
    "pulls": (3, {"protocol": "hardsync", "pull_format": "bfloat16"}),
}
PEERS: dict[str, tuple[int, dict[str, Any]]] = {
    "on-gpu": (3, {"averaging": 0.9, "checkpoint": {"every_updates": 20}}),
    "on-gpu-S2": (5, {"shards": 2, "optimizer": "adam", "clip_average": 0.1, "evaluator": True}),
    "on-gpu-allreduce": (2, {"protocol": "allreduce", "averaging": 0.9}),
    "on-gpu-chunks": (3, {"model": {"name": "mlp", "hidden": [1200, 1000]}, "mu": 64, "epochs": 0.5}),
    "in-place": (3, {"way": "in-place", "clip_norm": 0.5, "nonfinite": "drop"}),
    "in-place-each": (3, {"optimizer": "adam"}),
}
"""Those whose learners have a GPU, too; named by their way."""
ON_GPUS: dict[str, Any] = {"protocol": "hardsync", "device": "cuda", "deterministic": True}
RUNS |= {name: (ranks, ON_GPUS | special) for name, (ranks, special) in PEERS.items()}
APART: dict[str, tuple[int, dict[str, Any]]] = {
    "ahead": (4, {"protocol": "async", "ahead": 2, "alpha0": 0.01}),
    "layers": (5, {"protocol": "async", "per_layer": True, "shards": 2, "alpha0": 0.01}),
    "layers-held": (5, {"protocol": "hardsync", "per_layer": True, "shards": 2, "clip_norm": 0.5, "push_format": "bfloat16"}),
    "layers-rounded": (4, {"protocol": {"name": "backup", "b": 1}, "per_layer": True, "push_format": "bfloat16"}),
    "sandblaster": (4, {"protocol": {"name": "sandblaster", "iterations": 8}, "epochs": Config().epochs}),
}
"""Those of which only the learners have a GPU."""
RUNS |= {name: (ranks, {"device": "cuda", **special}) for name, (ranks, special) in APART.items()}
ON_HOST = ("topk", "pulls", *APART)
"""Those whose shards stay on the host, though a GPU is asked for."""
COMMON = {"epochs": 1, "mu": 16, "log": {"progress": "off"}, "evaluation": {"every_epochs": 0.5}}
REPEATABLE = [name for name in RUNS if name.startswith(("hardsync", "chunks", "team", "allreduce")) or name in PEERS]
PLAIN = ("send", "ssend")


def job(directory: Path, name: str) -> dict:
    run, _, gpu = name.partition("@")
    ranks, special = RUNS[run]
    device = {"device": "cpu"} if gpu == "none" else {} if run in APART else {"shard_device": "cuda"}
    return {"ranks": ranks, "gpu": gpu, "config": {**COMMON, **special, **device, "out": str(directory / name)}}


CASES = [("ssend" if how == "staged" else "send", f"{name}@{how}") for name in RUNS for how in MODES.get(name, ON_GPU)]
SHARED = Shared([*CASES, *(("send", f"{name}@none") for name in REPEATABLE)], job)


def weights(run: Path) -> np.ndarray:
    state = torch.load(run / "weights.pt", weights_only=True)["theta"]
    return np.concatenate([tensor.numpy().ravel() for tensor in state.values()])


@pytest.mark.parametrize(("switch", "name"), CASES)
def test_laws_and_replay(runs: Path, switch: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replayed on a CPU, whose sums have the same bits here: the GPU is pretended, and the CPU is given its kernels."""
    monkeypatch.setattr(optimizer, "CACHED_NBYTES", 0)
    monkeypatch.setitem(SliceUpdate.__init__.__kwdefaults__, "fused", True)
    path, run = runs / switch / name, name.partition("@")[0]
    if run != "sandblaster":
        laws.hold(Run(path), ahead=1 + Run(path).config["ahead"])
    assert Run(path).evaluations["error"][-1] < 0.5, "it learns"
    on_gpu = run not in ON_HOST
    assert Run(path).config["shard_device"] == ("cuda" if on_gpu else "cpu")
    if run in APART:
        assert replay.replay(path, trust=True, tolerance=0.0).holds, "gradients were computed on the CPU"
        return
    proof = replay.replay(path, trust=True)
    if run in PEERS:
        assert run.startswith(Run(path).environment["way"])
    assert not proof.reason and ("cuda" in proof.why_tolerant) == on_gpu


@pytest.mark.parametrize(("switch", "name"), [case for case in CASES if case[1].partition("@")[0] in PEERS])
def test_a_replay_on_a_gpu_has_the_bits(switch: str, name: str, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With models on the CPU, as learners of the run had theirs."""
    made = parts.build_model
    monkeypatch.setattr(parts, "build_model", lambda *ours, **named: made(*ours[:3], "cpu", **named))
    with pretend_gpu(late=False) as gpu:
        proof = replay.replay(runs / switch / name, trust=True, device="cuda")
        assert proof.holds and not proof.why_tolerant and proof.differences
        assert gpu.asked > 100 and torch.are_deterministic_algorithms_enabled() is False
        stopped = replay.replay(runs / switch / name, trust=True, device="cuda", until=3)
        assert stopped.holds and len(stopped.waypoints) == Run(runs / switch / name).shards
        assert "deterministic" in _tolerant(runs / switch / name, monkeypatch)


def _tolerant(run: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Why a run with the same log that does not ask for it is not compared to the bit."""
    read = prove.read

    def other(path: Path) -> Record:
        record = read(path)
        return dataclasses.replace(record, config=dataclasses.replace(record.config, deterministic=False))

    monkeypatch.setattr(prove, "read", other)
    return replay.replay(run, trust=True, device="cuda").why_tolerant


def test_a_plan_is_made_from_the_log(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main([str(runs / "send" / "on-gpu@direct")]) == EXIT_OK
    assert "2 learners: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("run", "why"), [("send/hardsync@none", "on which the run computed"), ("ssend/sandblaster@staged", "where portions are summed")]
)
def test_what_is_not_replayed_on_a_gpu(runs: Path, run: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"device = 'cuda': expected 'cpu', {why}"):
        replay.replay(runs / run, trust=True, device="cuda")


@pytest.mark.parametrize(("switch", "name"), [case for case in CASES if case[1].partition("@")[0] in REPEATABLE])
def test_it_ends_with_the_bits_of_a_cpu(runs: Path, switch: str, name: str) -> None:
    run, _, _ = name.partition("@")
    ours, theirs = Run(runs / switch / name), Run(runs / "send" / f"{run}@none")
    np.testing.assert_array_equal(weights(ours.path), weights(theirs.path))
    same = ["clock_min", "averaged", "train", "loss", "error"]
    assert ours.evaluations[same].tolist() == theirs.evaluations[same].tolist()


@pytest.mark.parametrize("option", ["device", "shard_device"])
def test_without_a_gpu_it_is_refused(option: str, tmp_path: Path) -> None:
    words = ["train", f"--{option.replace('_', '-')}", "cuda", "--out", "run"]
    done = launch(2, "-m", "mpisgd", *words, cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.status != 0
    assert f"{option} = 'cuda': torch finds no CUDA device on this rank" in done.text
    assert not (tmp_path / "run").exists()
