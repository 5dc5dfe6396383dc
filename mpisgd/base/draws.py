"""Named seeds for the global generators of torch, numpy and `random` (DESIGN 4, law 5).

User code draws from these; generators of its own are out of reach.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import numpy as np
import torch

from mpisgd.base.streams import Domain, stream


class Seeds(NamedTuple):
    """A seed per generator. torch and numpy share an algorithm: equal seeds would give equal draws."""

    torch: int
    numpy: int
    python: int


def seeds_of(domain: Domain, seed: int, learner_id: int = 0, seq: int = 0, part: int = 0) -> Seeds:
    for_torch, for_numpy, for_python = stream(domain, seed, learner_id, seq, part).integers(2**63, size=3).tolist()
    return Seeds(for_torch, for_numpy % 2**32, for_python)


def seed_all(seeds: Seeds) -> None:
    """Seed all three generators, and those of GPUs in use.

    `torch.manual_seed` takes a hundred times as long without a GPU.
    """
    torch.default_generator.manual_seed(seeds.torch)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seeds.torch)
    np.random.seed(seeds.numpy)  # noqa: NPY002
    random.seed(seeds.python)


@contextmanager
def seeded(seeds: Seeds) -> Iterator[None]:
    """Seed all three generators for this block; restore their states afterwards."""
    with kept():
        seed_all(seeds)
        yield


@contextmanager
def kept() -> Iterator[None]:
    """Restore the states of all three generators after this block."""
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


def exact_kernels() -> None:
    """Let a GPU compute the same bits each time, in float32."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.benchmark = False


@contextmanager
def as_in_the_run(threads: int, *, exact: bool = False) -> Iterator[None]:
    """Use this number of torch threads (last bits depend on it), and `exact_kernels`; finally restore torch and generators."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with kept(), _exactly() if exact else nullcontext():
            yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _exactly() -> Iterator[None]:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark
    chosen, warn_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    exact_kernels()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(chosen, warn_only=warn_only)
        cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark = before
