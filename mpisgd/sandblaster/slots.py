"""Slots: numbered vectors of one slice, on which a coordinator computes by commands [Dean12 4.2].

No slot is ever written to again once it is made: a command makes a new one. So what the coordinator knows by its number stays what
it is, a copy costs nothing, and nobody reads what is half changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mpisgd.base.errors import ProtocolError
from mpisgd.comm.messages import Op
from mpisgd.vectors.flat import squared_norm
from mpisgd.vectors.memory import host_view, vector_like


class Kept:
    """What a checkpoint has of a shard: slots as they were when an iteration was over, the weights first.

    Attributes:
        samples: of all evaluations until then.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.samples = 0

    def state(self) -> dict[str, Tensor]:
        """By the names that they have in a checkpoint."""
        return {name_of(place): tensor for place, tensor in enumerate(self.tensors)}


def name_of(place: int) -> str:
    return f"slot.{place}" if place else "weights"


class Slots:
    """The slots of one shard, and the sum of gradients of the evaluation under way.

    Args:
        weights: (slice,) float32 on the host; slot 0.

    Attributes:
        weights: those of the last iteration.
        served: what learners are given: the point that is evaluated.
        samples: of all evaluations so far.
        most: how many vectors there were at a time, at most.
        kept: for the checkpoint that is being written; nobody writes to those slots before it is.
    """

    averaged = None

    def __init__(self, weights: Tensor) -> None:
        self.weights = self.served = weights
        self.samples = 0
        self.most = 1
        self.kept = Kept()
        self._slots = {0: weights}
        self._spare: list[Tensor] = []
        self._freed: list[Tensor] = []
        """Slots that were freed, and are read until the next iteration, or evaluation."""
        self._lost: list[Tensor] = []
        """From which MPI may yet read."""
        self._scratch = self._new()
        self._parked: dict[tuple[int, int], Tensor] = {}
        self._sum: Tensor | None = None
        self._summed = 0

    @property
    def inbox(self) -> Any:
        """Memory for the next gradient, (slice,) float32."""
        return host_view(self._scratch)

    def _new(self) -> Tensor:
        if self._spare:
            return self._spare.pop()
        self.most += 1
        return vector_like(self.weights)

    # ------------------------------------------------------------------------------------------------------ commands

    def compute(self, op: int, out: int, a: int, b: int, alpha: float) -> float:
        """Obey a command that only computes; returns what is to be answered, 0.0 where nothing is. Raises ProtocolError."""
        if op == Op.FREE:
            self._free(a)
            return 0.0
        one = self.slot(a)
        if op == Op.DOT:
            return torch.dot(one, self.slot(b)).item()
        if op == Op.ABSMAX:
            return one.abs().max().item()
        if op == Op.ABSSUM:
            return one.abs().sum().item()
        self._make(op, out, one, self.slot(b), alpha)
        return 0.0

    def _make(self, op: int, out: int, one: Tensor, other: Tensor, alpha: float) -> None:
        if out in self._slots:
            raise ProtocolError(f"slot {out} is there already")
        made = self._new()
        if op == Op.ADD:
            torch.add(one, other, alpha=alpha, out=made)
        elif op == Op.SUB:
            torch.sub(one, other, out=made)
        elif op == Op.SCALE:
            torch.mul(one, alpha, out=made)
        else:
            raise ProtocolError(f"command {op} is unknown")
        self._slots[out] = made

    def _free(self, number: int) -> None:
        freed = self._slots.pop(number, None)
        if freed is None:
            raise ProtocolError(f"slot {number} is to be freed, and is not there")
        self._freed.append(freed)
        self._reuse()

    def _reuse(self) -> None:
        """What is free, and not to be read any more, may be written to again."""
        read = [self.weights, self.served, *self.kept.tensors, *self._lost]
        kept = [each for each in self._freed if any(each is other for other in read)]
        self._spare += [each for each in self._freed if not any(each is other for other in kept)]
        self._freed = kept

    def slot(self, number: int) -> Tensor:
        """Raises ProtocolError where there is none of this number."""
        found = self._slots.get(number)
        if found is None:
            raise ProtocolError(f"there is no slot {number}")
        return found

    def accept(self, number: int) -> None:
        """The weights are those of this slot now."""
        self.weights = self.slot(number)
        self.kept.samples = self.samples
        self._reuse()

    def keep(self, numbers: Sequence[int]) -> None:
        """These slots are to be written, the weights first; none: what was to be is."""
        self.kept.tensors = [self.slot(number) for number in numbers]
        self._reuse()

    @property
    def numbers(self) -> list[int]:
        """Of all slots."""
        return list(self._slots)

    def restore(self, tensors: Mapping[int, Tensor], samples: int, weights: int = 0) -> None:
        """Go on with these slots, of which this one is the weights, after so many samples."""
        self._slots = dict(tensors)
        self.weights = self.served = self._slots[weights]
        self.samples = self.kept.samples = samples
        self.most = max(self.most, len(self._slots) + 1)

    # ---------------------------------------------------------------------------------------------------- evaluations

    def begin(self, number: int) -> None:
        """Evaluate at this slot."""
        self.served = self.slot(number)
        self._reuse()

    def lose_served(self) -> None:
        """Nobody may ever write to what is served: it is still being sent to a learner that hangs."""
        self._lost.append(self.served)

    def renew_inbox(self) -> None:
        """A gradient was torn: MPI may yet write there."""
        self._scratch = self._new()

    def park(self, learner_id: int, seq: int) -> None:
        """Keep the gradient that has come until it is said whether it counts."""
        self._parked[learner_id, seq] = self._scratch
        self._scratch = self._new()

    def commit(self, learner_id: int, seq: int, samples: int) -> None:
        """Add a parked gradient, the sum over so many samples, to the sum."""
        gradient = self._parked.pop((learner_id, seq))
        if self._sum is None:
            self._sum = gradient
        else:
            self._sum.add_(gradient)
            self._spare.append(gradient)
        self._summed += samples

    def discard(self, learner_id: int, until: int) -> list[int]:
        """Forget what is parked of a learner, its pushes until this one; returns which that were."""
        gone = [seq for who, seq in self._parked if who == learner_id and seq <= until]
        self._spare += [self._parked.pop((learner_id, seq)) for seq in gone]
        return gone

    def end(self, out: int) -> float:
        """The gradient, the sum over its counted samples, goes into slot `out`; returns its squared norm."""
        gradient, samples = self._sum, self._summed
        if gradient is None or self._parked:
            raise ProtocolError(f"an evaluation is over with {samples} samples summed, {len(self._parked)} pushes parked")
        self._slots[out] = gradient.div_(samples)
        self.samples += samples
        self._sum, self._summed = None, 0
        return squared_norm(host_view(gradient))
