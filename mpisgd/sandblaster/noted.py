"""Commands to the shards, reported to the log (`protocol.log_commands`), or to a replay for comparison.

Only the optimiser's commands and the ends of iterations are reported; evaluations and checkpoints have other tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from mpisgd.comm.messages import Op
from mpisgd.sandblaster.coordinator import Channel
from mpisgd.sandblaster.remote import combined

_MAKE = frozenset({Op.ADD, Op.SUB, Op.SCALE})
_OF_TWO = frozenset({Op.ADD, Op.SUB, Op.DOT})
_TIMES = frozenset({Op.ADD, Op.SCALE})
TOLD = _MAKE | _OF_TWO | {Op.ABSMAX, Op.ABSSUM, Op.ACCEPT}
NONE = -1


class Noted:
    """Stand-in for a coordinator's channel.

    Args:
        clock: returns the number of evaluations.
        note: takes rows of `commands`, once answered.
    """

    def __init__(self, channel: Channel, clock: Callable[[], int], note: Callable[..., None]) -> None:
        self._channel = channel
        self._clock = clock
        self._note = note
        self.now_s = channel.now_s
        self.finish = channel.finish
        self.fail = channel.fail

    def do(self, op: Op, out: int = 0, a: int = 0, b: int = 0, alpha: float = 0.0, beta: float = 0.0) -> None:
        start_s = self.now_s()
        self._channel.do(op, out, a, b, alpha, beta)
        self._tell(op, out, a, b, alpha, math.nan, start_s)

    def ask(self, op: Op, out: int = 0, a: int = 0, b: int = 0, alpha: float = 0.0, beta: float = 0.0) -> list[float]:
        start_s = self.now_s()
        values = self._channel.ask(op, out, a, b, alpha, beta)
        self._tell(op, out, a, b, alpha, combined(op, values), start_s)
        return values

    def _tell(self, op: Op, out: int, a: int, b: int, alpha: float, value: float, start_s: float) -> None:
        if op not in TOLD:
            return
        self._note(
            clock=self._clock(),
            op=int(op),
            out=out if op in _MAKE else NONE,
            a=a,
            b=b if op in _OF_TWO else NONE,
            alpha=alpha if op in _TIMES else math.nan,
            value=value,
            took_s=self.now_s() - start_s,
        )
