"""Gradients into an optimiser step on one slice: weighting, averaging, schedule, averaged weights (DESIGN 3, 5).

The optimiser is torch.optim's, on the slice as its one parameter. Weighting happens per gradient, in the sum, and so before
momentum. The sum is divided by the number of gradients that were summed (law 3). The
learning rate is set before each step as a function of samples applied; torch's schedulers count steps, whose number depends on
the protocol. What an update was made of is measured on the way (`norms.py`); no weight depends on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mpisgd.base.errors import CheckpointError
from mpisgd.config import OptimizerOptions
from mpisgd.update.compensation import Compensation
from mpisgd.update.norms import Norms
from mpisgd.update.optimizer import CACHED_NBYTES, Stepper, make_optimizer, restore_slots, slots_of
from mpisgd.update.schedule import Schedule
from mpisgd.vectors.chunks import chunks_of, cuts
from mpisgd.vectors.computing import Updates
from mpisgd.vectors.flat import is_finite, squared_norm
from mpisgd.vectors.memory import host_vector, host_view, vector_like, view_of

PARKED_NBYTES = 2**30
"""Memory that a shard may use for gradients that came before their turn."""


class Step(NamedTuple):
    """Result of one update."""

    gradients: int
    """The divisor: how many gradients were summed, those that teams had summed before counted each."""
    learning_rate: float
    gradient_sq: float = math.nan
    """Sum of |w_i g_i|^2 over the pushed g_i and their weights w_i, by the divisor: their mean, where each is a single gradient;
    NaN where it was not measured."""
    sum_sq: float = math.nan
    """|sum w_i g_i|^2, before the divisor; NaN where it was not measured."""


class SliceUpdate(Updates):
    """The weights of one slice, the sum of gradients in the making, and the optimiser.

    `scratch`, (slice,) float32, holds the gradient that came last. The first gradient of a sum is not copied: scratch and sum
    change places. `learning_rate` is that of the next update, before any weight. All vectors lie where the weights do; those on a
    GPU meet MPI as `device_update.py` says.

    Args:
        weights: (slice,) float32; becomes the state, updated in place.
        learning_rate: alpha0 (times the scaling rule, where it is on).
        schedule: factor of the learning rate as a function of epochs.
        train_samples: samples of one epoch.
        compensation: what corrects stale gradients, or None; it knows these weights.
        half: gradients are received as bfloat16 (`rounding.py`).
        averaging: a of thetabar <- a thetabar + (1 - a) theta [Chen16 Alg. 2, 4]; 0 = no averaged weights.
        bias_correction: thetabar is the mean of the weights of all updates and not of the initial ones: after t updates
            (1 - a) sum of a^(t-k) theta_k, by 1 - a^t, which is to move by (1 - a) / (1 - a^t) of the way to each.
    """

    def __init__(
        self,
        weights: Tensor,
        options: OptimizerOptions,
        *,
        learning_rate: float,
        schedule: Schedule,
        train_samples: int,
        averaging: float = 0.0,
        bias_correction: bool = False,
        half: bool = False,
        compensation: Compensation | None = None,
    ) -> None:
        self.weights: Tensor = weights
        self.compensation: Compensation | None = compensation
        self.averaged: Tensor | None = weights.clone() if averaging > 0 else None
        self._averaging = averaging
        self._averages: Tensor | None = torch.zeros(()) if bias_correction and averaging > 0 else None
        """Number of updates that thetabar is the mean of, where that matters; kept in checkpoints."""
        self._share = 1.0 - averaging
        """Share of the way to the new weights, by which the averaged ones go."""
        self._train_samples = train_samples
        self._served = view_of(weights)
        self._cuts = list(cuts(weights.nbytes))
        self.chunks_count = len(self._cuts)
        self._made = weights.numel()
        """Number of weights that are those of the last update."""
        self._divisor = 0
        self._sum_sq = 0.0
        self.checks_sums = False
        self._weight, self._first = 1.0, True
        self._added = weights.numel()
        """Number of elements of the gradient accumulated last that are in the sum."""
        self._sum = vector_like(weights)
        self._scratch = vector_like(weights)
        self.scratch: Any = view_of(self._scratch)
        self._summed = view_of(self._sum)
        self._half: Tensor | None = torch.zeros_like(weights, dtype=torch.int16) if half else None
        self._norms = Norms()
        self._parked: dict[int, Tensor] = {}
        self._room: tuple[Tensor, ...] = ()
        self._spare: list[Tensor] = []
        self.cached = weights.nbytes <= CACHED_NBYTES
        self.gradients = 0
        self.samples = 0
        self._pending_samples = 0
        self._parameter = torch.nn.Parameter(weights)
        self._optimizer = make_optimizer(options, self._parameter, learning_rate)
        self._step = Stepper(self._optimizer, self._parameter)
        self._alpha0 = learning_rate
        self._schedule = schedule
        self._set_learning_rate()

    @property
    def inbox(self) -> Any:
        """Memory for the next gradient: `scratch`, or (slice,) int16, the bits of bfloat16."""
        return self.scratch if self._half is None else view_of(self._half)

    def take_in(self) -> None:
        if self._half is not None:
            self._scratch.copy_(self._half.view(torch.bfloat16))

    @property
    def served(self) -> Any:
        return self._served

    @property
    def epochs(self) -> float:
        return self.samples / self._train_samples

    @property
    def room_to_park(self) -> bool:
        return (len(self._parked) + 1) * self._scratch.nbytes <= PARKED_NBYTES

    def park(self, learner_id: int) -> None:
        """Keep the gradient in `scratch` for later; another buffer takes its place."""
        self._parked[learner_id] = self._scratch
        self._receive_into(self._spare.pop() if self._spare else vector_like(self.weights))

    def unpark(self, learner_id: int) -> None:
        self._spare.append(self._scratch)
        self._receive_into(self._parked.pop(learner_id))

    def make_room(self, gradients: int) -> np.ndarray:
        room = host_vector(gradients * len(self.weights))
        self._room = torch.split(room, len(self.weights))
        return host_view(room)

    def turn_to(self, place: int) -> None:
        """The gradient at this place of that memory is in `scratch`; it, and a sum that begins with it, are never copied."""
        self._receive_into(self._room[place])

    def renew_scratch(self) -> None:
        """The next gradient is received into memory of its own."""
        if self._half is not None:
            self._half = torch.zeros_like(self._half)
        self._receive_into(vector_like(self.weights))

    def live_in(self, weights: np.ndarray, gradients: Sequence[np.ndarray]) -> None:
        self._room = tuple(torch.from_numpy(each) for each in gradients)
        self._move_to(torch.from_numpy(weights))

    def renew_weights(self) -> None:
        """Go on in memory of its own: what is sent from the old one, and takes long, stays as it is."""
        self._move_to(vector_like(self.weights))

    def _move_to(self, weights: Tensor) -> None:
        weights.copy_(self.weights)
        self.weights = weights
        self._served = view_of(weights)
        self._parameter.data = weights
        self._step = Stepper(self._optimizer, self._parameter)
        if self.compensation is not None:
            self.compensation.move(weights)

    def _receive_into(self, vector: Tensor) -> None:
        self._scratch = vector
        self.scratch = view_of(vector)
        self._norms.received = None

    def scratch_is_finite(self) -> bool:
        """Whether the received gradient has no NaN and no infinity.

        Its squared norm, which tells in nearly all cases, is kept for `accumulate`: where gradients are asked about at all, each
        that is summed must be, after it was received.
        """
        self._norms.received = squared = squared_norm(self.scratch)
        return math.isfinite(squared) or is_finite(self.scratch)

    def sum_is_finite(self) -> bool:
        """Whether the sum that the last update was made from is finite; to be asked before the next gradient is summed.

        Where that was to be expected, each chunk was looked at while it was in the cache.
        """
        return (self.checks_sums and math.isfinite(self._sum_sq)) or is_finite(self._summed)

    def accumulate(self, weight: float, samples: int, timestamp: int = 0, gradients: int = 1, *, last: bool = False) -> None:
        """Add what is in `scratch`, of `samples` samples and the weights of `timestamp`, times `weight` to the sum.

        It is a gradient, or the sum of so many, which the divisor counts. Where it is the `last` one of an update, each chunk is
        added just before its step, while it is in the cache: the update must be made next.
        """
        if self.compensation is not None:
            self.compensation.compensate(self._scratch, timestamp, first=self.gradients == 0)
            self._norms.received = None
        self._norms.add(self.scratch, weight)
        self._weight, self._first, self._added = weight, self.gradients == 0, 0
        if self._first:
            self._swap()
        if not (last and self.chunks_count > 1):
            self._add(len(self.weights))
        self.gradients += gradients
        self._pending_samples += samples

    def _add(self, stop: int) -> None:
        """Let the sum hold the gradient accumulated last up to this element, too."""
        start, self._added = self._added, stop
        if self._first and self._weight == 1.0:
            return
        whole = stop - start == len(self.weights)
        summed = self._sum if whole else self._sum[start:stop]
        if self._first:
            summed.mul_(self._weight)
        else:
            summed.add_(self._scratch if whole else self._scratch[start:stop], alpha=self._weight)

    def _swap(self) -> None:
        """The received gradient becomes the sum, and the sum's buffer the one to receive into."""
        self._sum, self._scratch = self._scratch, self._sum
        self._summed, self.scratch = self.scratch, self._summed

    def step(self) -> Step:
        """Make the update from what was summed; where nothing was (all dropped), the weights stay.

        Returns the divisor and the learning rate that were used, and what was measured.
        """
        step = self.begin_step()
        self._make(self._cuts[-1].stop)
        return step

    def begin_step(self) -> Step:
        """Begin a `step`; the weights are made as `chunks` are asked for."""
        if self._norms.due and self._added < len(self.weights):
            self._add(len(self.weights))
        gradient_sq, sum_sq = self._norms.take(self._summed, self.gradients)
        step = Step(self.gradients, self.learning_rate, gradient_sq, sum_sq)
        self._divisor, self._made, self._sum_sq = self.gradients, 0, 0.0
        self.samples += self._pending_samples
        self.gradients = self._pending_samples = 0
        if self._averages is not None and self._divisor > 0:
            self._averages += 1
            self._share = (1.0 - self._averaging) / (1.0 - self._averaging ** self._averages.item())
        return step

    def chunks(self) -> Iterator[np.ndarray]:
        """The weights as they are sent, chunk by chunk, each made by now."""
        for cut, chunk in zip(self._cuts, chunks_of(self._served), strict=True):
            if self._made < cut.stop:
                self._make(cut.stop)
            yield chunk

    def _make(self, stop: int) -> None:
        """Make the new weights up to this element, at least; whoever makes the last ends the update."""
        size = len(self.weights)
        if self._divisor > 0:
            stop = self._step.reach(stop)
            if self._added < stop:
                self._add(stop)
            if self.checks_sums:
                self._look_at_sum(self._made, stop)
            self._step(self._sum, self._divisor, self._made, stop)
            if self.averaged is not None:
                self.averaged[self._made : stop].lerp_(self.weights[self._made : stop], self._share)
            self._made = stop
        else:
            self._made = size
        if self._made == size:
            if self._divisor == 1 and self.cached:
                self._swap()  # receive into the buffer that is still in the cache
            self._set_learning_rate()

    def _look_at_sum(self, start: int, stop: int) -> None:
        """Look at these elements of the sum, which are about to be used up: `sum_is_finite` will be asked."""
        self._sum_sq += squared_norm(self._summed[start:stop])

    def state(self) -> dict[str, Tensor]:
        """State that later updates depend on, besides `samples`: tensors by name, not copied. The sum in the making is none of it.

        `weights`, `averaged` and `averages` where there is such, `compensation`, and the optimiser's own as `optimizer.<name>`;
        each (slice,) float32, but for counts of steps, which are scalars.
        """
        state = {"weights": self.weights}
        if self.averaged is not None:
            state["averaged"] = self.averaged
        if self._averages is not None:
            state["averages"] = self._averages
        if self.compensation is not None:
            state |= self.compensation.state(summing=self.gradients > 0)
        slots = slots_of(self._optimizer, self._parameter)
        return state | {f"optimizer.{name}": tensor for name, tensor in slots.items()}

    def restore(self, state: Mapping[str, Tensor], samples: int) -> None:
        """Go on from what `state` gave when so many samples had been applied; nothing may have been summed yet. It is copied.

        Raises CheckpointError where a tensor is missing, not known, or of another shape: it is another optimiser's.
        """
        own = {name: tensor for name, tensor in self.state().items() if not name.startswith("optimizer.")}
        given = {name for name in state if not name.startswith("optimizer.")}
        if given != set(own):
            raise CheckpointError(f"the checkpoint has {', '.join(sorted(given))}: expected {', '.join(sorted(own))}")
        for name, tensor in state.items():
            if tensor.shape not in (self.weights.shape, ()) or (name in own and tensor.shape != own[name].shape):
                raise CheckpointError(
                    f"the checkpoint's {name} has shape {tuple(tensor.shape)}, expected {tuple(self.weights.shape)}"
                )
        for name, tensor in own.items():
            tensor.copy_(state[name])
        slots = {name.removeprefix("optimizer."): tensor for name, tensor in state.items() if name.startswith("optimizer.")}
        restore_slots(self._optimizer, self._parameter, slots)
        self.samples = samples
        self._set_learning_rate()

    def _set_learning_rate(self) -> None:
        self.learning_rate = self._alpha0 * self._schedule(self.epochs)
        self._optimizer.param_groups[0]["lr"] = self.learning_rate
