"""The averaged gradient of an update is clipped as torch clips it: of the whole model, or of each slice by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mpisgd.config import AdamwOptions, OptimizerOptions, SgdOptions
from mpisgd.update.slice_update import SliceUpdate
from mpisgd.vectors import chunks
from mpisgd.vectors.flat import slice_bounds
from tests.unit.update.give import give

SIZE, RATE = 600, 0.1
WEIGHTS = (1.0, 0.5, 0.25)
TORCHS: dict[OptimizerOptions, Any] = {
    SgdOptions(momentum=0.9): lambda them: torch.optim.SGD(them, lr=RATE, momentum=0.9),
    AdamwOptions(weight_decay=0.1): lambda them: torch.optim.AdamW(them, lr=RATE, weight_decay=0.1),
}


def given() -> tuple[torch.Tensor, torch.Tensor]:
    """Weights, and three gradients for each of five updates: the norm of their mean is around 25, and once around 0.25."""
    generator = torch.Generator().manual_seed(3)
    weights, gradients = torch.randn(SIZE, generator=generator), torch.randn(5, 3, SIZE, generator=generator)
    gradients[:, :, : SIZE // 3] *= 5.0
    gradients[3] *= 0.01
    return weights, gradients


def updated(options: OptimizerOptions, norm: float, shards: int = 1, *, chunked: bool = False) -> torch.Tensor:
    weights, gradients = given()
    slices = []
    for start, stop in slice_bounds(SIZE, shards):
        fields: dict[str, Any] = {"learning_rate": RATE, "schedule": lambda _: 1.0, "train_samples": 1, "clip_average": norm}
        update = SliceUpdate(weights[start:stop].clone(), options, **fields)
        for summed in gradients:
            for place, (gradient, weight) in enumerate(zip(summed, WEIGHTS, strict=True)):
                give(update, gradient[start:stop].numpy(), weight, samples=1, last=chunked and place == 2)
            if chunked:
                update.begin_step()
                assert update.made.gradients == 3, "the divisor that is told"
                assert len(list(update.chunks())) > 1
            else:
                assert update.step().gradients == 3
        slices.append(update.weights)
    return torch.cat(slices)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("options", TORCHS, ids=lambda options: type(options).__name__)
@pytest.mark.parametrize("norm", [2.0, 1e6])
def test_it_is_clip_grad_norm_of_the_average(norm: float, options: OptimizerOptions, shards: int) -> None:
    """Of three slices: of each slice's own part."""
    weights, gradients = given()
    sizes = [stop - start for start, stop in slice_bounds(SIZE, shards)]
    parameters = [torch.nn.Parameter(part.clone()) for part in weights.split(sizes)]
    optimizer = TORCHS[options](parameters)
    clipped = []
    for summed in gradients:
        mean = sum(weight * gradient for weight, gradient in zip(WEIGHTS, summed, strict=True)) / 3
        for parameter, part in zip(parameters, mean.split(sizes), strict=True):
            parameter.grad = part.clone()
            clipped.append(bool(torch.nn.utils.clip_grad_norm_([parameter], norm) > norm))
        optimizer.step()
    assert any(clipped) == (norm == 2.0) and not all(clipped)
    expected = torch.cat([parameter.detach() for parameter in parameters])
    torch.testing.assert_close(updated(options, norm, shards), expected, rtol=1e-5, atol=1e-6)


def test_chunk_by_chunk_the_whole_slice_is_clipped(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = updated(SgdOptions(), 2.0)
    monkeypatch.setattr(chunks, "CHUNK_NBYTES", 4 * 64)
    assert torch.equal(updated(SgdOptions(), 2.0, chunked=True), whole)


def test_what_is_not_finite_is_seen_all_the_same() -> None:
    for bad in (float("nan"), float("inf")):
        update = SliceUpdate(
            torch.ones(9), SgdOptions(), learning_rate=RATE, schedule=lambda _: 1.0, train_samples=1, clip_average=1.0
        )
        update.checks_sums, update.cached = True, False  # as of a large slice, whose gradients are looked at in the sum
        give(update, [1.0] * 4 + [bad] + [1.0] * 4)
        update.step()
        assert not update.sum_is_finite()
