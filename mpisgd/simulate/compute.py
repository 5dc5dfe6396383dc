"""Compute time of virtual learners: nanoseconds per mini-batch, a function of (seed, learner_id, seq) (law 5).

Numbers are drawn in blocks, each from a stream of `mpisgd.base.streams`. Growing blocks keep 100,000 learners with few
mini-batches cheap; block sizes are part of every seeded run.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, count, repeat

import numpy as np
import numpy.typing as npt

from mpisgd.base.checks import require
from mpisgd.base.errors import DataError, ProtocolError
from mpisgd.base.streams import Domain, stream
from mpisgd.config.config_virtual import (
    ComputeOptions,
    ConstantComputeOptions,
    EmpiricalComputeOptions,
    HeavyTailComputeOptions,
    LognormalComputeOptions,
    NormalComputeOptions,
    VirtualOptions,
)
from mpisgd.records.log.reader import Run

Seconds = npt.NDArray[np.float64]
Draw = Callable[[np.random.Generator, int], Seconds]
"""(generator, size) -> seconds of `size` mini-batches, float64."""

#: Mini-batches of a learner's first blocks; later blocks have the last size.
BLOCKS = (4, 16, 64, 256, 1024)
#: Longest mini-batch (73 years): more nanoseconds would not fit an int64.
_MOST_NS = 2.0**61


class Compute:
    def __init__(self, draws: Sequence[Draw | float], factors: Sequence[float], options: VirtualOptions, seed: int) -> None:
        """`draws[l % len(draws)]` gives learner l's seconds, a number if constant; `factors[l]` multiplies them."""
        self._draws = draws
        self._factors = factors
        self._pause_mean_s = options.pause_mean_s
        self._pause_every_s = options.pause_every_s
        self._seed = seed

    def nanoseconds(self, learner_id: int) -> Iterator[int]:
        """Return an endless iterator over a learner's mini-batches."""
        if not 0 <= learner_id < len(self._factors):
            raise ProtocolError(f"no compute for learner_id = {learner_id}; there are {len(self._factors)} learners")
        draw, factor = self._draws[learner_id % len(self._draws)], self._factors[learner_id]
        if callable(draw):
            working = _endless(Domain.COMPUTE, self._seed, learner_id, _times(draw, factor))
        else:
            working = repeat(int(_whole(np.array(draw * factor))))
        if not self._pause_mean_s:
            return working
        return _with_pauses(working, _endless(Domain.PAUSE, self._seed, learner_id, self._pauses))

    def _pauses(self, generator: np.random.Generator, size: int) -> Seconds:
        """Return work and pause seconds in turn, float64 (2 size,)."""
        return (generator.exponential(size=(size, 2)) * (self._pause_every_s, self._pause_mean_s)).ravel()


def make(options: ComputeOptions, virtual: VirtualOptions, *, seed: int, lambda_: int, nodes: Sequence[int]) -> Compute:
    """Return the compute of `lambda_` learners on `nodes`. Raises ConfigError: no run to resample; DataError: no usable log."""
    if len(nodes) != lambda_:
        raise ProtocolError(f"{len(nodes)} nodes of learners: expected lambda = {lambda_}")
    return Compute(_draws(options, lambda_), [virtual.slow_nodes.get(node, 1.0) for node in nodes], virtual, seed)


# ----------------------------------------------------------------------------------------------------------- the kinds


def _draws(options: ComputeOptions, lambda_: int) -> Sequence[Draw | float]:
    match options:
        case ConstantComputeOptions():
            return [options.mean_s]
        case NormalComputeOptions():
            return [_normal(options)]
        case LognormalComputeOptions():
            return [_lognormal(options.mean_s, options.sigma)]
        case HeavyTailComputeOptions():
            return [_heavy_tail(options)]
        case EmpiricalComputeOptions():
            return [_resampled(seconds) for seconds in _measured(options, lambda_)]


def _normal(options: NormalComputeOptions) -> Draw:
    return lambda generator, size: np.maximum(generator.normal(options.mean_s, options.deviation_s, size), options.mean_s / 10)


def _lognormal(mean_s: float, sigma: float) -> Draw:
    if mean_s == 0:
        return lambda generator, size: np.zeros(size)
    mu = math.log(mean_s) - sigma**2 / 2
    return lambda generator, size: generator.lognormal(mu, sigma, size)


def _heavy_tail(options: HeavyTailComputeOptions) -> Draw:
    body = _lognormal(options.mean_s, options.sigma)

    def draw(generator: np.random.Generator, size: int) -> Seconds:
        seconds = body(generator, size)
        uniform = 1.0 - generator.random(size)  # never 0
        late = np.flatnonzero(uniform <= options.tail_probability)
        # For late mini-batches, uniform / tail_probability is uniform again; the inverse gives the Pareto delay.
        extra = options.tail_scale_s * (options.tail_probability / uniform[late]) ** (1 / options.tail_index)
        seconds[late] += np.minimum(extra, options.tail_most_s)
        return seconds

    return draw


def _resampled(measured: Seconds) -> Draw:
    return lambda generator, size: measured[generator.integers(len(measured), size=size)]


def _measured(options: EmpiricalComputeOptions, lambda_: int) -> list[Seconds]:
    """Return compute seconds in a run's log: of all learners (pooled), or of each.

    Shard 0 has every push. The injected delay_s is left out, as is a learner's first mini-batch, which warms up libraries and
    memory, if others exist. Several mini-batches per push (downpour, own steps, accumulation) count as equal parts.
    """
    require(bool(options.run), "compute.run", options.run, "the directory of a run, to draw compute seconds from")
    run = Run(options.run)
    rows = run.pushes[run.pushes["shard"] == 0]
    if not len(rows):
        raise DataError(f"the log of {run.path} holds no pushes")
    if not (np.isfinite(rows["compute_s"]) & (rows["compute_s"] >= 0)).all():
        raise DataError(f"the log of {run.path} holds negative or non-finite compute seconds")
    rows = rows[np.lexsort((rows["seq"], rows["learner_id"]))]
    cuts = np.flatnonzero(np.diff(rows["learner_id"])) + 1
    parts = run.config["protocol"].get("n_push", 1) * max(1, run.config.get("local_steps", 0)) * run.config.get("accumulation", 1)
    one_s = rows["compute_s"] / parts
    own_s = dict(zip(np.unique(rows["learner_id"]).tolist(), np.split(one_s, cuts), strict=True))
    warm = {learner_id: seconds[1:] if len(seconds) > 1 else seconds for learner_id, seconds in own_s.items()}
    if options.pooled:
        return [np.concatenate(list(warm.values()))]
    for learner_id in range(min(lambda_, run.lambda_)):
        if learner_id not in warm:
            raise DataError(f"the log of {run.path} holds no pushes of learner {learner_id}; compute.pooled = true needs none")
    return [warm[learner_id] for learner_id in range(min(lambda_, run.lambda_))]


# --------------------------------------------------------------------------------------------------- drawing in blocks


def _endless(domain: Domain, seed: int, learner_id: int, draw: Draw) -> Iterator[int]:
    """Chain blocks; `chain` is twice as fast as `yield from`."""
    return chain.from_iterable(_blocks(domain, seed, learner_id, draw))


def _blocks(domain: Domain, seed: int, learner_id: int, draw: Draw) -> Iterator[array[int]]:
    """Yield arrays of 8 bytes per number (lists: 40), for 100,000 learners."""
    for block in count():
        size = BLOCKS[min(block, len(BLOCKS) - 1)]
        yield array("q", _whole(draw(stream(domain, seed, learner_id, block), size)).tobytes())


def _whole(seconds: Seconds) -> npt.NDArray[np.int64]:
    return np.rint(np.minimum(seconds * 1e9, _MOST_NS)).astype(np.int64)


def _times(draw: Draw, factor: float) -> Draw:
    return draw if factor == 1.0 else lambda generator, size: factor * draw(generator, size)


def _with_pauses(working: Iterator[int], pauses: Iterator[int]) -> Iterator[int]:
    """Lengthen mini-batches by the pauses in them."""
    left = next(pauses)
    for nanoseconds in working:
        left -= nanoseconds
        paused = 0
        while left < 0:
            paused += next(pauses)
            left += next(pauses)
        yield nanoseconds + paused
