"""Any model cut into stages before modules that are named, by torch's own splitter, `torch.distributed.pipelining`.

Its front end traces the model with `torch.export`, at the shapes of an example, and needs no process group. A value that a later
stage wants goes from each stage to the next one here, where torch would send it past those between: so do skip connections, and
inputs that are not of the first stage alone. Stages have the parameters and buffers of the model itself, which stays whole: who
evaluates it runs it as it was written, with batches of any size.
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
    "expected a model whose passes do the same whatever the values are (torch.export has the rules), and the same for each"
    " micro-batch; or let the factory return a list of modules, each of which takes what the one before returns"
)


@dataclass(frozen=True)
class Traced:
    """A model that was cut.

    Attributes:
        modules: the stages; each takes what the one before returned, a tensor or a tuple of them.
        parameters: the trainable ones of each stage, in its order.
    """

    modules: tuple[nn.Module, ...]
    parameters: tuple[tuple[nn.Parameter, ...], ...]

    def only(self, stage: int) -> Traced:
        """One stage as a model of its own."""
        return Traced((self.modules[stage],), (self.parameters[stage],))


class Piece(nn.Module):
    """A stage: what torch made of its part of the model, between the values that come and those that go.

    Args:
        takes, uses, makes, gives: names of values: those that come, that the part is called with, that it returns, and that go.
        form: of a whole model's output, where this is the last stage: its values are then put into that.
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
    """Cut a model before the modules of these names; `inputs` are those of a micro-batch, whose shapes are kept for good.

    Raises ConfigError where there is no such module, the model cannot be traced, or cannot be cut there.
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
            f"stages.at = {list(begin)}: torch's splitter made {pipe.num_stages} stages, expected {len(begin) + 1}: a module that"
            " is called more than once begins a stage each time, and one that is never called none"
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
    """Torch marks the modules by a `forward` of its own, and leaves it there."""
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
    """The stages, with what must go from each to the next: whatever is there, and wanted later."""
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
        if stage == 0:  # torch lets it take the model's own arguments, in their form
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
    """Give a stage the model's own parameters and buffers, by name: of those with two names, torch may have made copies, and left
    some where nothing uses them."""
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
    """The names of what a traced module reads, of itself and of the modules in it."""
    for prefix, module in part.named_modules():
        graph = getattr(module, "graph", None)
        if isinstance(graph, torch.fx.Graph):
            yield from (f"{prefix}.{node.target}" if prefix else str(node.target) for node in graph.nodes if node.op == "get_attr")


def _parameters(model: nn.Module, pieces: Sequence[nn.Module], begin: Sequence[str]) -> tuple[tuple[nn.Parameter, ...], ...]:
    """Those of each stage. Raises ConfigError where one is in no stage, or in two; or a stage has none."""
    trained = {each: name for name, each in model.named_parameters() if each.requires_grad}
    stage_of: dict[nn.Parameter, int] = {}
    for stage, piece in enumerate(pieces):
        for each in piece.parameters():
            if each in trained and stage_of.setdefault(each, stage) != stage:
                raise ConfigError(
                    f"stages.at = {list(begin)}: parameter {trained[each]} is used in stages {stage_of[each]} and {stage}, expected"
                    " cuts that leave each in one stage"
                )
    for each, name in trained.items():
        if each not in stage_of:
            raise ConfigError(
                f"stages.at = {list(begin)}: parameter {name} has no part in the model's output, expected none such, or that it"
                " does not require a gradient"
            )
    own = tuple(tuple(each for each in trained if stage_of[each] == stage) for stage in range(len(pieces)))
    for stage, parameters in enumerate(own):
        if not parameters:
            raise ConfigError(f"stages.at = {list(begin)}: stage {stage} has no trainable parameters, expected some in each")
    return own
