"""Random inputs with learnable classes: a mean per class, and noise. For timing and tests."""

from __future__ import annotations

import math

import numpy as np
import torch

from mpisgd.base.errors import ConfigError
from mpisgd.base.streams import Domain, stream
from mpisgd.config import SyntheticOptions
from mpisgd.data.dataset import DataSet, Split, make_dataset

#: Least deviation of class means per element, at noise 1; in few dimensions the norm decides: means lie about six standard
#: deviations of the noise apart, for an error of 1 or 2 %.
_LEAST_SPREAD = 0.25
_LEAST_NORM = 4.0


def load(options: SyntheticOptions, seed: int) -> DataSet:
    """Return inputs float32 (*options.shape), a function of (options, seed); classes are balanced within one sample."""
    size = math.prod(options.shape)
    means = stream(Domain.SYNTHETIC, seed).standard_normal((options.classes, size), dtype=np.float32)
    means *= max(_LEAST_SPREAD, _LEAST_NORM / math.sqrt(size))
    train = _split(options, means, seed, 1, options.samples)
    test = _split(options, means, seed, 2, options.test_samples)
    return make_dataset("synthetic", train, test, ConfigError)


def _split(options: SyntheticOptions, means: np.typing.NDArray[np.float32], seed: int, part: int, samples: int) -> Split:
    generator = stream(Domain.SYNTHETIC, seed, part)
    targets = np.arange(samples, dtype=np.int64) % options.classes
    inputs = generator.standard_normal((samples, means.shape[1]), dtype=np.float32)
    inputs += means[targets]
    return Split(torch.from_numpy(inputs).reshape(samples, *options.shape), torch.from_numpy(targets))
