"""The passes of a stage of a virtual group, in virtual time; sizes travel.

A stage costs its parameters' share of its rank's mini-batch, in equal parts per micro-batch: a third forward, two thirds backward.
With tensors, the whole gradient is computed at the last stage's last activation, as virtual ranks share one model (`passes.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpisgd.comm.messages import MOST_DIMENSIONS
from mpisgd.comm.virtual.cluster import VirtualRank
from mpisgd.config import Config
from mpisgd.simulate.failures import LearnerFailed
from mpisgd.vectors.computing import Travels
from mpisgd.vectors.memory import Memory, SizedVector


class StageSeconds:
    """A stage's passes (`pipeline.stage.Passes`).

    Args:
        next_ns: cost of this stage in the next mini-batch.
        crossing: bytes of a micro-batch from the stage before, and to the next.
        whole: of the last stage: the whole gradient; None without tensors.
    """

    def __init__(
        self,
        rank: VirtualRank,
        memory: Memory,
        next_ns: Callable[[], int],
        config: Config,
        *,
        crossing: Sequence[int],
        whole: Travels | None,
    ) -> None:
        self.memory = memory
        self.samples = config.mu
        self.loss = 0.0
        self.leaves = False
        self._failures = config.failures
        self._rank = rank
        self._next_ns = next_ns
        self._micro_batches = config.micro_batches
        self._before, self._after = (SizedVector(nbytes, 1) for nbytes in crossing)
        self._whole = whole
        self._seq = self._ns = 0

    def prepare(self, seq: int) -> None:
        """Do nothing."""

    def begin(self, seq: int) -> None:
        """Begin a mini-batch. A failure shows some time later, if its learner may leave; else it ends the job."""
        if self.leaves:
            return
        check, self._rank.check = self._rank.check, None  # give up only between passes: a neighbour waits for each
        try:
            self._seq, self._ns = seq, self._next_ns()
            self._rank.check = check
        except LearnerFailed:
            if self._failures.then == "stop":
                raise
            self._rank.work(round(self._failures.notice_s * 1e9))
            self.leaves = True

    def pass_on(self, micro: int, received: SizedVector | None) -> SizedVector:
        self._work(micro, micro + 1)
        if self._whole is not None and micro + 1 == self._micro_batches:
            self.loss = self._whole.compute(self._seq)
        return self._after

    def pass_back(self, micro: int, received: SizedVector | None) -> SizedVector:
        done = self._micro_batches + 2 * micro
        self._work(done, done + 2)
        return self._before

    def norm(self) -> float:
        """Return 0: `whole` clips."""
        return 0.0

    def clip(self, norm: float) -> None:
        """Do nothing."""

    def reported(self, loss: float) -> float:
        return loss

    def interrupt_by(self, check: Callable[[], None]) -> None:
        """Do nothing: in virtual time, the rank interrupts."""

    def _work(self, start: int, end: int) -> None:
        parts = 3 * self._micro_batches
        self._rank.work(self._ns * end // parts - self._ns * start // parts)

    def tensors_of(self, passed: SizedVector) -> tuple[int, Sequence[SizedVector]]:
        return 0, (passed,)

    def describe(self, passed: SizedVector) -> tuple[tuple[int, ...], SizedVector]:
        return (passed.nbytes, *([0] * (2 + 2 * MOST_DIMENSIONS))), passed

    def room(self, described: tuple[int, ...]) -> tuple[SizedVector, SizedVector]:
        vector = SizedVector(described[0], 1)
        return vector, vector
