"""Diverged is what is not finite, or far above its start for long; whatever size and sign the losses have."""

from __future__ import annotations

import numpy as np
import pytest

from mpisgd.serving.divergence import has_diverged


def noisy(start: float, end: float, size: int = 400, noise: float = 0.1) -> np.ndarray:
    """From one to the other along a line, with noise."""
    return np.linspace(start, end, size) + noise * np.random.default_rng(1).normal(size=size)


def skewed(typical: float, size: int) -> np.ndarray:
    """As of a network that is trained: most mini-batches have hardly any loss, a few a large one."""
    return typical * np.random.default_rng(1).lognormal(sigma=2.0, size=size)


FINITE = {
    "falls by little": noisy(2.30, 2.29),
    "rises by little": noisy(2.30, 2.40),
    "stuck at chance": np.concatenate([noisy(1.0, 1.0, 8), noisy(2.3, 2.3)]),
    "twice as large": noisy(1.0, 2.0),
    "a fine-tune that makes it worse": np.concatenate([skewed(0.01, 200), skewed(0.03, 200)]),
    "negative, falling": noisy(-1.0, -50.0),
    "negative, rising by little": noisy(-50.0, -45.0),
    "from above 0 to below": noisy(0.5, -3.0),
    "near 0": noisy(0.0, 0.05),
    "all 0": np.zeros(400),
    "from nothing to next to nothing": np.concatenate([np.zeros(8), np.full(392, 1e-9)]),
    "large for a while": np.concatenate([noisy(2.3, 2.3, 200), np.full(50, 1e6), noisy(1.0, 1.0, 150)]),
    "large only at the end": np.concatenate([noisy(2.3, 2.3, 380), np.full(20, 1e6)]),
    "too few to tell": np.array([2.3] * 8 + [100.0] * 10),
    "none": np.empty(0),
}
DIVERGED = {
    "NaN at last": np.append(noisy(2.3, 1.0), np.nan),
    "infinite for once": np.insert(noisy(2.3, 1.0), 100, np.inf),
    "ten times as large": np.concatenate([noisy(2.3, 2.3, 200), noisy(23.0, 23.0, 200)]),
    "larger and larger": 2.3 * 1.05 ** np.arange(400),
    "from below 0": np.concatenate([noisy(-1.0, -1.0, 200), noisy(30.0, 30.0, 200)]),
    "up and down, far above": np.concatenate([noisy(2.3, 2.3, 8), skewed(1e4, 392)]),
}


@pytest.mark.parametrize("name", FINITE)
def test_what_is_finite_and_near_its_start_has_not_diverged(name: str) -> None:
    assert not has_diverged(FINITE[name])


@pytest.mark.parametrize("name", DIVERGED)
def test_what_is_not_has(name: str) -> None:
    assert has_diverged(DIVERGED[name])


@pytest.mark.parametrize("scale", [1e-6, 1e6])
@pytest.mark.parametrize("name", [*FINITE, *DIVERGED])
def test_units_of_the_loss_do_not_matter(name: str, scale: float) -> None:
    losses = (FINITE | DIVERGED)[name]
    assert has_diverged(scale * losses) == (name in DIVERGED)
