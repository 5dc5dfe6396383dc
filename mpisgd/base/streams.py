"""Randomness as a function of names: counter-based generators keyed by (domain, seed, learner_id, seq, part) (DESIGN 4, law 5).

Philox4x64's key is (seed, domain); its counter has words for draws, part, learner_id and seq: streams never share a block. No torch
import: the virtual cluster uses these streams, too.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.random.bit_generator import ISeedSequence

from mpisgd.base.errors import ConfigError, ProtocolError

_WORD = 2**64


class Domain(IntEnum):
    """Purposes of streams. Values are part of every seeded run: never renumber."""

    EPOCH = 1
    REPLACEMENT = 2
    DROPOUT = 3
    DELAY = 4
    SYNTHETIC = 5
    COMPUTE = 6
    PAUSE = 7
    FAILURE = 8
    SAMPLES = 9
    EVALUATION = 10
    DATA = 11
    MODEL = 12
    ALIKE = 13
    RECALIBRATION = 14
    REST = 15
    OWN = 16
    ASIDE = 17


class _Key(ISeedSequence):
    """A Philox key. `Philox(key=...)` gives the same numbers, after asking the system for a seed in vain."""

    def __init__(self, key: npt.NDArray[np.uint64]) -> None:
        self._key = key

    def generate_state(self, n_words: int, dtype: npt.DTypeLike = np.uint32) -> npt.NDArray[np.uint64]:
        return self._key


def stream(domain: Domain, seed: int, learner_id: int = 0, seq: int = 0, part: int = 0) -> np.random.Generator:
    """Return the generator of a name. `part`: stage or micro-batch with its own draws.

    Raises ConfigError for a seed, ProtocolError for a learner_id or seq, outside [0, 2^64).
    """
    if not 0 <= seed < _WORD:
        raise ConfigError(f"seed = {seed}: expected 0 <= seed < 2^64")
    if not (0 <= learner_id < _WORD and 0 <= seq < _WORD):
        raise ProtocolError(f"no random stream for learner_id = {learner_id}, seq = {seq}: expected numbers from 0")
    key: Any = _Key(np.array([seed, domain], dtype=np.uint64))  # Any: numpy's types know only SeedSequence
    counter = np.array([0, part, learner_id, seq], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key, counter=counter))
