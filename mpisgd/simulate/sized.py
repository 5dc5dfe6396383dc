"""Stand-ins for weights, gradients and updates: sizes alone, for the same loops without tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from mpisgd.comm.virtual.cluster import VirtualRank
from mpisgd.update.schedule import Schedule
from mpisgd.update.slice_update import Step, Weighting
from mpisgd.vectors.body import Body, ChunkPool, Pool
from mpisgd.vectors.computing import Travels, Updates
from mpisgd.vectors.memory import Memory, SizedVector
from mpisgd.vectors.push_format import PushFormat
from mpisgd.vectors.skipped import NOTHING, Runs


class SizedUpdate(Updates):
    """Stand-in for `update.SliceUpdate`: counts, and passes the shard's service time.

    Args:
        service_ns: cost of one gradient, and of one update.
        streamed: number of chunks that take time on arrival (`body.py`).
    """

    served: Any = None
    averaged = compensation = None
    checks_sums = False

    def __init__(  # noqa: PLR0913 - each by name
        self,
        size: int,
        *,
        learning_rate: float,
        schedule: Schedule,
        train_samples: int,
        push_format: PushFormat,
        rank: VirtualRank,
        service_ns: tuple[int, int],
        weighting: Weighting,
        streamed: int = 0,
    ) -> None:
        vector = SizedVector(size)
        self._streamed = ChunkPool(size, streamed, lambda part: push_format.sized(SizedVector(part))) if streamed else None
        self._coming: list[Body] = []
        """Gradients in the next sum, in chunks."""
        self.bodies = self._streamed or Pool(push_format.sized(vector))
        self.chunks_count = self._made = len(self._streamed.pieces) if self._streamed is not None else 1
        self.cached = not streamed
        self.weights = self.served = vector
        self.gradients = 0
        self.samples = 0
        self._alpha0 = self.learning_rate = learning_rate
        self._schedule = schedule
        self._train_samples = train_samples
        self._pending_samples = 0
        self._weighting = weighting
        self._rank = rank
        self._gradient_ns, self._update_ns = service_ns
        self.learning_rate = learning_rate * schedule(0.0)

    @property
    def epochs(self) -> float:
        return self.samples / self._train_samples

    def sum_is_finite(self) -> bool:
        return True

    def accumulate(
        self,
        body: Body,
        weight: float,
        samples: int,
        timestamp: int,
        gradients: int,
        *,
        last: bool = False,
        skipped: Runs = NOTHING,
    ) -> None:
        if self._streamed is None:
            self._rank.now += self._gradient_ns
        else:
            self._coming.append(body)
        self._weighting.add(weight, gradients)
        self.gradients += gradients
        self._pending_samples += samples

    def step(self) -> Step:
        self.begin_step()
        if self._streamed is not None:
            for _ in self.chunks():
                pass
        return self.made

    def begin_step(self) -> None:
        if self._streamed is None:
            self._rank.now += self._update_ns
        else:
            self._made = 0 if self.gradients else self.chunks_count
        self.made: Step = Step(gradients=self.gradients, learning_rate=self.learning_rate * self._weighting.take())
        self.samples += self._pending_samples
        self.gradients = self._pending_samples = 0
        self.learning_rate = self._alpha0 * self._schedule(self.epochs)

    def chunks(self) -> Iterator[Any]:
        if self._streamed is None:
            yield self.served
            return
        for number, piece in enumerate(self._streamed.pieces):
            if number >= self._made:
                share = (piece.stop - piece.start) / self.weights.size
                for body in self._coming:
                    body.chunk(piece)
                    self._rank.now += round(share * self._gradient_ns)
                    body.release(self.weights.size - piece.start)
                self._rank.now += round(share * self._update_ns)
                self._made = number + 1
                if self._made == self.chunks_count:
                    self._coming = []
            yield self.weights[piece]


class SizedGradient(Travels):
    """Stand-in for `gradient.Gradient`: no model, no loss.

    Args:
        next_ns: cost of the next mini-batch; None = time passes elsewhere.
    """

    def __init__(self, memory: Memory, mu: int, rank: VirtualRank, next_ns: Callable[[], int] | None) -> None:
        self.memory = memory
        self.samples = mu
        self._rank = rank
        self._next_ns = next_ns

    def compute(self, seq: int) -> float:
        if self._next_ns is not None:
            self._rank.work(self._next_ns())
        return 0.0
