"""What a stage has under way: at most two messages of a kind, so that one is there to be taken while the next is made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mpisgd.comm.messages import MOST_DIMENSIONS, Tag
from mpisgd.pipeline.stage import Stage
from mpisgd.vectors.computing import Waited

MICRO = 6
TENSOR = (0, 0, 0, *([0] * 2 * MOST_DIMENSIONS))


class Written:
    """A wire that notes down what is begun and finished; gradients come as they are asked for."""

    rank = 0
    clock = SimpleNamespace(now_ns=lambda: 0)

    def __init__(self) -> None:
        self.under_way: list[tuple[int, int]] = []
        self.most: dict[int, int] = {}
        self.finished: list[tuple[int, int]] = []
        self._taken = 0

    def start(self, dest: int, tag: int, fields: Any, *bodies: Any) -> tuple[int, int]:
        sent = (tag, fields[1])
        self.under_way.append(sent)
        of_kind = sum(each == tag for each, _ in self.under_way)
        self.most[tag] = max(self.most.get(tag, 0), of_kind)
        return sent

    def finish(self, sent: tuple[int, int]) -> bool:
        self.under_way.remove(sent)
        self.finished.append(sent)
        return True

    def take(self, patterns: Any) -> Any:
        ((source, tag),) = patterns
        self._taken += 1
        return source, tag, (0, self._taken - 1, 0, 0, *TENSOR, 0.5)

    def take_body(self, *bodies: Any) -> bool:
        return True


class Passed:
    """Passes of nothing."""

    memory, samples, leaves = None, 1, False

    def __init__(self, wire: Written) -> None:
        self._wire = wire

    def prepare(self, seq: int) -> None: ...

    def begin(self, seq: int) -> None: ...

    def pass_on(self, micro: int, received: Any) -> int:
        return micro

    def pass_back(self, micro: int, received: Any) -> None: ...

    def reported(self, loss: float) -> float:
        return loss

    def tensors_of(self, passed: Any) -> Any:
        return 0, (passed,)

    def describe(self, passed: Any) -> Any:
        return TENSOR, b""

    def room(self, described: Any) -> Any:
        return 1, b""


@pytest.mark.parametrize("alternating", [False, True], ids=["gpipe", "1f1b"])
def test_two_messages_of_a_kind_are_under_way(alternating: bool) -> None:
    wire = Written()
    passes: Any = Passed(wire)
    communicator: Any = wire
    stage = Stage(communicator, (0, 1, 2), passes, MICRO, alternating=alternating)
    assert stage.compute(0) == 0.5
    assert wire.most == {Tag.ACTIVATION: 2}
    assert wire.finished == [(Tag.ACTIVATION, micro) for micro in range(MICRO)]
    assert wire.under_way == []
    assert isinstance(stage.waited, Waited)
