"""LARS and LAMB: the rate of each parameter by the norms of it and of what is to be added to it.

[LARS] You, Gitman, Ginsburg: Large Batch Training of Convolutional Networks (arXiv:1708.03888), Alg. 1 and eq. 6, for the
parameter w, its averaged gradient g, and the learning rate gamma:

    ratio = eta |w| / (|g| + beta |w|);   v <- m v + gamma ratio (g + beta w);   w <- w - v

[LAMB] You, Li, Reddi et al.: Large Batch Optimization for Deep Learning (arXiv:1904.00962), Alg. 2, phi(z) = z, for Adam's
direction r = m / (sqrt(v) + eps), both moments corrected for their bias:

    ratio = |w| / |r + lambda w|;   w <- w - gamma ratio (r + lambda w)

As in the authors' code, the papers' layer is one parameter, and the ratio is 1 where one of its two norms is 0; a parameter that is
excluded (`Segment.weight_decay` 0) has the ratio 1, too. Norms are of whole parameters. Shards decide alone (law 2), so of a
parameter that is cut between shards each has the norms, and the ratio, of its own part; S slices cut at most S - 1 parameters.

These are kernels as torch's functional ones, on the state of torch's SGD and Adam: lists with a tensor for each parameter.
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
    """Settings and state of LARS; its step is `lars`."""


class Lamb(torch.optim.AdamW):
    """Settings and state of LAMB; its step is `lamb`."""


def make(options: TrustRatioOptions, parameter: Tensor, learning_rate: float) -> torch.optim.Optimizer:
    """As `optimizer.make_optimizer`, without state."""
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
    """Make a step of each; the gradients are used up. `how`: what torch's `sgd` is told besides."""
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
    """Make a step of each; the gradients are used up. `how`: what torch's `adam` is told besides."""
    for weight, gradient, mean, square, step in zip(weights, gradients, means, squares, steps, strict=True):
        direction = torch.zeros_like(weight)  # Adam goes along r from 0, for its rate is -1
        adam([direction], [gradient], [mean], [square], [], [step], lr=-1.0, weight_decay=0.0, **how)
        direction.add_(weight, alpha=weight_decay)
        if not excluded:
            direction.mul_(_ratio(torch.linalg.vector_norm(weight), torch.linalg.vector_norm(direction)))
        weight.sub_(direction, alpha=lr)


def _ratio(one: Tensor, other: Tensor) -> Tensor:
    """Of two norms; on a GPU nobody waits for it."""
    return (one / other).masked_fill((one == 0) | (other == 0), 1.0)
