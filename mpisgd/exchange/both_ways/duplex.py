"""Push and pull at the same time: a link then carries gradients one way while it carries weights the other.

`push` only notes what is to be pushed. `pull` asks for weights first, then begins to send the gradient, takes the answers, and
waits until the gradient has left: then the next one may be computed into the same memory. A shard takes the next gradient while its
answers leave, and waits for them before it changes the weights. It takes pulls before pushes, so that weights do not have the
gradient which is under way: staleness counts one more than with `whole`, and is logged as it is.

No deadlock: the receives of answers are posted before anything is sent, as ever. A shard that receives a gradient waits for a
learner that waits for answers, and one that waits for its answers to leave waits for learners that receive them: MPI moves all that
was begun within any of its calls. A learner has one pull and one push under way, so pulls do not overtake its pushes for long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpisgd.base.errors import ProtocolError
from mpisgd.exchange.base import Answers, Report
from mpisgd.exchange.channel import LearnerChannel


class DuplexChannel(LearnerChannel):
    """A learner's end, for protocols whose pulls need not wait for the learner's own push."""

    duplex = True
    _noted: Report | None = None

    def push(self, report: Report, meanwhile: Callable[[], None] | None = None) -> None:
        """Note what is to be sent with the next pull; until that has come back the gradient must stay as it is.

        Raises ProtocolError where no pull follows each push.
        """
        if self._noted is not None or meanwhile is not None:
            raise ProtocolError("exchange = 'duplex': two pushes without a pull between them")
        self._noted = report

    def pull(self, min_clock: int, meanwhile: Callable[[], None] | None = None) -> Answers:
        """Ask for weights, push what is noted, take the weights; call `meanwhile`, which may clear the gradient, at the end.

        `push_ns` is what the push took longer than the pull.
        """
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
