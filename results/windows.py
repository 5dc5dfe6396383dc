"""Gradients of many learners in one pass on a GPU, each at weights of its own, and the updates made of them.

A window begins with one pass: the gradients of all learners whose weights are there and whose gradient is not. Then gradients are
taken in the order of the log, updates are made and learners pull, until a gradient is missing: all that in one kernel, each of its
threads with a parameter. Pass and kernel are a CUDA graph; windows are planned ahead as a table, of which a graph reads a row.
On a CPU the same is done without graphs, to test it.

Gradients are those of one by one to float tolerance. Networks are an `nn.Sequential` of convolutions, linear layers and some
without parameters; the optimiser is SGD with momentum, weight decay and groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from mpisgd.config import Config, SgdOptions
from mpisgd.data import Split
from mpisgd.job.tensors import Tensors
from mpisgd.models.cifar10_full import WithinChannels
from mpisgd.update.schedule import momentum_of_run
from mpisgd.vectors.flat import FlatModel

SHARES = (0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""A graph computes the gradients of such a share of the learners; where fewer are wanted, some are computed twice."""
_MOMENTUM = "optimizer.momentum_buffer"
_WITHOUT_PARAMETERS = (nn.ReLU, nn.MaxPool2d, nn.AvgPool2d, nn.Flatten, WithinChannels)


def refusal(config: Config, tensors: Tensors) -> str:
    """Why a job's gradients are computed one by one; "" = they need not be."""
    module, optimizer, data = tensors.model.module, config.optimizer, tensors.data
    if not (isinstance(module, nn.Sequential) and all(_is_known(layer) for layer in module)):
        return "the network is no nn.Sequential of plain convolutions, linear layers, and layers that neither draw nor remember"
    if not isinstance(optimizer, SgdOptions) or optimizer.nesterov or momentum_of_run(config, 1, 1) is not None:
        return "the optimiser is not SGD with a constant momentum"
    if config.averaging or config.clip_norm or config.clip_average or config.compensation or config.modulate != "gradient":
        return "weights are averaged, gradients clipped or corrected, or weights by staleness are of the rate"
    if data is None or type(data.train) is not Split or data.train.chosen is not None:
        return "the training samples are not in memory, or are a part of those"
    return ""


def _is_known(layer: nn.Module) -> bool:
    if isinstance(layer, nn.Conv2d):
        same = tuple(2 * int(each) + 1 for each in layer.padding) == layer.kernel_size and layer.padding_mode == "zeros"
        return same and layer.stride == layer.dilation == (1, 1) and layer.groups == 1 and layer.bias is not None
    return (isinstance(layer, nn.Linear) and layer.bias is not None) or isinstance(layer, _WITHOUT_PARAMETERS)


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


class Passes:
    """The passes of a network, each learner's mini-batch at weights of its own."""

    def __init__(self, model: FlatModel, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._model, self._loss = model, loss
        self._layers = list(model.module.named_children())

    def gradients(self, weights: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        """Gradients at weights (learners, parameters), of the same shape; samples (learners x mu, ...), learner by learner."""
        leaves = {name: each.contiguous().requires_grad_() for name, each in self._views(weights).items()}
        count, x = len(weights), inputs.view(len(weights), -1, *inputs.shape[1:])
        if x.dim() > 3:
            x = x.transpose(1, 2).contiguous()  # (learners, channels, mu, ...): products are of all images of a learner
        for name, layer in self._layers:
            if isinstance(layer, nn.Conv2d):
                x = Convolution.apply(x, leaves[f"{name}.weight"], leaves[f"{name}.bias"])
            elif isinstance(layer, nn.Linear):
                x = torch.baddbmm(leaves[f"{name}.bias"][:, None], x, leaves[f"{name}.weight"].mT)
            elif isinstance(layer, nn.Flatten):
                x = x.transpose(1, 2).flatten(2) if x.dim() > 3 else x.flatten(2)
            else:
                x = layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        made = torch.autograd.grad(count * self._loss(x.flatten(0, 1), targets), list(leaves.values()))  # the mean of all
        found = torch.empty_like(weights)
        for view, gradient in zip(self._views(found).values(), made, strict=True):
            view.copy_(gradient)
        return found

    def _views(self, rows: Tensor) -> dict[str, Tensor]:
        """The parameters, (learners, *shape), in flat vectors (learners, parameters)."""
        first = self._model.views(rows[0])
        shapes = {name: ((len(rows), *view.shape), (rows.stride(0), *view.stride())) for name, view in first.items()}
        return {name: rows.as_strided(*shapes[name], view.storage_offset()) for name, view in first.items()}


class Windows:
    """The weights of learners, the gradients computed at them, and the update that they go into.

    Args:
        order: of each gradient that is applied, in order, the columns of `course.COLUMNS`.
        rates: learning rates by clock.
        weights: (parameters,); updated in place. momentum: likewise.
    """

    def __init__(
        self,
        config: Config,
        tensors: Tensors,
        order: np.ndarray,
        rates: list[float],
        weights: Tensor,
    ) -> None:
        assert tensors.data is not None
        assert isinstance(config.optimizer, SgdOptions)
        device, count, mu = weights.device, config.virtual.learners, config.mu
        self._sampling, self._rates, self._train = tensors.sampling, rates, tensors.data.train.on(device)
        self._passes = Passes(tensors.model, tensors.loss)
        self._columns = {name: order[name].tolist() for name in order.dtype.names}
        self._next = _next_of_same(self._columns["learner_id"])
        self._learners, self._mu = count, mu
        self._sizes = sorted({math.ceil(share * count) for share in SHARES})
        self.weights, self.momentum, self._sum = weights, torch.zeros_like(weights), torch.zeros_like(weights)
        self._momentum = config.optimizer.momentum
        self._factors, self._decays = torch.ones_like(weights), torch.full_like(weights, config.optimizer.weight_decay)
        for each in tensors.segments:
            self._factors[each.start : each.stop] = each.rate
            if each.weight_decay is not None:
                self._decays[each.start : each.stop] = each.weight_decay
        self._pulled = torch.zeros(count, len(weights), device=device)
        self._gradients = torch.zeros_like(self._pulled)
        # A row of the table: the number of gradients taken; learners that compute; their samples; of each gradient taken its
        # learner, whether it begins a sum, its weight, the divisor (0: more are to come), the rate; how many learners have
        # pulled before the first gradient, and after each; these learners.
        self._samples = 1 + count
        self._taken = self._samples + count * mu
        self._pulls = self._taken + 6 * count + 1
        self._now = torch.zeros(self._pulls + count, dtype=torch.int32, device=device)
        self._graphs: dict[int, Callable[[], None]] = {}
        self._memory = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    @property
    def state(self) -> dict[str, Tensor]:
        """What a `SliceUpdate` calls its state."""
        return {"weights": self.weights} | ({_MOMENTUM: self.momentum} if self._momentum else {})

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave."""
        for name, tensor in self.state.items():
            tensor.copy_(state[name])

    def advance(self, start: int, stop: int, clock: int, kept: dict[int, Tensor]) -> tuple[int, dict[int, Tensor]]:
        """Take the gradients of these rows, which end with an update; `kept`: weights by clock, of which gradients are to come.

        Returns the new clock, and what is to be kept then.
        """
        stamps, waiting = self._columns["timestamp"], dict[int, list[int]]()
        coming = self._coming(start)
        for learner, row in coming.items():
            if stamps[row] <= clock:
                self._pulled[learner] = kept[stamps[row]]
            else:
                waiting.setdefault(stamps[row], []).append(learner)
        table, sizes = self._planned(start, stop, clock, coming, waiting)
        for row, size in zip(torch.from_numpy(table).to(self._now.device), sizes, strict=True):
            self._now.copy_(row)
            self._window(size)
        clock = self._columns["clock"][stop - 1] + 1
        pulled = {stamps[row]: learner for learner, row in self._coming(stop).items() if stamps[row] <= clock}
        return clock, {stamp: self._pulled[learner].clone() for stamp, learner in pulled.items()}

    def _coming(self, start: int) -> dict[int, int]:
        """Of each learner that has a gradient from this row on, the row of the first one."""
        found: dict[int, int] = {}
        for row in range(start, len(self._next)):
            found.setdefault(self._columns["learner_id"][row], row)
            if len(found) == self._learners:
                break
        return found

    def _planned(
        self, start: int, stop: int, clock: int, coming: dict[int, int], waiting: dict[int, list[int]]
    ) -> tuple[np.ndarray, list[int]]:
        """The table, int32, and how many gradients each window computes; `waiting`: learners by the clock that they pull at."""
        learner_ids, stamps, clocks, seqs, weights, gradients = (
            self._columns[name] for name in ("learner_id", "timestamp", "clock", "seq", "weight", "gradients")
        )
        count, table, sizes, row, summed = self._learners, list[np.ndarray](), list[int](), start, 0
        wanted, there = {learner for learner, each in coming.items() if stamps[each] <= clock}, set[int]()
        while row < stop:
            chosen = sorted(wanted)
            size = next(each for each in self._sizes if each >= len(chosen))
            filled = (chosen * size)[:size]
            now = np.zeros(len(self._now), np.int32)
            now[1 : 1 + size] = filled
            drawn = [self._sampling.indices(learner, seqs[coming[learner]]) for learner in chosen] * size
            now[self._samples : self._samples + size * self._mu] = np.concatenate(drawn[:size])
            taken, real = (each[self._taken : self._pulls - 1].reshape(6, count) for each in (now, now.view(np.float32)))
            pulled, pulls, at = now[self._pulls - count :], list[int](), 0
            there |= wanted
            while row < stop and learner_ids[row] in there:
                learner = learner_ids[row]
                there.remove(learner)
                taken[0, at], taken[1, at], real[2, at] = learner, summed == 0, weights[row]
                summed += gradients[row]
                if row + 1 == len(clocks) or clocks[row + 1] > clock:
                    real[3, at], real[4, at] = summed, self._rates[clock]
                    clock, summed = clock + 1, 0
                    pulls += waiting.pop(clock, [])
                del coming[learner]
                if self._next[row]:
                    coming[learner] = self._next[row]
                    if stamps[self._next[row]] <= clock:
                        pulls.append(learner)
                    else:
                        waiting.setdefault(stamps[self._next[row]], []).append(learner)
                pulled[at] = len(pulls)
                at, row = at + 1, row + 1
            now[0] = at
            now[self._pulls : self._pulls + len(pulls)] = pulls
            wanted = set(pulls)
            table.append(now)
            sizes.append(size)
        return np.stack(table), sizes

    def _window(self, size: int) -> None:
        """Compute so many gradients, and take those of the present row of the table."""
        if self._now.is_cpu:
            self._compute(size)
            self._take()
            return
        if size not in self._graphs:
            self._graphs[size] = self._captured(size)
        self._graphs[size]()

    def _captured(self, size: int) -> Callable[[], None]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._compute(size)  # the same gradients, once more
            self._take_nothing()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            self._compute(size)
            self._take()
        return graph.replay

    def _compute(self, size: int) -> None:
        train, chosen = self._train, self._now[1 : 1 + size]
        samples = self._now[self._samples : self._samples + size * self._mu]
        inputs = train.inputs.index_select(0, samples).to(torch.float32)
        if train.scale is not None:
            inputs = inputs.div_(train.scale)
        if train.mean is not None:
            inputs = inputs.sub_(train.mean)
        made = self._passes.gradients(self._pulled.index_select(0, chosen), inputs, train.targets.index_select(0, samples))
        self._gradients.index_copy_(0, chosen.long(), made)

    def _take_nothing(self) -> None:
        """Compile the kernel."""
        row = self._now.clone()
        self._now[0] = 0
        self._take()
        self._now.copy_(row)

    def _take(self) -> None:
        if not self._now.is_cpu:
            from window_kernel import take

            vectors = (self._gradients, self._pulled, self.weights, self.momentum, self._sum, self._factors, self._decays)
            take(self._now, vectors, (self._taken, self._pulls), self._momentum)
            return
        now, real = self._now.tolist(), self._now.view(torch.float32).tolist()
        count = self._learners
        for at in range(self._taken, self._taken + now[0]):
            self._sum.mul_(0 if now[at + count] else 1).add_(self._gradients[now[at]], alpha=real[at + 2 * count])
            if divisor := real[at + 3 * count]:
                step = self._sum / divisor + self._decays * self.weights
                self.momentum.mul_(self._momentum).add_(step)
                self.weights.sub_(real[at + 4 * count] * self._factors * self.momentum)
            for each in range(now[at + 5 * count], now[at + 5 * count + 1]):
                self._pulled[now[self._pulls + each]] = self.weights


def _next_of_same(learner_ids: list[int]) -> list[int]:
    """Of each row the next one of the same learner; 0 = there is none."""
    found, last = [0] * len(learner_ids), dict[int, int]()
    for row in range(len(learner_ids) - 1, -1, -1):
        found[row] = last.get(learner_ids[row], 0)
        last[learner_ids[row]] = row
    return found
