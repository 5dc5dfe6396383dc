"""Interfaces between the loops and what computes, with tensors (`gradient.Gradient`, `update.SliceUpdate`) or sizes alone.

`Exchanges` is what a gradient tells in return, where layers are exchanged one by one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from mpisgd.vectors.memory import Memory
from mpisgd.vectors.skipped import NOTHING, Runs


class Waited:
    """How long computing has waited for the other ranks of its group, in all; shared by the stages of one gradient."""

    __slots__ = ("ns",)

    def __init__(self) -> None:
        self.ns = 0


class Scaled:
    """By what a learner's loss was multiplied in its last backward pass (`scaling.py`); shared as `Waited` is.

    Of a team that is its first rank's.
    """

    __slots__ = ("by",)

    def __init__(self) -> None:
        self.by = 1.0


class Computes(ABC):
    """A gradient, as a learner's loop asks for it. After `compute`, it lies where the channel sends it from."""

    samples: int
    """Samples of the mini-batch computed last."""
    rounded: float = 0.0
    """Norm of what was rounded off its gradient, as a share of the gradient's (`rounding.py`)."""
    skipped: Runs = NOTHING
    """Of the mini-batch computed last, the elements that have no gradient, not even of zeros, where an optimiser asks."""
    waited: Waited = Waited()
    """Stays 0 where a learner is one rank."""
    scaled: Scaled = Scaled()
    """Stays 1 where no loss is scaled."""

    def prepare(self, seq: int) -> None:  # noqa: B027 - virtual learners, who wait in virtual time, gain nothing
        """Do what mini-batch `seq` needs before its weights are known."""

    @abstractmethod
    def compute(self, seq: int) -> float:
        """Compute the gradient of mini-batch `seq` at the weights that were pulled; returns the loss."""

    def at_clock(self, clock: int) -> None:  # noqa: B027 - only a learner that steps by itself has a learning rate of its own
        """The weights that `compute` will use were pulled at this clock, the least of all slices'."""

    def take_own_step(self) -> None:  # noqa: B027 - only a learner of `local_steps.LocalSteps` goes on without weights from shards
        """Step by itself from the weights that are there, along the gradient computed last; that stays as it is, to be sent."""

    def give_up(self) -> None:  # noqa: B027 - only what keeps something of each mini-batch has anything to take back
        """What was computed last, or in part, is not pushed."""

    def interrupt_by(self, check: Callable[[], None]) -> None:  # noqa: B027 - in virtual time the wire does
        """Call this every now and then in `compute`; it may raise to end that."""


class Keeps:
    """Is told of snapshots, to keep what a learner has beside its weights (`records/checkpoint/buffers.py`); nothing by itself."""

    def begins(self, snapshots: int, clock: int) -> None:
        """A mini-batch begins, from weights of shard 0 that have this clock, and are as new as so many snapshots."""

    def give_up(self) -> None:
        """The mini-batch that has begun last came to no end: what it has changed is to be as it was."""

    def end(self, snapshots: int, clock: int, *, interrupted: bool) -> None:
        """The last mini-batch is over; `interrupted`: another attempt may go on."""


class Exchanges(Protocol):
    """Listener to a gradient whose slices, by layers, are exchanged one by one while it is computed."""

    def need(self, shard: int) -> None:
        """The forward pass is about to use the weights of a slice for the first time: they must be in place on return."""

    def leave(self, shard: int, seq: int, samples: int, loss: float, rounded: float, scale: float, skipped: Runs) -> None:
        """The gradient of a slice, of mini-batch `seq`, will not change any more, nor will its memory until the push is done."""


class Travels(Computes):
    """A stage of a learner's gradient (`gradient/stages.py`), and the memory that the gradient and its weights travel in.

    Where layers are exchanged one by one, `finish_slice` is called for each slice when its gradient is there, or `finish` for all.
    """

    memory: Memory

    @property
    def single(self) -> Any:
        """What computes one mini-batch, where this is of several."""
        return self

    @property
    def leaves(self) -> bool:
        """Whether a rank that computes this with others is no more."""
        return False

    def begin(self, seq: int) -> None:
        """The weights of mini-batch `seq` are there; it is computed some virtual time later."""

    def finish_slice(self, shard: int) -> None:
        """Make what is pushed of a slice from its gradient."""

    def finish(self, loss: float) -> float:
        """Make what is pushed of all slices; returns the loss that is to be told."""
        return loss

    def rounded_of(self, shard: int) -> float:
        """What was rounded off a slice, as a share of the slice; of a gradient that is rounded whole, off all of it."""
        return self.rounded

    def move_out(self) -> None:
        """Compute no more, and keep nothing in memory that is shared: it goes."""


class Copied(Protocol):
    """Weights of a slice, as snapshots are taken of them."""

    weights: Any
    averaged: Any
    samples: int


class Rooms(Protocol):
    """Lends memory for gradients that come at the same time (`gathering.py`)."""

    @property
    def room_to_park(self) -> bool:
        """Whether one more may be kept, or come."""

    def lend(self) -> Any:
        """Memory like `Updates.inbox`, for one gradient."""

    def take_back(self, room: Any) -> None:
        """What was received into lent memory is the gradient that has come last, as if it lay in `Updates.inbox`."""


class Receives(ABC):
    """The memory of a slice that gradients come into, and wait in for their turn."""

    rooms: Rooms

    scratch: Any
    """The gradient that was taken in last; (slice,) float32."""
    cached: bool
    """Whether the slice is so small that each gradient is checked at once."""

    @property
    @abstractmethod
    def inbox(self) -> Any:
        """Memory that the next gradient is received into, (slice,): `scratch`, or memory of the type that it travels in."""

    def take_in(self, skipped: Runs = NOTHING) -> str:
        """Let the gradient in `inbox`, which skips these runs, be in `scratch`. Returns why it can be none; "" = it is one."""
        return ""

    @property
    @abstractmethod
    def room_to_park(self) -> bool:
        """Whether one more gradient may be kept for later."""

    def park(self, learner_id: int) -> None:  # noqa: B027 - only where there are tensors
        """Keep the gradient in `scratch` for later."""

    def unpark(self, learner_id: int) -> None:  # noqa: B027 - only where there are tensors
        """The gradient kept for this learner is in `scratch` again."""

    @abstractmethod
    def make_room(self, gradients: int) -> Any:
        """Memory for so many gradients that are received at once, one behind the other, each as `inbox`."""

    def live_in(self, weights: Any, gradients: Sequence[Any]) -> None:  # noqa: B027 - only where there are tensors
        """Let this memory, each (slice,) float32, take the place of `weights`, as they are, and of what `make_room` makes."""

    def turn_to(self, place: int) -> None:  # noqa: B027 - only where there are tensors
        """The gradient at this place of that memory is in `scratch`, or `take_in` will see to it."""

    def renew_scratch(self) -> None:  # noqa: B027 - only where there are tensors
        """Receive the next gradient elsewhere: into the old place something may yet be written."""

    @abstractmethod
    def scratch_is_finite(self) -> bool:
        """Whether the received gradient has no NaN and no infinity."""


class Updates(Receives):
    """A slice, as a shard's loop uses it: the memory of what comes, the sum of gradients in the making, and the weights."""

    weights: Any
    averaged: Any
    compensation: Any
    """Correction of stale gradients (`compensation.Compensation`), or None."""
    checks_sums: bool
    """Whether `sum_is_finite` will be asked after each update."""
    chunks_count: int
    """In how many chunks the weights are sent (`chunks.py`)."""
    samples: int
    """Applied so far."""
    learning_rate: float
    """Learning rate of the next update."""

    @property
    @abstractmethod
    def served(self) -> Any:
        """The weights as the channel sends them, (slice,) float32; of several `chunks`, once all have been asked for."""

    @property
    @abstractmethod
    def epochs(self) -> float:
        """Samples applied / training samples."""

    def renew_weights(self) -> None:
        """Go on with the same weights elsewhere: from the old place something may yet be sent."""

    @abstractmethod
    def sum_is_finite(self) -> bool:
        """Whether the sum that the last update was made from is finite."""

    @abstractmethod
    def accumulate(
        self, weight: float, samples: int, timestamp: int, gradients: int, *, last: bool = False, skipped: Runs = NOTHING
    ) -> None:
        """Add what is in `scratch` times `weight` to the sum: a gradient, or the sum of so many, of so many samples in all and the
        weights of `timestamp`; `last`: the update is made next; `skipped`: elements that it has no gradient of."""

    def norm_of_average(self) -> float:
        """The L2 norm of what was summed / the number of gradients: of the average that the update will be made from."""
        return 0.0

    def agree(self, norm: float) -> None:
        """The next update's averaged gradient is a slice of one of this L2 norm, by which it is clipped."""

    @abstractmethod
    def step(self) -> Any:
        """Make the update from what was summed; returns an `update.Step`."""

    def begin_step(self) -> Any:
        """Begin a `step`. Nobody may look at the weights, nor sum the next gradient, before all of `chunks` have been asked for."""
        return self.step()

    def chunks(self) -> Iterator[Any]:
        """The weights as the channel sends them, chunk by chunk; each is made when it is asked for."""
        yield self.served
