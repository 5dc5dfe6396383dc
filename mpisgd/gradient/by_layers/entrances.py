"""The first use of each slice's weights in a forward pass: at a module's entrance, or at the start.

A trial pass finds modules used without a call: the nearest called module around counts. Parameters used earlier, or outside all
called modules, are needed from the start; with any compiled module, all.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from mpisgd.base.errors import ConfigError
from mpisgd.vectors.flat import FlatModel
from mpisgd.vectors.kept_state import state_kept


class AllThere:
    """Stand-in for `Entrances`: all weights are there before a pass."""

    unseen: Collection[int] = ()

    def __init__(self, count: int) -> None:
        self.needed = [True for _ in range(count)]

    def begin(self) -> None:
        """Ask for nothing, here and below."""

    def end(self) -> None: ...

    def need_the_others(self) -> None: ...


class Entrances:
    """Hooks that call `need(number)` once per slice in each forward pass, before its weights are used.

    Args:
        bounds: slices; a large parameter may span several.
        forward: a pass that leaves the model unchanged.

    Attributes:
        unseen: slices not requested by the end of the pass.
    """

    def __init__(
        self, model: FlatModel, bounds: Sequence[tuple[int, int]], forward: Callable[[], object], need: Callable[[int], None]
    ) -> None:
        self.needed = [False for _ in bounds]
        self.unseen: Collection[int] = set[int]()
        self._need = need
        self._passing = False
        slices_of = {parameter: numbers for _, parameter, numbers in within(model.module, bounds)}
        entrances, early = _found(model.module, slices_of, forward)
        self._first = sorted(early)
        for module, entered in entrances.items():
            # First: other hooks may make weights from parameters, as torch.nn.utils.weight_norm does.
            module.register_forward_pre_hook(self._entered(sorted(entered)), prepend=True)

    def begin(self) -> None:
        self.needed = [False for _ in self.needed]
        self.unseen = set()
        self._passing = True
        self._ask(self._first)

    def end(self) -> None:
        self._passing = False

    def need_the_others(self) -> None:
        """Request all other slices, after the pass."""
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
    """Yield each trainable parameter, with its slices' numbers."""
    offset = 0
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            start, offset = offset, offset + parameter.numel()
            yield name, parameter, [number for number, (begin, end) in enumerate(bounds) if begin < offset and start < end]


def refused(name: str, *, unseen: bool) -> ConfigError:
    why = "the weights were used before the call of the module" if unseen else "the gradient came in parts"
    return ConfigError(
        f"per_layer, buckets or streamed chunks: expected whole vectors for this model: {why}: parameter {name}; leave per_layer"
        " out, or set MPISGD_TRAVEL=whole"
    )


class _Uses(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """First use of each parameter, counted in torch operations."""

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
    """Return the slices needed at modules' entrances, and those needed from the start."""
    compiler = sys.modules.get("torch._dynamo")  # never imported here: as slow as importing torch
    if any(_is_compiled(module, compiler) for module in model.modules()):
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
    """Return the steps before each module's entrance, and each parameter's first step."""
    uses, entered = _Uses(), dict[nn.Module, int]()

    def enter(module: nn.Module, _: object) -> None:
        entered.setdefault(module, uses.steps)

    handles = [module.register_forward_pre_hook(enter, prepend=True) for module in model.modules()]
    with state_kept(model), uses:
        forward()  # not without gradients: a loss may be of the inputs' gradient
    for handle in handles:
        handle.remove()
    return entered, uses.used


def _is_compiled(module: nn.Module, compiler: Any) -> bool:
    if compiler is None or isinstance(module, torch.jit.ScriptModule):
        return isinstance(module, torch.jit.ScriptModule)
    return module._compiled_call_impl is not None or isinstance(module, compiler.OptimizedModule)
