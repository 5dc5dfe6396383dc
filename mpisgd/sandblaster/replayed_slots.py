"""Slots of all shards in one process, under the coordinator of a `replay`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from mpisgd.comm.messages import Ending, Op
from mpisgd.sandblaster.slots import Slots
from mpisgd.vectors.memory import host_view


class Here:
    """Stand-in for the coordinator's channel.

    Args:
        weights: initial, (parameters,) float32.
        accepted: called after each iteration.
    """

    def __init__(self, weights: Tensor, bounds: Sequence[tuple[int, int]], accepted: Callable[[], None]) -> None:
        self.slots = [Slots(weights[start:end].clone()) for start, end in bounds]
        self._bounds = bounds
        self._accepted = accepted

    def cut_anew(self, bounds: Sequence[tuple[int, int]]) -> None:
        """Cut the slots anew for the next attempt."""
        if list(bounds) == list(self._bounds):
            return
        numbers, samples = self.slots[0].numbers, self.slots[0].samples
        whole = {number: torch.cat([slots.slot(number) for slots in self.slots]) for number in numbers}
        at = next(number for number in numbers if self.slots[0].slot(number) is self.slots[0].weights)
        self.slots = []
        for start, end in bounds:
            slots = Slots(whole[at][start:end].clone())
            slots.restore({number: vector[start:end].clone() for number, vector in whole.items()}, samples, weights=at)
            self.slots.append(slots)
        self._bounds = bounds

    def now_s(self) -> float:
        return 0.0

    def finish(self, ending: Ending) -> None:
        """Do nothing."""

    def fail(self) -> None:
        """Do nothing."""

    def do(self, op: Op, out: int = 0, a: int = 0, b: int = 0, alpha: float = 0.0, beta: float = 0.0) -> None:
        if op is Op.ACCEPT:
            for slots in self.slots:
                slots.accept(a)
            self._accepted()
            return
        self.ask(op, out, a, b, alpha)

    def ask(self, op: Op, out: int = 0, a: int = 0, b: int = 0, alpha: float = 0.0, beta: float = 0.0) -> list[float]:
        return [slots.compute(op, out, a, b, alpha) for slots in self.slots]

    def begin(self, number: int, into: np.ndarray) -> None:
        for slots, (start, end) in zip(self.slots, self._bounds, strict=True):
            slots.begin(number)
            into[start:end] = host_view(slots.served)

    def push(self, vector: np.ndarray, learner_id: int, seq: int, samples: int) -> None:
        for slots, (start, end) in zip(self.slots, self._bounds, strict=True):
            body = slots.bodies.take()
            body.memory[:] = vector[start:end]
            slots.park(learner_id, seq, body)
            slots.commit(learner_id, seq, samples)

    def end(self, out: int) -> list[float]:
        return [slots.end(out) for slots in self.slots]

    def weights(self) -> Tensor:
        return torch.cat([slots.weights for slots in self.slots])
