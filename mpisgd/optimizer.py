"""The optimisers of the shards: torch.optim on one flat parameter (DESIGN 5)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from mpisgd.config import AdagradOptions, AdamOptions, OptimizerOptions, RmspropOptions, SgdOptions
from mpisgd.errors import CheckpointError
from mpisgd.flat import host_vector

_SAID = "__dynamo_disable"
CACHED_NBYTES = 4_000_000
"""Slices up to this size are taken to stay in a core's cache between receiving, update and sending."""


def make_optimizer(options: OptimizerOptions, parameter: Tensor, learning_rate: float) -> torch.optim.Optimizer:
    """torch.optim on one flat parameter; fused kernels, which touch each byte once, where torch has them for the CPU.

    Except for SGD on slices that fit into a core's cache: there torch's plain kernels take two thirds of the time.
    """
    fused = parameter.nbytes > CACHED_NBYTES
    with _without_the_compiler():
        return _make(options, parameter, learning_rate, fused)


def _make(options: OptimizerOptions, parameter: Tensor, learning_rate: float, fused: bool) -> torch.optim.Optimizer:
    match options:
        case SgdOptions(momentum=momentum, nesterov=nesterov, weight_decay=decay):
            return torch.optim.SGD(
                [parameter], lr=learning_rate, momentum=momentum, nesterov=nesterov, weight_decay=decay, fused=fused
            )
        case AdagradOptions(weight_decay=decay, eps=eps):
            return torch.optim.Adagrad([parameter], lr=learning_rate, weight_decay=decay, eps=eps, fused=True)
        case RmspropOptions(smoothing=smoothing, momentum=momentum, eps=eps, weight_decay=decay):
            return torch.optim.RMSprop(
                [parameter], lr=learning_rate, alpha=smoothing, eps=eps, momentum=momentum, weight_decay=decay
            )
        case AdamOptions(beta1=beta1, beta2=beta2, eps=eps, weight_decay=decay):
            return torch.optim.Adam([parameter], lr=learning_rate, betas=(beta1, beta2), eps=eps, weight_decay=decay, fused=True)


@contextmanager
def _without_the_compiler() -> Iterator[None]:
    """Torch's optimisers import its compiler when they are made, only to say of a function that it is not to be compiled.

    That takes 1.5 s of every shard's start, as much as torch itself. So it is said before (see `torch._compile`); where torch
    does it in another way, the compiler is imported. Adagrad, RMSprop and Adam need it at their first step anyway.
    """
    function = getattr(torch.optim.Optimizer.add_param_group, "__wrapped__", None)
    if function is None or "torch._dynamo" in sys.modules or hasattr(function, _SAID):
        yield
        return
    setattr(function, _SAID, function)
    try:
        yield
    finally:
        delattr(function, _SAID)


#: The tensors that each optimiser of torch keeps for a parameter.
_SLOTS = {
    torch.optim.SGD: {"momentum_buffer"},
    torch.optim.Adagrad: {"step", "sum"},
    torch.optim.RMSprop: {"step", "square_avg", "momentum_buffer"},
    torch.optim.Adam: {"step", "exp_avg", "exp_avg_sq"},
}


def slots_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """The tensors that an optimiser keeps for a parameter by now, not copied; None, SGD's buffer without momentum, is none."""
    return {name: value for name, value in optimizer.state[parameter].items() if isinstance(value, Tensor)}


def restore_slots(optimizer: torch.optim.Optimizer, parameter: Tensor, slots: Mapping[str, Tensor]) -> None:
    """Give an optimiser the tensors that another of its kind kept for its parameter; they are copied.

    Raises CheckpointError where it keeps no such tensor.
    """
    unknown = set(slots) - _SLOTS[type(optimizer)]
    if unknown:
        raise CheckpointError(f"the checkpoint has {', '.join(sorted(unknown))}, which {type(optimizer).__name__} does not keep")
    for name, tensor in slots.items():
        own = host_vector(tensor.numel()) if tensor.dim() else torch.zeros((), dtype=torch.float32)
        own.copy_(tensor)
        optimizer.state[parameter][name] = own


class Stepper:
    """Makes one step of `optimizer`, from the first element to the last; SGD chunk by chunk, the others all elements at once.

    The hooks around `Optimizer.step` cost 12 microseconds, a tenth of the whole cycle of a small slice, and the first import
    torch's compiler; so SGD goes to torch's functional form of the same step, on the same state. With the fused kernel the division
    happens inside it, which saves one pass over the slice.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameter: Tensor) -> None:
        self._optimizer = optimizer
        self._parameter = parameter
        self._group, self._state, self._weights = optimizer.param_groups[0], optimizer.state[parameter], parameter.detach()
        self._size = parameter.numel()
        self._sgd = isinstance(optimizer, torch.optim.SGD)
        self._fused = bool(self._group["fused"]) if self._sgd else False
        self._scale = torch.ones(())

    def reach(self, stop: int) -> int:
        """Where a step to this element ends: there, or, where that cannot be, at the last one."""
        made_before = self._sgd and (self._group["momentum"] == 0 or self._state.get("momentum_buffer") is not None)
        return stop if made_before else self._size

    def __call__(self, gradient: Tensor, divisor: int, start: int, stop: int) -> None:
        """Make it for these elements, from the sum of `divisor` gradients, all (slice,) float32; their sum is used up."""
        if self._sgd:
            self._step_sgd(gradient, divisor, start, stop)
            return
        if divisor > 1:
            gradient.div_(divisor)
        self._parameter.grad = gradient
        self._optimizer.step()

    def _step_sgd(self, gradient: Tensor, divisor: int, start: int, stop: int) -> None:
        weights, buffer, group, fused = self._weights, self._state.get("momentum_buffer"), self._group, self._fused
        whole = stop - start == self._size
        if not whole:
            weights, gradient = weights[start:stop], gradient[start:stop]
            buffer = None if buffer is None else buffer[start:stop]
        if fused:
            self._scale.fill_(divisor)
        elif divisor > 1:
            gradient.div_(divisor)
        buffers = [buffer]
        sgd(
            [weights],
            [gradient],
            buffers,
            fused=fused,
            foreach=False,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=False,
            grad_scale=self._scale if fused and divisor > 1 else None,
        )
        if whole:  # the first step makes it; None without momentum, as torch's own step leaves it
            self._state["momentum_buffer"] = buffers[0]
