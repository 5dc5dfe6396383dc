"""One mini-batch's gradient: equal to plain autograd, clipped to a global norm, and a function of its names (law 5)."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mpisgd.data import Split
from mpisgd.data.sampling import EpochSampling
from mpisgd.gradient.gradient import Gradient
from mpisgd.vectors.flat import FlatModel
from mpisgd.vectors.memory import Memory
from tests.pretend_gpu import OnGpu, held, pretend_gpu

MU, SEED = 4, 3


@pytest.fixture(scope="module")
def split() -> Split:
    generator = torch.Generator().manual_seed(0)
    return Split(torch.randn(40, 2, 6, 6, generator=generator), torch.arange(40) % 3)


def network(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(dropout), nn.Linear(64, 3))


def gradient(split: Split, module: nn.Module, *, learner_id: int = 0, seed: int = SEED, **fields: Any) -> Gradient:
    model = FlatModel(module, "channels_last")
    return Gradient(
        model,
        nn.functional.cross_entropy,
        split,
        EpochSampling(len(split), MU, 2, SEED),
        model.memory,
        seed=seed,
        learner_id=learner_id,
        **fields,
    )


def by_hand(split: Split, module: nn.Module, indices: np.ndarray) -> tuple[float, np.ndarray]:
    """Loss, and gradient in the order of the flat vector: channels-last for the convolution."""
    inputs, targets = split.batch(indices)
    loss = nn.functional.cross_entropy(module(inputs), targets)
    parts = torch.autograd.grad(loss, list(module.parameters()))
    return loss.item(), torch.cat([(p.permute(0, 2, 3, 1) if p.dim() == 4 else p).reshape(-1) for p in parts]).numpy()


@pytest.mark.parametrize("learner_id", [0, 1])
def test_it_is_autograds_on_the_learners_own_mini_batches(split: Split, learner_id: int) -> None:
    module = network()
    computed = gradient(split, copy.deepcopy(module), learner_id=learner_id)
    for seq in (0, 1, 7):  # one after the other: nothing of the last may be left
        loss, expected = by_hand(split, module, EpochSampling(40, MU, 2, SEED).indices(learner_id, seq))
        assert computed.compute(seq) == pytest.approx(loss, rel=1e-5)
        np.testing.assert_allclose(computed.memory.gradients, expected, rtol=1e-4, atol=1e-6)
        assert computed.samples == MU


def test_what_was_prepared_is_used_once_and_only_for_its_own_mini_batch(split: Split) -> None:
    """A learner prepares the next mini-batch while it waits for weights."""
    prepared = gradient(split, network())
    for seq, prepare in ((2, 2), (2, None), (1, 3), (3, 3)):
        if prepare is not None:
            prepared.prepare(prepare)
        loss, expected = by_hand(split, network(), EpochSampling(40, MU, 2, SEED).indices(0, seq))
        assert prepared.compute(seq) == pytest.approx(loss, rel=1e-5)
        np.testing.assert_allclose(prepared.memory.gradients, expected, rtol=1e-4, atol=1e-6)


def test_weights_that_are_pulled_are_the_weights_it_computes_with(split: Split) -> None:
    computed = gradient(split, network())
    before = computed.compute(0)
    computed.memory.weights[:] = 0.0
    assert computed.compute(0) == pytest.approx(np.log(3))
    assert before != pytest.approx(np.log(3))


@pytest.mark.parametrize("norm", [0.05, 0.5, 1e6])
def test_clipping_to_a_global_norm(split: Split, norm: float) -> None:
    """Over all parameters together, as torch.nn.utils.clip_grad_norm_ does; a smaller gradient is left as it is."""
    free, clipped = (gradient(split, network(), clip_norm=each) for each in (0.0, norm))
    free.compute(2)
    clipped.compute(2)
    length = float(np.linalg.norm(free.memory.gradients))
    np.testing.assert_allclose(clipped.memory.gradients, free.memory.gradients * min(1.0, norm / length), rtol=1e-4, atol=1e-8)


def test_dropout_is_a_function_of_seed_learner_and_seq(split: Split) -> None:
    """The same mini-batch drops the same units, whatever was computed or drawn before; another name drops others."""
    first = gradient(split, network(0.5))
    losses = [first.compute(seq) for seq in range(4)]
    again = gradient(split, network(0.5))
    torch.rand(17)
    assert [again.compute(seq) for seq in (3, 1, 0, 2)] == [losses[seq] for seq in (3, 1, 0, 2)]
    other = gradient(split, network(0.5), seed=SEED + 1)  # same samples: the sampling has its own seed here
    assert other.compute(0) != losses[0]


def test_forward_alone_leaves_the_gradient(split: Split) -> None:
    """The check before the start computes a loss only."""
    computed = gradient(split, network())
    with torch.no_grad():
        loss = computed.forward(0)
    assert loss.item() == pytest.approx(computed.compute(0))
    assert computed.samples == MU


class Enough(Exception):
    pass


def test_it_can_be_interrupted_between_any_two_layers_and_computed_anew(split: Split) -> None:
    """Five layers forward, four parameters backward: nine places; then the same bits as without."""
    alone = gradient(split, network(dropout=0.5))
    wanted = alone.compute(3), alone.memory.gradients.copy()
    interrupted = gradient(split, network(dropout=0.5))
    left = 0

    def check() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise Enough

    interrupted.interrupt_by(check)
    for place in range(1, 10):
        left = place
        interrupted.prepare(3)
        with pytest.raises(Enough):
            interrupted.compute(3)
    left = 10
    assert interrupted.compute(3) == wanted[0]
    assert left == 1, "nine places"
    assert np.array_equal(interrupted.memory.gradients, wanted[1])


class _OnGpu:
    """A model on a (pretended) GPU whose loss is |weights|^2, with what `Gradient` asks of one; and its loss."""

    requires_grad = True

    def __init__(self) -> None:
        self.weights, self.gradients = (torch.zeros(8, device="cuda:0") for _ in range(2))
        self.memory = Memory(self.weights, self.gradients)
        self.module = self._loss = self

    def inputs(self, batch: torch.Tensor) -> torch.Tensor:
        return batch.to("cuda:0", non_blocking=True)

    def zero_gradients(self, seq: int) -> None:
        self.gradients.zero_()

    overflows = False

    def casting(self) -> nullcontext[None]:
        return nullcontext()

    grad_fn = None

    def parameters(self) -> list[Any]:
        return []

    def untouched(self) -> nullcontext[None]:
        return nullcontext()

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs

    def loss(self, output: torch.Tensor, targets: torch.Tensor) -> _OnGpu:
        assert output.device == targets.device == self.weights.device
        return self

    def take_gradients_back(self) -> None:
        """They never left."""

    def backward(self) -> None:
        self.gradients.add_(self.weights, alpha=2.0)

    def detach(self) -> torch.Tensor:
        return torch.dot(self.weights, self.weights)


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("direct", [True, False])
def test_on_a_gpu_it_waits_once_and_all_is_there(split: Split, direct: bool, late: bool) -> None:
    """MPI is given what it asks nobody about: host memory, or the GPU's own."""
    with pretend_gpu(late) as gpu:
        model: Any = _OnGpu()
        sampling = EpochSampling(len(split), MU, 2, SEED)
        memory = model.memory if direct else model.memory.pinned()
        computed = Gradient(model, model.loss, split, sampling, memory, seed=SEED, learner_id=0)
        assert isinstance(computed.memory.weights, OnGpu if direct else np.ndarray)
        weights, gradients = (np.asarray(held(each)) for each in (computed.memory.weights, computed.memory.gradients))
        generator = np.random.default_rng(1)
        for seq in range(5):
            weights[:] = generator.standard_normal(8, np.float32)
            before = gpu.waits
            assert computed.compute(seq) == pytest.approx(np.dot(weights, weights))
            assert gpu.waits == before + 1
            np.testing.assert_array_equal(gradients, 2 * weights)
            if not direct:  # what is staged may be sent while the next mini-batch is prepared
                computed.prepare(seq + 1)
                np.testing.assert_array_equal(gradients, 2 * weights)


@pytest.mark.parametrize("direct", [True, False])
def test_on_a_gpu_it_is_clipped_and_looked_at(split: Split, direct: bool) -> None:
    with pretend_gpu():
        model: Any = _OnGpu()
        sampling, special = EpochSampling(len(split), MU, 2, SEED), {"clip_norm": 1.0, "tell_nonfinite": True}
        memory = model.memory if direct else model.memory.pinned()
        computed = Gradient(model, model.loss, split, sampling, memory, seed=SEED, learner_id=0, **special)
        weights, gradients = (np.asarray(held(each)) for each in (computed.memory.weights, computed.memory.gradients))
        weights[:] = 3.0
        assert computed.compute(0) == pytest.approx(72.0)
        np.testing.assert_allclose(gradients, np.full(8, 8**-0.5), rtol=1e-5)
        weights[3] = np.nan
        assert np.isnan(computed.compute(1))
        weights[:] = 1.0
        assert computed.compute(2) == pytest.approx(8.0)
