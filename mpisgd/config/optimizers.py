"""Options of the shards' optimiser and the schedule: a frozen dataclass per kind."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mpisgd.base.checks import at_least, below_one, require


@dataclass(frozen=True)
class SgdOptions:
    """torch.optim.SGD on each shard's slice."""

    momentum: float = 0.0
    """Momentum factor m of v <- m v + g [Zhang16 4.1: 0.9]."""
    nesterov: bool = False
    """Use Nesterov momentum."""
    weight_decay: float = 0.0
    """L2 penalty in the gradient."""

    def __post_init__(self) -> None:
        at_least(self, "optimizer.", momentum=0, weight_decay=0)
        below_one(self, "optimizer.", "momentum")
        require(not self.nesterov or self.momentum > 0, "optimizer.nesterov", True, "momentum > 0 beside nesterov")


@dataclass(frozen=True)
class AdagradOptions:
    """torch.optim.Adagrad on each shard's slice [Dean12 4.1]."""

    weight_decay: float = 0.0
    """L2 penalty in the gradient."""
    eps: float = 1e-10
    """Term of the denominator."""

    def __post_init__(self) -> None:
        at_least(self, "optimizer.", weight_decay=0, eps=0)


@dataclass(frozen=True)
class RmspropOptions:
    """torch.optim.RMSprop on each shard's slice, with torch's defaults; jobs/chen16-inception.toml is [Chen16 A.2]."""

    smoothing: float = 0.99
    """Decay of the squared gradients' running mean (torch's alpha) [Chen16 A.2: 0.9]."""
    momentum: float = 0.0
    """Momentum factor [Chen16 A.2: 0.9]."""
    eps: float = 1e-8
    """Term of the denominator. Above the gradients, RMSprop becomes SGD of rate alpha0 / eps."""
    weight_decay: float = 0.0
    """L2 penalty in the gradient."""

    def __post_init__(self) -> None:
        at_least(self, "optimizer.", smoothing=0, momentum=0, eps=0, weight_decay=0)
        below_one(self, "optimizer.", "smoothing", "momentum")


@dataclass(frozen=True)
class AdamOptions:
    """torch.optim.Adam on each shard's slice."""

    beta1: float = 0.9
    """Decay of the gradients' running mean."""
    beta2: float = 0.999
    """Decay of the squared gradients' running mean."""
    eps: float = 1e-8
    """Term of the denominator."""
    weight_decay: float = 0.0
    """L2 penalty in the gradient."""

    def __post_init__(self) -> None:
        at_least(self, "optimizer.", beta1=0, beta2=0, eps=0, weight_decay=0)
        below_one(self, "optimizer.", "beta1", "beta2")


@dataclass(frozen=True)
class AdamwOptions:
    """torch.optim.AdamW on each shard's slice: Adam, with weight decay apart from the gradient (arXiv:1711.05101)."""

    beta1: float = 0.9
    """Decay of the gradients' running mean."""
    beta2: float = 0.999
    """Decay of the squared gradients' running mean."""
    eps: float = 1e-8
    """Term of the denominator."""
    weight_decay: float = 0.01
    """Share of the weights, times the rate, subtracted per update."""

    def __post_init__(self) -> None:
        at_least(self, "optimizer.", beta1=0, beta2=0, eps=0, weight_decay=0)
        below_one(self, "optimizer.", "beta1", "beta2")


@dataclass(frozen=True)
class LarsOptions:
    """LARS for large batches (arXiv:1708.03888): SGD with momentum, and rates by each parameter's and gradient's norm.

    A parameter cut between shards has a rate per part. Weight decay 0 by `groups`: the plain rate.
    """

    momentum: float = 0.9
    """Momentum factor m of v <- m v + rate * (g + weight_decay w) [LARS Alg. 1]."""
    weight_decay: float = 0.0005
    """L2 penalty in the gradient."""
    trust: float = 0.001
    """Trust coefficient eta: a parameter's rate is multiplied by eta |w| / (|g| + weight_decay |w|) [LARS 4]."""

    def __post_init__(self) -> None:
        at_least(self, "optimizer.", momentum=0, weight_decay=0, trust=0)
        below_one(self, "optimizer.", "momentum")
        require(self.trust > 0, "optimizer.trust", self.trust, "a number above 0")


@dataclass(frozen=True)
class LambOptions:
    """LAMB for large batches (arXiv:1904.00962): AdamW, each parameter's step as long as the parameter, times the rate.

    A parameter cut between shards has a step per part. Weight decay 0 by `groups`: AdamW's step.
    """

    beta1: float = 0.9
    """Decay of the gradients' running mean."""
    beta2: float = 0.999
    """Decay of the squared gradients' running mean."""
    eps: float = 1e-6
    """Term of the denominator."""
    weight_decay: float = 0.01
    """Share of the weights added to a step before its scaling."""

    def __post_init__(self) -> None:
        at_least(self, "optimizer.", beta1=0, beta2=0, eps=0, weight_decay=0)
        below_one(self, "optimizer.", "beta1", "beta2")


TrustRatioOptions = LarsOptions | LambOptions
"""Optimisers by norms of whole parameters (`update/trust_ratio.py`)."""
OptimizerOptions = SgdOptions | AdagradOptions | RmspropOptions | AdamOptions | AdamwOptions | TrustRatioOptions
OPTIMIZERS: Mapping[str, type] = {
    "sgd": SgdOptions,
    "adagrad": AdagradOptions,
    "rmsprop": RmspropOptions,
    "adam": AdamOptions,
    "adamw": AdamwOptions,
    "lars": LarsOptions,
    "lamb": LambOptions,
}


@dataclass(frozen=True)
class GroupOptions:
    """Parameters with own settings: patterns of names, with values.

    In a pattern * is any text, dots too: "*.bias". The last match decides.
    """

    weight_decay: dict[str, float] = field(default_factory=dict)
    """Pairs of a pattern and a weight decay: '*.bias' 0. In place of `optimizer.weight_decay`."""
    rate: dict[str, float] = field(default_factory=dict)
    """Pairs of a pattern and a rate factor: 'head.*' 10. 0 = frozen. The log has the rate without factors."""

    def __post_init__(self) -> None:
        for name, values in (("weight_decay", self.weight_decay), ("rate", self.rate)):
            for pattern, value in values.items():
                require(0 <= value < math.inf, f"groups.{name}[{pattern!r}]", value, "a finite number >= 0")


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """Warm-up of any schedule, of a single length."""

    warmup_epochs: float = 0.0
    """Grow the rate linearly over this many epochs; 0 = off. Of k updates, the first has 1/k of the rate."""
    warmup_updates: int = 0
    """Grow the rate over this many updates; 0 = off. An update is its usual number of samples."""
    warmup_samples: int = 0
    """Grow the rate over this many samples; 0 = off."""

    def __post_init__(self) -> None:
        at_least(self, "schedule.", warmup_epochs=0, warmup_updates=0, warmup_samples=0)
        given = [name for name in ("warmup_epochs", "warmup_updates", "warmup_samples") if getattr(self, name) > 0]
        if len(given) > 1:
            expected = f"0 beside schedule.{given[0]}: a warm-up has one length"
            require(False, f"schedule.{given[1]}", getattr(self, given[1]), expected)


@dataclass(frozen=True)
class ConstantOptions(WarmUp):
    """The rate stays at alpha0."""


@dataclass(frozen=True)
class StepOptions(WarmUp):
    """The rate is divided after given epochs [Zhang16 4.1: by 10 after 120 and 130]."""

    epochs: tuple[float, ...] = (120.0, 130.0)
    """Multiply the rate by `factor` after each of these epochs."""
    factor: float = 0.1
    """Multiplier at each of `epochs`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, "schedule.", factor=0)


@dataclass(frozen=True)
class ExponentialOptions(WarmUp):
    """alpha0 * beta^(epochs / every_epochs): [Chen16 A.2] gamma0 beta^(tN/2T), T mini-batches per epoch."""

    beta: float = 0.94
    """Decay per `every_epochs` epochs [Chen16 A.2]."""
    every_epochs: float = 2.0
    """Epochs per decay [Chen16 A.2: 2]."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, "schedule.", beta=0, every_epochs=1e-9)


@dataclass(frozen=True)
class LinearOptions(WarmUp):
    """The rate stays at alpha0 to `start_epochs`, then falls linearly to `end` * alpha0 at the last epoch."""

    start_epochs: float = 0.0
    """Begin annealing after this many epochs [Chen16 A.1: 15 of 25]."""
    end: float = 0.0
    """Final fraction of alpha0 [Chen16 A.1: 0]."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, "schedule.", start_epochs=0, end=0)


#: Functions of a count of steps, and of numbers, in torch.optim.lr_scheduler.
TORCH_SCHEDULERS = (
    "ConstantLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts",
    "CyclicLR",
    "ExponentialLR",
    "LinearLR",
    "MultiStepLR",
    "OneCycleLR",
    "PolynomialLR",
    "StepLR",
)


@dataclass(frozen=True)
class TorchScheduleOptions(WarmUp):
    """A scheduler of torch.optim.lr_scheduler, named as the schedule; steps are counted in applied samples."""

    scheduler: str = "CosineAnnealingLR"
    """Name in torch."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """The scheduler's keyword arguments. Rates (eta_min, max_lr) are factors of alpha0. Defaults: the run's length for
    CosineAnnealingLR's T_max and OneCycleLR's total_steps; 1 for max_lr. OneCycleLR and CyclicLR also cycle the momentum (Adam's
    beta1) unless cycle_momentum = false."""
    unit: Literal["updates", "epochs", "samples"] = "updates"
    """Count steps in updates, epochs or samples. An update is its usual number of samples."""
    every: float = 1.0
    """Units per step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, "schedule.", every=1e-9)
        named = f"one of {', '.join(TORCH_SCHEDULERS)}, or your own package.module:function"
        require(self.scheduler in TORCH_SCHEDULERS, "schedule.scheduler", self.scheduler, named)

    @property
    def cycles_momentum(self) -> bool:
        """The momentum follows the schedule, too, as in torch."""
        return self.scheduler in ("CyclicLR", "OneCycleLR") and bool(self.kwargs.get("cycle_momentum", True))


@dataclass(frozen=True)
class CustomScheduleOptions(WarmUp):
    """The user's own schedule."""

    factory: str = ""
    """package.module:function of progress, returning the factor of alpha0, >= 0."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """The function's keyword arguments."""
    unit: Literal["epochs", "updates", "samples"] = "epochs"
    """Progress in applied epochs (a fraction), updates or samples. An update is its usual number of samples."""


ScheduleOptions = ConstantOptions | StepOptions | ExponentialOptions | LinearOptions | TorchScheduleOptions | CustomScheduleOptions
SCHEDULES: Mapping[str, type] = {
    "constant": ConstantOptions,
    "step": StepOptions,
    "exponential": ExponentialOptions,
    "linear": LinearOptions,
    "torch": TorchScheduleOptions,
    "custom": CustomScheduleOptions,
}
