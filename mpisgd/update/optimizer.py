"""Optimisers of the shards: torch.optim on a flat parameter (DESIGN 5), LARS and LAMB."""

from __future__ import annotations

import itertools
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.rmsprop import rmsprop
from torch.optim.sgd import sgd

from mpisgd.base.errors import CheckpointError
from mpisgd.config import (
    AdagradOptions,
    AdamOptions,
    AdamwOptions,
    LambOptions,
    LarsOptions,
    OptimizerOptions,
    RmspropOptions,
    SgdOptions,
)
from mpisgd.update import trust_ratio
from mpisgd.update.groups import Segment
from mpisgd.update.trust_ratio import Lamb, Lars, lamb, lars
from mpisgd.vectors.chunks import cuts
from mpisgd.vectors.memory import vector_like
from mpisgd.vectors.skipped import NOTHING, Runs, between

_Group = dict[str, Any]
_SAID = "__dynamo_disable"
MISSED = "missed"
"""Checkpoint name of each element's missed steps."""
CACHED_NBYTES = 4_000_000
"""Largest slice taken to stay in a core's cache between receiving, update and sending."""
IN_PASSES = 2**17
"""Elements per call of a plain kernel: its passes stay in a core's cache."""


def make_optimizer(
    options: OptimizerOptions, parameter: Tensor, learning_rate: float, *, begun: bool = False, fused: bool = False
) -> torch.optim.Optimizer:
    """Make torch.optim on a flat parameter, with the bits of torch's default CPU kernels.

    Fused kernels touch each byte once, with other bits except in SGD (`_sgd`): SGD takes them beyond cache size, GPUs wherever
    possible.

    Args:
        begun: with all state; torch would make SGD's momentum of the first gradient, all at once.
        fused: as in runs of rules before 6 (`schema.RULES`).
    """
    with without_the_compiler():
        optimizer = _make(options, parameter, learning_rate, fused)
    if begun or type(optimizer) is not torch.optim.SGD:
        _begin(optimizer, parameter)
    return optimizer


def _begin(optimizer: torch.optim.Optimizer, parameter: Tensor) -> None:
    group, state = optimizer.param_groups[0], optimizer.state[parameter]
    for name in sorted(_SLOTS[type(optimizer)] - set(state)):
        if name != "momentum_buffer" or group.get("momentum", 0.0) > 0:
            state[name] = _count_of_steps(group, parameter) if name == "step" else vector_like(parameter.detach())


def _count_of_steps(group: _Group, parameter: Tensor) -> Tensor:
    """Return 0 where the kernel wants it: with the parameter if fused, else on the CPU."""
    return torch.zeros((), device=parameter.device if group.get("fused") else None)


def _make(options: OptimizerOptions, parameter: Tensor, learning_rate: float, fused: bool) -> torch.optim.Optimizer:
    on_gpu = parameter.device.type != "cpu"
    match options:
        case SgdOptions(momentum=momentum, nesterov=nesterov, weight_decay=decay):
            large = on_gpu or parameter.nbytes > CACHED_NBYTES
            return torch.optim.SGD(
                [parameter], lr=learning_rate, momentum=momentum, nesterov=nesterov, weight_decay=decay, fused=large
            )
        case AdagradOptions(weight_decay=decay, eps=eps):
            return torch.optim.Adagrad([parameter], lr=learning_rate, weight_decay=decay, eps=eps, fused=fused and not on_gpu)
        case RmspropOptions(smoothing=smoothing, momentum=momentum, eps=eps, weight_decay=decay):
            return torch.optim.RMSprop(
                [parameter], lr=learning_rate, alpha=smoothing, eps=eps, momentum=momentum, weight_decay=decay
            )
        case AdamOptions(beta1=beta1, beta2=beta2, eps=eps, weight_decay=decay):
            betas, fused = (beta1, beta2), fused or on_gpu
            return torch.optim.Adam([parameter], lr=learning_rate, betas=betas, eps=eps, weight_decay=decay, fused=fused)
        case AdamwOptions(beta1=beta1, beta2=beta2, eps=eps, weight_decay=decay):
            betas, fused = (beta1, beta2), fused or on_gpu
            return torch.optim.AdamW([parameter], lr=learning_rate, betas=betas, eps=eps, weight_decay=decay, fused=fused)
        case LarsOptions() | LambOptions():
            return trust_ratio.make(options, parameter, learning_rate)


@contextmanager
def without_the_compiler() -> Iterator[None]:
    """Keep torch's optimisers from importing torch's compiler, as slow as torch: set `torch._compile`'s mark before."""
    function = getattr(torch.optim.Optimizer.add_param_group, "__wrapped__", None)
    if function is None or "torch._dynamo" in sys.modules or hasattr(function, _SAID):
        yield
        return
    setattr(function, _SAID, function)
    try:
        yield
    finally:
        delattr(function, _SAID)


#: Tensors that each torch optimiser keeps for a parameter.
_SLOTS = {
    torch.optim.SGD: {"momentum_buffer"},
    torch.optim.Adagrad: {"step", "sum"},
    torch.optim.RMSprop: {"step", "square_avg", "momentum_buffer"},
    torch.optim.Adam: {"step", "exp_avg", "exp_avg_sq"},
    torch.optim.AdamW: {"step", "exp_avg", "exp_avg_sq"},
    Lars: {"momentum_buffer"},
    Lamb: {"step", "exp_avg", "exp_avg_sq"},
}


def slots_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Return an optimiser's tensors for a parameter, not copied, without SGD's None."""
    return {name: value for name, value in optimizer.state[parameter].items() if isinstance(value, Tensor)}


def restore_slots(optimizer: torch.optim.Optimizer, parameter: Tensor, slots: Mapping[str, Tensor]) -> None:
    """Copy tensors of a like optimiser. Raises CheckpointError for an unknown tensor."""
    unknown = set(slots) - _SLOTS[type(optimizer)]
    if unknown:
        raise CheckpointError(f"the checkpoint has {', '.join(sorted(unknown))}, not kept by {type(optimizer).__name__}")
    for name, tensor in slots.items():
        own = vector_like(parameter.detach()) if tensor.dim() else _count_of_steps(optimizer.param_groups[0], parameter)
        own.copy_(tensor)
        optimizer.state[parameter][name] = own


class Stepper:
    """A step of `optimizer` by torch's functional form, chunk by chunk, from either end.

    Fused kernels also divide, which saves a pass; plain kernels make their passes within the cache. Skipped elements
    (`vectors/skipped.py`) have `missed` steps.

    Args:
        optimizer: begun, where there are segments.
        segments: cover the slice; steps make whole pieces, of at most a chunk.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameter: Tensor, segments: Sequence[Segment] = (), *, fused: bool = False
    ) -> None:
        self._group, self._state, self._weights = optimizer.param_groups[0], optimizer.state[parameter], parameter.detach()
        self._skipped: Runs = NOTHING
        self._missed: list[tuple[int, int, int]] = []
        """Runs of elements and their missed steps, where counted."""
        self._size = parameter.numel()
        # hooks around `Optimizer.step` cost 12 microseconds, a tenth of a small slice's cycle, and import torch's compiler
        self._kernel = _KERNELS[type(optimizer)]
        self._fused = bool(self._group.get("fused"))
        if self._kernel.step is sgd and self._fused and not fused and parameter.is_cpu:
            self._kernel = self._kernel._replace(step=_sgd)
        self._settings = self._kernel.settings_of(self._group)
        self._scale = torch.ones((), device=self._weights.device)
        self._stepped = 0
        """Elements past this step."""
        self._by_norms = self._kernel.step in (lars, lamb)
        if self._by_norms:  # a segment is a parameter
            self._pieces = list(segments) or [Segment(0, self._size)]
        else:
            self._pieces = [
                each._replace(start=each.start + cut.start, stop=each.start + cut.stop)
                for each in segments
                for cut in cuts(4 * (each.stop - each.start))
            ]
        # never cut: last bits of some kernels depend on where vectors begin and end
        self._ends = [piece.stop for piece in self._pieces]
        in_passes = self._kernel.step in (adam, adamw, adagrad, rmsprop) and not (self._fused or self._pieces)
        self._at_once = self._size if not in_passes else IN_PASSES

    def set_momentum(self, momentum: float) -> None:
        """Set the next steps' momentum, or Adam's beta1."""
        if "betas" in self._group:
            self._group["betas"] = momentum, self._group["betas"][1]
        else:
            self._group["momentum"] = momentum
        self._settings["beta1" if "betas" in self._group else "momentum"] = momentum

    def move(self, weights: Tensor) -> None:
        """Step these weights from now on; values must be equal."""
        self._weights = weights

    def skip(self, runs: Runs) -> None:
        self._skipped = runs
        if len(runs) and self._makes_momentum:
            self._state["momentum_buffer"] = vector_like(self._weights)

    @property
    def missed(self) -> Tensor | None:
        """Steps missed by each element, (slice,) float32, or None."""
        if not self._missed:
            return None
        missed = vector_like(self._weights)
        for start, stop, steps in self._missed:
            missed[start:stop] = steps
        return missed

    @missed.setter
    def missed(self, missed: Tensor) -> None:
        steps = missed.to(torch.int64).cpu()
        edges = [0, *(1 + torch.nonzero(steps.diff()).flatten()).tolist(), self._size]
        self._missed = [(start, stop, int(steps[start])) for start, stop in itertools.pairwise(edges) if steps[start]]

    def reach(self, start: int, stop: int) -> tuple[int, int]:
        """Return the elements that a step makes with these: pieces are whole, SGD's first step makes all momentum."""
        if self._pieces:
            return self._pieces[bisect_right(self._ends, start)].start, self._ends[bisect_left(self._ends, stop)]
        return (0, self._size) if self._makes_momentum else (start, stop)

    @property
    def _makes_momentum(self) -> bool:
        return self._kernel.step in (sgd, _sgd) and self._group["momentum"] > 0 and "momentum_buffer" not in self._state

    def __call__(self, gradient: Tensor, divisor: int, start: int, stop: int) -> None:
        """Step these elements by the sum of `divisor` gradients, (slice,) float32, used up; the last count the step."""
        self._stepped += stop - start
        ends = self._stepped == self._size
        if ends:
            self._stepped = 0
        if not (len(self._skipped) or self._missed):
            if stop - start <= self._at_once:
                self._make(gradient, divisor, start, stop, counts=ends)
                return
            for begin in range(start, stop, self._at_once):
                end = min(begin + self._at_once, stop)
                self._make(gradient, divisor, begin, end, counts=ends and end == stop)
            return
        for first, last in between(self._skipped, start, stop):
            for alike, end, missed in self._alike(first, last):
                for begin in range(alike, end, self._at_once):
                    self._make(gradient, divisor, begin, min(begin + self._at_once, end), missed)
        if ends and "step" in self._state:
            self._state["step"] += 1
            skipped = ((first, last, 1) for first, last in self._skipped.tolist())
            self._missed = _added([*self._missed, *skipped])

    def _alike(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield runs of equal missed steps, with the number."""
        for first, last, missed in self._missed:
            if first < stop and start < last:
                if start < first:
                    yield start, first, 0
                yield max(start, first), min(stop, last), missed
                start = min(stop, last)
        if start < stop:
            yield start, stop, 0

    def _make(self, gradient: Tensor, divisor: int, start: int, stop: int, missed: int = 0, *, counts: bool = False) -> None:
        """Step these elements, with `missed` steps; `counts`: the count of steps grows."""
        weights, slots = self._weights, self._state
        if stop - start < self._size:
            weights, gradient = weights[start:stop], gradient[start:stop]
            slots = {name: tensor[start:stop] if tensor.dim() else tensor for name, tensor in slots.items()}
        if not counts and "step" in slots:
            slots = {**slots, "step": self._state["step"] - missed}
        if self._fused:
            self._scale.fill_(divisor)
            self._settings["grad_scale"] = self._scale if divisor > 1 else None
        elif divisor > 1:
            gradient.div_(divisor)
        if self._pieces:
            self._step_by_groups(weights, gradient, slots, start, stop)
            if counts and "step" in slots:
                self._state["step"] += 1
            return
        kernel, settings = self._kernel, self._settings
        tensors: list[list[Any]] = []
        for name in kernel.slots:
            tensors.append([slots[name]] if name in slots else [])
        first = not tensors[0] and kernel.step in (sgd, _sgd)
        if first:
            tensors[0].append(None)  # torch puts the new momentum here
        settings["lr"] = self._group["lr"]
        kernel.step([weights], [gradient], *tensors, **settings)
        if first and tensors[0][0] is not None:
            self._state["momentum_buffer"] = tensors[0][0]

    def _step_by_groups(self, weights: Tensor, gradient: Tensor, slots: Mapping[str, Tensor], start: int, stop: int) -> None:
        """Step whole pieces, in one call per settings."""
        pieces = self._pieces[bisect_right(self._ends, start) : bisect_left(self._ends, stop) + 1]
        sizes = [min(piece.stop, stop) - max(piece.start, start) for piece in pieces]
        weights_of, gradient_of = torch.split(weights, sizes), torch.split(gradient, sizes)
        slots_of = {name: torch.split(each, sizes) if each.dim() else [each.clone() for _ in sizes] for name, each in slots.items()}
        alike: dict[tuple[float, float | None], list[int]] = {}
        for at, piece in enumerate(pieces):
            alike.setdefault((piece.rate, piece.weight_decay), []).append(at)
        for (rate, weight_decay), those in alike.items():
            settings = self._settings | {"lr": self._group["lr"] * rate}
            if weight_decay is not None:
                settings["weight_decay"] = weight_decay
            if self._by_norms:
                settings["excluded"] = weight_decay == 0
            tensors: list[list[Any]] = []
            for name in self._kernel.slots:
                tensors.append([slots_of[name][at] for at in those] if name in slots else [])
            if self._kernel.step in (sgd, _sgd, lars) and not tensors[0]:
                tensors = [[None] * len(those)]
            of_them = [weights_of[at] for at in those], [gradient_of[at] for at in those]
            self._kernel.step(*of_them, *tensors, **settings)


def _added(runs: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Return disjoint ascending runs; overlaps add their numbers."""
    edges = sorted({edge for start, stop, _ in runs for edge in (start, stop)})
    found = []
    for first, last in itertools.pairwise(edges):
        steps = sum(steps for start, stop, steps in runs if start <= first < stop)
        if steps:
            found.append((first, last, steps))
    return found


class _Kernel(NamedTuple):
    """A torch step for consecutive elements.

    `slots`: tensors after weights and gradients, in order.
    """

    step: Callable[..., None]
    slots: tuple[str, ...]
    settings: tuple[str, ...]

    def settings_of(self, group: _Group) -> _Group:
        found = {name: group[name] for name in self.settings}
        if "betas" in found:
            found["beta1"], found["beta2"] = found.pop("betas")
        return found | {"maximize": False, "foreach": False} | ({"has_sparse_grad": False} if self.step is adagrad else {})


def _sgd(
    weights: list[Tensor],
    gradients: list[Tensor],
    momenta: list[Any],
    *,
    fused: bool,
    grad_scale: Tensor | None = None,
    **settings: Any,
) -> None:
    """Step by torch's fused SGD; elements that fill no register take the plain kernel, for equal bits."""
    begins = settings["momentum"] > 0 and momenta[0] is None
    filled = [0 if begins else len(each) - len(each) % _REGISTER for each in weights]
    for kernel, parts in (fused, [slice(end) for end in filled]), (False, [slice(end, None) for end in filled]):
        those = [at for at, part in enumerate(parts) if len(weights[at][part])]
        if not those:
            continue
        own = [gradients[at][parts[at]] for at in those]
        made = momenta if begins else [None if momenta[at] is None else momenta[at][parts[at]] for at in those]
        if not kernel and grad_scale is not None:
            for each in own:
                each.div_(grad_scale)
        scale = grad_scale if kernel else None
        sgd([weights[at][parts[at]] for at in those], own, made, fused=kernel, grad_scale=scale, **settings)


_REGISTER = 16
"""Elements of torch's widest CPU register."""
_SGD = "fused", "weight_decay", "momentum", "lr", "dampening", "nesterov"
_ADAM = ("exp_avg", "exp_avg_sq", "", "step"), ("fused", "lr", "betas", "weight_decay", "eps", "amsgrad")
_KERNELS: dict[type[torch.optim.Optimizer], _Kernel] = {
    torch.optim.SGD: _Kernel(sgd, ("momentum_buffer",), _SGD),
    torch.optim.Adagrad: _Kernel(adagrad, ("sum", "step"), ("fused", "lr", "weight_decay", "lr_decay", "eps")),
    torch.optim.RMSprop: _Kernel(
        rmsprop, ("square_avg", "", "momentum_buffer", "step"), ("lr", "alpha", "eps", "weight_decay", "momentum", "centered")
    ),
    torch.optim.Adam: _Kernel(adam, *_ADAM),
    torch.optim.AdamW: _Kernel(adamw, *_ADAM),
    Lars: _Kernel(lars, ("momentum_buffer",), (*_SGD, "trust")),
    Lamb: _Kernel(lamb, *_ADAM),
}
