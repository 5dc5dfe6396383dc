"""The global generators of torch, numpy and `random`, seeded by a name: what the user's own code draws from (DESIGN 4, law 5).

A data set that crops at random, a model that drops layers, a factory that shuffles: they draw from these three, and what they draw
must be a function of names, too. Generators that the user's code keeps for itself are out of reach.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch

from mpisgd.base.streams import Domain, stream


class Seeds(NamedTuple):
    """A seed for each generator: torch's and numpy's are the same algorithm, and would draw the same numbers from the same seed."""

    torch: int
    numpy: int
    python: int


def seeds_of(domain: Domain, seed: int, learner_id: int = 0, seq: int = 0, part: int = 0) -> Seeds:
    """The seeds of one name, as `streams.stream` has them."""
    for_torch, for_numpy, for_python = stream(domain, seed, learner_id, seq, part).integers(2**63, size=3).tolist()
    return Seeds(for_torch, for_numpy % 2**32, for_python)


def seed_all(seeds: Seeds) -> None:
    """Seed the three; of torch also the generators of the GPUs, once one is in use.

    As `torch.manual_seed` does, which takes a hundred times as long where there is no GPU.
    """
    torch.default_generator.manual_seed(seeds.torch)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seeds.torch)
    np.random.seed(seeds.numpy)  # noqa: NPY002
    random.seed(seeds.python)


@contextmanager
def seeded(seeds: Seeds) -> Iterator[None]:
    """Draw from the three as seeded so; afterwards, also after an exception, they are in the states that they had."""
    with kept():
        seed_all(seeds)
        yield


@contextmanager
def kept() -> Iterator[None]:
    """Whatever is drawn from the three, and seeded: afterwards they are in the states that they had."""
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    of_gpus = [torch.cuda.get_rng_state(gpu) for gpu in gpus]
    of_torch, of_python = torch.default_generator.get_state(), random.getstate()
    of_numpy = np.random.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002
        torch.default_generator.set_state(of_torch)
        for gpu, state in zip(gpus, of_gpus, strict=True):
            torch.cuda.set_rng_state(state, gpu)
