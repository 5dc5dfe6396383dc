"""A slice updated on a GPU: sum, optimiser and weights lie there.

                MPI, on the host                    GPU, in this order
    push        receives into pinned memory    ->   copy to a vector; weight and add to the sum
    update                                          step of the whole slice
    answer      sends each chunk once copied   <-   copy chunk by chunk

The host waits for free memory, a chunk to send, a due norm, and each gradient's check where non-finite ones are dropped. Where
they stop the run, the sum is checked while the weights travel.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpisgd.config import Config
from mpisgd.update import schedule
from mpisgd.update.average import Average
from mpisgd.update.compensation import Compensation
from mpisgd.update.groups import Segment
from mpisgd.update.slice_update import SliceUpdate, Step, Weighting
from mpisgd.vectors.body import WholePool
from mpisgd.vectors.flat import is_finite
from mpisgd.vectors.memory import Copy, as_tensor, host_view, staging, vector_like, wait_for
from mpisgd.vectors.push_format import PushFormat


class DeviceUpdate(SliceUpdate):
    """A `SliceUpdate` in GPU memory, given to a CUDA-aware MPI after a wait; chunks are made together, sent singly."""

    receives_again = False

    def __init__(self, weights: Tensor, *arguments: Any, **fields: Any) -> None:
        super().__init__(weights, *arguments, **fields)
        self.cached = False
        self._told_sq = staging(weights.new_zeros(()))
        self._telling: Copy | None = None

    @property
    def served(self) -> Any:
        wait_for(self.weights)
        return super().served

    def step(self) -> Step:
        """Make the update and wait for the GPU: callers measure the time."""
        self.begin_step()
        self._until_made()
        return self.made

    def _until_made(self) -> None:
        wait_for(self.weights)

    def begin_step(self) -> None:
        super().begin_step()
        self._make(0, self._size)

    def chunks(self) -> Iterator[Any]:
        wait_for(self.weights)
        return super().chunks()

    def _look_at_sum(self, start: int, stop: int) -> None:
        part = self._sum[start:stop]
        self._telling = Copy(self._told_sq, torch.dot(part, part))

    def _note_norms(self) -> None:
        if self._norms.of_sum:
            assert self._telling is not None
            self._telling.wait()
            self._sum_sq = self._told_sq.item()
        super()._note_norms()

    def sum_is_finite(self) -> bool:
        if self._telling is None:
            return is_finite(self._sum)
        self._telling.wait()
        return math.isfinite(self._told_sq.item()) or is_finite(self._sum)


class StagedPool(WholePool):
    """Pinned memory to receive into; vectors lie on the GPU."""

    def __init__(self, weights: Tensor, push_format: PushFormat) -> None:
        super().__init__(weights, push_format)
        self._words_there = self._travels.new_zeros(self._words) if self._comes_apart else None
        """The GPU's memory for coded words."""
        self._comes_apart, self._waits = True, False
        self._emptying = deque[tuple[Tensor, Copy]]()
        """Memory, and the copies out of it, the first begun first."""

    def _take_apart(self) -> Tensor:
        if len(self._emptying) < 2:
            return self._space(self._words)
        came, copy = self._emptying.popleft()
        copy.wait()
        return came

    def _space(self, words: int) -> Tensor:
        return staging(self._travels.new_empty(words))

    def put_apart(self, came: Tensor) -> None:
        """Forget memory received into for nothing: refused pushes are rare."""

    def widen(self, came: Tensor, vector: Tensor, *, lasts: bool) -> None:
        copy = Copy(vector if self._words_there is None else self._words_there, came)
        if self._words_there is not None:
            self.format.widen(self._words_there, vector)
        if not lasts:
            self._emptying.append((came, copy))


class StagedUpdate(DeviceUpdate):
    """A `DeviceUpdate` for MPI limited to host memory.

    `served` is pinned; after `live_in`, in a node's shared memory.
    """

    pool = StagedPool

    def __init__(self, weights: Tensor, *arguments: Any, **fields: Any) -> None:
        super().__init__(weights, *arguments, **fields)
        self._serve_from(staging(weights))

    def live_in(self, weights: np.ndarray | Tensor) -> None:
        """Serve from this memory."""
        self._serve_from(as_tensor(weights))

    def renew_weights(self) -> None:
        """Serve from new memory; slow sends from the old stay intact."""
        self._serve_from(staging(self.weights))

    def restore(self, state: Mapping[str, Tensor], samples: int) -> None:
        super().restore(state, samples)
        self._serve_from(self._out)

    def _serve_from(self, out: Tensor) -> None:
        self._out = out
        self._begin_to_send()
        self._until_made()

    def _begin_to_send(self) -> None:
        self._leaving = [Copy(self._out[cut], self.weights[cut]) for cut in self._cuts]

    def _until_made(self) -> None:
        for copy in self._leaving:
            copy.wait()

    @property
    def served(self) -> Any:
        return host_view(self._out)

    def begin_step(self) -> None:
        super().begin_step()
        self._begin_to_send()

    def chunks(self) -> Iterator[Any]:
        for cut, copy in zip(self._cuts, self._leaving, strict=True):
            copy.wait()
            yield host_view(self._out[cut])


def make_update(
    config: Config,
    weights: Tensor,
    *,
    gradients_per_update: float,
    train_samples: int,
    device: str = "cpu",
    direct: bool = False,
    segments: Sequence[Segment] = (),
    kind: Callable[..., SliceUpdate] | None = None,
) -> SliceUpdate:
    """Make a slice's update from initial `weights`, (slice,) float32, copied to `device`.

    Args:
        direct: MPI takes GPU memory.
        kind: maker of the update; None: by the device and MPI.
    """
    own = vector_like(weights.detach().to(device))
    own.copy_(weights)
    made = kind or (SliceUpdate if device == "cpu" else DeviceUpdate if direct else StagedUpdate)
    return made(
        own,
        config.optimizer,
        learning_rate=config.alpha0 * (gradients_per_update if config.linear_scaling else 1),
        schedule=schedule.of_run(config, gradients_per_update, train_samples),
        train_samples=train_samples,
        momentum=schedule.momentum_of_run(config, gradients_per_update, train_samples),
        average=Average.of(own, config.averaging, config.averaging_bias_correction),
        segments=segments,
        push_format=PushFormat.of(config),
        weighting=Weighting(config.modulate),
        clip_average=config.clip_average,
        compensation=Compensation(own, config.compensation, config.compensation_memory) if config.compensation > 0 else None,
    )
