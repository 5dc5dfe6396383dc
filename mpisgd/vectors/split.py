"""Stages of any model, cut before named modules by torch's splitter, `torch.distributed.pipelining`.

`torch.export` traces the model at an example's shapes, without a process group. A value passes through all stages on its way, not
past stages as in torch. Stages share the model's tensors; evaluation runs
the model as written, at any batch size.
"""

from __future__ import annotations

import itertools
import operator
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from mpisgd.base.draws import kept
from mpisgd.base.errors import ConfigError

_WAY_OUT = (
    "expected a model with the same passes for all values (torch.export has the rules), and for each"
    " micro-batch; or let the factory return a list of modules, each with the result of the module before as input"
)


@dataclass(frozen=True)
class Traced:
    """A model cut into stages.

    Attributes:
        modules: stages; each takes the previous result, a tensor or a tuple.
        parameters: trainable, of each stage.
    """

    modules: tuple[nn.Module, ...]
    parameters: tuple[tuple[nn.Parameter, ...], ...]

    def only(self, stage: int) -> Traced:
        return Traced((self.modules[stage],), (self.parameters[stage],))


class Piece(nn.Module):
    """A stage: torch's part of the model, and its values.

    Args:
        takes, uses, makes, gives: names of values that come, enter the part, leave the part, go.
        form: structure of the model's output, in the last stage.
    """

    def __init__(
        self,
        part: nn.Module,
        takes: Sequence[str],
        uses: Sequence[str],
        makes: Sequence[str],
        gives: Sequence[str],
        *,
        form: Any = None,
    ) -> None:
        super().__init__()
        self.part = part
        self._takes, self._uses, self._makes, self._gives = takes, uses, makes, gives
        self._form = form

    def forward(self, passed: Any) -> Any:
        came = _pytree.tree_leaves(passed)
        values = dict(zip(self._takes, came, strict=True))
        made = self.part(*(values[name] for name in self._uses))
        values |= zip(self._makes, made if isinstance(made, tuple | list) else (made,), strict=True)
        given = tuple(values[name] for name in self._gives)
        if self._form is not None:
            return _pytree.tree_unflatten(given, self._form)
        return given if len(given) > 1 else given[0]


def split(model: nn.Module, begin: Sequence[str], inputs: Any) -> Traced:
    """Cut a model before these modules; `inputs` of a micro-batch fix the shapes.

    Raises ConfigError if a module is missing, or the model cannot be traced or cut.
    """
    _check_names(model, begin)
    forms: list[Any] = []
    with _annotated(model, begin), kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own code
        hook = model.register_forward_hook(lambda _, __, output: forms.append(_pytree.tree_structure(output)))
        try:
            from torch.distributed.pipelining import SplitPoint, pipeline

            pipe = pipeline(model, (inputs,), split_spec=dict.fromkeys(begin, SplitPoint.BEGINNING))
        except Exception as error:
            why = error.__cause__ or error
            said = str(why).strip().split("\n")[0]
            raise ConfigError(
                f"stages.at = {list(begin)}: torch's splitter cannot trace the {type(model).__name__}: {type(why).__name__}:"
                f" {said}: {_WAY_OUT}"
            ) from error
        finally:
            hook.remove()
    if pipe.num_stages != len(begin) + 1:
        raise ConfigError(
            f"stages.at = {list(begin)}: torch's splitter made {pipe.num_stages} stages, expected {len(begin) + 1}: a module"
            " called more than once begins a stage each time, and a module never called begins none"
        )
    pieces = tuple(_pieces(model, pipe.split_gm, forms[-1]))
    return Traced(pieces, _parameters(model, pieces, begin))


def _check_names(model: nn.Module, begin: Sequence[str]) -> None:
    there = [name for name, _ in model.named_modules() if name]
    for name in begin:
        if name not in there:
            listed = ", ".join(there[:12]) + (", ..." if len(there) > 12 else "")
            raise ConfigError(f"stages.at: the model has no module {name!r}, expected some of {listed}")


@contextmanager
def _annotated(model: nn.Module, begin: Sequence[str]) -> Iterator[None]:
    """Remove torch's marks after this block: a `forward` on each named module."""
    marked = [model.get_submodule(name) for name in begin]
    before = [module.__dict__.get("forward") for module in marked]
    try:
        yield
    finally:
        for module, forward in zip(marked, before, strict=True):
            for name in ("forward", "_orig_forward"):
                module.__dict__.pop(name, None)
            if forward is not None:
                module.__dict__["forward"] = forward


def _pieces(model: nn.Module, whole: torch.fx.GraphModule, form: Any) -> Iterator[Piece]:
    """Yield stages, each passing on values wanted later."""
    nodes = list(whole.graph.nodes)
    calls = [node for node in nodes if node.op == "call_module"]
    takes = [node.name for node in nodes if node.op == "placeholder"]
    names = {node: node.name for node in nodes}
    for node in nodes:
        if node.target is operator.getitem:
            names[node] = f"{node.args[0].name}[{node.args[1]}]"
    uses = [[names[each] for each in node.args] for node in calls]
    uses.append([names[each] for each in _pytree.tree_leaves(nodes[-1].args[0])])  # what the model returns
    for stage, node in enumerate(calls):
        part: Any = whole.get_submodule(str(node.target))
        if stage == 0:  # torch has it take the model's own arguments
            part.graph.set_codegen(torch.fx.graph.CodeGen())
            part.recompile()
        _bind(model, part)
        (returned,) = next(each for each in part.graph.nodes if each.op == "output").args
        several = isinstance(returned, tuple | list)
        makes = [f"{node.name}[{place}]" for place in range(len(returned))] if several else [node.name]
        later = set(itertools.chain(*uses[stage + 1 :]))
        last = stage + 1 == len(calls)
        gives = uses[-1] if last else [name for name in [*takes, *makes] if name in later]
        yield Piece(part, takes, uses[stage], makes, gives, form=form if last else None)
        takes = gives


def _bind(model: nn.Module, part: nn.Module) -> None:
    """Give a stage the model's own tensors: torch may have copied tensors with two names, or left some unused."""
    used = set(_used(part))
    for own, there in ((model.named_parameters, part.named_parameters), (model.named_buffers, part.named_buffers)):
        mine = dict(own(remove_duplicate=False))
        for name, _ in list(there(remove_duplicate=False)):
            owner, _, leaf = name.rpartition(".")
            if name not in used:
                delattr(part.get_submodule(owner), leaf)
            elif name in mine:
                setattr(part.get_submodule(owner), leaf, mine[name])


def _used(part: nn.Module) -> Iterator[str]:
    for prefix, module in part.named_modules():
        graph = getattr(module, "graph", None)
        if isinstance(graph, torch.fx.Graph):
            yield from (f"{prefix}.{node.target}" if prefix else str(node.target) for node in graph.nodes if node.op == "get_attr")


def _parameters(model: nn.Module, pieces: Sequence[nn.Module], begin: Sequence[str]) -> tuple[tuple[nn.Parameter, ...], ...]:
    """Return stages' parameters. Raises ConfigError unless each is in one stage, and no stage empty."""
    trained = {each: name for name, each in model.named_parameters() if each.requires_grad}
    stage_of: dict[nn.Parameter, int] = {}
    for stage, piece in enumerate(pieces):
        for each in piece.parameters():
            if each in trained and stage_of.setdefault(each, stage) != stage:
                raise ConfigError(
                    f"stages.at = {list(begin)}: parameter {trained[each]} is used in stages {stage_of[each]} and {stage}, expected"
                    " cuts that leave each parameter in one stage"
                )
    for each, name in trained.items():
        if each not in stage_of:
            raise ConfigError(
                f"stages.at = {list(begin)}: parameter {name} has no part in the model's output, expected a"
                " part, or requires_grad = False"
            )
    own = tuple(tuple(each for each in trained if stage_of[each] == stage) for stage in range(len(pieces)))
    for stage, parameters in enumerate(own):
        if not parameters:
            raise ConfigError(f"stages.at = {list(begin)}: stage {stage} has no trainable parameters, expected some in each")
    return own
