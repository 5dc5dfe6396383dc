"""Slots: numbered vectors of one slice, for the commands of a coordinator [Dean12 4.2].

A slot is never written to again: each command makes a new slot. Copies cost nothing, and no reader sees a vector half changed.
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
        most: most vectors at a time.
        kept: slots in the writing, not to be overwritten.
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
        """Freed slots, still read until the next iteration or evaluation."""
        self._lost: list[Tensor] = []
        """Memory that MPI may yet read."""
        self._scratch = self._new()
        self._parked: dict[tuple[int, int], Tensor] = {}
        self._sum: Tensor | None = None
        self._summed = 0

    @property
    def inbox(self) -> Any:
        return host_view(self._scratch)

    def _new(self) -> Tensor:
        if self._spare:
            return self._spare.pop()
        self.most += 1
        return vector_like(self.weights)

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
        read = [self.weights, self.served, *self.kept.tensors, *self._lost]
        kept = [each for each in self._freed if any(each is other for other in read)]
        self._spare += [each for each in self._freed if not any(each is other for other in kept)]
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
        self.most = max(self.most, len(self._slots) + 1)

    # ---------------------------------------------------------------------------------------------------- evaluations

    def begin(self, number: int) -> None:
        self.served = self.slot(number)
        self._reuse()

    def lose_served(self) -> None:
        """Never write to the served point again: a send to a hung learner goes on."""
        self._lost.append(self.served)

    def renew_inbox(self) -> None:
        """Take new memory: MPI may yet write a torn gradient into the old."""
        self._scratch = self._new()

    def park(self, learner_id: int, seq: int) -> None:
        self._parked[learner_id, seq] = self._scratch
        self._scratch = self._new()

    def commit(self, learner_id: int, seq: int, samples: int) -> None:
        gradient = self._parked.pop((learner_id, seq))
        if self._sum is None:
            self._sum = gradient
        else:
            self._sum.add_(gradient)
            self._spare.append(gradient)
        self._summed += samples

    def discard(self, learner_id: int, until: int) -> list[int]:
        """Forget a learner's parked pushes until this one; return their numbers."""
        gone = [seq for who, seq in self._parked if who == learner_id and seq <= until]
        self._spare += [self._parked.pop((learner_id, seq)) for seq in gone]
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
