"""A slice updated on a GPU: sum, optimiser and weights lie there.

                MPI, on the host                    GPU, in this order
    push        receives into an inbox         ->   copy to scratch; weight and add to the sum
    update                                          step of the whole slice
    answer      sends each chunk once copied   <-   copy chunk by chunk

The host waits for a free inbox, a chunk to send, a due norm, and each gradient's check where non-finite ones are dropped. Where
they stop the run, the sum is checked while the weights travel.
"""

from __future__ import annotations

import math
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
from mpisgd.vectors.flat import is_finite
from mpisgd.vectors.memory import Copy, host_view, staging, vector_like, wait_for
from mpisgd.vectors.push_format import PushFormat
from mpisgd.vectors.skipped import NOTHING, Runs


class DeviceUpdate(SliceUpdate):
    """A `SliceUpdate` in GPU memory, given to a CUDA-aware MPI after a wait; chunks are made together, sent singly."""

    receives_again = False

    def __init__(self, weights: Tensor, *arguments: Any, **fields: Any) -> None:
        super().__init__(weights, *arguments, **fields)
        self.cached = False
        self._told_sq = staging(weights.new_zeros(()))
        self._telling: Copy | None = None

    @property
    def inbox(self) -> Any:
        wait_for(self.weights)
        return super().inbox

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
        self._make(self._size)

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


class StagedUpdate(DeviceUpdate):
    """A `DeviceUpdate` for MPI limited to host memory.

    `inbox` and `served` are pinned; after `live_in`, `served` is in a node's shared memory.
    """

    def __init__(self, weights: Tensor, *arguments: Any, **fields: Any) -> None:
        super().__init__(weights, *arguments, **fields)
        self._inboxes = [staging(self._travelling), staging(self._travelling)]
        self._emptying: list[Copy | None] = [None, None]
        """Pending copies out of the inboxes."""
        self._turn: Tensor | None = None
        """The next gradient, where many come at once."""
        self._serve_from(staging(weights))

    @property
    def _travelling(self) -> Tensor:
        """The GPU's memory for the next gradient, as it travels."""
        return self._scratch if self._coded is None else self._coded

    @property
    def inbox(self) -> Any:
        """The inbox filled least recently, once free."""
        emptying = self._emptying[0]
        if emptying is not None:
            emptying.wait()
        return host_view(self._inboxes[0])

    def take_in(self, skipped: Runs = NOTHING) -> str:
        if self._turn is not None:
            self._travelling.copy_(self._turn, non_blocking=True)
        else:
            self._emptying[0] = Copy(self._travelling, self._inboxes[0])
            self._inboxes.reverse()
            self._emptying.reverse()
        return super().take_in(skipped)

    def renew_scratch(self) -> None:
        super().renew_scratch()
        self._inboxes[0], self._emptying[0] = staging(self._travelling), None

    def make_room(self, gradients: int) -> np.ndarray:
        like = self._travelling
        room = staging(like.new_empty(gradients * len(like)))
        self._room = torch.split(room, len(like))
        return host_view(room)

    def turn_to(self, place: int) -> None:
        """Let `take_in` take the gradient at this place of `make_room`'s memory."""
        self._turn = self._room[place]

    def live_in(self, weights: np.ndarray, gradients: Sequence[np.ndarray]) -> None:
        """Serve from this memory, and receive into `gradients` instead of `make_room`; each (slice,) float32."""
        self._room = tuple(torch.from_numpy(each) for each in gradients)
        self._serve_from(torch.from_numpy(weights))

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
