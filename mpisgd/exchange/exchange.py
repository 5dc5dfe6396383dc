"""Interface of a learner's loop to every way of exchange."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from mpisgd.vectors.skipped import NOTHING, Runs


@dataclass(slots=True)
class Report:
    """A learner's report on a push."""

    seq: int
    samples: int
    loss: float
    compute_ns: int
    delay_ns: int
    """Deliberate delay."""
    rounded: float = 0.0
    """Rounding error (`rounding.py`)."""
    neighbour_ns: int = 0
    """Wait for ranks of its group, outside `compute_ns`."""
    scale: float = 1.0
    """Factor of the loss (`scaling.py`)."""
    skipped: Runs = field(default_factory=lambda: NOTHING)
    """Elements without a gradient (`vectors/skipped.py`)."""


@dataclass(slots=True)
class Answers:
    """Answers of all shards to a pull."""

    clocks: tuple[int, ...]
    stop: int
    """An `Ending`; weights come only with NONE."""
    rejected: bool
    """Any shard rejected the last push: compute its mini-batch again."""
    snapshots: int = 0
    """Snapshots of shard 0, taken or due at its clock."""


class Interrupted(Exception):
    """Unwanted computation: an update was made without this gradient, or the run is over."""


class Left(Exception):
    """Departure of a learner after the loss of a rank in its group."""


class Exchange(Protocol):
    """Vectors or layers (`rounds.py`), or collectives (`allreduce.py`)."""

    @property
    def duplex(self) -> bool:
        """The next pull sends the gradient, and calls `meanwhile` once its memory is free."""
        return False

    @property
    def exchanging_ns(self) -> int:
        """Nanoseconds of exchange during the computation, not counted in it."""
        return 0

    def now_ns(self) -> int:
        """Return nanoseconds since the run's start."""

    def sleep(self, seconds: float) -> None:
        """Delay this learner on purpose."""

    def pull(self, min_clock: int, meanwhile: Callable[[], None] | None = None) -> Answers:
        """Wait for weights at clock `min_clock` or later; call `meanwhile` after the request."""

    def push(self, report: Report, meanwhile: Callable[[], None] | None = None) -> None:
        """Send the gradient of the last pulled weights; call `meanwhile` during the send."""

    def goodbye(self, *, ending: int) -> None:
        """Tell the end of all messages, and why."""

    # Defaults for protocols without notices of late gradients:

    def interrupt_by_notices(self) -> None:
        """Let a notice end the current mini-batch: `check` then raises Interrupted."""
        return

    def check(self) -> None:
        """Raise Interrupted where the current gradient is unwanted."""
        return

    def gave_up(self, seq: int) -> None:
        """Tell of a given-up mini-batch."""
        return
