"""Learning-rate schedules, driven by samples applied, so that protocols are comparable.

A schedule is a function of `epochs` = samples applied / training samples, giving the factor of alpha0 in the next update. Updates
are counted as so many samples as normally make one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mpisgd.config import (
    Config,
    CustomScheduleOptions,
    ExponentialOptions,
    LinearOptions,
    ScheduleOptions,
    StepOptions,
    TorchScheduleOptions,
)
from mpisgd.update import named_schedule

Schedule = Callable[[float], float]


def make(options: ScheduleOptions, total_epochs: float, update_epochs: float = 0.0, sample_epochs: float = 0.0) -> Schedule:
    """The factor of alpha0 as a function of epochs.

    Args:
        total_epochs: length of the run.
        update_epochs: of the samples of one update. A warm-up of k updates gives them 1/k, 2/k ... 1 of the rate: counts its own
            samples, too, for from 0 the first update would do nothing.
        sample_epochs: of one sample.

    Raises ConfigError where torch's scheduler, or the user's, is none.
    """
    units = {"epochs": 1.0, "updates": update_epochs, "samples": sample_epochs}
    warmup = max(options.warmup_epochs, options.warmup_updates * update_epochs, options.warmup_samples * sample_epochs)
    after = _after_warm_up(options, total_epochs, units)

    def factor(epochs: float) -> float:
        value = after(epochs)
        return value * min(1.0, (epochs + update_epochs) / warmup) if warmup > 0 else value

    return factor


def of_run(config: Config, gradients_per_update: float, train_samples: int) -> Schedule:
    """The schedule of a run's shards, so many gradients of which normally make one update; where learners take inner steps, the
    schedule is theirs (`of_inner_steps`), and the shards' is constant [DiLoCo 3]."""
    if config.local_steps:
        return lambda epochs: 1.0
    update_epochs = samples_per_update(config, gradients_per_update) / train_samples
    return make(config.schedule, config.epochs, update_epochs, 1 / train_samples)


def of_inner_steps(config: Config, gradients_per_update: float, train_samples: int) -> Callable[[int, int], float]:
    """The rate of the k-th own step of a learner from weights of a clock, k from 0: as if all took it at once."""
    step_epochs = gradients_per_update * config.mu / train_samples
    factor = make(config.schedule, config.epochs, step_epochs, 1 / train_samples)
    return lambda clock, place: config.inner_alpha0 * factor((clock * config.local_steps + place) * step_epochs)


def samples_per_update(config: Config, gradients_per_update: float) -> float:
    """Number of samples that normally make one update; in teams, of all ranks."""
    return gradients_per_update * config.mini_batches_per_push * config.mu


def _after_warm_up(options: ScheduleOptions, total_epochs: float, units: Mapping[str, float]) -> Schedule:
    """The factor as if nothing was warmed up; `units`: the epochs of each."""
    match options:
        case TorchScheduleOptions(unit=unit, every=every):
            step = every * units[unit]
            of_torch = named_schedule.of_torch(options, total_epochs / step)
            return lambda epochs: of_torch(epochs / step)
        case CustomScheduleOptions(unit=unit):
            size = units[unit]
            of_user = named_schedule.of_user(options, total_epochs / size)
            return lambda epochs: of_user(epochs / size)
        case _:
            return lambda epochs: _factor(options, epochs, total_epochs)


def _factor(options: ScheduleOptions, epochs: float, total_epochs: float) -> float:
    match options:
        case StepOptions(epochs=boundaries, factor=factor):  # [Zhang16 4.1]
            return float(factor ** sum(epochs >= boundary for boundary in boundaries))
        case ExponentialOptions(beta=beta, every_epochs=every):  # [Chen16 A.2]: gamma0 * beta^(t N / 2T)
            return float(beta ** (epochs / every))
        case LinearOptions(start_epochs=start, end=end):  # [Chen16 A.1]: start 15 of 25 epochs
            if epochs <= start:
                return 1.0
            return 1.0 - (1.0 - end) * min(1.0, (epochs - start) / max(total_epochs - start, 1e-9))
        case _:
            return 1.0
