"""Gradients into an optimiser step on one slice: weighting, averaging, schedule, averaged weights (DESIGN 3, 5).

The optimiser is torch.optim's, on the slice as its one parameter. Weighting happens per gradient, in the sum, and so before
momentum. The sum is divided by the number of gradients that were summed (law 3).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from mpisgd.config import AdagradOptions, AdamOptions, OptimizerOptions, RmspropOptions, SgdOptions
from mpisgd.flat import host_view
from mpisgd.schedule import Schedule


def make_optimizer(options: OptimizerOptions, parameter: Tensor, learning_rate: float) -> torch.optim.Optimizer:
    """torch.optim on one flat parameter; fused kernels, which touch each byte once, where torch has them for the CPU."""
    match options:
        case SgdOptions(momentum=momentum, nesterov=nesterov, weight_decay=decay):
            return torch.optim.SGD(
                [parameter], lr=learning_rate, momentum=momentum, nesterov=nesterov, weight_decay=decay, fused=True
            )
        case AdagradOptions(weight_decay=decay, eps=eps):
            return torch.optim.Adagrad([parameter], lr=learning_rate, weight_decay=decay, eps=eps, fused=True)
        case RmspropOptions(smoothing=smoothing, momentum=momentum, eps=eps, weight_decay=decay):
            return torch.optim.RMSprop(
                [parameter], lr=learning_rate, alpha=smoothing, eps=eps, momentum=momentum, weight_decay=decay
            )
        case AdamOptions(beta1=beta1, beta2=beta2, eps=eps, weight_decay=decay):
            return torch.optim.Adam(
                [parameter], lr=learning_rate, betas=(beta1, beta2), eps=eps, weight_decay=decay, fused=True
            )


@dataclass(frozen=True)
class Step:
    """What one update did."""

    gradients: int
    """The divisor: how many gradients were summed."""
    learning_rate: float


class SliceUpdate:
    """The weights of one slice, the sum of gradients in the making, and the optimiser.

    `scratch` is where the next gradient is to be received. The first gradient of a sum is not copied: scratch and sum change
    places.

    Args:
        weights: (slice,) float32 on the CPU; becomes the state, updated in place.
        learning_rate: alpha0 (times the scaling rule, where it is on).
        schedule: factor of the learning rate as a function of epochs.
        train_samples: samples of one epoch.
        averaging: a of thetabar <- a thetabar + (1 - a) theta [Chen16 Alg. 2, 4]; 0 = no averaged weights.
    """

    def __init__(
        self,
        weights: Tensor,
        options: OptimizerOptions,
        *,
        learning_rate: float,
        schedule: Schedule,
        train_samples: int,
        averaging: float = 0.0,
    ) -> None:
        self.weights = weights
        self.averaged = weights.clone() if averaging > 0 else None
        self._averaging = averaging
        self._train_samples = train_samples
        self._sum = torch.zeros_like(weights)
        self._scratch = torch.zeros_like(weights)
        self.gradients = 0
        self.samples = 0
        self._pending_samples = 0
        self._parameter = torch.nn.Parameter(weights)
        self._optimizer = make_optimizer(options, self._parameter, learning_rate)
        self._schedule = LambdaLR(self._optimizer, lambda _: schedule(self.epochs))

    @property
    def scratch(self) -> np.ndarray:
        """(slice,) float32: receive the next gradient into this."""
        return host_view(self._scratch)

    @property
    def epochs(self) -> float:
        """Samples applied / training samples."""
        return self.samples / self._train_samples

    @property
    def learning_rate(self) -> float:
        """Of the next update, before any weight."""
        return float(self._optimizer.param_groups[0]["lr"])

    def scratch_is_finite(self) -> bool:
        """Whether the received gradient has no NaN and no infinity.

        The squared norm is ten times as fast as `isfinite` and finite for nearly all finite gradients (TRAPS 9).
        """
        gradient = self.scratch
        if np.isfinite(np.dot(gradient, gradient)):
            return True
        return bool(torch.isfinite(self._scratch).all())

    def accumulate(self, weight: float, samples: int) -> None:
        """Add the gradient in `scratch`, times `weight`, computed from `samples` samples, to the sum."""
        if self.gradients == 0:
            self._sum, self._scratch = self._scratch, self._sum
            if weight != 1.0:
                self._sum.mul_(weight)
        else:
            self._sum.add_(self._scratch, alpha=weight)
        self.gradients += 1
        self._pending_samples += samples

    def step(self) -> Step:
        """Make the update from what was summed; where nothing was (all dropped), the weights stay.

        Returns the divisor and the learning rate that were used.
        """
        step = Step(gradients=self.gradients, learning_rate=self.learning_rate)
        if self.gradients > 0:
            if self.gradients > 1:
                self._sum.div_(self.gradients)
            self._parameter.grad = self._sum
            self._optimizer.step()
            if self.averaged is not None:
                self.averaged.lerp_(self.weights, 1.0 - self._averaging)
        self.samples += self._pending_samples
        self.gradients = self._pending_samples = 0
        self._schedule.step()
        return step
