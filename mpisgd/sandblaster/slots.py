"""Slots: numbered vectors of one slice, for the commands of a coordinator [Dean12 4.2].

A slot is never written to again: each command makes a new slot. Copies cost nothing, and no reader sees a vector half changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mpisgd.base.errors import ProtocolError
from mpisgd.comm.messages import Op
from mpisgd.vectors.body import Body, WholePool
from mpisgd.vectors.flat import squared_norm
from mpisgd.vectors.memory import host_view


class Kept:
    """Slots of a checkpoint, as of the last iteration, the weights first."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.samples = 0

    def state(self) -> dict[str, Tensor]:
        return {name_of(place): tensor for place, tensor in enumerate(self.tensors)}


def name_of(place: int) -> str:
    return f"slot.{place}" if place else "weights"


class Slots:
    """Slots of one shard, and the sum of the evaluation under way.

    Args:
        weights: (slice,) float32 on the host; slot 0.

    Attributes:
        weights: of the last iteration.
        served: point under evaluation.
        bodies: memory for gradients, and for slots.
        kept: slots in the writing, not to be overwritten.
    """

    averaged = None

    def __init__(self, weights: Tensor) -> None:
        self.weights = self.served = weights
        self.samples = 0
        self.bodies = WholePool(weights)
        self.kept = Kept()
        self._slots = {0: weights}
        self._freed: list[Tensor] = []
        """Freed slots, still read until the next iteration or evaluation."""
        self._lost: list[Tensor] = []
        """Memory that MPI may yet read."""
        self._parked: dict[tuple[int, int], Body] = {}
        self._sum: Tensor | None = None
        self._summed = 0

    # ------------------------------------------------------------------------------------------------------ commands

    def compute(self, op: int, out: int, a: int, b: int, alpha: float) -> float:
        """Compute; return the answer, or 0.0. Raises ProtocolError."""
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
        made, _ = self.bodies.vector()
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
        read = [self.weights, self.served, *self.kept.tensors, *self._lost]
        kept = [each for each in self._freed if any(each is other for other in read)]
        self.bodies.free += [(each, host_view(each)) for each in self._freed if not any(each is other for other in kept)]
        self._freed = kept

    def slot(self, number: int) -> Tensor:
        found = self._slots.get(number)
        if found is None:
            raise ProtocolError(f"there is no slot {number}")
        return found

    def accept(self, number: int) -> None:
        self.weights = self.slot(number)
        self.kept.samples = self.samples
        self._reuse()

    def keep(self, numbers: Sequence[int]) -> None:
        """Keep slots to be written, the weights first."""
        self.kept.tensors = [self.slot(number) for number in numbers]
        self._reuse()

    @property
    def numbers(self) -> list[int]:
        return list(self._slots)

    def restore(self, tensors: Mapping[int, Tensor], samples: int, weights: int = 0) -> None:
        self._slots = dict(tensors)
        self.weights = self.served = self._slots[weights]
        self.samples = self.kept.samples = samples

    # ---------------------------------------------------------------------------------------------------- evaluations

    def begin(self, number: int) -> None:
        self.served = self.slot(number)
        self._reuse()

    def lose_served(self) -> None:
        """Never write to the served point again: a send to a hung learner goes on."""
        self._lost.append(self.served)

    def park(self, learner_id: int, seq: int, body: Body) -> None:
        self._parked[learner_id, seq] = body

    def commit(self, learner_id: int, seq: int, samples: int) -> None:
        body = self._parked.pop((learner_id, seq))
        if self._sum is None:
            self._sum, _, _ = body.adopt()
        else:
            self._sum.add_(body.vector)
            body.release()
        self._summed += samples

    def discard(self, learner_id: int, until: int) -> list[int]:
        """Forget a learner's parked pushes until this one; return their numbers."""
        gone = [seq for who, seq in self._parked if who == learner_id and seq <= until]
        for seq in gone:
            self._parked.pop((learner_id, seq)).release()
        return gone

    def end(self, out: int) -> float:
        """Put the gradient, the sum / its samples, into slot `out`; return its squared norm."""
        gradient, samples = self._sum, self._summed
        if gradient is None or self._parked:
            raise ProtocolError(f"an evaluation is over with {samples} samples summed, {len(self._parked)} pushes parked")
        self._slots[out] = gradient.div_(samples)
        self.samples += samples
        self._sum, self._summed = None, 0
        return squared_norm(host_view(gradient))
