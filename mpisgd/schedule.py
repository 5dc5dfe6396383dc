"""Learning-rate schedules, driven by samples applied, so that protocols are comparable.

A schedule is a function of `epochs` = samples applied / training samples, giving the factor of alpha0.
"""

from __future__ import annotations

from collections.abc import Callable

from mpisgd.config import ConstantOptions, ExponentialOptions, LinearOptions, ScheduleOptions, StepOptions

Schedule = Callable[[float], float]


def make(options: ScheduleOptions, total_epochs: float) -> Schedule:
    """The factor of alpha0 as a function of epochs; `total_epochs` is the length of the run."""
    warmup = options.warmup_epochs

    def factor(epochs: float) -> float:
        value = _factor(options, epochs, total_epochs)
        return value * min(1.0, epochs / warmup) if warmup > 0 else value

    return factor


def _factor(options: ScheduleOptions, epochs: float, total_epochs: float) -> float:
    match options:
        case ConstantOptions():
            return 1.0
        case StepOptions(epochs=boundaries, factor=factor):  # [Zhang16 4.1]
            return float(factor ** sum(epochs >= boundary for boundary in boundaries))
        case ExponentialOptions(beta=beta, every_epochs=every):  # [Chen16 4.1]: gamma0 * beta^(t N / 2T)
            return float(beta ** (epochs / every))
        case LinearOptions(end=end):  # [Chen16 A.1]
            return 1.0 - (1.0 - end) * min(1.0, epochs / total_epochs)
