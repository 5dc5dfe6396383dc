"""The passes of a network for many learners at once, each mini-batch at weights of its own.

Networks are an `nn.Sequential` of convolutions that keep the size of images, of linear layers, both perhaps with weight
normalisation, and of some layers without parameters. Activations are (learners, channels, mu, height, width), so that each
product is of all images of a learner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _WeightNorm

from mpisgd.models.cifar10_full import WithinChannels
from mpisgd.vectors.flat import FlatModel

_WITHOUT_PARAMETERS = (nn.ReLU, nn.MaxPool2d, nn.AvgPool2d, nn.Flatten, WithinChannels)
_NORMALISED = "parametrizations.weight.original"


@runtime_checkable
class Drawing(Protocol):
    """A layer that draws numbers for each sample."""

    def draw(self, samples: int) -> Tensor:
        """Numbers for so many samples, (samples, n), drawn by torch's generator of the CPU."""

    def given(self, inputs: Tensor, drawn: Tensor) -> Tensor:
        """What the layer makes of samples and these numbers."""


def layers_of(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The layers of a sequence, and of sequences in it, with the prefix of their parameters' names."""
    if type(module) is nn.Sequential:
        for own, layer in module.named_children():
            yield from layers_of(layer, f"{name}{own}.")
    else:
        yield name, module


def is_known(layer: nn.Module) -> bool:
    """Whether a pass of many learners can have this layer."""
    if parametrize.is_parametrized(layer):
        made = dict(layer.parametrizations.items())  # type: ignore[operator, union-attr]
        plain = list(made) == ["weight"] and [type(each) for each in made["weight"]] == [_WeightNorm] and made["weight"][0].dim == 0
    else:
        plain = True
    if isinstance(layer, nn.Conv2d):
        same = tuple(2 * int(each) + 1 for each in layer.padding) == layer.kernel_size and layer.padding_mode == "zeros"
        return plain and same and layer.stride == layer.dilation == (1, 1) and layer.groups == 1 and layer.bias is not None
    linear = isinstance(layer, nn.Linear) and layer.bias is not None
    return plain and (linear or isinstance(layer, (*_WITHOUT_PARAMETERS, Drawing)))


class Convolution(torch.autograd.Function):
    """Convolutions of stride 1 that keep the size of images, of each learner with filters of its own."""

    @staticmethod
    def forward(context: Any, x: Tensor, filters: Tensor, bias: Tensor) -> Tensor:
        """Images (learners, channels, mu, height, width); filters (learners, out, channels, ...); bias (learners, out)."""
        seen = _seen(x, filters)
        context.save_for_backward(filters, seen)
        context.shape = x.shape
        return torch.baddbmm(bias[:, :, None], filters.flatten(2), seen).view(*filters.shape[:2], *x.shape[2:])

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        """A convolution of the gradient with the filters turned; and products with what each filter saw."""
        filters, seen = context.saved_tensors
        of_places = gradient.flatten(2)
        of_filters = torch.bmm(of_places, seen.mT).view(filters.shape)
        of_images = None
        if context.needs_input_grad[0]:
            turned = filters.flip(3, 4).transpose(1, 2).flatten(2)
            of_images = torch.bmm(turned, _seen(gradient, filters)).view(context.shape)
        return of_images, of_filters, of_places.sum(2)


def _seen(x: Tensor, filters: Tensor) -> Tensor:
    """What filters see at each place: (learners, channels x height x width of a filter, mu x height x width)."""
    high, wide = filters.shape[3:]
    around = functional.pad(x, (wide // 2, wide // 2, high // 2, high // 2))
    own, shape = around.stride(), x.shape
    places = around.as_strided((*shape[:2], high, wide, *shape[2:]), (own[0], own[1], own[3], own[4], *own[2:]))
    return places.reshape(shape[0], shape[1] * high * wide, -1)


@dataclass(frozen=True, eq=False)
class Decay:
    """A hook of a parameter: adds `decay` times the weights to the gradient."""

    weights: Tensor
    decay: float

    def __call__(self, gradient: Tensor) -> Tensor:
        return gradient.add(self.weights, alpha=self.decay)


def hooks_of(module: nn.Module) -> dict[str, list[Any]]:
    """Hooks by parameter."""
    return {name: list((each._backward_hooks or {}).values()) for name, each in module.named_parameters()}


class Passes:
    """The passes of a network, each learner's mini-batch at weights of its own."""

    def __init__(self, model: FlatModel, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._model, self._loss = model, loss
        self._layers = list(layers_of(model.module))
        self._decays = {name: sum(hook.decay for hook in hooks) for name, hooks in hooks_of(model.module).items()}
        self.drawing = [layer for _, layer in self._layers if isinstance(layer, Drawing)]

    def gradients(self, weights: Tensor, inputs: Tensor, targets: Tensor, drawn: Tensor) -> Tensor:
        """Gradients at weights (learners, parameters), of the same shape.

        Args:
            inputs: (learners x mu, ...), learner by learner; targets likewise.
            drawn: (learners x mu, n), what `drawing` has drawn for each sample, layer by layer.
        """
        leaves = {name: each.contiguous().requires_grad_() for name, each in self._views(weights).items()}
        count, x = len(weights), inputs.view(len(weights), -1, *inputs.shape[1:])
        if x.dim() > 3:
            x = x.transpose(1, 2).contiguous()
        for name, layer in self._layers:
            if isinstance(layer, nn.Conv2d):
                x = Convolution.apply(x, _weight(leaves, name), leaves[f"{name}bias"])
            elif isinstance(layer, nn.Linear):
                x = torch.baddbmm(leaves[f"{name}bias"][:, None], x, _weight(leaves, name).mT)
            elif isinstance(layer, nn.Flatten):
                x = x.transpose(1, 2).flatten(2) if x.dim() > 3 else x.flatten(2)
            elif isinstance(layer, Drawing):
                x, drawn = _given(layer, x, drawn)
            else:
                x = layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        made = torch.autograd.grad(count * self._loss(x.flatten(0, 1), targets), list(leaves.values()))  # the mean of all
        found = torch.empty_like(weights)
        for (name, view), gradient in zip(self._views(found).items(), made, strict=True):
            view.copy_(gradient.add(leaves[name].detach(), alpha=self._decays[name]) if self._decays[name] else gradient)
        return found

    def _views(self, rows: Tensor) -> dict[str, Tensor]:
        """The parameters, (learners, *shape), in flat vectors (learners, parameters)."""
        first = self._model.views(rows[0])
        shapes = {name: ((len(rows), *view.shape), (rows.stride(0), *view.stride())) for name, view in first.items()}
        return {name: rows.as_strided(*shapes[name], view.storage_offset()) for name, view in first.items()}


def _weight(leaves: Mapping[str, Tensor], name: str) -> Tensor:
    """The weights of a layer: (learners, out, ...)."""
    if f"{name}weight" in leaves:
        return leaves[f"{name}weight"]
    lengths, directions = (leaves[f"{name}{_NORMALISED}{at}"] for at in (0, 1))
    return directions * (lengths / directions.flatten(2).norm(dim=2).view_as(lengths))


def _given(layer: Drawing, x: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
    """What a layer that draws makes of (learners, channels, mu, ...), and the numbers that are left."""
    own = layer.draw(0).shape[1]
    made = layer.given(x.transpose(1, 2).flatten(0, 1), drawn[:, :own])
    return made.unflatten(0, (x.shape[0], x.shape[2])).transpose(1, 2).contiguous(), drawn[:, own:]
