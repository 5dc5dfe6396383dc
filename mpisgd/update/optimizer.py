"""The optimisers of the shards: torch.optim on one flat parameter (DESIGN 5)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.rmsprop import rmsprop
from torch.optim.sgd import sgd

from mpisgd.base.errors import CheckpointError
from mpisgd.config import AdagradOptions, AdamOptions, OptimizerOptions, RmspropOptions, SgdOptions
from mpisgd.vectors.memory import vector_like

_Group = dict[str, Any]
"""An optimiser's settings (`torch.optim.Optimizer.param_groups`)."""
_SAID = "__dynamo_disable"
CACHED_NBYTES = 4_000_000
"""Slices up to this size are taken to stay in a core's cache between receiving, update and sending."""


def make_optimizer(options: OptimizerOptions, parameter: Tensor, learning_rate: float) -> torch.optim.Optimizer:
    """torch.optim on one flat parameter; fused kernels, which touch each byte once, where torch has them: for all but RMSprop, and
    Adagrad's for CPUs alone.

    Except for SGD on slices that fit into a CPU core's cache: there torch's plain kernels take two thirds of the time.
    """
    with _without_the_compiler():
        optimizer = _make(options, parameter, learning_rate)
    if not isinstance(optimizer, torch.optim.SGD):  # whose momentum begins with a gradient
        _begin(optimizer, parameter)
    return optimizer


def _begin(optimizer: torch.optim.Optimizer, parameter: Tensor) -> None:
    """Make the state that torch's own first step would make, where the optimiser has not made it yet."""
    group, state = optimizer.param_groups[0], optimizer.state[parameter]
    for name in sorted(_SLOTS[type(optimizer)] - set(state)):
        if name != "momentum_buffer" or group.get("momentum", 0.0) > 0:
            state[name] = _count_of_steps(group, parameter) if name == "step" else vector_like(parameter.detach())


def _count_of_steps(group: _Group, parameter: Tensor) -> Tensor:
    """None yet; counted where the kernel wants it: with the parameter if it is fused, else on the CPU."""
    return torch.zeros((), device=parameter.device if group.get("fused") else None)


def _make(options: OptimizerOptions, parameter: Tensor, learning_rate: float) -> torch.optim.Optimizer:
    on_gpu = parameter.device.type != "cpu"
    match options:
        case SgdOptions(momentum=momentum, nesterov=nesterov, weight_decay=decay):
            fused = on_gpu or parameter.nbytes > CACHED_NBYTES
            return torch.optim.SGD(
                [parameter], lr=learning_rate, momentum=momentum, nesterov=nesterov, weight_decay=decay, fused=fused
            )
        case AdagradOptions(weight_decay=decay, eps=eps):
            return torch.optim.Adagrad([parameter], lr=learning_rate, weight_decay=decay, eps=eps, fused=not on_gpu)
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
    does it in another way, the compiler is imported.
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
        own = vector_like(parameter.detach()) if tensor.dim() else _count_of_steps(optimizer.param_groups[0], parameter)
        own.copy_(tensor)
        optimizer.state[parameter][name] = own


class Stepper:
    """Makes one step of `optimizer`, from the first element to the last, chunk by chunk.

    It goes to torch's functional form of the same step, on the same state: the hooks around `Optimizer.step` cost 12 microseconds,
    a tenth of the whole cycle of a small slice, and import torch's compiler. Fused kernels divide by the number of gradients, too,
    which saves one pass over the slice; the plain ones of RMSprop make many passes, which stay in the cache where a chunk does.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameter: Tensor) -> None:
        self._group, self._state, self._weights = optimizer.param_groups[0], optimizer.state[parameter], parameter.detach()
        self._size = parameter.numel()
        self._kernel = _KERNELS[type(optimizer)]
        self._fused = bool(self._group.get("fused"))
        self._scale = torch.ones((), device=self._weights.device)

    def reach(self, stop: int) -> int:
        """Element at which a step to this one ends: there, or, where that cannot be, at the last one.

        The first step of SGD makes its momentum, all at once.
        """
        made_before = self._kernel is not _sgd or self._group["momentum"] == 0 or "momentum_buffer" in self._state
        return stop if made_before else self._size

    def __call__(self, gradient: Tensor, divisor: int, start: int, stop: int) -> None:
        """Make it for these elements, from the sum of `divisor` gradients, all (slice,) float32; their sum is used up."""
        weights, slots = self._weights, self._state
        if stop - start < self._size:
            weights, gradient, slots = weights[start:stop], gradient[start:stop], self._slots(start, stop)
        if self._fused:
            self._scale.fill_(divisor)
        elif divisor > 1:
            gradient.div_(divisor)
        self._kernel(self._group, weights, gradient, slots, self._scale if self._fused and divisor > 1 else None)

    def _slots(self, start: int, stop: int) -> dict[str, Tensor]:
        """State of these elements; steps are counted with the last of them."""
        slots = {name: tensor[start:stop] if tensor.dim() else tensor for name, tensor in self._state.items()}
        if stop < self._size and "step" in slots:
            slots["step"] = slots["step"].clone()
        return slots


def _sgd(group: _Group, weights: Tensor, gradient: Tensor, slots: dict[str, Tensor], scale: Tensor | None) -> None:
    buffers: list[Tensor | None] = [slots.get("momentum_buffer")]
    sgd(
        [weights],
        [gradient],
        buffers,
        fused=group["fused"],
        foreach=False,
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        maximize=False,
        grad_scale=scale,
    )
    if buffers[0] is not None:  # made by the first step; none without momentum
        slots["momentum_buffer"] = buffers[0]


def _adagrad(group: _Group, weights: Tensor, gradient: Tensor, slots: dict[str, Tensor], scale: Tensor | None) -> None:
    adagrad(
        [weights],
        [gradient],
        [slots["sum"]],
        [slots["step"]],
        fused=group["fused"],
        foreach=False,
        has_sparse_grad=False,
        grad_scale=scale,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        lr_decay=group["lr_decay"],
        eps=group["eps"],
        maximize=False,
    )


def _rmsprop(group: _Group, weights: Tensor, gradient: Tensor, slots: dict[str, Tensor], _: Tensor | None) -> None:
    rmsprop(
        [weights],
        [gradient],
        [slots["square_avg"]],
        [],
        [slots["momentum_buffer"]] if group["momentum"] > 0 else [],
        [slots["step"]],
        foreach=False,
        lr=group["lr"],
        alpha=group["alpha"],
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        centered=False,
    )


def _adam(group: _Group, weights: Tensor, gradient: Tensor, slots: dict[str, Tensor], scale: Tensor | None) -> None:
    beta1, beta2 = group["betas"]
    adam(
        [weights],
        [gradient],
        [slots["exp_avg"]],
        [slots["exp_avg_sq"]],
        [],
        [slots["step"]],
        fused=True,
        foreach=False,
        grad_scale=scale,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


#: One step of elements that follow each other: (group, weights, their summed gradient, slots, divisor of the sum).
_KERNELS: dict[type[torch.optim.Optimizer], Callable[..., None]] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adagrad: _adagrad,
    torch.optim.RMSprop: _rmsprop,
    torch.optim.Adam: _adam,
}
