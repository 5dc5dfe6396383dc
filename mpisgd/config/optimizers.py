"""Choices of the optimiser on the shards and of the learning-rate schedule: one frozen dataclass per kind."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mpisgd.base.checks import at_least, require


@dataclass(frozen=True)
class SgdOptions:
    """torch.optim.SGD on each shard's slice."""

    momentum: float = 0.0
    """Momentum factor m of v <- m v + g [Zhang16 4.1: 0.9]."""
    nesterov: bool = False
    """Use Nesterov momentum."""
    weight_decay: float = 0.0
    """L2 penalty added to the gradient."""

    def __post_init__(self) -> None:
        at_least(self, "optimizer.", momentum=0, weight_decay=0)
        require(self.momentum < 1, "optimizer.momentum", self.momentum, "a number below 1")
        require(not self.nesterov or self.momentum > 0, "optimizer.nesterov", True, "momentum > 0 beside it")


@dataclass(frozen=True)
class AdagradOptions:
    """torch.optim.Adagrad on each shard's slice [Dean12 4.1]."""

    weight_decay: float = 0.0
    """L2 penalty added to the gradient."""
    eps: float = 1e-10
    """Term added to the denominator."""

    def __post_init__(self) -> None:
        at_least(self, "optimizer.", weight_decay=0, eps=0)


@dataclass(frozen=True)
class RmspropOptions:
    """torch.optim.RMSprop on each shard's slice, with torch's defaults; jobs/chen16-inception.toml has those of [Chen16 A.2]."""

    smoothing: float = 0.99
    """Decay of the running mean of squared gradients (torch's alpha) [Chen16 A.2: 0.9]."""
    momentum: float = 0.0
    """Momentum factor [Chen16 A.2: 0.9]."""
    eps: float = 1e-8
    """Term added to the denominator. Where it exceeds the gradients, RMSprop becomes SGD of rate alpha0 / eps."""
    weight_decay: float = 0.0
    """L2 penalty added to the gradient."""

    def __post_init__(self) -> None:
        at_least(self, "optimizer.", smoothing=0, momentum=0, eps=0, weight_decay=0)
        require(self.smoothing < 1, "optimizer.smoothing", self.smoothing, "a number below 1")
        require(self.momentum < 1, "optimizer.momentum", self.momentum, "a number below 1")


@dataclass(frozen=True)
class AdamOptions:
    """torch.optim.Adam on each shard's slice."""

    beta1: float = 0.9
    """Decay of the running mean of gradients."""
    beta2: float = 0.999
    """Decay of the running mean of squared gradients."""
    eps: float = 1e-8
    """Term added to the denominator."""
    weight_decay: float = 0.0
    """L2 penalty added to the gradient."""

    def __post_init__(self) -> None:
        at_least(self, "optimizer.", beta1=0, beta2=0, eps=0, weight_decay=0)
        require(self.beta1 < 1, "optimizer.beta1", self.beta1, "a number below 1")
        require(self.beta2 < 1, "optimizer.beta2", self.beta2, "a number below 1")


@dataclass(frozen=True)
class AdamwOptions:
    """torch.optim.AdamW on each shard's slice: Adam, with weight decay that is no part of the gradient (arXiv:1711.05101)."""

    beta1: float = 0.9
    """Decay of the running mean of gradients."""
    beta2: float = 0.999
    """Decay of the running mean of squared gradients."""
    eps: float = 1e-8
    """Term added to the denominator."""
    weight_decay: float = 0.01
    """Share of the weights, times the learning rate, that each update takes away."""

    def __post_init__(self) -> None:
        at_least(self, "optimizer.", beta1=0, beta2=0, eps=0, weight_decay=0)
        require(self.beta1 < 1, "optimizer.beta1", self.beta1, "a number below 1")
        require(self.beta2 < 1, "optimizer.beta2", self.beta2, "a number below 1")


@dataclass(frozen=True)
class LarsOptions:
    """LARS for large batches (arXiv:1708.03888): SGD with momentum and rates by the norms of each parameter and its gradient.

    A parameter that is cut between shards has a rate for each part. One to which `groups` gives weight decay 0 has the plain rate.
    """

    momentum: float = 0.9
    """Momentum factor m of v <- m v + rate * (g + weight_decay w) [LARS Alg. 1]. The rate is part of v."""
    weight_decay: float = 0.0005
    """L2 penalty added to the gradient."""
    trust: float = 0.001
    """Trust coefficient eta: a parameter's rate is multiplied by eta |w| / (|g| + weight_decay |w|) [LARS 4]."""

    def __post_init__(self) -> None:
        at_least(self, "optimizer.", momentum=0, weight_decay=0, trust=0)
        require(self.momentum < 1, "optimizer.momentum", self.momentum, "a number below 1")
        require(self.trust > 0, "optimizer.trust", self.trust, "a number above 0")


@dataclass(frozen=True)
class LambOptions:
    """LAMB for large batches (arXiv:1904.00962): AdamW, each parameter's step as long as the parameter, times the learning rate.

    A parameter that is cut between shards has a step for each part. One to which `groups` gives weight decay 0 has AdamW's.
    """

    beta1: float = 0.9
    """Decay of the running mean of gradients."""
    beta2: float = 0.999
    """Decay of the running mean of squared gradients."""
    eps: float = 1e-6
    """Term added to the denominator."""
    weight_decay: float = 0.01
    """Share of the weights that is added to a step before its length is set."""

    def __post_init__(self) -> None:
        at_least(self, "optimizer.", beta1=0, beta2=0, eps=0, weight_decay=0)
        require(self.beta1 < 1, "optimizer.beta1", self.beta1, "a number below 1")
        require(self.beta2 < 1, "optimizer.beta2", self.beta2, "a number below 1")


TrustRatioOptions = LarsOptions | LambOptions
"""Those that look at whole parameters, by their norms (`update/trust_ratio.py`)."""
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
    """Parameters that are updated otherwise than the rest: patterns of their names, and a value for each.

    In a pattern * is any text, dots too: "*.bias". Of those that match a name the last one decides.
    """

    weight_decay: dict[str, float] = field(default_factory=dict)
    """Pairs of a pattern and a weight decay: '*.bias' 0. It is in place of `optimizer.weight_decay`."""
    rate: dict[str, float] = field(default_factory=dict)
    """Pairs of a pattern and a factor of the rate: 'head.*' 10. 0 leaves parameters as they are. The log has the rate
    without it."""

    def __post_init__(self) -> None:
        for name, values in (("weight_decay", self.weight_decay), ("rate", self.rate)):
            for pattern, value in values.items():
                require(0 <= value < math.inf, f"groups.{name}[{pattern!r}]", value, "a finite number >= 0")


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """How any schedule may begin; one of the three, or none."""

    warmup_epochs: float = 0.0
    """Grow the rate linearly over this many epochs; 0 = off. Of k updates, the first has 1/k of it."""
    warmup_updates: int = 0
    """Grow it over this many updates; 0 = off. That is as many samples as they normally have."""
    warmup_samples: int = 0
    """Grow it over this many samples; 0 = off."""

    def __post_init__(self) -> None:
        at_least(self, "schedule.", warmup_epochs=0, warmup_updates=0, warmup_samples=0)
        given = [name for name in ("warmup_epochs", "warmup_updates", "warmup_samples") if getattr(self, name) > 0]
        if len(given) > 1:
            expected = f"0 beside schedule.{given[0]}: a warm-up has one length"
            require(False, f"schedule.{given[1]}", getattr(self, given[1]), expected)


@dataclass(frozen=True)
class ConstantOptions(WarmUp):
    """The learning rate stays at alpha0."""


@dataclass(frozen=True)
class StepOptions(WarmUp):
    """The learning rate is divided after given epochs [Zhang16 4.1: by 10 after 120 and 130]."""

    epochs: tuple[float, ...] = (120.0, 130.0)
    """Multiply the learning rate by `factor` after each of these epochs."""
    factor: float = 0.1
    """Multiplier at each of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, "schedule.", factor=0)


@dataclass(frozen=True)
class ExponentialOptions(WarmUp):
    """alpha0 * beta^(epochs / every_epochs): [Chen16 A.2] gamma0 beta^(tN/2T), T mini-batches making one epoch."""

    beta: float = 0.94
    """Decay per `every_epochs` epochs [Chen16 A.2]."""
    every_epochs: float = 2.0
    """Epochs per decay [Chen16 A.2: 2]."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, "schedule.", beta=0, every_epochs=1e-9)


@dataclass(frozen=True)
class LinearOptions(WarmUp):
    """The learning rate stays at alpha0 to `start_epochs`, and is then annealed linearly to `end` * alpha0 at the last epoch."""

    start_epochs: float = 0.0
    """Begin annealing after this many epochs. [Chen16 A.1] anneals the last 10 of 25 epochs: 15."""
    end: float = 0.0
    """Fraction of alpha0 at the end of the run [Chen16 A.1: 0]."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, "schedule.", start_epochs=0, end=0)


#: Those of torch.optim.lr_scheduler that are functions of a count of steps, and of numbers.
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
    """A scheduler of torch.optim.lr_scheduler, whose steps are counted in applied samples; it is named as the schedule itself."""

    scheduler: str = "CosineAnnealingLR"
    """Name of the scheduler in torch."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Its keyword arguments. Rates among them (eta_min, max_lr) are factors of alpha0. Left out, T_max of CosineAnnealingLR and
    total_steps of OneCycleLR are the run's length, max_lr is 1. OneCycleLR and CyclicLR cycle the momentum, too (of Adam beta1),
    but for cycle_momentum = false."""
    unit: Literal["updates", "epochs", "samples"] = "updates"
    """Count its steps in updates, epochs or samples. An update is as many samples as normally make one."""
    every: float = 1.0
    """Let one step be this many of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, "schedule.", every=1e-9)
        named = f"one of {', '.join(TORCH_SCHEDULERS)}, or your own package.module:function"
        require(self.scheduler in TORCH_SCHEDULERS, "schedule.scheduler", self.scheduler, named)

    @property
    def cycles_momentum(self) -> bool:
        """Whether the momentum follows the schedule, too, as torch has it."""
        return self.scheduler in ("CyclicLR", "OneCycleLR") and bool(self.kwargs.get("cycle_momentum", True))


@dataclass(frozen=True)
class CustomScheduleOptions(WarmUp):
    """The user's own schedule, from a function."""

    factory: str = ""
    """package.module:function of what has been applied, which returns the factor of alpha0, a number >= 0."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function."""
    unit: Literal["epochs", "updates", "samples"] = "epochs"
    """Count what has been applied in epochs (a fraction), updates or samples. An update is as many samples as normally make one."""


ScheduleOptions = ConstantOptions | StepOptions | ExponentialOptions | LinearOptions | TorchScheduleOptions | CustomScheduleOptions
SCHEDULES: Mapping[str, type] = {
    "constant": ConstantOptions,
    "step": StepOptions,
    "exponential": ExponentialOptions,
    "linear": LinearOptions,
    "torch": TorchScheduleOptions,
    "custom": CustomScheduleOptions,
}
