"""Gradients of many learners in one pass on a GPU, each at weights of its own, and the updates made of them.

A window begins with one pass: the gradients of all learners whose weights are there and whose gradient is not. Then gradients are
taken in the order of the log, updates are made and learners pull, until a gradient is missing: all that in one kernel, each of its
threads with a parameter. Pass and kernel are a CUDA graph; windows are planned ahead as a table, of which a graph reads a row.
On a CPU the same is done without graphs, to test it.

Gradients are those of one by one to float tolerance. What networks may be `passes.py` says; the optimiser is SGD with momentum,
weight decay and groups; weights may be averaged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from passes import Passes, is_known, layers_of
from torch import Tensor

from mpisgd.base.draws import seeded, seeds_of
from mpisgd.base.streams import Domain
from mpisgd.config import Config, SgdOptions
from mpisgd.data import Split
from mpisgd.gradient.objective import OwnStep
from mpisgd.job.tensors import Tensors
from mpisgd.update.schedule import momentum_of_run

SHARES = (0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""A graph computes the gradients of such a share of the learners; where fewer are wanted, some are computed twice."""
_MOMENTUM = "optimizer.momentum_buffer"


def refusal(config: Config, tensors: Tensors) -> str:
    """Why a job's gradients are computed one by one; "" = they need not be."""
    module, optimizer, data = tensors.model.module, config.optimizer, tensors.data
    if not all(is_known(layer) for _, layer in layers_of(module)):
        return "the network has layers that a pass of many learners cannot have"
    if not isinstance(optimizer, SgdOptions) or optimizer.nesterov or momentum_of_run(config, 1, 1) is not None:
        return "the optimiser is not SGD with a constant momentum"
    if config.clip_norm or config.clip_average or config.compensation or config.modulate != "gradient":
        return "gradients are clipped or corrected, or weights by staleness are of the rate"
    if data is None or type(data.train) is not Split or data.train.chosen is not None:
        return "the training samples are not in memory, or are a part of those"
    return ""


class Windows:
    """The weights of learners, the gradients computed at them, and the update that they go into.

    Args:
        columns: `course.COLUMNS` by name, of each gradient that is applied, in order.
        rates: learning rates by clock.
        weights: (parameters,); updated in place. momentum: likewise.
    """

    def __init__(
        self, config: Config, tensors: Tensors, columns: Mapping[str, list[Any]], rates: Sequence[float], weights: Tensor
    ) -> None:
        assert tensors.data is not None and not isinstance(tensors.loss, OwnStep)
        assert isinstance(config.optimizer, SgdOptions)
        device, count, mu = weights.device, config.virtual.learners, config.mu
        self._sampling, self._rates, self._train = tensors.sampling, rates, tensors.data.train.on(device)
        self._passes = Passes(tensors.model, tensors.loss)
        self._columns, self._next = columns, _next_of_same(columns["learner_id"])
        self._learners, self._mu = count, mu
        self._sizes = sorted({math.ceil(share * count) for share in SHARES})
        self.weights, self.momentum, self._sum = weights, torch.zeros_like(weights), torch.zeros_like(weights)
        self._momentum, self._seed = config.optimizer.momentum, config.seed
        self._decay, self._corrected = config.averaging, config.averaging_bias_correction
        self.averaged = weights.clone()
        self._factors, self._decays = torch.ones_like(weights), torch.full_like(weights, config.optimizer.weight_decay)
        for each in tensors.segments:
            self._factors[each.start : each.stop] = each.rate
            if each.weight_decay is not None:
                self._decays[each.start : each.stop] = each.weight_decay
        self._pulled = torch.zeros(count, len(weights), device=device)
        self._gradients = torch.zeros_like(self._pulled)
        # A row of the table: the number of gradients taken; learners that compute; their samples; numbers drawn for these; of each
        # gradient taken its learner, whether it begins a sum, its weight, the divisor (0: more are to come), the rate, the share of
        # the new weights in the average; how many learners have pulled before the first gradient, and after each; these learners.
        self._samples = 1 + count
        self._drawn = self._samples + count * mu
        self._width = sum(layer.draw(0).shape[1] for layer in self._passes.drawing)
        self._taken = self._drawn + count * mu * self._width
        self._pulls = self._taken + 7 * count + 1
        self._now = torch.zeros(self._pulls + count, dtype=torch.int32, device=device)
        self._graphs: dict[int, Callable[[], None]] = {}
        self._memory = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    @property
    def state(self) -> dict[str, Tensor]:
        """What a `SliceUpdate` calls its state."""
        averaged = {"averaged": self.averaged} if self._decay else {}
        return {"weights": self.weights} | averaged | ({_MOMENTUM: self.momentum} if self._momentum else {})

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave."""
        for name, tensor in self.state.items():
            tensor.copy_(state[name])

    def _share(self, update: int) -> float:
        """Share of the weights that an update made in their average, as in `update/average.py`."""
        if not self._decay:
            return 0.0
        return (1 - self._decay) / (1 - self._decay**update if self._corrected else 1)

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
        return clock, {clock: self.weights.clone()} | {stamp: self._pulled[learner].clone() for stamp, learner in pulled.items()}

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
            if self._width:
                numbers = [self._numbers(learner, seqs[coming[learner]]) for learner in chosen] * size
                end = self._drawn + size * self._mu * self._width
                now.view(np.float32)[self._drawn : end] = np.concatenate(numbers[:size]).reshape(-1)
            taken, real = (each[self._taken : self._pulls - 1].reshape(7, count) for each in (now, now.view(np.float32)))
            pulled, pulls, at = now[self._pulls - count :], list[int](), 0
            there |= wanted
            while row < stop and learner_ids[row] in there:
                learner = learner_ids[row]
                there.remove(learner)
                taken[0, at], taken[1, at], real[2, at] = learner, summed == 0, weights[row]
                summed += gradients[row]
                if row + 1 == len(clocks) or clocks[row + 1] > clock:
                    clock, real[3:6, at], summed = clock + 1, (summed, self._rates[clock], self._share(clock + 1)), 0
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

    def _numbers(self, learner: int, seq: int) -> np.ndarray:
        """What a learner's layers draw for a mini-batch, (mu, n)."""
        with seeded(seeds_of(Domain.DROPOUT, self._seed, learner, seq)):
            return torch.cat([layer.draw(self._mu) for layer in self._passes.drawing], 1).numpy()

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
        drawn = self._now.view(torch.float32)[self._drawn : self._drawn + size * self._mu * self._width].view(size * self._mu, -1)
        targets = train.targets.index_select(0, samples)
        made = self._passes.gradients(self._pulled.index_select(0, chosen), inputs, targets, drawn)
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

            matrices, constant = (self._gradients, self._pulled), (self._factors, self._decays)
            vectors = (*matrices, self.weights, self.momentum, self._sum, self.averaged, *constant)
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
                self.averaged.lerp_(self.weights, real[at + 5 * count])
            for each in range(now[at + 6 * count], now[at + 6 * count + 1]):
                self._pulled[now[self._pulls + each]] = self.weights


def _next_of_same(learner_ids: list[int]) -> list[int]:
    """Of each row the next one of the same learner; 0 = there is none."""
    found, last = [0] * len(learner_ids), dict[int, int]()
    for row in range(len(learner_ids) - 1, -1, -1):
        found[row] = last.get(learner_ids[row], 0)
        last[learner_ids[row]] = row
    return found
