"""Push and pull at the same time: gradients and weights use both directions of a link.

`push` only notes the gradient; `pull` asks for weights, sends the gradient, takes the answers, and waits until the gradient has
left. A shard takes gradients while its answers leave, and changes the weights afterwards. Pulls go before pushes: staleness is
higher by 1 than with `whole`. No deadlock: `no-deadlock.md`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpisgd.base.errors import ProtocolError
from mpisgd.exchange.channel import LearnerChannel
from mpisgd.exchange.learner_channel import Answers, Report


class DuplexChannel(LearnerChannel):
    """A learner's end, for protocols with pulls independent of the learner's own push."""

    duplex = True
    _noted: Report | None = None

    def push(self, report: Report, meanwhile: Callable[[], None] | None = None) -> None:
        """Note the gradient, not to be changed until the next pull returns.

        Raises ProtocolError: a second push without a pull.
        """
        if self._noted is not None or meanwhile is not None:
            raise ProtocolError("exchange = 'duplex': two pushes without a pull between them")
        self._noted = report

    def pull(self, min_clock: int, meanwhile: Callable[[], None] | None = None) -> Answers:
        """Ask for weights, push, take the weights; `meanwhile` may clear the gradient. `push_ns` is the excess over the pull."""
        report, self._noted = self._noted, None
        if report is None:
            return super().pull(min_clock, meanwhile)
        wire, transfers = self._wire, list[Any]()
        answers = super().pull(min_clock, lambda: transfers.extend(self._send(report)))
        start_ns = self.now_ns()
        for transfer in transfers:
            wire.finish(transfer)
        self.push_ns = self.now_ns() - start_ns
        if meanwhile is not None:
            meanwhile()
        return answers
