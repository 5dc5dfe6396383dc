"""Injected stragglers: slow learners, random delays, pauses; reproducible from the seed."""

from __future__ import annotations

import math

import numpy as np

from mpisgd.base.streams import Domain, stream
from mpisgd.config import StragglerOptions


class Delays:
    """Extra delays of a learner: a function of (seed, learner_id, number) and compute seconds."""

    def __init__(self, options: StragglerOptions, seed: int, learner_id: int) -> None:
        self._options = options
        self._seed = seed
        self._learner_id = learner_id
        self._active = options.active
        self._factor = options.slowdown.get(learner_id, 1.0)

    def of(self, number: int, compute_s: float) -> float:
        """Return the seconds to wait after computation `number`, of `compute_s` seconds.

        `number` also counts repeats, lest a late mini-batch be given up forever.
        """
        if not self._active:
            return 0.0
        options = self._options
        delay_s = self._random(number)
        delay_s += (self._factor - 1.0) * (compute_s + delay_s)
        if self._learner_id == options.pause_learner and number % options.pause_every == options.pause_every - 1:
            delay_s += options.pause_s
        if options.rest_mean_s > 0:
            delay_s += self._rest(number)
        return delay_s

    def _rest(self, number: int) -> float:
        mean_s, deviation_s = self._options.rest_mean_s, self._options.rest_deviation_s
        if deviation_s == 0:
            return mean_s
        variance = math.log1p((deviation_s / mean_s) ** 2)
        generator = stream(Domain.REST, self._seed, self._learner_id, number)
        return mean_s * float(generator.lognormal(-variance / 2.0, math.sqrt(variance)))

    def _random(self, number: int) -> float:
        options = self._options
        if options.delay == "none":
            return 0.0
        generator = stream(Domain.DELAY, self._seed, self._learner_id, number)
        if generator.random() >= options.delay_probability:
            return 0.0
        return max(0.0, options.delay_mean_s * _unit(generator, options))


NO_DELAYS = Delays(StragglerOptions(), seed=0, learner_id=0)


def _unit(generator: np.random.Generator, options: StragglerOptions) -> float:
    """Draw with mean 1."""
    spread = options.delay_spread
    match options.delay:
        case "normal":
            return float(generator.normal(1.0, spread))
        case "exponential":
            return float(generator.exponential())
        case "lognormal":
            return float(generator.lognormal(-spread * spread / 2.0, spread))
        case "pareto":  # Lomax: heavy tail of index `spread`, mean 1 / (spread - 1)
            return float(generator.pareto(spread) * (spread - 1.0))
    return 1.0
