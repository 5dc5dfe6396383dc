"""A slice on a (pretended) GPU has the bits of one on a CPU, and whoever uses memory that the GPU uses has waited before."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from mpisgd.config import (
    AdagradOptions,
    AdamOptions,
    AdamwOptions,
    LambOptions,
    LarsOptions,
    OptimizerOptions,
    RmspropOptions,
    SgdOptions,
)
from mpisgd.update import optimizer
from mpisgd.update.average import Average
from mpisgd.update.compensation import Compensation
from mpisgd.update.device_update import DeviceUpdate, StagedPool, StagedUpdate
from mpisgd.update.slice_update import SliceUpdate
from mpisgd.vectors import chunks
from mpisgd.vectors.memory import Copy, on_host
from mpisgd.vectors.push_format import BFLOAT16
from mpisgd.vectors.skipped import NOTHING
from tests.effort import spread
from tests.pretend_gpu import Gpu, OnGpu, held, pretend_gpu
from tests.unit.update.give import come, give

SIZE = 256
GPU = "cuda:0"
KINDS = (DeviceUpdate, StagedUpdate)
MOMENTUM = SgdOptions(momentum=0.9)
OPTIMIZERS = (
    SgdOptions(momentum=0.0),
    MOMENTUM,
    SgdOptions(momentum=0.9, nesterov=True, weight_decay=0.01),
    AdagradOptions(),
    RmspropOptions(momentum=0.5),
    AdamOptions(),
    AdamwOptions(),
    LarsOptions(),
    LambOptions(),
)


CHUNKS, LATE = (1, 4), ("late", "at once")


@pytest.fixture(params=LATE)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    monkeypatch.setattr(optimizer, "CACHED_NBYTES", 0)
    monkeypatch.setitem(SliceUpdate.__init__.__kwdefaults__, "fused", True)  # the same kernels on the CPU
    with pretend_gpu(late=request.param == "late") as gpu:
        yield gpu


@pytest.fixture(params=CHUNKS)
def cut(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """In how many chunks."""
    monkeypatch.setattr(chunks, "CHUNK_NBYTES", 4 * SIZE // request.param)
    return int(request.param)


def make(
    kind: type[SliceUpdate], options: OptimizerOptions = MOMENTUM, *, dc: float = 0.0, averaging: float = 0.0, **fields: Any
) -> SliceUpdate:
    weights = torch.randn(SIZE, generator=torch.Generator().manual_seed(1))
    if kind is not SliceUpdate:
        weights = weights.to(GPU)
    given = {"learning_rate": 0.1, "schedule": lambda epochs: 0.5 if epochs > 2 else 1.0, "train_samples": 8, **fields}
    average = Average.of(weights, averaging)
    return kind(weights, options, average=average, compensation=Compensation(weights, dc, 0.9) if dc else None, **given)


def step(update: SliceUpdate) -> None:
    """As a shard does."""
    if update.chunks_count > 1:
        update.begin_step()
    else:
        update.step()


def sent(update: SliceUpdate) -> np.ndarray:
    """As MPI does."""
    if update.chunks_count == 1:
        return seen(update.served).copy()
    return np.concatenate([seen(chunk) for chunk in update.chunks()])


def seen(vector: Any) -> np.ndarray:
    """What MPI sees there now."""
    return np.asarray(held(vector))


def train(update: SliceUpdate, rounds: int = 8) -> list[np.ndarray]:
    """The weights sent after each update; what is pushed comes in any order, some of it dropped, kept for later, or compensated."""
    generator = np.random.default_rng(2)
    found = []
    update.checks_sums = True
    for clock in range(rounds):
        if update.compensation is not None:
            for learner_id in range(3):
                update.compensation.given(learner_id, clock)
        kept = []
        for _ in range(3):
            came = come(update, generator.standard_normal(SIZE, np.float32))
            fate = generator.choice(["sum", "keep", "drop"], p=[0.5, 0.3, 0.2])
            if fate == "sum":
                give(update, came, float(generator.choice([1.0, 0.5])), 2, clock)
            elif fate == "keep":
                kept.append(came)
            else:
                came.release()
        for place, came in enumerate(kept):
            give(update, came, 1.0, 2, clock, last=place == len(kept) - 1)
        step(update)
        found.append(sent(update))
        assert update.sum_is_finite()
    return found


SPECIAL: tuple[dict[str, Any], ...] = ({}, {"averaging": 0.9, "push_format": BFLOAT16}, {"dc": 0.04, "clip_average": 3.0})


WAYS = (CHUNKS, LATE)


@pytest.mark.parametrize(  # each of all comes up
    ("options", "special", "kind", "cut", "gpu"),
    spread(itertools.product(OPTIMIZERS, SPECIAL, KINDS, *WAYS), 23, unpack=True),
    indirect=["cut", "gpu"],
    ids=str,
)
def test_it_has_the_bits_of_a_cpu(
    options: OptimizerOptions, special: dict[str, Any], kind: type[SliceUpdate], cut: int, gpu: Gpu
) -> None:
    theirs, ours = make(SliceUpdate, options, **special), make(kind, options, **special)
    assert ours.chunks_count == cut
    close = 1e-6 if isinstance(options, AdagradOptions) else 0.0  # torch has a fused kernel of it for CPUs alone
    for expected, found in zip(train(theirs), train(ours), strict=True):
        np.testing.assert_allclose(found, expected, rtol=close, atol=close)
    assert set(ours.state()) == set(theirs.state())
    for name, expected in theirs.state().items():
        assert isinstance(ours.state()[name], OnGpu) or expected.dim() == 0, name
        np.testing.assert_allclose(on_host(ours.state()[name]), on_host(expected), rtol=close, atol=close, err_msg=name)
    assert (ours.samples, ours.learning_rate) == (theirs.samples, theirs.learning_rate)


@pytest.mark.parametrize("kind", [DeviceUpdate, StagedUpdate])
def test_an_update_is_over_when_it_is_made(kind: type[SliceUpdate]) -> None:
    """Its seconds, which the shard takes, are those of the GPU, too."""
    with pretend_gpu() as gpu:
        update = make(kind)
        give(update, 1.0)
        before = gpu.waits
        update.step()
        assert gpu.waits == before + 1
        gpu.synchronize()
        assert gpu.waits == before + 1, "nothing was left to be done"


class _NeverWaits(StagedUpdate):
    """Sends what may not be there yet."""

    def _until_made(self) -> None:
        pass


class _OneInbox(StagedUpdate):
    """Receives into memory that the GPU has not read yet."""

    class pool(StagedPool):
        def _take_apart(self) -> torch.Tensor:
            return self._emptying.popleft()[0] if self._emptying else super()._take_apart()


@pytest.mark.parametrize("kind", [_NeverWaits, _OneInbox])
def test_who_does_not_wait_is_found_out(kind: type[SliceUpdate], monkeypatch: pytest.MonkeyPatch) -> None:
    """That the test above can fail."""
    monkeypatch.setattr(optimizer, "CACHED_NBYTES", 0)
    with pretend_gpu():
        expected, found = train(make(SliceUpdate)), train(make(kind))
    assert any((ours != theirs).any() for ours, theirs in zip(found, expected, strict=True))


def test_what_is_mixed_with_the_host_is_found_out() -> None:
    with pretend_gpu(), pytest.raises(RuntimeError, match="same device"):
        torch.zeros(3, device=GPU).add_(torch.ones(3))


@pytest.mark.parametrize("kind", [DeviceUpdate, StagedUpdate])
def test_a_cycle_waits_for_what_it_sends_and_little_else(kind: type[SliceUpdate], cut: int) -> None:
    """Gradients of two learners, an update, the answers: one wait for each chunk, and for norms now and then (`norms.py`)."""
    with pretend_gpu() as gpu:
        update = make(kind)
        waits = []
        for _ in range(30):
            before = gpu.waits
            for _ in range(2):
                give(update, 1.0)
            step(update)
            sent(update)
            waits.append(gpu.waits - before)
    needed = cut if kind is StagedUpdate else 1
    assert np.bincount(waits).argmax() == needed
    assert np.mean(waits) < needed + 1


@pytest.mark.parametrize(  # each of all comes up
    ("kind", "value", "cut", "gpu"),
    spread(itertools.product(KINDS, [1.0, 1e30, np.nan, -np.inf], *WAYS), 5, unpack=True),
    indirect=["cut", "gpu"],
)
def test_what_is_not_finite_is_seen(kind: type[SliceUpdate], value: float, cut: int, gpu: Gpu) -> None:
    update, finite = make(kind), bool(np.isfinite(value))
    update.checks_sums = True
    gradient = np.ones(SIZE, np.float32)
    gradient[SIZE // 2] = value
    came = come(update, gradient)
    assert came.is_finite() == finite
    give(update, came, 0.5)
    step(update)
    sent(update)
    assert update.sum_is_finite() == finite
    for asked in (True, False):  # also before anything was sent; and where nobody said that it would be asked
        update = make(kind)
        update.checks_sums = asked
        give(update, gradient, 0.5)
        step(update)
        assert update.sum_is_finite() == finite


@pytest.mark.parametrize(
    ("options", "kind", "cut", "gpu"),
    spread(itertools.product(OPTIMIZERS, KINDS, *WAYS), 7, unpack=True),
    indirect=["cut", "gpu"],
    ids=str,
)
def test_it_goes_on_from_a_checkpoint(options: OptimizerOptions, kind: type[SliceUpdate], cut: int, gpu: Gpu) -> None:
    """Of its own kind, or of a CPU's; and what was restored is what is served."""
    first = make(kind, options, averaging=0.9)
    train(first, 5)
    state = {name: torch.from_numpy(on_host(tensor).copy()) for name, tensor in first.state().items()}
    second = make(kind, options, averaging=0.9)
    second.restore(state, first.samples)
    np.testing.assert_array_equal(sent(second), state["weights"].numpy())
    again = make(SliceUpdate, options, averaging=0.9)
    again.restore(state, first.samples)
    expected, close = train(first, 3), 1e-6 if isinstance(options, AdagradOptions) else 0.0
    np.testing.assert_array_equal(train(second, 3), expected)
    np.testing.assert_allclose(train(again, 3), expected, rtol=close, atol=close)


def test_gradients_that_come_at_once_are_taken_in_one_by_one(cut: int, gpu: Gpu) -> None:
    """As an allreduce does, by messages and in memory that ranks share."""
    theirs, ours = make(SliceUpdate), make(StagedUpdate)
    gradients = np.random.default_rng(3).standard_normal((4, 3, SIZE)).astype(np.float32)
    rows = [update.bodies.row(3) for update in (theirs, ours)]
    shared = np.zeros((4, SIZE), np.float32)
    for number, of_all in enumerate(gradients):
        if number == 2:
            ours.live_in(shared[3])
            np.testing.assert_array_equal(shared[3], sent(theirs))
            rows[1] = shared[:3], [ours.bodies.at(each) for each in shared[:3]]
        for (room, bodies), update in zip(rows, (theirs, ours), strict=True):
            held(room).reshape(3, SIZE)[:] = of_all
            for body in bodies:
                assert body.arrive(NOTHING) == ""
                assert body.is_finite()
                update.accumulate(body, 1.0, 1)
            step(update)
        np.testing.assert_array_equal(sent(ours), sent(theirs))
    np.testing.assert_array_equal(shared[3], sent(theirs))
    ours.renew_weights()
    assert not np.shares_memory(seen(ours.served), shared)
    np.testing.assert_array_equal(sent(ours), sent(theirs))


@pytest.mark.parametrize("kind", [DeviceUpdate, StagedUpdate])
def test_memory_that_somebody_may_still_use_is_left_alone(kind: type[SliceUpdate], cut: int, gpu: Gpu) -> None:
    """A push that broke off may still write, and an answer that was given up may still be read from."""
    theirs, ours = make(SliceUpdate), make(kind)
    for update in (theirs, ours):
        give(update, 1.0)
        step(update)
        before = sent(update)
        answer = seen(update.served)
        lost = update.bodies.take()
        lost.lose()
        torn = held(lost.memory)
        update.renew_weights()
        came = come(update, 2.0)
        torn[:] = 7.0
        give(update, came)
        torn[:] = 8.0
        step(update)
        sent(update)
        np.testing.assert_array_equal(answer, before)
    np.testing.assert_array_equal(sent(ours), sent(theirs))


def test_a_copy_from_and_to_the_host_is_not_made_before_its_turn() -> None:
    """What the pretended GPU is for."""
    with pretend_gpu() as gpu:
        there, back = torch.zeros(3, device=GPU), torch.zeros(3)
        out = torch.ones(3)
        first = Copy(there, out)
        there.mul_(2.0)
        second = Copy(back, there)
        assert back.tolist() == [0.0] * 3 and gpu.waits == 0
        first.wait()
        out.fill_(5.0)
        assert back.tolist() == [0.0] * 3 and gpu.waits == 1
        second.wait()
        second.wait()
        assert back.tolist() == [2.0] * 3 and gpu.waits == 2
