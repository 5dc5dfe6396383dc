"""Gradients into an optimiser step on a slice: weighting, averaging, schedule, averaged weights (DESIGN 3, 5).

Weights apply to gradients in the sum, before momentum, or to the rate (`Weighting`). The divisor is the number of summed
gradients (law 3). The learning rate follows samples applied: the number of steps depends on the protocol.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mpisgd.base.errors import CheckpointError
from mpisgd.config import OptimizerOptions
from mpisgd.update.average import Average
from mpisgd.update.compensation import Compensation
from mpisgd.update.groups import Segment
from mpisgd.update.norms import Norms
from mpisgd.update.optimizer import CACHED_NBYTES, MISSED, Stepper, make_optimizer, restore_slots, slots_of
from mpisgd.update.schedule import Schedule
from mpisgd.vectors.body import Body, ChunkPool, Pool, Sum, WholePool
from mpisgd.vectors.chunks import Rest, cuts, squared_norm_of_chunks
from mpisgd.vectors.computing import FREE, Charges, Updates
from mpisgd.vectors.flat import clip, clip_part, is_finite, norm_of, norm_of_parts
from mpisgd.vectors.memory import as_tensor, vector_like, view_of
from mpisgd.vectors.push_format import FLOAT32, PushFormat
from mpisgd.vectors.skipped import NOTHING, Runs, common, joined


class Step(NamedTuple):
    gradients: int
    """The divisor: summed gradients, those in teams' sums included."""
    learning_rate: float
    """With the factor of `Weighting`."""
    gradient_sq: float = math.nan
    """Sum of |w_i g_i|^2 over pushes, by the divisor; NaN = not measured."""
    sum_sq: float = math.nan
    """|sum w_i g_i|^2, undivided; NaN = not measured."""


class Weighting:
    """Effect of a stale gradient's weight: on the gradient in the sum, or on the update's rate.

        gradient    theta <- theta - gamma opt(1/c sum w_i g_i)               [Zhang16 eq. 5]; before momentum
        rate        theta <- theta - gamma (1/c sum w_i) opt(1/c sum g_i)     [ElasticDL], for single gradients: gamma w

    opt is the optimiser's step. For several gradients the papers say nothing; the mean weight moves plain SGD as far, if gradients
    are alike.
    """

    def __init__(self, of: Literal["gradient", "rate"] = "gradient") -> None:
        self._of_rate = of == "rate"
        self._total = 0.0
        self._gradients = 0

    def add(self, weight: float, gradients: int) -> float:
        """Note the weight of a gradient, or of a sum of several; return the factor in the sum."""
        if not self._of_rate:
            return weight
        self._total += weight * gradients
        self._gradients += gradients
        return 1.0

    def take(self) -> float:
        """Return the rate's factor, and begin the next update."""
        factor = self._total / self._gradients if self._gradients else 1.0
        self._total, self._gradients = 0.0, 0
        return factor


class SliceUpdate(Updates):
    """Weights of a slice, the sum of gradients in the making, and the optimiser.

    A sum is made in its first gradient; of gradients that come in chunks, a chunk is summed once all have delivered it, in their
    order: the bits are the same. `learning_rate` is the next update's, before any weight.

    Args:
        weights: (slice,) float32; the state, updated in place.
        learning_rate: alpha0, scaled if configured.
        schedule, momentum: functions of epochs.
        compensation: made with the same `weights`.
        segments: cover the slice.
        streamed: number of chunks; 0 = gradients come whole.
        clip_average: L2 norm limit of the averaged gradient: of the slice, or after `agree` of the whole; 0 = off.
    """

    receives_again = True
    """The memory of a sum may receive the next gradient once the update is made."""
    pool: Callable[[Tensor, PushFormat], Pool] = WholePool

    def __init__(  # noqa: PLR0913 - each by name
        self,
        weights: Tensor,
        options: OptimizerOptions,
        *,
        learning_rate: float,
        schedule: Schedule,
        train_samples: int,
        momentum: Schedule | None = None,
        average: Average | None = None,
        compensation: Compensation | None = None,
        segments: Sequence[Segment] = (),
        push_format: PushFormat = FLOAT32,
        weighting: Weighting | None = None,
        clip_average: float = 0.0,
        measured: bool = True,
        fused: bool = False,
        streamed: int = 0,
        charges: Charges = FREE,
    ) -> None:
        self.weights: Tensor = weights
        self._size = weights.numel()  # costs half a microsecond in torch
        self.bodies: Pool = ChunkPool.of(self._size, streamed, push_format) if streamed else self.pool(weights, push_format)
        self._charges = charges
        self.compensation: Compensation | None = compensation
        self.averaged: Tensor | None = None if average is None else average.weights
        self._average = average
        self._weighting = weighting or Weighting()
        self._clip_average = clip_average
        self._agreed: float | None = None
        self._train_samples = train_samples
        self._served = view_of(weights)
        self._cuts = list(cuts(weights.nbytes, streamed))
        self.chunks_count = len(self._cuts)
        self._unmade = Rest(0, 0)
        """Weights that the update has yet to make."""
        self._divisor = 0
        self._looks, self._sum_sq = False, 0.0
        self.made: Step = Step(0, learning_rate)
        self.checks_sums = False
        self._norms = Norms(on=measured)
        self._adding: list[tuple[Body | None, float]] = []
        """Gradients not in the sum yet, with their weights; None: the sum is made in it."""
        self._begins = self._in_chunks = False
        """The first of these begins the sum; any comes in chunks."""
        self._unsummed = Rest(0, 0)
        """Elements of these not in the sum yet."""
        self._to_sum = iter(self._cuts)
        self._sum, self._summed = weights[:0], view_of(weights[:0])
        self._home: list[Sum] | None = None
        """Free memory, to which the sum's returns; None: the sum lies in another's."""
        self.cached = weights.nbytes <= CACHED_NBYTES and not streamed
        self.gradients = 0
        self._skipped = NOTHING
        """Elements without a gradient in the sum."""
        self.samples = 0
        self._pending_samples = 0
        self._parameter = torch.nn.Parameter(weights)
        self._optimizer = make_optimizer(options, self._parameter, learning_rate, begun=bool(segments), fused=fused)
        self._step = Stepper(self._optimizer, self._parameter, segments, fused=fused)
        self._alpha0 = learning_rate
        self._schedule, self._momentum = schedule, momentum
        self._set_learning_rate()

    @property
    def served(self) -> Any:
        return self._served

    @property
    def epochs(self) -> float:
        return self.samples / self._train_samples

    def live_in(self, weights: np.ndarray | Tensor) -> None:
        self._move_to(as_tensor(weights))

    def renew_weights(self) -> None:
        """Go on in new memory; slow sends from the old stay intact."""
        self._move_to(vector_like(self.weights))

    def _move_to(self, weights: Tensor) -> None:
        weights.copy_(self.weights)
        self.weights = weights
        self._served = view_of(weights)
        self._parameter.data = weights
        self._step.move(weights)
        if self.compensation is not None:
            self.compensation.move(weights)

    def sum_is_finite(self) -> bool:
        """Return whether the last update's sum is finite; ask before summing again.

        With `checks_sums`, chunks were checked in the cache.
        """
        return (self.checks_sums and math.isfinite(self._sum_sq)) or is_finite(self._summed)

    def accumulate(
        self,
        body: Body,
        weight: float,
        samples: int,
        timestamp: int = 0,
        gradients: int = 1,
        *,
        last: bool = False,
        skipped: Runs = NOTHING,
    ) -> None:
        """Add `body` times `weight` to the sum: `gradients` of `samples` samples at the weights of `timestamp`.

        Chunks of the `last` gradient are added just before their step, in the cache: the update must come next.
        """
        self._charges.gradient()
        first = self.gradients == 0
        if first or len(self._skipped):
            self._skipped = skipped if first else common(self._skipped, skipped)
        if self.compensation is not None:
            self.compensation.compensate(body.vector, timestamp, first)
            body.squared = None
        weight = self._weighting.add(weight, gradients)
        if body.owned:
            self._norms.add(body.view, weight, body.squared)
        else:
            self._norms.add_later()
            self._in_chunks = True
        self._unsummed, self._to_sum = Rest(0, self._size), iter(self._cuts)
        if first:
            self._begin_sum(body)
        self._adding.append((None if first and body.owned else body, weight))
        if not (self._in_chunks or (last and self.chunks_count > 1)):
            self._add(0, self._size)
        self.gradients += gradients
        self._pending_samples += samples

    def _begin_sum(self, body: Body) -> None:
        self._begins = not body.owned
        if body.owned:
            self._give_back()
            self._sum, self._summed, self._home = body.adopt()
        elif not len(self._sum):
            self._sum = vector_like(self.weights)
            self._summed = view_of(self._sum)

    def _give_back(self) -> None:
        if self._home is not None:
            self._home.append((self._sum, self._summed))
            self._home = None

    def norm_of_average(self) -> float:
        self._add(0, self._size)
        return norm_of(self._sum) / self.gradients if self.gradients else 0.0

    def agree(self, norm: float) -> None:
        self._agreed = norm

    def _add(self, start: int, stop: int) -> None:
        """Complete the sum at least in these elements."""
        left = self._unsummed
        while left.meets(start, stop):
            cut = next(self._to_sum) if self._in_chunks else slice(max(start, left.start), min(stop, left.stop))
            summed = self._sum if cut.stop - cut.start == self._size else self._sum[cut]
            copies = self._begins
            skipped: Runs | None = None
            for body, weight in self._adding:
                if body is None:
                    if weight != 1.0:
                        summed.mul_(weight)
                    continue
                gradient = body.chunk(cut)
                if not body.owned:
                    self._norms.add_chunk(view_of(gradient), weight)
                    skipped = body.skipped if skipped is None else common(skipped, body.skipped)
                if copies:
                    copies = False
                    summed.copy_(gradient)
                    if weight != 1.0:
                        summed.mul_(weight)
                else:
                    summed.add_(gradient, alpha=weight)
                body.release(self._size - (left.stop - left.start) + cut.stop - cut.start)
            left.take(cut.start, cut.stop)
            if skipped is not None and len(skipped):
                self._skipped = joined(self._skipped, skipped)
                self._step.skip(self._skipped)
        if left.start == left.stop:
            self._adding.clear()
            self._begins = self._in_chunks = False

    def step(self) -> Step:
        """Make the update; if all was dropped, the weights stay."""
        self.begin_step()
        self._make(0, self._size)
        return self.made

    def begin_step(self) -> None:
        """Begin a `step`; `chunks` makes the weights."""
        self._charges.update()
        rate = self.learning_rate * self._weighting.take()
        self.made = Step(self.gradients, rate)
        self._optimizer.param_groups[0]["lr"] = rate
        self._step.skip(self._skipped)
        self._divisor, self._unmade, self._sum_sq = self.gradients, Rest(0, self._size), 0.0
        self._looks = self.checks_sums or self._norms.of_sum
        if self._clip_average > 0 and self.gradients > 0:
            self._add(0, self._size)
            if self._looks:
                self._look_at_sum(0, self._size)
                self._looks = False
            self._clip(self._sum.div_(self._divisor))
            self._divisor = 1
        self.samples += self._pending_samples
        self.gradients = self._pending_samples = 0
        if self._average is not None and self._divisor > 0:
            self._average.begin()

    def _clip(self, average: Tensor) -> None:
        if self._agreed is None:
            clip(average, self._clip_average)
        else:
            clip_part(average, self._agreed, self._clip_average)

    def chunks(self) -> Iterator[Any]:
        """Yield the weights chunk by chunk, making each on demand."""
        for cut in self._cuts:
            if self._unmade.meets(cut.start, cut.stop):
                self._make(cut.start, cut.stop)
            yield self._served[cut]

    def _make(self, start: int, stop: int) -> None:
        """Make these weights, at least; the last end the update."""
        left = self._unmade
        if self._divisor > 0:
            start, stop = left.take(*self._step.reach(start, stop))
            self._add(start, stop)
            if self._looks:
                self._look_at_sum(start, stop)
            self._step(self._sum, self._divisor, start, stop)
            if self._average is not None:
                self._average.follow(self.weights, start, stop)
        else:
            left.take(0, self._size)
        if left.start == left.stop:
            self._note_norms()
            if self.receives_again and (not self.checks_sums or math.isfinite(self._sum_sq)):
                self._give_back()  # receive into the buffer that may still be in the cache
            self._set_learning_rate()

    def _look_at_sum(self, start: int, stop: int) -> None:
        self._sum_sq += squared_norm_of_chunks(self._summed[start:stop])

    def _note_norms(self) -> None:
        gradient_sq, sum_sq = self._norms.take(self._sum_sq, self.made.gradients)
        self.made = self.made._replace(gradient_sq=gradient_sq, sum_sq=sum_sq)

    def state(self) -> dict[str, Tensor]:
        """Return the state besides `samples` and the sum: tensors by name, not copied.

        `weights`; `averaged`, `averages`, `compensation` if present; `optimizer.<name>`. Each (slice,) float32; counts of steps
        are scalars.
        """
        state = {"weights": self.weights}
        if self._average is not None:
            state |= self._average.state()
        if self.compensation is not None:
            state |= self.compensation.state(summing=self.gradients > 0)
        slots = slots_of(self._optimizer, self._parameter)
        if (missed := self._step.missed) is not None:
            slots[MISSED] = missed
        return state | {f"optimizer.{name}": tensor for name, tensor in slots.items()}

    def restore(self, state: Mapping[str, Tensor], samples: int) -> None:
        """Copy a `state` as of this many samples, before anything is summed.

        Raises CheckpointError if a tensor is missing, unknown or misshapen: another optimiser's.
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
        if (missed := slots.pop(MISSED, None)) is not None:
            self._step.missed = missed
        restore_slots(self._optimizer, self._parameter, slots)
        self.samples = samples
        self._set_learning_rate()

    def _set_learning_rate(self) -> None:
        self.learning_rate = self._alpha0 * self._schedule(self.epochs)
        self._optimizer.param_groups[0]["lr"] = self.learning_rate
        if self._momentum is not None:
            self._step.set_momentum(self._momentum(self.epochs))


def agree(updates: Sequence[SliceUpdate]) -> None:
    """Clip all slices by the norm of the whole, where one process has all."""
    norm = norm_of_parts(update.norm_of_average() for update in updates)
    for update in updates:
        update.agree(norm)
