"""Node aggregation: ranks of a node sum their gradients in shared memory, and one rank pushes the sum [Chen16 6].

A learner is then a *team*: the leader runs any learner's loop (`learner.learn`), members `follow`:

                leader                                  members
    pull        weights, into shared memory
    meet        tells the next mini-batch, or the end
    calculate   its gradient, into its slot             the same
    meet        all slots are full
    sum         its part, over all slots                their parts
    meet        the sum is in the first slot
    push        the sum, with the count                 prepare their next mini-batches

Sums are float32, in the order of ranks: one team has the bits of hardsync with as many learners (law 5). Shards divide by the
number of ranks (law 3); with backup or timeout and unequal teams, shards may apply different numbers of samples. No rank can leave
alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mpisgd.base.errors import ConfigError, ProtocolError
from mpisgd.comm.communicator import Communicator, Segment
from mpisgd.gradient.straggler import Delays
from mpisgd.vectors.computing import Travels
from mpisgd.vectors.flat import is_finite
from mpisgd.vectors.memory import Memory
from mpisgd.vectors.skipped import NOTHING, Runs, common

_OVER = -1.0
_FACTS, _RUNS = 4, 64
_TOLD = _FACTS + 2 * _RUNS
"""Words of a rank: loss, samples, signal, number of runs without a gradient, and the runs."""
_PAGE = 4096


def _in_words(runs: Runs) -> np.ndarray:
    if len(runs) > _RUNS:
        raise ConfigError(
            f"model: a mini-batch gave no gradient to {len(runs)} runs of parameters: torch would not change these runs:"
            f" expected at most {_RUNS} beside aggregation = 'node'"
        )
    words = np.zeros(2 * _RUNS)
    words[: runs.size] = runs.ravel()
    return words


def team_loss(losses: Sequence[float], summed: np.ndarray | None) -> float:
    """Return a team's mean loss; NaN for a non-finite `summed`, (parameters,) float32: all shards drop the push."""
    return math.nan if summed is not None and not is_finite(summed) else sum(losses) / len(losses)


@dataclass(frozen=True)
class SharedMemory:
    """A node's memory: `words`, float64, the weights once, and a gradient slot per rank, with outboxes if several."""

    segment: Segment
    words: np.ndarray
    slots: Sequence[Memory]

    @classmethod
    def of(cls, wire: Communicator, ranks: Sequence[int], words: int, size: int, outboxes: int = 0) -> SharedMemory:
        """Return memory for `size` parameters; collective. Raises ConfigError: ranks that cannot share memory."""
        room, before = (-(-nbytes // _PAGE) * _PAGE for nbytes in (4 * size, 8 * words))
        rooms = max(1, outboxes) * room
        segment = wire.segment(ranks, [rooms + (before + room) * (place == 0) for place in range(len(ranks))])
        if segment is None:
            raise ConfigError(
                "the ranks of a node cannot share memory: expected a common /proc, or room in a common /dev/shm; otherwise"
                " aggregation = 'none', and MPISGD_TRAVEL=messages"
            )
        common = segment.bytes_of(0)[rooms:]
        weights, slots = common[before : before + 4 * size].view(np.float32), []
        for place in range(len(ranks)):
            starts = [room * number for number in range(max(1, outboxes))]
            gradients = [segment.bytes_of(place)[start : start + 4 * size].view(np.float32) for start in starts]
            slots.append(Memory(weights, gradients[0], shared=True, outboxes=gradients[:outboxes]))
        return cls(segment, common[: 8 * words].view(np.float64), slots)

    @property
    def own(self) -> Memory:
        return self.slots[self.segment.place]

    def require(self, gradient: Travels) -> None:
        """Raise ProtocolError for a gradient outside this rank's slot, unseen by its team."""
        if gradient.memory is not self.own:
            raise ProtocolError(
                f"{type(gradient).__name__} has separate memory: expected the memory shared by the ranks of the node"
            )


class Member:
    """A rank's part in its team: its gradient, and its share of the sum in the first slot.

    `sum_cost` passes virtual seconds before each sum. `disband` ends the shared memory.
    """

    @staticmethod
    def words_of(places: int) -> int:
        """Return a team's shared words."""
        return 1 + _TOLD * places

    def __init__(
        self,
        shared: SharedMemory,
        gradient: Travels,
        delays: Delays,
        wire: Communicator,
        sum_cost: Callable[[], None] = lambda: None,
    ) -> None:
        shared.require(gradient)
        self.segment = segment = shared.segment
        self._sum_cost = sum_cost
        self.gradient = gradient
        self._delays = delays
        self._wire = wire
        self._next, self._told = shared.words[:1], shared.words[1:].reshape(segment.places, _TOLD)
        self.skipped = NOTHING
        self.memory = shared.slots[0]
        self._parts: list[np.ndarray] = []
        if self.memory.has_numbers:
            size, place, places = len(self.memory.weights), segment.place, segment.places
            part = slice(size * place // places, size * (place + 1) // places)
            self._parts = [slot.gradients[part] for slot in shared.slots]

    def begin(self, seq: int | None) -> None:
        """Start mini-batch `seq` as the leader; None ends the run."""
        self._next[0] = _OVER if seq is None else seq
        self.segment.meet()

    def wait(self) -> int | None:
        self.segment.meet()
        word = float(self._next[0])
        return None if word == _OVER else int(word)

    def compute(self, seq: int) -> tuple[list[float], int]:
        """Compute and sum gradients; return all ranks' losses and the team's samples."""
        start_ns = self._wire.clock.now_ns()
        loss = self.gradient.compute(seq)
        delay_s = self._delays.of(seq, (self._wire.clock.now_ns() - start_ns) * 1e-9)
        if delay_s > 0:
            self._wire.clock.sleep(delay_s)
        told = self._told[self.segment.place]
        told[:_FACTS] = loss, self.gradient.samples, self._wire.signal, len(self.gradient.skipped)
        told[_FACTS:] = _in_words(self.gradient.skipped)
        self.segment.meet()
        losses, samples, signals, counts = self._told[:, :_FACTS].T.tolist()
        runs = [
            each[: 2 * int(count)].astype(np.int64).reshape(-1, 2)
            for each, count in zip(self._told[:, _FACTS:], counts, strict=True)
        ]
        self.skipped = functools.reduce(common, runs)
        if any(signals):  # the leader passes on the signals of its ranks
            self._wire.signal = int(max(signals))
        self.add()
        self.segment.meet()
        return losses, int(sum(samples))

    def add(self) -> None:
        self._sum_cost()
        with np.errstate(over="ignore", invalid="ignore"):  # the caller checks
            for part in self._parts[1:]:
                np.add(self._parts[0], part, out=self._parts[0])

    def disband(self) -> None:
        self.gradient.move_out()
        self.segment.disband()


class Leader(Travels):
    """A team's gradient."""

    def __init__(self, member: Member, drop_nonfinite: bool) -> None:
        self._member = member
        self.memory, self.scaled = member.memory, member.gradient.scaled
        self._drop_nonfinite = drop_nonfinite and self.memory.has_numbers
        self.samples = 0

    def prepare(self, seq: int) -> None:
        self._member.gradient.prepare(seq)

    def compute(self, seq: int) -> float:
        self._member.begin(seq)
        losses, self.samples = self._member.compute(seq)
        self.skipped = self._member.skipped
        return team_loss(losses, self.memory.gradients if self._drop_nonfinite else None)

    def stop(self) -> None:
        self._member.begin(None)


def follow(member: Member) -> None:
    member.gradient.prepare(0)
    while (seq := member.wait()) is not None:
        member.compute(seq)
        member.gradient.prepare(seq + 1)
