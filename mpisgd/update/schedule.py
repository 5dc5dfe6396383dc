"""Learning-rate schedules, driven by samples applied: protocols stay comparable.

A schedule maps `epochs` = samples applied / training samples to the next update's factor of alpha0; an update counts as its usual
samples. A torch scheduler steps beside an idle optimiser of rate 1. Its n-th rate holds for the update after n steps, the last
beyond the run's end.
"""

from __future__ import annotations

import inspect
import math
import warnings
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import lr_scheduler

from mpisgd.base.errors import ConfigError
from mpisgd.base.imports import load_attribute
from mpisgd.config import (
    Config,
    CustomScheduleOptions,
    ExponentialOptions,
    LinearOptions,
    ScheduleOptions,
    StepOptions,
    TorchScheduleOptions,
)
from mpisgd.update.optimizer import without_the_compiler

Schedule = Callable[[float], float]

_ROUNDED = 1e-6
"""Tolerance in steps: epochs are rounded."""
_MOST_STEPS = 10_000_000
"""Most steps of a torch scheduler: a minute of Python, and 80 MB."""


def make(options: ScheduleOptions, total_epochs: float, update_epochs: float = 0.0, sample_epochs: float = 0.0) -> Schedule:
    """Return the factor of alpha0 as a function of epochs. Raises ConfigError for an invalid scheduler."""
    units = {"epochs": 1.0, "updates": update_epochs, "samples": sample_epochs}
    warmup = max(options.warmup_epochs, options.warmup_updates * update_epochs, options.warmup_samples * sample_epochs)
    after = _after_warm_up(options, total_epochs, units)

    def factor(epochs: float) -> float:
        value = after(epochs)
        # a warm-up of k updates takes 1/k, 2/k ... 1 of the rate: from 0 the first update would do nothing
        return value * min(1.0, (epochs + update_epochs) / warmup) if warmup > 0 else value

    return factor


def of_run(config: Config, gradients_per_update: float, train_samples: int) -> Schedule:
    """Return the shards' schedule: constant where inner steps have theirs (`of_inner_steps`) [DiLoCo 3]."""
    if config.local_steps:
        return lambda epochs: 1.0
    update_epochs = samples_per_update(config, gradients_per_update) / train_samples
    return make(config.schedule, config.epochs, update_epochs, 1 / train_samples)


def momentum_of_run(config: Config, gradients_per_update: float, train_samples: int) -> Schedule | None:
    """Return momentum, or Adam's beta1, over epochs; None unless the scheduler cycles it."""
    options = config.schedule
    if not isinstance(options, TorchScheduleOptions) or not options.cycles_momentum or config.local_steps:
        return None
    units = {
        "epochs": 1.0,
        "updates": samples_per_update(config, gradients_per_update) / train_samples,
        "samples": 1 / train_samples,
    }
    step = options.every * units[options.unit]
    momentum = _of_torch(options, config.epochs / step, "momentum")
    return lambda epochs: momentum(epochs / step)


def of_inner_steps(config: Config, gradients_per_update: float, train_samples: int) -> Callable[[int, int], float]:
    """Return the rate of a learner's own step k, from 0, at weights of a clock [DiLoCo 3].

    Samples count as if all learners of an update were at step k.
    """
    step_epochs = gradients_per_update * config.accumulation * config.mu / train_samples
    factor = make(config.schedule, config.epochs, step_epochs, 1 / train_samples)
    return lambda clock, place: config.inner_alpha0 * factor((clock * config.local_steps + place) * step_epochs)


def samples_per_update(config: Config, gradients_per_update: float) -> float:
    """Return the usual number of samples per update; in teams, of all ranks."""
    return gradients_per_update * config.mini_batches_per_push * config.mu


def _after_warm_up(options: ScheduleOptions, total_epochs: float, units: Mapping[str, float]) -> Schedule:
    match options:
        case TorchScheduleOptions(unit=unit, every=every):
            step = every * units[unit]
            factor = _of_torch(options, total_epochs / step)
            return lambda epochs: factor(epochs / step)
        case CustomScheduleOptions(unit=unit):
            step = units[unit]
            factor = _of_user(options, total_epochs / step)
            return lambda epochs: factor(epochs / step)
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


def _of_torch(options: TorchScheduleOptions, total: float, what: str = "lr") -> Schedule:
    """Return the factor or momentum over `total` scheduler steps; both steps and total may be fractions.

    Raises ConfigError if torch refuses the arguments or the scheduler ends before the run; later, if a value is no factor.
    """
    steps = max(1, math.ceil(total - _ROUNDED))
    if steps > _MOST_STEPS:
        expected = f"a number >= {options.every * steps / _MOST_STEPS:.3g}, for at most {_MOST_STEPS:,} steps in the run"
        raise ConfigError(f"schedule.every = {options.every}: {steps:,} steps of {options.scheduler}; expected {expected}")
    with _answering_for(options):
        scheduler = _made(options, steps)
    lasts = getattr(scheduler, "total_steps", steps)
    if lasts < steps:
        raise ConfigError(f"schedule.kwargs: {options.scheduler} of {lasts:,} steps: expected at least the run's {steps:,}")
    known = array("d")

    def know_next() -> None:
        if known:
            scheduler.step()
        rate = scheduler.optimizer.param_groups[0][what]
        known.append(_checked(rate, f"schedule.scheduler = {options.scheduler!r}", f"step {len(known):,}"))

    def factor(passed: float) -> float:
        step = min(math.floor(passed + _ROUNDED), steps - 1)
        if len(known) <= step:
            with _answering_for(options):
                while len(known) <= step:
                    know_next()
        return known[step]

    for step in range(min(steps, 3)):
        factor(step)
    return factor


def _made(options: TorchScheduleOptions, steps: int) -> lr_scheduler.LRScheduler:
    kind = getattr(lr_scheduler, options.scheduler)
    offered = {"T_max": steps, "total_steps": steps, "max_lr": 1.0}
    if "epochs" in options.kwargs:  # OneCycleLR's other way to its length
        del offered["total_steps"]
    taken = inspect.signature(kind).parameters
    with without_the_compiler():
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0, momentum=0.9)
    made: lr_scheduler.LRScheduler = kind(optimizer, **{name: offered[name] for name in offered if name in taken} | options.kwargs)
    return made


@contextmanager
def _answering_for(options: TorchScheduleOptions) -> Iterator[None]:
    """Report torch's errors as the arguments'; silence its warning about an idle optimiser."""
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    except ConfigError:
        raise
    except Exception as error:
        refused = f"{options.scheduler} refuses these arguments: {type(error).__name__}: {error}"
        raise ConfigError(f"schedule.kwargs = {options.kwargs}: {refused}") from error


def _of_user(options: CustomScheduleOptions, total: float) -> Schedule:
    """Return the user's factor over applied samples, in the user's unit; `total`: the run's end.

    Raises ConfigError if the function is missing, raises, or returns no factor; begin and end are tried at once.
    """
    named = f"schedule.factory = {options.factory!r}"
    function, whole = load_attribute(options.factory, "schedule.factory"), options.unit != "epochs"

    def factor(applied: float) -> float:
        at = math.floor(applied + _ROUNDED) if whole else applied
        try:
            said = function(at, **options.kwargs)
        except Exception as error:
            called = f"called with ({at}, **{options.kwargs})"
            raise ConfigError(f"{named}: {called} the function raised {type(error).__name__}: {error}") from error
        return _checked(said, named, f"{at} {options.unit}")

    for applied in (0.0, total):
        factor(applied)
    return factor


def _checked(said: Any, named: str, where: str) -> float:
    """Return a finite factor >= 0, or raise ConfigError."""
    try:
        factor = float(said)
    except (TypeError, ValueError):
        factor = math.nan
    if not 0 <= factor < math.inf:
        raise ConfigError(f"{named}: factor {said!r} at {where}; expected a finite number >= 0")
    return factor
