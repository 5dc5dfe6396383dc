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

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mpisgd.base.errors import ConfigError, ProtocolError
from mpisgd.comm.communicator import Communicator, Node
from mpisgd.gradient.straggler import Delays
from mpisgd.vectors.computing import Travels
from mpisgd.vectors.flat import is_finite
from mpisgd.vectors.memory import Memory
from mpisgd.vectors.skipped import NOTHING, Runs, common

_OVER = -1.0
_FACTS, _RUNS = 4, 64
_TOLD = _FACTS + 2 * _RUNS
"""Words of a rank: its loss, samples and signal, and of how many runs of elements it has no gradient, which follow."""


def _in_words(runs: Runs) -> np.ndarray:
    """Raises ConfigError for more runs than a team has room for."""
    if len(runs) > _RUNS:
        raise ConfigError(
            f"model: a mini-batch gave no gradient to {len(runs)} runs of parameters, which torch would leave as they are:"
            f" expected at most {_RUNS} beside aggregation = 'node'"
        )
    words = np.zeros(2 * _RUNS)
    words[: runs.size] = runs.ravel()
    return words


def team_loss(losses: Sequence[float], summed: np.ndarray | None) -> float:
    """The loss of a team from those of its ranks, in their order.

    Args:
        summed: the sum of their gradients, (parameters,) float32, where it is to be finite: else the loss is NaN, so that all
            shards drop it alike (`gradient.Gradient`); None = whatever it is.
    """
    return math.nan if summed is not None and not is_finite(summed) else sum(losses) / len(losses)


@dataclass(frozen=True)
class SharedMemory:
    """Memory that the ranks of a node have in common: the weights once for all, and a slot for the gradient of each."""

    node: Node
    slots: Sequence[Memory]

    @classmethod
    def of(cls, node: Node, size: int) -> SharedMemory:
        """Memory for so many parameters; all ranks of the node call this."""
        weights, *gradients = node.vectors(1 + node.places, size)
        return cls(node, [Memory(weights, each, shared=True) for each in gradients])

    @property
    def own(self) -> Memory:
        """This rank's, in which its gradient is to be made."""
        return self.slots[self.node.place]

    def require(self, gradient: Travels) -> None:
        """Raises ProtocolError for a gradient that does not lie there: it would train on, unseen by the others."""
        if gradient.memory is not self.own:
            raise ProtocolError(f"{type(gradient).__name__} has memory of its own: expected that which the ranks of its node share")


class Member:
    """A rank's part in its team: its own gradient, and its share of the sum, which is made in the first slot.

    `sum_cost` is called before each sum: where seconds are virtual, it lets them pass. After `disband` the shared memory is not to
    be looked at. Raises ProtocolError for a gradient in memory of its own.
    """

    def __init__(
        self,
        shared: SharedMemory,
        gradient: Travels,
        delays: Delays,
        wire: Communicator,
        sum_cost: Callable[[], None] = lambda: None,
    ) -> None:
        shared.require(gradient)
        self.node = node = shared.node
        self._sum_cost = sum_cost
        self.gradient = gradient
        self._delays = delays
        self._wire = wire
        words = node.words(1 + _TOLD * node.places)
        self._next, self._told = words[:1], words[1:].reshape(node.places, _TOLD)
        self.skipped = NOTHING
        self.memory = shared.slots[0]
        self._parts: list[np.ndarray] = []
        if self.memory.has_numbers:
            size, place, places = len(self.memory.weights), node.place, node.places
            part = slice(size * place // places, size * (place + 1) // places)
            self._parts = [slot.gradients[part] for slot in shared.slots]

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
        start_ns = self._wire.clock.now_ns()
        loss = self.gradient.compute(seq)
        delay_s = self._delays.of(seq, (self._wire.clock.now_ns() - start_ns) * 1e-9)
        if delay_s > 0:
            self._wire.clock.sleep(delay_s)
        told = self._told[self.node.place]
        told[:_FACTS] = loss, self.gradient.samples, self._wire.signal, len(self.gradient.skipped)
        told[_FACTS:] = _in_words(self.gradient.skipped)
        self.node.meet()
        losses, samples, signals, counts = self._told[:, :_FACTS].T.tolist()
        runs = [
            each[: 2 * int(count)].astype(np.int64).reshape(-1, 2)
            for each, count in zip(self._told[:, _FACTS:], counts, strict=True)
        ]
        self.skipped = functools.reduce(common, runs)
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
        """The shared memory goes; the model moves to memory of its own, as it is."""
        self.gradient.move_out()
        self.node.disband()


class Leader(Travels):
    """The gradient of a whole team, as the learner's loop asks for it.

    Args:
        drop_nonfinite: a sum that is not finite is to be dropped by all shards alike.
    """

    def __init__(self, member: Member, drop_nonfinite: bool) -> None:
        self._member = member
        self.memory, self.scaled = member.memory, member.gradient.scaled
        self._drop_nonfinite = drop_nonfinite and self.memory.has_numbers
        self.samples = 0

    def prepare(self, seq: int) -> None:
        self._member.gradient.prepare(seq)

    def compute(self, seq: int) -> float:
        """Compute the team's gradients and their sum; returns its loss."""
        self._member.begin(seq)
        losses, self.samples = self._member.compute(seq)
        self.skipped = self._member.skipped
        return team_loss(losses, self.memory.gradients if self._drop_nonfinite else None)

    def stop(self) -> None:
        """The run is over: let the members go."""
        self._member.begin(None)


def follow(member: Member) -> None:
    """A member's loop: compute what the leader begins, until the run is over."""
    member.gradient.prepare(0)
    while (seq := member.wait()) is not None:
        member.compute(seq)
        member.gradient.prepare(seq + 1)
