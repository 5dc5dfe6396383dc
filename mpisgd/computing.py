"""What the loops ask of what computes, with tensors (`gradient.Gradient`, `update.SliceUpdate`) or where only sizes travel.

And what a gradient tells in return, where layers are exchanged one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from mypy_extensions import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class Computes(Protocol):
    """What a learner's loop asks of its gradient; after `compute`, it lies where the channel sends it from."""

    samples: int
    """Of the mini-batch computed last."""

    def prepare(self, seq: int) -> None:
        """Do what mini-batch `seq` needs before its weights are known."""

    def compute(self, seq: int) -> float:
        """Compute the gradient of mini-batch `seq` at the weights that were pulled; returns the loss."""

    def interrupt_by(self, check: Callable[[], None]) -> None:
        """Call this every now and then in `compute`; it may raise to end that."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Exchanges(Protocol):
    """What is told of a gradient whose slices, whole layers, are exchanged one by one while it is computed."""

    def need(self, shard: int) -> None:
        """The forward pass is about to use the weights of a slice for the first time: they must be in place on return."""

    def leave(self, shard: int, seq: int, samples: int, loss: float) -> None:
        """The gradient of a slice, of mini-batch `seq`, will not change any more, nor will its memory until the push is done."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Updates(Protocol):
    """What a shard's loop asks of its slice: the sum of gradients in the making, and the weights."""

    scratch: Any
    """Where the next gradient is received; (slice,) float32."""
    served: Any
    """The weights as the channel sends them; (slice,) float32."""
    weights: Any
    averaged: Any
    compensation: Any
    """What corrects stale gradients (`compensation.Compensation`), or None."""
    cached: bool
    """Whether the slice is so small that each gradient is checked at once."""
    samples: int
    """Applied so far."""
    learning_rate: float
    """Of the next update."""

    @property
    def epochs(self) -> float:
        """Samples applied / training samples."""

    @property
    def room_to_park(self) -> bool:
        """Whether one more gradient may be kept for later."""

    def park(self, learner_id: int) -> None:
        """Keep the gradient in `scratch` for later."""

    def unpark(self, learner_id: int) -> None:
        """The gradient kept for this learner is in `scratch` again."""

    def make_room(self, gradients: int) -> Any:
        """Memory for so many gradients that are received at once, one behind the other: (gradients * slice,) float32."""

    def turn_to(self, place: int) -> None:
        """The gradient at this place of that memory is in `scratch`."""

    def scratch_is_finite(self) -> bool:
        """Whether the received gradient has no NaN and no infinity."""

    def sum_is_finite(self) -> bool:
        """The same of the sum that the last update was made from."""

    def accumulate(self, weight: float, samples: int, timestamp: int) -> None:
        """Add the gradient in `scratch`, of so many samples and the weights of `timestamp`, times `weight` to the sum."""

    def step(self) -> Any:
        """Make the update from what was summed; returns an `update.Step`."""
