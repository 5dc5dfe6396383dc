"""Where only sizes travel: what stands for weights, gradients and updates, so that the same loops run without tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpisgd.schedule import Schedule
from mpisgd.update import Step


class SizedVector:
    """As large as a float32 vector of so many elements, and nothing else."""

    __slots__ = ("nbytes", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.nbytes = 4 * size

    def __getitem__(self, part: slice) -> SizedVector:
        start, stop, _ = part.indices(self.size)
        return SizedVector(stop - start)


class SizedUpdate:
    """What `update.SliceUpdate` is to a shard, without weights: counts, and lets the shard's service time pass.

    Args:
        size: elements of the slice.
        work: lets nanoseconds pass on this shard's clock.
        gradient_ns, update_ns: what one gradient, and one update, cost.
    """

    cached = True
    averaged = None

    def __init__(
        self,
        size: int,
        *,
        learning_rate: float,
        schedule: Schedule,
        train_samples: int,
        work: Callable[[int], None],
        gradient_ns: int,
        update_ns: int,
    ) -> None:
        self.scratch: Any = SizedVector(size)
        self.served: Any = self.scratch
        self.gradients = 0
        self.samples = 0
        self.room_to_park = True
        self._alpha0 = self.learning_rate = learning_rate
        self._schedule = schedule
        self._train_samples = train_samples
        self._pending_samples = 0
        self._work = work
        self._gradient_ns = gradient_ns
        self._update_ns = update_ns
        self.learning_rate = learning_rate * schedule(0.0)

    @property
    def epochs(self) -> float:
        return self.samples / self._train_samples

    def park(self, learner_id: int) -> None:
        """Sizes need no memory."""

    def unpark(self, learner_id: int) -> None:
        """Sizes need no memory."""

    def make_room(self, gradients: int) -> Any:
        return SizedVector(gradients * self.scratch.size)

    def turn_to(self, place: int) -> None:
        """One size is like the other."""

    def scratch_is_finite(self) -> bool:
        return True

    def accumulate(self, weight: float, samples: int) -> None:
        self._work(self._gradient_ns)
        self.gradients += 1
        self._pending_samples += samples

    def step(self) -> Step:
        self._work(self._update_ns)
        step = Step(gradients=self.gradients, learning_rate=self.learning_rate)
        self.samples += self._pending_samples
        self.gradients = self._pending_samples = 0
        self.learning_rate = self._alpha0 * self._schedule(self.epochs)
        return step


class SizedGradient:
    """What `gradient.Gradient` is to a learner, without a model: mini-batches take their virtual seconds, and have no loss.

    Args:
        size: parameters of the model.
        mu: samples of a mini-batch.
        compute: lets the nanoseconds of the next mini-batch pass on this learner's clock.
    """

    def __init__(self, vector: SizedVector, mu: int, compute: Callable[[], None]) -> None:
        self.host_weights: Any = vector
        self.host_gradients: Any = vector
        self.samples = mu
        self._compute = compute

    def prepare(self, seq: int) -> None:
        """There is nothing to prepare."""

    def compute(self, seq: int) -> float:
        """Returns 0.0 for a loss: there is none."""
        self._compute()
        return 0.0
