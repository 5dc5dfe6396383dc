"""A model as one flat vector, and the slices of the shards (DESIGN 5).

Parameters and gradients are views into two float32 vectors: pushes and pulls copy nothing. Elements keep their order in memory;
with channels_last, a convolution's weight is (out, height, width, in).
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
from mpisgd.vectors.memory import Memory, as_tensor, outbox_of
from mpisgd.vectors.skipped import NOTHING, Runs, runs_of
from mpisgd.vectors.split import Traced


def slice_bounds(parameters: int, shards: int, sizes: Sequence[int] = ()) -> list[tuple[int, int]]:
    """Cut `parameters` into contiguous slices of `sizes`, or evenly; the first have one element more.

    Raises ConfigError if a shard would own nothing, or `sizes` misfit.
    """
    if sizes:
        if len(sizes) != shards or sum(sizes) != parameters or min(sizes) < 1:
            raise ConfigError(f"slices = {list(sizes)}: expected {shards} sizes with the sum {parameters}")
        return list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))
    if parameters < shards:
        raise ConfigError(f"shards = {shards}: expected at most the number of parameters, {parameters}")
    base, longer = divmod(parameters, shards)
    edges = [shard * base + min(shard, longer) for shard in range(shards + 1)]
    return list(itertools.pairwise(edges))


class Layer(NamedTuple):
    """A module with trainable parameters, and their number of elements."""

    name: str
    size: int


def cut_between(layers: Sequence[Layer], shards: int, most: float = math.inf) -> list[list[Layer]]:
    """Deal consecutive layers to slices, with the least sum of squared sizes.

    `most`: limit of a slice, if possible. There are at least as many layers as slices.
    """
    ends = np.cumsum([0, *(layer.size for layer in layers)], dtype=np.float64)
    least = np.where(ends > 0, np.inf, 0.0)  # cost of the first layers, in no slice yet
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
    """Cut layers above a shard's share into even parts. Raises ConfigError if shards outnumber parameters."""
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
    """Return slices that end between layers; or within, if shards outnumber layers or a slice exceeds twice a share.

    Raises ConfigError if shards outnumber parameters.
    """
    if len(layers) >= shards:
        slices = bounds_of(cut_between(layers, shards))
        most = max(end - start for start, end in slices)
        # a smaller cut does not pay: the upper part waits for the layer's gradient
        if not within or most * shards <= 2 * slices[-1][1]:
            return slices
    return bounds_of(cut_between(cut_large(layers, shards), shards))


def first_layers(layers: Sequence[Layer], slices: Sequence[tuple[int, int]]) -> list[int]:
    """Return the index of each slice's first layer."""
    begins = [start for start, _ in bounds_of([[layer] for layer in layers])]
    return [bisect.bisect_right(begins, start) - 1 for start, _ in slices]


def named(layers: Sequence[Layer], slices: Sequence[tuple[int, int]]) -> list[list[str]]:
    """Return each slice's layer names; a divided layer has its part: `1 2/3`."""
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
    edges = itertools.accumulate((sum(layer.size for layer in layers) for layers in slices), initial=0)
    return list(itertools.pairwise(edges))


_UNDONE = (
    " by the model, the loss or the step; the next pull would undo the change: expected the loss alone; constrain weights by"
    " torch.nn.utils.parametrize, say"
)


def _view(part: Tensor, shape: torch.Size, order: Sequence[int]) -> Tensor:
    if not order:
        return part.view(shape)
    return part.view([shape[at] for at in order]).permute([order.index(at) for at in range(len(order))])


class FlatModel:
    """A module with trainable parameters and gradients as views into two flat float32 vectors.

    Attributes:
        weights: (parameters,) float32, on the model's device.
        gradients: (parameters,) float32; `zero_gradients` before each backward pass.
        memory: both as MPI takes them.
        traced: stages by torch's splitter, each contiguous.
        begins: a stage's offset in the larger model's vectors.
        overflows: whether a backward pass may overflow; the loss is then scaled (`scaling.py`).

    Parameters on the device "meta" (`models/in_pieces.py`) stay there. Raises ConfigError without trainable parameters, or if one
    is not float32 or cannot change.
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
            raise ConfigError("model: no trainable parameters")
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
        """Number of parameters, and a hash of names, shapes and memory order."""
        layout: list[Any] = [[name, list(parameter.shape)] for name, parameter in self._parameters]
        layout += [[name, order] for name, order in self._orders.items() if order and not (self._channels_last and len(order) == 4)]
        digest = hashlib.sha256(json.dumps([self._channels_last, layout]).encode()).hexdigest()[:16]
        return f"{self.size:,} ({digest})"

    def casting(self) -> AbstractContextManager[object]:
        return torch.autocast(self._cast_on, self._cast_to) if self._cast_on else nullcontext()

    def move_to(self, memory: Memory) -> None:
        """Make parameters and gradients views into this memory."""
        self.memory = memory
        self.weights, self.gradients = memory.tensors
        outboxes = [as_tensor(each) for each in memory.outboxes] or [self.gradients]
        # .data has its own version; autograd steps it on adding a gradient
        trained = [(name, each) for name, each in self._parameters if not each.is_meta]
        views = [self.views(each) for each in outboxes]
        places = [[(name, each, of[name].data) for name, each in trained] for of in views]
        self._outboxes = list(zip(outboxes, places, strict=True))
        for (_, parameter), into in zip(self._parameters, self.views(self.weights).values(), strict=True):
            if parameter.is_meta:
                continue  # another rank's part: untouched, without memory
            into.copy_(parameter.detach())
            parameter.data = into
        self._turn_to(0)

    def _turn_to(self, seq: int) -> None:
        """Let the next gradient go to the outbox of mini-batch `seq`."""
        self.gradients, self._places = outbox_of(self._outboxes, seq)
        self._before = [place._version for _, _, place in self._places]
        for _, parameter, place in self._places:
            parameter.grad = place  # not written: a shard never uses the memory

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Raise ConfigError if user code changes weights or `requires_grad`."""
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
                    f"model: requires_grad of {name} became {parameter.requires_grad} in training: expected the factory's value;"
                    " to train a part later, resume a run from a factory that makes the part trainable (init_from)"
                )

    def _refuse_gradients(self) -> None:
        """Raise ConfigError if user code leaves gradients; a step may clear its own."""
        for name, parameter, _ in self._places:
            if parameter.grad is not None and bool(parameter.grad.any()):
                raise ConfigError(
                    f"step: backward in the step left a gradient of {name}: expected the loss alone: mpisgd calls"
                    " backward, and shards step"
                )

    def take_gradients_back(self) -> None:
        """Return gradients to the flat vector where user code cleared or set some."""
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
        """Parameters without a gradient since `zero_gradients`."""
        return [name for version, (name, _, place) in zip(self._before, self._places, strict=True) if place._version == version]

    def forget(self) -> None:
        """Free memory: another model has the parameters."""
        self.memory = Memory.zeros(self.size)
        self.weights, self.gradients = self.memory.tensors
        self._places, self._before = [], []

    def as_made(self, owners: Iterable[nn.Module]) -> None:
        """Restore the factory's buffers in these modules."""
        self._initial.put_back(owners)

    def reclaim(self) -> None:
        """Take parameters back from stages; restore buffers."""
        self.move_to(self.memory)
        self._initial.put_back()

    def _order(self, parameter: nn.Parameter) -> list[int]:
        """Return dimensions, outermost in memory first; [] = as they are."""
        if self._channels_last and parameter.dim() == 4:
            return [0, 2, 3, 1]
        order = sorted(range(parameter.dim()), key=lambda at: -parameter.stride()[at])
        dense = parameter.permute(order).is_contiguous()
        return order if dense and not parameter.is_contiguous() else []

    def _stride(self, parameter: nn.Parameter, order: Sequence[int]) -> tuple[int, ...]:
        """Return strides if dimensions of 1 have special ones, by which torch chooses kernels; else ()."""
        if not (order or parameter.is_contiguous()) or (self._channels_last and parameter.dim() == 4):
            return ()
        plain = _view(torch.empty(parameter.numel(), device="meta"), parameter.shape, order)
        return () if plain.stride() == parameter.stride() else parameter.stride()

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """Return the parameters, by name, as views into a vector."""
        found, offset = {}, 0
        for name, parameter in self._parameters:
            end = offset + parameter.numel()
            view, strides = _view(vector[offset:end], parameter.shape, self._orders[name]), self._strides[name]
            found[name] = view.as_strided(view.shape, strides, view.storage_offset()) if strides else view
            offset = end
        return found

    def state(self) -> dict[str, Any]:
        """Return the state dict: contiguous copies on the host."""
        return {name: _saved(each) for name, each in self.module.state_dict().items()}

    @property
    def layers(self) -> list[Layer]:
        """Modules with trainable parameters, in vector order; a shared parameter is its first owner's.

        A parametrisation (e.g. weight normalisation) is in its module's layer.
        """
        owned = [(owner_of(name), parameter.numel()) for name, parameter in self._parameters]
        runs = itertools.groupby(owned, key=operator.itemgetter(0))
        return [Layer(name, sum(size for _, size in run)) for name, run in runs]

    @property
    def size(self) -> int:
        return self.weights.numel()

    def inputs(self, batch: Any) -> Any:
        """Move a batch to the model's device and memory format."""
        return nest.mapped(batch, self._placed)

    def _placed(self, _: str, value: Any) -> Any:
        value = value.to(self.weights.device, non_blocking=True)
        return in_channels_last("", value) if self._channels_last else value

    def zero_gradients(self, seq: int | None = None) -> None:
        """Clear the gradient, or begin that of mini-batch `seq`."""
        if seq is not None and len(self._outboxes) > 1:
            self._turn_to(seq)
        self.gradients.zero_()
        self._before = [place._version for _, _, place in self._places]


def pass_back(model: FlatModel, loss: Tensor) -> None:
    """Add the loss's gradient to any left by the user's step, as torch does."""
    model.take_gradients_back()
    loss.backward()  # type: ignore[no-untyped-call]


def skipped_runs(model: FlatModel) -> Runs:
    names = set(model.skipped_names)
    if not names:
        return NOTHING
    spans = bounds_of([[Layer(name, parameter.numel())] for name, parameter in model._parameters])
    return runs_of(span for span, (name, _) in zip(spans, model._parameters, strict=True) if name in names)


@contextmanager
def unchanged(model: FlatModel) -> Iterator[None]:
    """Raise ConfigError if weights change in any way, by comparing a copy."""
    before = model.weights.clone()
    yield
    if not torch.equal(model.weights, before):
        raise ConfigError(f"model: weights were changed in place{_UNDONE}")


def in_channels_last(_: str, value: Any) -> Any:
    four = isinstance(value, Tensor) and value.dim() == 4
    return value.contiguous(memory_format=torch.channels_last) if four else value


def _saved(value: Any) -> Any:
    """Copy a state-dict entry to the host; extra state may be anything."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    value = value.detach().cpu()
    return value.clone(memory_format=torch.contiguous_format) if value.layout == torch.strided else value.clone()


def owner_of(parameter: str) -> str:
    """Return the name of a parameter's module; "" is the model."""
    module, inside, _ = f".{parameter}".partition(".parametrizations.")
    return (module if inside else module.rpartition(".")[0]).removeprefix(".")


def squared_norm(vector: np.ndarray | Tensor) -> float:
    """Return |vector|^2 in float32: not finite if an element is not, or the sum overflows. Waits for a GPU."""
    if isinstance(vector, Tensor):
        return torch.dot(vector, vector).item()
    return float(np.vdot(vector, vector))  # as dot, without a warning of overflow


def clip(gradient: Tensor, norm: float) -> None:
    """Clip a gradient in place to an L2 norm, as `torch.nn.utils.clip_grad_norm_`; 0 = off."""
    if norm > 0:
        gradient.mul_(torch.clamp(norm / (torch.linalg.vector_norm(gradient) + 1e-6), max=1.0))


def clip_parts(gradient: Tensor, bounds: Sequence[tuple[int, int]], norm: float) -> None:
    """Clip a gradient as a group's ranks do, each with a part."""
    if norm > 0:
        clip_part(gradient, norm_of_parts(norm_of(gradient[start:end]) for start, end in bounds), norm)


def norm_of(part: Tensor) -> float:
    return float(torch.linalg.vector_norm(part))


def norm_of_parts(norms: Iterable[float]) -> float:
    """Return the L2 norm from the norms of parts, in order."""
    return math.sqrt(sum(each * each for each in norms))


def clip_part(part: Tensor, found: float, norm: float) -> None:
    """Clip a part by the whole's L2 norm `found`; a single part has the bits of `clip`."""
    part.mul_(torch.clamp(norm / (torch.tensor(found, dtype=part.dtype) + 1e-6), max=1.0))


def is_finite(vector: np.ndarray | Tensor) -> bool:
    # ten times as fast as `isfinite`, and finite for nearly all finite gradients (TRAPS 9)
    if math.isfinite(squared_norm(vector)):
        return True
    return bool(torch.isfinite(vector).all() if isinstance(vector, Tensor) else np.isfinite(vector).all())
