"""LARS and LAMB: each parameter's rate, by the norms of parameter and update.

[LARS] You, Gitman, Ginsburg: Large Batch Training of Convolutional Networks (arXiv:1708.03888), Alg. 1 and eq. 6, for parameter w,
averaged gradient g, learning rate gamma:

    ratio = eta |w| / (|g| + beta |w|);   v <- m v + gamma ratio (g + beta w);   w <- w - v

[LAMB] You, Li, Reddi et al.: Large Batch Optimization for Deep Learning (arXiv:1904.00962), Alg. 2, phi(z) = z, for Adam's
direction r = m / (sqrt(v) + eps), moments corrected for bias:

    ratio = |w| / |r + lambda w|;   w <- w - gamma ratio (r + lambda w)

The ratio is 1 if a norm is 0, and for excluded parameters (`weight_decay` 0).
Shards decide alone (law 2), by the norms of their part of a cut parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from mpisgd.config import LarsOptions, TrustRatioOptions


class Lars(torch.optim.SGD):
    """Settings and state of `lars`."""


class Lamb(torch.optim.AdamW):
    """Settings and state of `lamb`."""


def make(options: TrustRatioOptions, parameter: Tensor, learning_rate: float) -> torch.optim.Optimizer:
    if isinstance(options, LarsOptions):
        momentum, decay = options.momentum, options.weight_decay
        optimizer = Lars([parameter], lr=learning_rate, momentum=momentum, weight_decay=decay, fused=False)
        optimizer.param_groups[0]["trust"] = options.trust
        return optimizer
    betas, eps, decay = (options.beta1, options.beta2), options.eps, options.weight_decay
    return Lamb([parameter], lr=learning_rate, betas=betas, eps=eps, weight_decay=decay, fused=True)


def lars(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    momenta: Sequence[Tensor | None],
    *,
    lr: float,
    weight_decay: float,
    trust: float,
    excluded: bool,
    **how: Any,
) -> None:
    """Step each parameter; gradients are used up. `how`: for torch's `sgd`."""
    for weight, gradient, momentum in zip(weights, gradients, momenta, strict=True):
        length, steepness = torch.linalg.vector_norm(weight), torch.linalg.vector_norm(gradient)
        gradient.add_(weight, alpha=weight_decay)
        gradient.mul_(lr if excluded else lr * _ratio(trust * length, steepness + weight_decay * length))
        sgd([weight], [gradient], [momentum], lr=1.0, weight_decay=0.0, **how)


def lamb(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    _: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float,
    weight_decay: float,
    excluded: bool,
    **how: Any,
) -> None:
    """Step each parameter; gradients are used up. `how`: for torch's `adam`."""
    for weight, gradient, mean, square, step in zip(weights, gradients, means, squares, steps, strict=True):
        direction = torch.zeros_like(weight)  # at rate -1, Adam goes along r from 0
        adam([direction], [gradient], [mean], [square], [], [step], lr=-1.0, weight_decay=0.0, **how)
        direction.add_(weight, alpha=weight_decay)
        if not excluded:
            direction.mul_(_ratio(torch.linalg.vector_norm(weight), torch.linalg.vector_norm(direction)))
        weight.sub_(direction, alpha=lr)


def _ratio(one: Tensor, other: Tensor) -> Tensor:
    """Return a ratio, without waiting for a GPU."""
    return (one / other).masked_fill((one == 0) | (other == 0), 1.0)
