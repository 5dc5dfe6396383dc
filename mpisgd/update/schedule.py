"""Learning-rate schedules, driven by samples applied, so that protocols are comparable.

A schedule is a function of `epochs` = samples applied / training samples, giving the factor of alpha0 in the next update. Updates
are counted as so many samples as normally make one.

A scheduler of torch is stepped beside an optimiser that has nothing to optimise, of rate 1: what it sets there is the factor. Its
n-th value holds for the update before which n of its steps are over, as in a loop that calls `optimizer.step()` and then
`scheduler.step()`. It ends with the last of the run's steps: what is applied beyond keeps that.
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
"""Share of a step that counts as none: numbers of epochs are rounded."""
_MOST_STEPS = 10_000_000
"""Of a scheduler of torch in one run: a minute of Python, and 80 MB."""


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


def momentum_of_run(config: Config, gradients_per_update: float, train_samples: int) -> Schedule | None:
    """The momentum, or Adam's beta1, as a function of epochs, where the scheduler cycles it; None where it stays."""
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
    """The rate of the k-th own step, k from 0, that a learner takes from weights of a clock [DiLoCo 3].

    Samples are counted as if all learners that make an update were at the same step: those of `clock` updates, and of k steps.
    """
    step_epochs = gradients_per_update * config.accumulation * config.mu / train_samples
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
    """The factor, or the momentum, as a function of steps of the scheduler, of which the run has `total`; both may be fractions.

    Raises ConfigError where it cannot be made with these arguments, or does not last as long as the run; later, where it gives
    no factor.
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
    if "epochs" in options.kwargs:  # the other way to tell OneCycleLR its length
        del offered["total_steps"]
    taken = inspect.signature(kind).parameters
    with without_the_compiler():
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0, momentum=0.9)
    made: lr_scheduler.LRScheduler = kind(optimizer, **{name: offered[name] for name in offered if name in taken} | options.kwargs)
    return made


@contextmanager
def _answering_for(options: TorchScheduleOptions) -> Iterator[None]:
    """Say of its arguments what torch raises; let it not warn that its optimiser takes no steps: it has none to take."""
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    except ConfigError:
        raise
    except Exception as error:
        refused = f"{options.scheduler} refuses them: {type(error).__name__}: {error}"
        raise ConfigError(f"schedule.kwargs = {options.kwargs}: {refused}") from error


def _of_user(options: CustomScheduleOptions, total: float) -> Schedule:
    """The factor as a function of what has been applied, in the user's unit, of which the whole run has `total`.

    Raises ConfigError where there is no such function, it raises, or it gives no factor: at first for the begin and the end of the
    run.
    """
    named = f"schedule.factory = {options.factory!r}"
    function, whole = load_attribute(options.factory, "schedule.factory"), options.unit != "epochs"

    def factor(applied: float) -> float:
        at = math.floor(applied + _ROUNDED) if whole else applied
        try:
            said = function(at, **options.kwargs)
        except Exception as error:
            called = f"called with ({at}, **{options.kwargs})"
            raise ConfigError(f"{named}: {called} it raised {type(error).__name__}: {error}") from error
        return _checked(said, named, f"{at} {options.unit}")

    for applied in (0.0, total):
        factor(applied)
    return factor


def _checked(said: Any, named: str, where: str) -> float:
    """Raises ConfigError where what was said is no factor."""
    try:
        factor = float(said)
    except (TypeError, ValueError):
        factor = math.nan
    if not 0 <= factor < math.inf:
        raise ConfigError(f"{named}: factor {said!r} at {where}; expected a finite number >= 0")
    return factor
