"""The objective: a loss of (output, target), or the user's own step of (model, batch)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor, nn

from mpisgd.base.errors import ConfigError

Loss = Callable[[Any, Any], Tensor]

_NAME = re.compile(r"[\w.,/@%()+-]+( [\w.,/@%()+-]+)*")  # for log columns and Markdown tables


@dataclass(frozen=True)
class OwnStep:
    """The user's step: `function(model, batch)` returns a scalar tensor, or a mapping of `loss` and metrics.

    `batch` is a pair (inputs, targets) for tensors in memory, collated samples for a Dataset.
    """

    function: Callable[[nn.Module, Any], Any]

    def loss(self, module: nn.Module, batch: Any) -> Tensor:
        return scalar(self._returned(module, batch)["loss"], "step")

    def measured(self, module: nn.Module, batch: Any) -> tuple[float, dict[str, float]]:
        returned = self._returned(module, batch)
        metrics = {_named(name): _number(value, name) for name, value in returned.items() if name != "loss"}
        return scalar(returned["loss"], "step").item(), metrics

    def _returned(self, module: nn.Module, batch: Any) -> Mapping[str, Any]:
        returned = self.function(module, batch)
        if not isinstance(returned, Mapping):
            return {"loss": returned}
        if "loss" not in returned:
            keys = ", ".join(map(repr, returned)) or "nothing"
            raise ConfigError(f"step: returned a mapping of {keys}, expected a scalar tensor under 'loss'")
        return returned


Objective = Loss | OwnStep


def function_of(objective: Objective) -> Callable[..., Any]:
    return objective.function if isinstance(objective, OwnStep) else objective


def scalar(loss: Any, who: str) -> Tensor:
    """Return the loss. Raises ConfigError: no real scalar tensor."""
    if not isinstance(loss, Tensor) or loss.is_complex():
        found = f"a tensor of {loss.dtype}" if isinstance(loss, Tensor) else described(loss)
        raise ConfigError(f"{who}: returned {found}, expected a scalar tensor that autograd can differentiate")
    if loss.numel() != 1:
        raise ConfigError(f"{who}: expected a scalar, got shape {tuple(loss.shape)}")
    return loss


def described(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)} ({', '.join(type(each).__name__ for each in value[:4])})"
    return f"{type(value).__name__} {value!r}" if isinstance(value, int | float | str) else f"{type(value).__name__}"


def _named(name: Any) -> str:
    if isinstance(name, str) and _NAME.fullmatch(name):
        return name
    raise ConfigError(f"step: metric {name!r} has no name for a column: expected letters, digits, blanks and . , / @ % ( ) + -")


def _number(value: Any, name: str) -> float:
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value.detach())
    if isinstance(value, Real | np.bool_):
        return float(value)
    found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else described(value)
    raise ConfigError(f"step: metric {name!r} is {found}, expected a number: the mean over the batch")
