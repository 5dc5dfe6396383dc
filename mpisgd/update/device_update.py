"""A slice that is updated on a GPU: sum, optimiser and weights lie there, and gradients and weights cross to MPI and back.

                MPI, on the host                    the GPU, in this order
    push        receives into the inbox        ->   copy to scratch; weight and add to the sum
    update                                          one step of the whole slice; then chunk by chunk
    answer      sends each chunk when it is    <-   copy of the chunk
                there, the first ones while the last are being copied

The host waits where it needs something: for an inbox, of which there are two, to be free again; for a chunk that is to be sent; for
a norm, where one is due (`norms.py`); and where gradients that are not finite are dropped, for each to be looked at. Where they
stop the run, the sum is looked at, while the weights are under way.

Where MPI is CUDA-aware it receives and sends in the GPU's own memory (`DeviceUpdate` alone), which costs a wait before each.
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
from mpisgd.update.slice_update import SliceUpdate, Step
from mpisgd.update.weighting import Weighting
from mpisgd.vectors.flat import is_finite
from mpisgd.vectors.memory import Copy, host_view, staging, vector_like, wait_for
from mpisgd.vectors.push_format import PushFormat
from mpisgd.vectors.skipped import NOTHING, Runs


class DeviceUpdate(SliceUpdate):
    """`SliceUpdate` on a GPU whose memory MPI takes: chunks are sent one by one, but made all at once."""

    receives_again = False

    def __init__(self, weights: Tensor, *arguments: Any, **fields: Any) -> None:
        super().__init__(weights, *arguments, **fields)
        self.cached = False
        self._told_sq = staging(weights.new_zeros(()))
        self._telling: Copy | None = None

    @property
    def inbox(self) -> Any:
        """Memory for the next gradient, once the GPU is done with what came before."""
        wait_for(self.weights)
        return super().inbox

    @property
    def served(self) -> Any:
        wait_for(self.weights)
        return super().served

    def step(self) -> Step:
        """The weights are made when it returns, as on a CPU: whoever takes the time of an update takes the GPU's."""
        step = self.begin_step()
        self._until_made()
        return step

    def _until_made(self) -> None:
        wait_for(self.weights)

    def begin_step(self) -> Step:
        step = super().begin_step()
        self._make(self._size)
        return step

    def chunks(self) -> Iterator[Any]:
        wait_for(self.weights)
        return super().chunks()

    def _look_at_sum(self, start: int, stop: int) -> None:
        part = self._sum[start:stop]
        self._telling = Copy(self._told_sq, torch.dot(part, part))

    def sum_is_finite(self) -> bool:
        if self._telling is None:
            return is_finite(self._sum)
        self._telling.wait()
        return math.isfinite(self._told_sq.item()) or is_finite(self._sum)


class StagedUpdate(DeviceUpdate):
    """`DeviceUpdate` where MPI takes host memory alone.

    `inbox` and `served` are numpy views of pinned memory, or, after `live_in`, `served` is of memory that ranks of a node share.
    """

    def __init__(self, weights: Tensor, *arguments: Any, **fields: Any) -> None:
        super().__init__(weights, *arguments, **fields)
        self._inboxes = [self._new_inbox(), self._new_inbox()]
        self._emptying: list[Copy | None] = [None, None]
        """The copy out of each, where one was begun."""
        self._turn: Tensor | None = None
        """The next gradient, where many come at once."""
        self._serve_from(staging(weights))

    def _new_inbox(self) -> Tensor:
        return staging(self._scratch if self._coded is None else self._coded)

    @property
    def inbox(self) -> Any:
        """Memory for the next gradient: the inbox that was filled before the last one, once it is free again."""
        emptying = self._emptying[0]
        if emptying is not None:
            emptying.wait()
        return host_view(self._inboxes[0])

    def take_in(self, skipped: Runs = NOTHING) -> str:
        if self._turn is not None:
            (self._scratch if self._coded is None else self._coded).copy_(self._turn, non_blocking=True)
        else:
            self._emptying[0] = Copy(self._scratch if self._coded is None else self._coded, self._inboxes[0])
            self._inboxes.reverse()
            self._emptying.reverse()
        return super().take_in(skipped)

    def renew_scratch(self) -> None:
        super().renew_scratch()
        self._inboxes[0], self._emptying[0] = self._new_inbox(), None

    def make_room(self, gradients: int) -> np.ndarray:
        like = self._scratch if self._coded is None else self._coded
        room = staging(like.new_empty(gradients * len(like)))
        self._room = torch.split(room, len(like))
        return host_view(room)

    def turn_to(self, place: int) -> None:
        """The gradient at this place of that memory is what `take_in` takes in."""
        self._turn = self._room[place]

    def live_in(self, weights: np.ndarray, gradients: Sequence[np.ndarray]) -> None:
        """Let this memory, each (slice,) float32, hold the weights that are served, and what comes instead of in `make_room`'s."""
        self._room = tuple(torch.from_numpy(each) for each in gradients)
        self._serve_from(torch.from_numpy(weights))

    def renew_weights(self) -> None:
        """Serve them from memory of its own: what is sent from the old one, and takes long, stays as it is."""
        self._serve_from(staging(self.weights))

    def restore(self, state: Mapping[str, Tensor], samples: int) -> None:
        super().restore(state, samples)
        self._serve_from(self._out)

    def _serve_from(self, out: Tensor) -> None:
        """From now on serve the weights, as they are, from this host memory, (slice,) float32."""
        self._out = out
        self._begin_to_send()
        self._until_made()

    def _begin_to_send(self) -> None:
        self._leaving = [Copy(self._out[cut], self.weights[cut]) for cut in self._cuts]

    def _until_made(self) -> None:
        """And copied."""
        for copy in self._leaving:
            copy.wait()

    @property
    def served(self) -> Any:
        return host_view(self._out)

    def begin_step(self) -> Step:
        step = super().begin_step()
        self._begin_to_send()
        return step

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
    """The update of one slice, from initial `weights`, (slice,) float32, which are copied to `device`.

    Args:
        direct: MPI takes a GPU's memory.
        segments: of this slice, as in `SliceUpdate`.
        kind: makes it, wherever it is; None: as MPI needs it there.
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
        measured=config.exchange != "streamed",
        compensation=Compensation(own, config.compensation, config.compensation_memory) if config.compensation > 0 else None,
    )
