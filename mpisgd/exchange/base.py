"""What a learner's loop asks of the wire, whichever way gradients and weights are exchanged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from mpisgd.vectors.skipped import NOTHING, Runs


@dataclass(slots=True)
class Report:
    """What a learner tells of the gradient that it pushes."""

    seq: int
    samples: int
    loss: float
    compute_ns: int
    delay_ns: int
    """How late it is on purpose."""
    rounded: float = 0.0
    """What was rounded off (`rounding.py`)."""
    neighbour_ns: int = 0
    """In which it waited for the ranks of its group, and which are not in `compute_ns`."""
    scale: float = 1.0
    """By what its loss was multiplied (`scaling.py`)."""
    skipped: Runs = field(default_factory=lambda: NOTHING)
    """Elements that it has no gradient of (`vectors/skipped.py`)."""


@dataclass(slots=True)
class Answers:
    """Answers of the shards to a pull: the clock of each slice, or that there are no more weights."""

    clocks: tuple[int, ...]
    stop: int
    """An `Ending`; nothing but NONE means that there are weights."""
    rejected: bool
    """Whether any shard rejected the gradient pushed last: the same mini-batch is to be computed again."""
    snapshots: int = 0
    """How many snapshots shard 0 had taken, or was about to take, at its clock."""


class Interrupted(Exception):
    """The gradient that this learner is computing is not wanted: an update was made without it, or the run is over."""


class Left(Exception):
    """This learner is to leave while others go on: a rank of its group is no more."""


class Exchange(Protocol):
    """Whole vectors (`channel.py`, `both_ways/`), layer by layer (`layerwise.py`), or by collectives (`allreduce.py`)."""

    @property
    def duplex(self) -> bool:
        """Whether the gradient leaves with the next pull, which calls `meanwhile` when it has."""
        return False

    @property
    def exchanging_ns(self) -> int:
        """Nanoseconds of this mini-batch in which it waited for weights, or parts of its gradient began to leave, while it was
        computed; no part of what computing took."""
        return 0

    def now_ns(self) -> int:
        """Nanoseconds since the start of the run."""

    def sleep(self, seconds: float) -> None:
        """Be late on purpose."""

    def pull(self, min_clock: int, meanwhile: Callable[[], None] | None = None) -> Answers:
        """Wait for weights of at least this clock; `meanwhile` is called once they are asked for."""

    def push(self, report: Report, meanwhile: Callable[[], None] | None = None) -> None:
        """Send the gradient, computed from the weights that were pulled last; `meanwhile` is called while it leaves."""

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
