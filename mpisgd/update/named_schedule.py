"""Schedules that others have written: torch's by name, and the user's own function; as functions of what has been applied.

A scheduler of torch is stepped beside an optimiser that has nothing to optimise, of rate 1: what it sets there is the factor. Its
n-th value holds for the update before which n of its steps are over, as in a loop that calls `optimizer.step()` and then
`scheduler.step()`. It ends with the last of the run's steps: what is applied beyond keeps that.
"""

from __future__ import annotations

import inspect
import math
import warnings
from array import array
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import lr_scheduler

from mpisgd.base.errors import ConfigError
from mpisgd.base.imports import load_attribute
from mpisgd.config import CustomScheduleOptions, TorchScheduleOptions
from mpisgd.update.optimizer import without_the_compiler

_ROUNDED = 1e-6
"""Share of a step that counts as none: numbers of epochs are rounded."""


def of_torch(options: TorchScheduleOptions, total: float) -> Callable[[float], float]:
    """The factor as a function of steps of the scheduler, of which the whole run has `total`; both may be fractions.

    Raises ConfigError where it cannot be made with these arguments, or does not last as long as the run; later, where it gives
    no factor.
    """
    steps = max(1, math.ceil(total - _ROUNDED))
    scheduler = _make(options, steps)
    lasts = getattr(scheduler, "total_steps", steps)
    if lasts < steps:
        raise ConfigError(f"schedule.kwargs: {options.scheduler} of {lasts:,} steps: expected at least the run's {steps:,}")
    known = array("d", [_rate(options, scheduler, 0)])

    def factor(passed: float) -> float:
        step = min(math.floor(passed + _ROUNDED), steps - 1)
        while len(known) <= step:
            _step(options, scheduler)
            known.append(_rate(options, scheduler, len(known)))
        return known[step]

    for step in range(min(steps, 3)):
        factor(step)
    return factor


def of_user(options: CustomScheduleOptions, total: float) -> Callable[[float], float]:
    """The factor as a function of what has been applied, in the user's unit, of which the whole run has `total`.

    Raises ConfigError where there is no such function, or it gives no factor: at first for the begin and the end of the run.
    """
    function, whole = load_attribute(options.factory, "schedule.factory"), options.unit != "epochs"

    def factor(applied: float) -> float:
        at = math.floor(applied + _ROUNDED) if whole else applied
        try:
            said = function(at, **options.kwargs)
        except TypeError as error:
            raise ConfigError(f"schedule.factory = {options.factory!r}: called with ({at}, **{options.kwargs}): {error}") from error
        return _checked(said, f"schedule.factory = {options.factory!r}", f"{at} {options.unit}")

    for applied in (0.0, total):
        factor(applied)
    return factor


def _make(options: TorchScheduleOptions, steps: int) -> lr_scheduler.LRScheduler:
    kind = getattr(lr_scheduler, options.scheduler)
    known = inspect.signature(kind).parameters
    given = dict(options.kwargs)
    if "epochs" not in given:
        given = {name: steps for name in ("T_max", "total_steps") if name in known} | given
    offered = {"cycle_momentum": False} | ({"max_lr": 1.0} if "total_steps" in known else {})
    given = {name: value for name, value in offered.items() if name in known} | given
    try:
        with without_the_compiler(), _quietly():
            optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
            made: lr_scheduler.LRScheduler = kind(optimizer, **given)
    except Exception as error:
        raise _refused(options, error) from error
    return made


def _step(options: TorchScheduleOptions, scheduler: lr_scheduler.LRScheduler) -> None:
    try:
        with _quietly():
            scheduler.step()
    except Exception as error:
        raise _refused(options, error) from error


def _quietly() -> warnings.catch_warnings[None]:
    """Torch warns that its optimiser takes no steps: it has none to take."""
    return warnings.catch_warnings(action="ignore")


def _refused(options: TorchScheduleOptions, error: Exception) -> ConfigError:
    return ConfigError(f"schedule.kwargs = {options.kwargs}: {options.scheduler} refuses them: {type(error).__name__}: {error}")


def _rate(options: TorchScheduleOptions, scheduler: lr_scheduler.LRScheduler, step: int) -> float:
    return _checked(scheduler.optimizer.param_groups[0]["lr"], f"schedule.scheduler = {options.scheduler!r}", f"step {step:,}")


def _checked(said: Any, named: str, where: str) -> float:
    try:
        factor = float(said)
    except (TypeError, ValueError):
        factor = math.nan
    if not 0 <= factor < math.inf:
        raise ConfigError(f"{named}: factor {said!r} at {where}; expected a finite number >= 0")
    return factor
