"""Node aggregation: ranks of one node sum their gradients in shared memory, and one of them pushes the sum [Chen16 6].

To the shards a learner is then a *team* of ranks. Its leader runs the loop of any learner (`learner.learn`), the others `follow`:

                leader                                            members
    pull        the weights, into memory that all share
    meet        says which mini-batch is next, or that it is over
    calculate   gradient of its mini-batch, into its slot         the same, each into its own
    meet        all slots are full
    sum         its part of the vector, over all slots            theirs
    meet        the sum is in the first slot
    push        that slot, with the count                         prepare their next mini-batches

So one vector each way crosses the network for a team, in place of one for each of its ranks. The sum is a reduce-scatter in
place: each element is ((g_0 + g_1) + g_2) + ... in float32, in the order of the team's ranks. That is the order of hardsync's
sum, so that a run of one team has the bits of hardsync with as many learners, and any run those of itself again (law 5).

The shards' divisor counts the ranks (law 3): an update is the mean over gradients, however unequal the teams. A team's loss is the
mean over its ranks, for it is of that mean that theirs is the gradient; mini-batches are all of one size. Where only some teams
make an update (backup, timeout) and these are unequal, shards that choose different ones apply different numbers of samples.

Each rank has its own place in the dealing of samples, and its own straggler delays, which it takes before the sum: what a team
takes from weights to sum is its slowest rank's time. Nobody can leave a team alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpisgd.comm.communicator import Communicator, Node
from mpisgd.gradient.straggler import Delays
from mpisgd.vectors.computing import Travels
from mpisgd.vectors.flat import is_finite

_OVER = -1.0


def team_loss(losses: Sequence[float], summed: np.ndarray | None) -> float:
    """The loss of a team from those of its ranks, in their order.

    Args:
        summed: the sum of their gradients, (parameters,) float32, where it is to be finite: else the loss is NaN, so that all
            shards drop it alike (`gradient.Gradient`); None = whatever it is.
    """
    return math.nan if summed is not None and not is_finite(summed) else sum(losses) / len(losses)


class Member:
    """A rank's part in its team: its own gradient, and its share of the sum.

    `weights`, the team's, and `summed`, the first slot, are both (parameters,) float32, or, where only sizes travel, what stands
    for them. After `disband` they are not to be looked at.
    `sum_cost` is called before each sum: where seconds are virtual, it lets them pass.
    """

    def __init__(
        self, node: Node, gradient: Travels, delays: Delays, wire: Communicator, sum_cost: Callable[[], None] = lambda: None
    ) -> None:
        self.node = node
        self._sum_cost = sum_cost
        self.gradient = gradient
        self._delays = delays
        self._wire = wire
        words = node.words(1 + 3 * node.places)
        self._next, self._told = words[:1], words[1:].reshape(node.places, 3)
        self.weights: Any = gradient.wire_weights
        self.summed: Any = gradient.wire_gradients
        self._parts: list[np.ndarray] = []
        if isinstance(self.weights, np.ndarray):
            size, place, places = len(self.weights), node.place, node.places
            self.weights, *slots = node.vectors(1 + places, size)
            self.summed = slots[0]
            gradient.live_in(self.weights, slots[place])
            self._parts = [slot[size * place // places : size * (place + 1) // places] for slot in slots]

    def begin(self, seq: int | None) -> None:
        """Leader: the weights of mini-batch `seq` are there; None = the run is over."""
        self._next[0] = _OVER if seq is None else seq
        self.node.meet()

    def wait(self) -> int | None:
        """The others: which mini-batch the leader begins."""
        self.node.meet()
        word = float(self._next[0])
        return None if word == _OVER else int(word)

    def compute(self, seq: int) -> tuple[list[float], int]:
        """Compute this rank's gradient, then the sum with all others; returns the losses of all ranks, and samples in all."""
        start_ns = self._wire.now_ns()
        loss = self.gradient.compute(seq)
        delay_s = self._delays.of(seq, (self._wire.now_ns() - start_ns) * 1e-9)
        if delay_s > 0:
            self._wire.sleep(delay_s)
        self._told[self.node.place] = loss, self.gradient.samples, self._wire.signal
        self.node.meet()
        losses, samples, signals = self._told.T.tolist()
        if any(signals):  # the leader tells the shards of what any of its ranks has heard
            self._wire.signal = int(max(signals))
        self.add()
        self.node.meet()
        return losses, int(sum(samples))

    def add(self) -> None:
        """Add this rank's part of the sum. Others ask whether it is finite."""
        self._sum_cost()
        with np.errstate(over="ignore", invalid="ignore"):
            for part in self._parts[1:]:
                np.add(self._parts[0], part, out=self._parts[0])

    def disband(self) -> None:
        """Weights and gradient move to memory of their own, as they are; the shared memory goes."""
        if self._parts:
            self.gradient.live_in(np.zeros_like(self.weights), np.zeros_like(self.weights))
        self.node.disband()


class Leader(Travels):
    """The gradient of a whole team, as the learner's loop asks for it.

    Args:
        drop_nonfinite: a sum that is not finite is to be dropped by all shards alike.
    """

    def __init__(self, member: Member, drop_nonfinite: bool) -> None:
        self._member = member
        self._drop_nonfinite = drop_nonfinite and isinstance(member.summed, np.ndarray)
        self.wire_weights = member.weights
        self.wire_gradients = member.summed
        self.samples = 0

    def prepare(self, seq: int) -> None:
        self._member.gradient.prepare(seq)

    def interrupt_by(self, check: Callable[[], None]) -> None:
        """Do nothing: protocols that abort have no teams (`roles.of_job`), so no rank gives up alone."""

    def compute(self, seq: int) -> float:
        """Compute the team's gradients and their sum; returns its loss."""
        self._member.begin(seq)
        losses, self.samples = self._member.compute(seq)
        return team_loss(losses, self.wire_gradients if self._drop_nonfinite else None)

    def stop(self) -> None:
        """The run is over: let the members go."""
        self._member.begin(None)


def follow(member: Member) -> None:
    """A member's loop: compute what the leader begins, until the run is over."""
    member.gradient.prepare(0)
    while (seq := member.wait()) is not None:
        member.compute(seq)
        member.gradient.prepare(seq + 1)
