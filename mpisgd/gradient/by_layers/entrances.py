"""When a forward pass first uses the weights of each slice, or part: at the entrance of a module, or from its beginning on.

A module uses its own parameters from when it is entered. One forward pass, computed before, shows where this is not so: of a module
that is used without being called (attention's output projection, say) the nearest one around it that is called is the entrance; and
parameters that something else uses before that, or that no module around them is called for, are needed from the beginning on. So
is all of a model that torch.compile has made, in whole or in part: what is compiled knows no modules.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from mpisgd.base.errors import ConfigError
from mpisgd.vectors.flat import FlatModel
from mpisgd.vectors.kept_state import state_kept


class Entrances:
    """Says `need(number)` in each forward pass, once for each slice, before its weights are used.

    Args:
        bounds: the slices of the flat vector; a large parameter may be in several.
        forward: computes a forward pass, once, and leaves the model as it is.

    Attributes:
        needed: which slices have been asked for in this pass.
        unseen: those that the pass came to its end without asking for.
    """

    def __init__(
        self, model: FlatModel, bounds: Sequence[tuple[int, int]], forward: Callable[[], object], need: Callable[[int], None]
    ) -> None:
        self.needed = [False for _ in bounds]
        self.unseen = set[int]()
        self._need = need
        self._passing = False
        slices_of = {parameter: numbers for _, parameter, numbers in within(model.module, bounds)}
        entrances, early = _found(model.module, slices_of, forward)
        self._first = sorted(early)
        for module, entered in entrances.items():
            # First of its hooks: others may make its weights of the parameters, as torch.nn.utils.weight_norm does.
            module.register_forward_pre_hook(self._entered(sorted(entered)), prepend=True)

    def begin(self) -> None:
        """A forward pass begins."""
        self.needed = [False for _ in self.needed]
        self.unseen = set()
        self._passing = True
        self._ask(self._first)

    def end(self) -> None:
        """It has ended, or raised."""
        self._passing = False

    def need_the_others(self) -> None:
        """It has ended: what no module has asked for is asked for."""
        self.unseen = {number for number, needed in enumerate(self.needed) if not needed}
        self._ask(sorted(self.unseen))

    def _ask(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if not self.needed[number]:
                self.needed[number] = True
                self._need(number)

    def _entered(self, numbers: Sequence[int]) -> Callable[..., None]:
        def hook(*_: object) -> None:
            if self._passing:
                self._ask(numbers)

        return hook


def within(model: nn.Module, bounds: Sequence[tuple[int, int]]) -> Iterator[tuple[str, nn.Parameter, list[int]]]:
    """Each trainable parameter, and the numbers of those slices of the flat vector that have some of it."""
    offset = 0
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            start, offset = offset, offset + parameter.numel()
            yield name, parameter, [number for number, (begin, end) in enumerate(bounds) if begin < offset and start < end]


def refused(name: str, *, unseen: bool) -> ConfigError:
    """The error for a model whose passes do not show when a slice with this parameter is used, or when its gradient is there."""
    why = "its weights were used before its module was called" if unseen else "its gradient came in parts"
    return ConfigError(f"exchange = 'layerwise': expected 'whole' for this model: {why}: parameter {name}")


class _Uses(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the first use of each parameter, and in which step of the pass that was: an operation of torch's own, whatever function
    of Python's it was called by."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps = 0
        self.used: dict[nn.Parameter, int] = {}

    def __torch_dispatch__(
        self, operation: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.steps += 1
        for each in _pytree.tree_leaves((args, kwargs)):
            if isinstance(each, nn.Parameter):
                self.used.setdefault(each, self.steps)
        return operation(*args, **(kwargs or {}))


def _found(
    model: nn.Module, slices_of: Mapping[nn.Parameter, Sequence[int]], forward: Callable[[], object]
) -> tuple[dict[nn.Module, set[int]], set[int]]:
    """The modules at whose entrance slices are needed, and which; the slices that are needed before."""
    compiler = sys.modules.get("torch._dynamo")  # not imported here: that takes as long as torch
    if compiler is not None and any(_is_compiled(module, compiler) for module in model.modules()):
        return {}, set(itertools.chain.from_iterable(slices_of.values()))
    with nullcontext() if compiler is None else torch.compiler.set_stance("force_eager"):
        entered, used = _seen(model, forward)
    found, early = dict[nn.Module, set[int]](), set[int]()
    asked: dict[nn.Parameter, int] = {}
    for name, module in model.named_modules():
        owned = [parameter for parameter in module.parameters(recurse=False) if parameter in slices_of]
        around = name
        while owned and module not in entered and around:
            around = around.rpartition(".")[0]
            module = model.get_submodule(around)  # noqa: PLW2901
        for parameter in owned:
            if module in entered:
                asked[parameter] = min(entered[module], asked.get(parameter, entered[module]))
                found.setdefault(module, set()).update(slices_of[parameter])
    for parameter, numbers in slices_of.items():
        if parameter not in asked or used.get(parameter, math.inf) <= asked[parameter]:
            early.update(numbers)
    return found, early


def _seen(model: nn.Module, forward: Callable[[], object]) -> tuple[dict[nn.Module, int], dict[nn.Parameter, int]]:
    """The modules that a forward pass enters, and the parameters that it uses: after which step, and in which, first."""
    uses, entered = _Uses(), dict[nn.Module, int]()

    def enter(module: nn.Module, _: object) -> None:
        entered.setdefault(module, uses.steps)

    handles = [module.register_forward_pre_hook(enter, prepend=True) for module in model.modules()]
    with state_kept(model), torch.no_grad(), uses:
        forward()
    for handle in handles:
        handle.remove()
    return entered, uses.used


def _is_compiled(module: nn.Module, compiler: Any) -> bool:
    return module._compiled_call_impl is not None or isinstance(module, compiler.OptimizedModule)
