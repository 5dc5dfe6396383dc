"""What a learner's loop asks of the wire, whichever way gradients and weights are exchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from mpisgd.exchange.channel import Answers


class Exchange(Protocol):
    """Whole vectors (`channel.py`), layer by layer (`layerwise.py`), or by collectives (`allreduce.py`)."""

    def now_ns(self) -> int:
        """Nanoseconds since the start of the run."""

    def sleep(self, seconds: float) -> None:
        """Be late on purpose."""

    def pull(self, min_clock: int, meanwhile: Callable[[], None] | None = None) -> Answers:
        """Wait for weights of at least this clock; `meanwhile` is called once they are asked for."""

    def push(
        self,
        *,
        seq: int,
        samples: int,
        loss: float,
        compute_ns: int,
        delay_ns: int,
        last: Answers,
        push_ns: int,
        rounded: float = 0.0,
        meanwhile: Callable[[], None] | None = None,
    ) -> int:
        """Send the gradient (`LearnerChannel.push`)."""

    def goodbye(self, *, ending: int) -> None:
        """Say that nothing more comes, and why."""

    # Where nobody tells a learner that its gradient comes too late:

    def interrupt_by_notices(self) -> None:
        """Let a notice end a mini-batch that is being computed (`Protocol.aborts`); `check` raises Interrupted for it."""
        return

    def check(self) -> None:
        """Raises Interrupted where the gradient that is being computed is not wanted."""
        return

    def gave_up(self, seq: int) -> None:
        """Say that a mini-batch was given up."""
        return
