"""Jobs on streams: random virtual ones are replayed to the same bits; hardsync is a plain loop over a DataLoader's workers."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import IterableDataset, get_worker_info

from mpisgd import replay
from mpisgd.base.errors import DataError
from mpisgd.config import Config
from mpisgd.job import parts
from mpisgd.job.parts import UserObjects
from tests.effort import examples
from tests.virtual.jobs import TENSORS, simulated

from .test_random_samples import PROTOCOLS

STREAM = {**TENSORS, "sampling": "stream"}


class Stream(IterableDataset[Any]):
    """Samples of three classes, one of each worker's next three first, noisy: by draws of torch, numpy and `random`."""

    classes = 3

    def __init__(self, samples: int, noise: float = 0.1) -> None:
        generator = torch.Generator().manual_seed(samples)
        self.targets = torch.randint(3, (samples,), generator=generator)
        self.inputs = torch.randn(samples, 6, generator=generator) + self.targets[:, None]
        self.noise = noise

    def __len__(self) -> int:
        return len(self.inputs)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        worker = get_worker_info()
        own = list(range(len(self))) if worker is None else list(range(worker.id, len(self), worker.num_workers))
        while own:
            at = own.pop(random.randrange(min(3, len(own)))) if self.noise else own.pop(0)
            drawn = torch.randn(6) + np.float32(np.random.randn())  # noqa: NPY002
            yield self.inputs[at] + self.noise * drawn, self.targets[at]


BROUGHT = UserObjects(data=lambda: (Stream(60), Stream(20, noise=0)))


@pytest.mark.slow
@settings(
    max_examples=examples(10), deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(protocol=st.sampled_from(PROTOCOLS), learners=st.integers(1, 4), shards=st.integers(1, 2), seed=st.integers(0, 2**32))
def test_random_schedules_on_streams_are_replayed(protocol: dict[str, Any], learners: int, shards: int, seed: int) -> None:
    """Learners that come to the end of their shard begin it again: some twice as often as others."""
    changes = {"protocol": protocol, "virtual": {"learners": max(learners, 2)}, "seed": seed, "epochs": 2}
    shards = 1 if protocol["name"] == "allreduce" else shards
    with tempfile.TemporaryDirectory() as directory:
        simulated(Path(directory) / "run", STREAM, BROUGHT, shards=shards, **changes)
        proof = replay.replay(Path(directory) / "run", BROUGHT)
    assert (proof.reason, proof.other_losses) == ("", 0)
    assert all(each.elements == 0 for each in proof.differences)


def test_hardsync_is_a_plain_loop_over_what_workers_would_read(tmp_path: Path) -> None:
    """Two learners are two workers; the mean of their gradients is that of both batches in one."""
    user_objects = UserObjects(model=lambda: nn.Linear(6, 3), data=lambda: (Stream(48, noise=0), None))
    simulated(tmp_path / "run", STREAM, user_objects, virtual={"learners": 2}, epochs=2, protocol="hardsync", alpha0=0.1)
    with_mpisgd = torch.load(tmp_path / "run" / "weights.pt", weights_only=True)["theta"]
    stream = Stream(48, noise=0)
    model = parts.build_model(Config(), parts.Meta(48, 0, (6,), 3), user_objects).module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=Config().optimizer.momentum)  # type: ignore[union-attr]
    for update in range(2 * 48 // 8):
        places = [(4 * update + place) % 24 * 2 + learner_id for learner_id in (0, 1) for place in range(4)]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(stream.inputs[places]), stream.targets[places]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for name, values in model.state_dict().items():
        assert torch.allclose(values, with_mpisgd[name], atol=1e-6), name


class Changed(Stream):
    """Has other samples from the seventh on."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for place, (inputs, target) in enumerate(super().__iter__()):
            yield inputs + (place > 6), target


def test_a_stream_that_gives_others_is_found_out(tmp_path: Path) -> None:
    simulated(tmp_path / "run", STREAM, BROUGHT, epochs=1, protocol={"name": "softsync", "n": 2})
    proof = replay.replay(tmp_path / "run", UserObjects(data=lambda: (Changed(60), Stream(20, noise=0))))
    assert "loss" in proof.reason
    assert any("does the stream give learners the same samples again?" in note for note in proof.notes)
    assert proof.gradients > 4, "the first mini-batches were the same"


def test_batch_norm_is_measured_and_the_training_loss_on_the_first_samples(tmp_path: Path) -> None:
    user_objects = UserObjects(model=lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)), data=BROUGHT.data)
    run = simulated(tmp_path / "run", STREAM, user_objects, epochs=1, evaluation={"train": True, "batch": 16})
    assert np.isfinite(run.evaluations["loss"]).all()
    assert set(run.evaluations["train"]) == {0, 1}
    assert replay.replay(tmp_path / "run", user_objects).reason == ""


def test_a_learner_without_samples_ends_the_job(tmp_path: Path) -> None:
    class Short(Stream):
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            worker = get_worker_info()
            return iter(()) if worker is not None and worker.id == 3 else super().__iter__()

    with pytest.raises(DataError, match="the stream Short gives nothing to learner 3 of 4"):
        simulated(tmp_path / "run", STREAM, UserObjects(data=lambda: (Short(60), None)), epochs=1)
