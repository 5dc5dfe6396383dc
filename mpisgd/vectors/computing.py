"""Interfaces between the loops and computing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from mpisgd.vectors.body import Body, Pool
from mpisgd.vectors.memory import Memory
from mpisgd.vectors.skipped import NOTHING, Runs


class Waited:
    """Time that computing has waited for other ranks."""

    __slots__ = ("ns",)

    def __init__(self) -> None:
        self.ns = 0


class Scaled:
    """Loss scale of the last backward pass (`scaling.py`); in a team, the first rank's."""

    __slots__ = ("by",)

    def __init__(self) -> None:
        self.by = 1.0


class Computes(ABC):
    """A gradient for a learner's loop, computed where the channel sends from."""

    samples: int
    rounded: float = 0.0
    """Norm of the rounding error, as a share of the gradient's."""
    skipped: Runs = NOTHING
    """Elements of the last mini-batch without a gradient, if an optimiser asks."""
    waited: Waited = Waited()
    scaled: Scaled = Scaled()

    def prepare(self, seq: int) -> None:  # noqa: B027 - virtual learners, who wait in virtual time, gain nothing
        """Do work of mini-batch `seq` that needs no weights."""

    @abstractmethod
    def compute(self, seq: int) -> float:
        """Compute the gradient of mini-batch `seq`; return the loss."""

    def at_clock(self, clock: int) -> None:  # noqa: B027 - only a learner that steps by itself has a learning rate of its own
        """Note the clock of the pulled weights, the least of all slices."""

    def take_own_step(self) -> None:  # noqa: B027 - only a learner of `mini_batches.LocalSteps` goes on without weights from shards
        """Step along the last gradient, left intact for sending."""

    def give_up(self) -> None:  # noqa: B027 - only what keeps something of each mini-batch has anything to take back
        """Take back the last mini-batch, even partial."""

    def interrupt_by(self, check: Callable[[], None]) -> None:  # noqa: B027 - in virtual time the wire does
        """Call `check` now and then in `compute`; it may raise."""


class Keeps:
    """Listener to snapshots, for a learner's state beside weights; inert by default."""

    def begins(self, snapshots: int, clock: int) -> None:
        """Begin a mini-batch, at shard 0's clock and number of snapshots."""

    def give_up(self) -> None:
        """Undo changes of the unfinished mini-batch."""

    def end(self, snapshots: int, clock: int, *, interrupted: bool) -> None:
        """End the last mini-batch; `interrupted`: another attempt may follow."""


class Exchanges(Protocol):
    """Listener to a gradient exchanged by layers while computed."""

    @property
    def early(self) -> bool:
        """Parts may leave during this mini-batch's backward pass."""
        return True

    def need(self, shard: int) -> None:
        """Have a slice's weights in place before their first use."""

    def leave(self, shard: int, seq: int, samples: int, loss: float, rounded: float, scale: float, skipped: Runs) -> None:
        """Push a slice's final gradient; its memory stays intact until done."""


class Travels(Computes):
    """A stage of a learner's gradient (`gradient/stages.py`), and the memory in which gradient and weights travel.

    `finish_slice` serves an exchange by layers, `finish` all others.
    """

    memory: Memory

    @property
    def single(self) -> Any:
        """The part for a single mini-batch."""
        return self

    @property
    def leaves(self) -> bool:
        """Another rank of this gradient has gone."""
        return False

    def begin(self, seq: int) -> None:
        """Note that the weights of mini-batch `seq` are there; computing follows in virtual time."""

    def finish_slice(self, shard: int) -> None:
        """Make a slice's push from its gradient."""

    def finish(self, loss: float) -> float:
        """Make all pushes; return the loss to tell."""
        return loss

    def rounded_of(self, shard: int) -> float:
        """Return a slice's rounding error as a share; if rounded whole, the gradient's."""
        return self.rounded

    def move_out(self) -> None:
        """Stop computing, and leave shared memory, which goes."""


class Charges:
    """Payer of a shard's virtual seconds; real ones pass by themselves."""

    def gradient(self) -> None:
        """Let the time of adding a gradient pass."""

    def update(self) -> None:
        """Let the time of an update pass."""


FREE = Charges()


class Copied(Protocol):
    weights: Any
    averaged: Any
    samples: int


class Updates(ABC):
    """A slice for a shard's loop."""

    bodies: Pool
    cached: bool
    """The slice is small enough to check each gradient at once."""
    weights: Any
    averaged: Any
    compensation: Any
    """`compensation.Compensation`, or None."""
    checks_sums: bool
    """`sum_is_finite` follows each update."""
    chunks_count: int
    samples: int
    learning_rate: float
    made: Any
    """An `update.Step`, complete with the last of `chunks`."""

    @property
    @abstractmethod
    def served(self) -> Any:
        """Weights for the channel, (slice,) float32; complete after all `chunks`."""

    @property
    @abstractmethod
    def epochs(self) -> float:
        """Samples applied / training samples."""

    def live_in(self, weights: Any) -> None:  # noqa: B027 - only where there are tensors
        """Replace the memory of `weights`, (slice,) float32, values kept."""

    def renew_weights(self) -> None:  # noqa: B027 - only where there are tensors
        """Move the weights elsewhere: the old place may yet be sent."""

    @abstractmethod
    def sum_is_finite(self) -> bool:
        """Return whether the last update's sum is finite."""

    @abstractmethod
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
        """Add `body` times `weight` to the sum: `gradients` of `samples` samples at the weights of `timestamp`.

        `last`: the update comes next; `skipped`: elements without a gradient.
        """

    def norm_of_average(self) -> float:
        """Return the L2 norm of the average: sum / gradients."""
        return 0.0

    def agree(self, norm: float) -> None:  # noqa: B027 - only where there are tensors
        """Set the L2 norm of the whole average, for clipping."""

    @abstractmethod
    def step(self) -> Any:
        """Make the update; return `made`."""

    def begin_step(self) -> None:
        """Begin a `step`; until all `chunks` are out, read no weights and sum nothing."""
        self.step()

    def chunks(self) -> Iterator[Any]:
        """Yield the weights chunk by chunk, each made when asked for."""
        yield self.served
