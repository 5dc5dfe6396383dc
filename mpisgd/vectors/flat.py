"""A model as one flat vector, and the slices of the shards (DESIGN 5).

The parameters of the model become views into one float32 vector, their gradients views into another, so that a push or pull
of a slice needs no copy. A parameter's elements lie there in the order that they have in memory where the model is made, as its
strides say; with channels_last, those of a convolution's weight in the order (out, height, width, in).
"""

from __future__ import annotations

import bisect
import copy
import hashlib
import itertools
import json
import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mpisgd.base.errors import ConfigError
from mpisgd.vectors import nest
from mpisgd.vectors.kept_state import KeptState
from mpisgd.vectors.memory import Memory
from mpisgd.vectors.skipped import NOTHING, Runs, runs_of
from mpisgd.vectors.split import Traced


def slice_bounds(parameters: int, shards: int) -> list[tuple[int, int]]:
    """Cut `parameters` elements evenly into `shards` contiguous slices; the first ones are one element longer.

    Raises ConfigError where a shard would own nothing.
    """
    if parameters < shards:
        raise ConfigError(f"shards = {shards}: expected at most the number of parameters, {parameters}")
    base, longer = divmod(parameters, shards)
    edges = [shard * base + min(shard, longer) for shard in range(shards + 1)]
    return list(itertools.pairwise(edges))


class Layer(NamedTuple):
    """A module that owns trainable parameters, by its name in the model, and how many elements they have."""

    name: str
    size: int


def cut_between(layers: Sequence[Layer], shards: int, most: float = math.inf) -> list[list[Layer]]:
    """Deal layers out to `shards` slices, each a run of consecutive ones, so that the squares of the slices' sizes sum to least.

    `most`: no slice is larger, where it can be done so. There are at least as many layers.
    """
    ends = np.cumsum([0, *(layer.size for layer in layers)], dtype=np.float64)
    least = np.where(ends > 0, np.inf, 0.0)  # of the first layers in so many slices: none yet
    cuts = []
    for _ in range(shards):
        sizes = ends - ends[:, None]  # [from this layer, up to that one]
        sums = least[:, None] + np.where(sizes <= most, sizes**2, np.inf)
        sums[np.tril_indices(len(ends))] = np.inf
        cuts.append(sums.argmin(axis=0))
        least = sums.min(axis=0)
    edges = [len(layers)]
    for cut in reversed(cuts):
        edges.append(int(cut[edges[-1]]))
    return [list(layers[start:end]) for start, end in itertools.pairwise(reversed(edges))]


def cut_large(layers: Sequence[Layer], shards: int) -> list[Layer]:
    """Cut layers that are larger than a shard's share into even parts, each called as its layer.

    Raises ConfigError where there are more shards than parameters.
    """
    size = sum(layer.size for layer in layers)
    if size < shards:
        raise ConfigError(f"shards = {shards}: expected at most the number of parameters, {size}")
    found = []
    for layer in layers:
        count = max(1, -(-layer.size * shards // size))
        base, longer = divmod(layer.size, count)
        found += [Layer(layer.name, base + (part < longer)) for part in range(count)]
    return found


def cut_by_layers(layers: Sequence[Layer], shards: int, *, within: bool) -> list[tuple[int, int]]:
    """Slices that end between layers; or in large ones, where shards are more than layers, or (`within`) where a slice would be
    twice a share. Less is not worth it: the part above a layer waits for that layer's gradient, and nothing of it is hidden.

    Raises ConfigError where there are more shards than parameters.
    """
    if len(layers) >= shards:
        slices = bounds_of(cut_between(layers, shards))
        most = max(end - start for start, end in slices)
        if not within or most * shards <= 2 * slices[-1][1]:
            return slices
    return bounds_of(cut_between(cut_large(layers, shards), shards))


def first_layers(layers: Sequence[Layer], slices: Sequence[tuple[int, int]]) -> list[int]:
    """The number of the first layer that each slice has elements of."""
    begins = [start for start, _ in bounds_of([[layer] for layer in layers])]
    return [bisect.bisect_right(begins, start) - 1 for start, _ in slices]


def named(layers: Sequence[Layer], slices: Sequence[tuple[int, int]]) -> list[list[str]]:
    """The names of each slice's layers; of one in several slices also which of them it is: `1 2/3`."""
    names = [layer.name or "(model)" for layer in layers]
    begins = [start for start, _ in bounds_of([[layer] for layer in layers])]
    firsts, ends = first_layers(layers, slices), (bisect.bisect_left(begins, end) for _, end in slices)
    has = [range(first, end) for first, end in zip(firsts, ends, strict=True)]
    count = Counter(itertools.chain.from_iterable(has))
    seen = Counter[int]()
    found = []
    for numbers in has:
        seen.update(numbers)
        found.append([names[at] + (f" {seen[at]}/{count[at]}" if count[at] > 1 else "") for at in numbers])
    return found


def bounds_of(slices: Sequence[Sequence[Layer]]) -> list[tuple[int, int]]:
    """The slices of layers that follow each other, as `slice_bounds` gives them."""
    edges = itertools.accumulate((sum(layer.size for layer in layers) for layers in slices), initial=0)
    return list(itertools.pairwise(edges))


_UNDONE = (
    " by the model, the loss or the step, which the next pull of weights would undo: expected the loss alone; constrain weights by"
    " torch.nn.utils.parametrize, say"
)


def _view(part: Tensor, shape: torch.Size, order: Sequence[int]) -> Tensor:
    if not order:
        return part.view(shape)
    return part.view([shape[at] for at in order]).permute([order.index(at) for at in range(len(order))])


class FlatModel:
    """A module whose trainable parameters and gradients are views into two flat float32 vectors.

    Attributes:
        module: the model itself, changed in place.
        weights: (parameters,) float32, on the model's device.
        gradients: (parameters,) float32; zero it with `zero_gradients` before each backward pass.
        memory: both as MPI takes them.
        traced: as torch's splitter has cut it into stages; the vectors then have the parameters of each stage together.
        begins: the element of a larger model's vectors at which these begin, where this is a stage of it.
        overflows: whether a backward pass may, so that its loss is to be scaled (`scaling.py`).

    Parameters on torch's device "meta" (`models/in_pieces.py`) stay there.

    Raises ConfigError for a model without trainable parameters, or with ones that are not float32, or that torch cannot change.
    """

    def __init__(
        self,
        module: nn.Module,
        memory_format: Literal["channels_last", "contiguous"] = "contiguous",
        device: str = "cpu",
        autocast: Literal["off", "bfloat16", "float16"] = "off",
        traced: Traced | None = None,
        begins: int = 0,
    ) -> None:
        self._parts_on_meta = any(parameter.is_meta for parameter in module.parameters())
        self.module = module if self._parts_on_meta else module.to(device)
        self._cast_on = device.partition(":")[0] if autocast != "off" else ""
        self._cast_to = torch.float16 if autocast == "float16" else torch.bfloat16
        self.overflows = autocast == "float16"
        self._initial = KeptState(self.module)
        self._channels_last = memory_format == "channels_last"
        parameters = [(name, each) for name, each in module.named_parameters() if each.requires_grad]
        self.traced = traced
        if traced is not None:
            order = {parameter: place for place, parameter in enumerate(itertools.chain(*traced.parameters))}
            parameters.sort(key=lambda named: order[named[1]])
        self._parameters = parameters
        self._trained = {(name, each): each.requires_grad for name, each in module.named_parameters()}
        if not parameters:
            raise ConfigError("model: it has no trainable parameters")
        for name, parameter in parameters:
            if parameter.dtype != torch.float32:
                raise ConfigError(f"model: parameter {name} is {parameter.dtype}, expected torch.float32")
            if parameter.is_inference():
                raise ConfigError(
                    f"model: parameter {name} was made in torch.inference_mode(), and cannot change: expected torch.no_grad()"
                )
        self._orders = {name: self._order(parameter) for name, parameter in parameters}
        self._strides = {name: self._stride(parameter, self._orders[name]) for name, parameter in parameters}
        size = sum(parameter.numel() for _, parameter in parameters)
        self.move_to(Memory.zeros(size, device, begins))

    @property
    def fingerprint(self) -> str:
        """Their number, and a hash of names, shapes and order in memory: what a flat vector of this model means."""
        layout: list[Any] = [[name, list(parameter.shape)] for name, parameter in self._parameters]
        layout += [[name, order] for name, order in self._orders.items() if order and not (self._channels_last and len(order) == 4)]
        digest = hashlib.sha256(json.dumps([self._channels_last, layout]).encode()).hexdigest()[:16]
        return f"{self.size:,} ({digest})"

    def casting(self) -> AbstractContextManager[object]:
        """The precision of a training pass: torch's autocast where that is chosen; weights and gradients stay float32."""
        return torch.autocast(self._cast_on, self._cast_to) if self._cast_on else nullcontext()

    def move_to(self, memory: Memory) -> None:
        """Let the parameters, as they are, and their gradients be views into this memory, on the model's device."""
        self.memory = memory
        self.weights, self.gradients = memory.tensors
        places = self.views(self.gradients)
        # as .data, each has a version of its own: autograd steps it where it adds a gradient
        self._places = [(name, each, places[name].data) for name, each in self._parameters if not each.is_meta]
        for (_, parameter), into in zip(self._parameters, self.views(self.weights).values(), strict=True):
            if parameter.is_meta:
                continue  # another rank's: its part of the vectors is never touched, and takes no memory
            into.copy_(parameter.detach())
            parameter.data = into
        self._before = [place._version for _, _, place in self._places]
        for _, parameter, place in self._places:
            parameter.grad = place  # not written: a shard has no use for that memory

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Raises ConfigError where the user's code changes weights, or which of them are trained."""
        before = [(parameter._version, place._version) for _, parameter, place in self._places]
        yield
        if any(
            parameter.grad is not place or place._version != version
            for (_, version), (_, parameter, place) in zip(before, self._places, strict=True)
        ):
            self._refuse_gradients()
        for (version, _), (name, parameter, _) in zip(before, self._places, strict=True):
            if parameter._version != version:
                raise ConfigError(f"model: {name} was changed in place{_UNDONE}")
        for (name, parameter), trained in self._trained.items():
            if parameter.requires_grad != trained:
                raise ConfigError(
                    f"model: requires_grad of {name} became {parameter.requires_grad} in training: expected what the factory made;"
                    " to train a part later, resume a run from a factory that makes it trainable (init_from)"
                )

    def _refuse_gradients(self) -> None:
        """Raises ConfigError where the user's code has computed gradients and left them: a step may, if it clears them again."""
        for name, parameter, _ in self._places:
            if parameter.grad is not None and bool(parameter.grad.any()):
                raise ConfigError(
                    f"step: it computed the gradient of {name} itself (backward) and left it: expected the loss alone: mpisgd calls"
                    " backward, and shards step"
                )

    def take_gradients_back(self) -> None:
        """Let gradients be in the flat vector again, where the user's step or hooks have cleared some, or set them."""
        for at, (_, parameter, place) in enumerate(self._places):
            if parameter.grad is not place:
                if parameter.grad is None:
                    place.zero_()
                    self._before[at] = place._version
                else:
                    place.copy_(parameter.grad)
                parameter.grad = place

    @property
    def skipped_names(self) -> list[str]:
        """Parameters that have got no gradient since `zero_gradients`."""
        return [name for version, (name, _, place) in zip(self._before, self._places, strict=True) if place._version == version]

    def forget(self) -> None:
        """Of parameters that are another model's by now, this one keeps no memory."""
        self.memory = Memory.zeros(self.size)
        self.weights, self.gradients = self.memory.tensors
        self._places, self._before = [], []

    def as_made(self, owners: Iterable[nn.Module]) -> None:
        """Let the buffers of these modules of it have the values that the model's factory gave them."""
        self._initial.put_back(owners)

    def reclaim(self) -> None:
        """Stages of the module were models of their own: the parameters come back, and buffers are as they were made."""
        self.move_to(self.memory)
        self._initial.put_back()

    def _order(self, parameter: nn.Parameter) -> list[int]:
        """Dimensions from the outermost in memory to the innermost; [] = as they are."""
        if self._channels_last and parameter.dim() == 4:
            return [0, 2, 3, 1]
        order = sorted(range(parameter.dim()), key=lambda at: -parameter.stride()[at])
        dense = parameter.permute(order).is_contiguous()
        return order if dense and not parameter.is_contiguous() else []

    def _stride(self, parameter: nn.Parameter, order: Sequence[int]) -> tuple[int, ...]:
        """Strides that the order does not tell: those of dimensions of 1, by which torch chooses kernels; () = there are none."""
        if not (order or parameter.is_contiguous()) or (self._channels_last and parameter.dim() == 4):
            return ()
        plain = _view(torch.empty(parameter.numel(), device="meta"), parameter.shape, order)
        return () if plain.stride() == parameter.stride() else parameter.stride()

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """The parameters, by name, that a flat vector of the model's size holds: views into it."""
        found, offset = {}, 0
        for name, parameter in self._parameters:
            end = offset + parameter.numel()
            view, strides = _view(vector[offset:end], parameter.shape, self._orders[name]), self._strides[name]
            found[name] = view.as_strided(view.shape, strides, view.storage_offset()) if strides else view
            offset = end
        return found

    def state(self) -> dict[str, Any]:
        """The module's state dict as it is now: copies, on the host, of tensors contiguous."""
        return {name: _saved(each) for name, each in self.module.state_dict().items()}

    @property
    def layers(self) -> list[Layer]:
        """The modules that own trainable parameters, in the order of the flat vector; a shared parameter is its first owner's.

        What a parametrisation (weight normalisation, say) keeps for a module belongs to that module's layer.
        """
        owned = [(owner_of(name), parameter.numel()) for name, parameter in self._parameters]
        runs = itertools.groupby(owned, key=operator.itemgetter(0))
        return [Layer(name, sum(size for _, size in run)) for name, run in runs]

    @property
    def size(self) -> int:
        """Number of trainable parameters."""
        return self.weights.numel()

    def inputs(self, batch: Any) -> Any:
        """A batch, or the inputs of one, on the model's device; tensors of four dimensions in its memory format."""
        return nest.mapped(batch, self._placed)

    def _placed(self, _: str, value: Any) -> Any:
        value = value.to(self.weights.device, non_blocking=True)
        return in_channels_last("", value) if self._channels_last else value

    def zero_gradients(self) -> None:
        self.gradients.zero_()
        self._before = [place._version for _, _, place in self._places]


def pass_back(model: FlatModel, loss: Tensor) -> None:
    """Add the gradient of the loss to that which the user's own step has left, as torch does."""
    model.take_gradients_back()
    loss.backward()  # type: ignore[no-untyped-call]


def skipped_runs(model: FlatModel) -> Runs:
    """The elements of `skipped_names`."""
    names = set(model.skipped_names)
    if not names:
        return NOTHING
    spans = bounds_of([[Layer(name, parameter.numel())] for name, parameter in model._parameters])
    return runs_of(span for span, (name, _) in zip(spans, model._parameters, strict=True) if name in names)


@contextmanager
def unchanged(model: FlatModel) -> Iterator[None]:
    """As `FlatModel.untouched`, in whatever way weights are changed: they are compared with a copy."""
    before = model.weights.clone()
    yield
    if not torch.equal(model.weights, before):
        raise ConfigError(f"model: its weights were changed in place{_UNDONE}")


def in_channels_last(_: str, value: Any) -> Any:
    """A tensor of four dimensions in that memory format; anything else as it is."""
    four = isinstance(value, Tensor) and value.dim() == 4
    return value.contiguous(memory_format=torch.channels_last) if four else value


def _saved(value: Any) -> Any:
    """A copy of an entry of a state dict, on the host; extra state may be anything."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    value = value.detach().cpu()
    return value.clone(memory_format=torch.contiguous_format) if value.layout == torch.strided else value.clone()


def owner_of(parameter: str) -> str:
    """The name of the module whose layer a parameter, by its name, belongs to; "" is the model itself."""
    module, inside, _ = f".{parameter}".partition(".parametrizations.")
    return (module if inside else module.rpartition(".")[0]).removeprefix(".")


def squared_norm(vector: np.ndarray | Tensor) -> float:
    """|vector|^2, summed in float32: not finite where the vector is not, and where the sum is too large for float32.

    Of a vector on a GPU: waits for that.
    """
    if isinstance(vector, Tensor):
        return torch.dot(vector, vector).item()
    return float(np.vdot(vector, vector))  # as dot, but without a warning where it is too large


def clip(gradient: Tensor, norm: float) -> None:
    """Clip a gradient, (elements,), in place to this L2 norm, as `torch.nn.utils.clip_grad_norm_` does; 0 = leave it as it is."""
    if norm > 0:
        gradient.mul_(torch.clamp(norm / (torch.linalg.vector_norm(gradient) + 1e-6), max=1.0))


def clip_parts(gradient: Tensor, bounds: Sequence[tuple[int, int]], norm: float) -> None:
    """Clip a gradient as the ranks of a group do, each of which knows a part of it: with the norm that `norm_of_parts` gives."""
    if norm > 0:
        clip_part(gradient, norm_of_parts(norm_of(gradient[start:end]) for start, end in bounds), norm)


def norm_of(part: Tensor) -> float:
    """The L2 norm of a part of a gradient."""
    return float(torch.linalg.vector_norm(part))


def norm_of_parts(norms: Iterable[float]) -> float:
    """The L2 norm of a gradient from those of its parts, in their order."""
    return math.sqrt(sum(each * each for each in norms))


def clip_part(part: Tensor, found: float, norm: float) -> None:
    """Clip a part of a gradient whose L2 norm is `found` in place, as `clip` does with all of it: of one part, to the same bits."""
    part.mul_(torch.clamp(norm / (torch.tensor(found, dtype=part.dtype) + 1e-6), max=1.0))


def is_finite(vector: np.ndarray | Tensor) -> bool:
    """The squared norm is ten times as fast as `isfinite`, and finite for nearly all finite gradients (TRAPS 9)."""
    if math.isfinite(squared_norm(vector)):
        return True
    return bool(torch.isfinite(vector).all() if isinstance(vector, Tensor) else np.isfinite(vector).all())
