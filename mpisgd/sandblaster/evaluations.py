"""Evaluations of a batch's loss: portions are dealt to learners (`rules/portions.py`), pushes committed [Dean12 4.2].

learner asks          a portion; push, with `push_every` results or nothing left to deal; or wait
result                the first joins its learner's sum; a second is forgotten
push on all shards    they add it to their sums
all summed            the loss is the mean over samples, in the order of portions
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mpisgd.base.errors import PeerError, ProtocolError
from mpisgd.comm.messages import FORGET, PUSH_NOW, STOP_FINISHED, STOP_INTERRUPTED, Ending, Goodbye, Lost, Next, Op
from mpisgd.protocols import SandblasterOptions
from mpisgd.records.coordinator_records import CoordinatorLog
from mpisgd.records.log.schema import Outcome
from mpisgd.rules.portions import Dealing
from mpisgd.sandblaster.channels import CoordinatorChannel
from mpisgd.sandblaster.coordinator import Interrupted
from mpisgd.sandblaster.remote import Slot

_FOR_EVER = 2**62
"""Number above all pushes: none of a gone learner is summed."""

_AHEAD = 2
"""Portions per learner dealt ahead of the first missing, where summed in order."""


@dataclass
class Dealt:
    clock: int
    portion: int
    learner_id: int
    copy: bool
    dealt_s: float
    done_s: float = math.nan
    samples: int = 0
    loss: float = math.nan
    compute_s: float = 0.0
    delay_s: float = 0.0


class Evaluations:
    """Evaluations over the whole batch, one after the other.

    Args:
        first_seq: number of each learner's first push.
        patience_s: longest silence of a learner, where ranks may be lost; then others take over.
        warn: takes warnings for people.

    Attributes:
        clock: evaluations so far.
        seconds: time spent in evaluations.
    """

    def __init__(
        self,
        channel: CoordinatorChannel,
        options: SandblasterOptions,
        portions: int,
        first_seq: Sequence[int],
        log: CoordinatorLog,
        *,
        clock: int = 0,
        patience_s: float = math.inf,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        lambda_ = len(first_seq)
        self.clock = clock
        self.seconds = 0.0
        self._channel = channel
        self._options = options
        self._portions = portions
        self._present = set(range(lambda_))
        self._log = log
        self._ordered = options.order == "portions"
        self._ahead = _AHEAD * lambda_ if self._ordered else math.inf
        self._dealing: Dealing | None = None
        self._stop = 0
        self._stopped: list[int] = []
        self._waiting: dict[int, int] = {}
        """Asking learner -> 1 if its last result counts, 0 if not, FORGET."""
        self._dealt: dict[int, Dealt] = {}
        self._held: dict[int, list[Dealt]] = {}
        self._leaving: dict[int, list[Dealt]] = {}
        self._patience_s = patience_s
        self._warn = warn
        self._since_s: dict[int, float] = {}
        """Start of silence, by learner that does not ask."""
        self._look_s = math.inf
        self._missed: set[int] = set()
        """Learners that lost their work, not told yet."""
        self._told = [seq - 1 for seq in first_seq]
        self._arrived: dict[int, tuple[int, Dealt]] = {}
        """Portions on all shards ahead of their turn, with the push."""
        self._losses: dict[int, tuple[float, int]] = {}

    def evaluate(self, point: Slot, out: int, step: float) -> tuple[float, float]:
        """Evaluate (`coordinator.Evaluates`).

        Raises PeerError where no learner is left, Interrupted after a signal.
        """
        channel, start_s = self._channel, self._channel.now_s()
        if channel.signal:
            raise Interrupted
        self._await()
        channel.ask(Op.BEGIN, a=point.number)
        self._dealing = dealing = Dealing(self._portions, duplicates=self._options.duplicates, ahead=self._ahead)
        self._losses.clear()
        self._answer()
        while not dealing.complete:
            self._hear()
            if channel.signal:
                self._give_up()
                raise Interrupted
        self._dealing = None
        summed = [self._losses[portion] for portion in range(self._portions)]
        loss = sum(loss * samples for loss, samples in summed) / sum(samples for _, samples in summed)
        squared = sum(channel.ask(Op.END, out, self.clock, alpha=loss, beta=step))
        self.clock += 1
        self.seconds += channel.now_s() - start_s
        return loss, squared

    def end(self, ending: Ending) -> None:
        """Tell each asking learner to stop."""
        self._stop = STOP_FINISHED if ending is Ending.FINISHED else STOP_INTERRUPTED
        self._since_s.clear()
        self._await()
        self._answer()
        while self._present:
            self._hear()
        self._channel.finish_deals(self._stopped)

    # ------------------------------------------------------------------------------------------------------- learners

    def _await(self) -> None:
        now_s = self._channel.now_s()
        self._since_s = {**dict.fromkeys(self._present - self._waiting.keys(), now_s), **self._since_s}
        self._look_s = now_s + self._patience_s / 4

    def _hear(self) -> None:
        said = self._channel.receive(self._look_s)
        if isinstance(said, Next):
            self._next(said)
        elif isinstance(said, Goodbye):
            self._lose(said.learner_id)
        elif isinstance(said, Lost) and said.learner_id in self._present:
            self._warn(f"clock {self.clock}: learner {said.learner_id} is lost: others take over")
            self._lose(said.learner_id)
        if said is None or self._channel.now_s() >= self._look_s:
            self._look()
        self._answer()

    def _next(self, said: Next) -> None:
        learner_id = said.learner_id
        self._since_s.pop(learner_id, None)
        counts = int(self._result(self._dealt.pop(learner_id), said)) if learner_id in self._dealt else 0
        if said.pushed >= 0:
            self._take(learner_id, said.pushed)
        elif learner_id in self._leaving:  # torn
            self._give_back(learner_id, self._told[learner_id])
            counts = FORGET
        if learner_id in self._missed:
            self._missed.discard(learner_id)
            counts = FORGET
        self._waiting[learner_id] = counts

    def _look(self) -> None:
        """Go on without overdue learners until they ask again, but never without the last.

        Raises PeerError where the last is overdue, and no learner gives a sign of life.
        """
        now_s, last_is_overdue = self._channel.now_s(), False
        self._look_s = now_s + self._patience_s / 4
        for learner_id in sorted(self._since_s.keys() & self._present):
            if now_s - self._since_s[learner_id] <= self._patience_s:
                continue
            if self._stop:
                self._present.discard(learner_id)
            elif learner_id not in self._missed and len(self._present - self._missed) > 1:
                self._warn(
                    f"clock {self.clock}: learner {learner_id} was not heard of for {self._patience_s:g} s: others take over"
                )
                self._missed.add(learner_id)
                self._give_back(learner_id, self._told[learner_id])
            elif learner_id not in self._missed:
                last_is_overdue = True
        if self._channel.silent(self._present if last_is_overdue else ()):
            raise PeerError(f"no running learner is left to evaluate the loss at clock {self.clock}")

    def _result(self, dealt: Dealt, said: Next) -> bool:
        """Take a result, if any; return whether it counts."""
        dealt.done_s, dealt.samples, dealt.loss = self._channel.now_s(), said.samples, said.loss
        dealt.compute_s, dealt.delay_s = said.compute_ns * 1e-9, said.delay_ns * 1e-9
        if said.portion < 0:
            self._log.portion(dealt, Outcome.LATE)
            return False
        if (said.clock, said.portion) != (dealt.clock, dealt.portion):
            raise ProtocolError(
                f"learner {said.learner_id} has computed portion {said.portion} of clock {said.clock}: expected portion"
                f" {dealt.portion} of clock {dealt.clock}"
            )
        if self._dealing is None or dealt.clock != self.clock or not self._dealing.done(dealt.portion, dealt.learner_id):
            self._log.portion(dealt, Outcome.DUPLICATE)
            return False
        self._held.setdefault(dealt.learner_id, []).append(dealt)
        return True

    def _take(self, learner_id: int, seq: int) -> None:
        pushed = self._leaving.pop(learner_id, [])
        if not pushed:
            return
        if not self._ordered:
            self._commit(seq, pushed)
            return
        for each in pushed:
            self._arrived[each.portion] = (seq, each)
        dealing = self._dealing
        assert dealing is not None
        while dealing.first in self._arrived:
            seq, each = self._arrived.pop(dealing.first)
            self._commit(seq, [each])

    def _commit(self, seq: int, pushed: list[Dealt]) -> None:
        assert self._dealing is not None
        self._channel.do(Op.COMMIT, len(pushed), pushed[0].learner_id, seq)
        for each in pushed:
            self._dealing.commit(each.portion, each.learner_id)
            self._losses[each.portion] = (each.loss, each.samples)
            self._log.portion(each, Outcome.COUNTED, seq)

    def _lose(self, learner_id: int) -> None:
        """Go on without a learner. Raises PeerError where none is left."""
        self._present.discard(learner_id)
        self._waiting.pop(learner_id, None)
        self._since_s.pop(learner_id, None)
        self._missed.discard(learner_id)
        self._give_back(learner_id, _FOR_EVER)
        if not self._present and not self._stop:
            raise PeerError(f"no learner is left to evaluate the loss, at clock {self.clock}")

    def _give_up(self) -> None:
        for learner_id in sorted(self._present):
            self._give_back(learner_id, self._told[learner_id])
        self._dealing = None

    def _give_back(self, learner_id: int, seq: int) -> None:
        """Deal a learner's unsummed portions again; shards forget its pushes until `seq`."""
        lost = [*self._held.pop(learner_id, []), *self._leaving.pop(learner_id, [])]
        lost += [each for _, each in self._arrived.values() if each.learner_id == learner_id]
        self._arrived = {portion: it for portion, it in self._arrived.items() if it[1].learner_id != learner_id}
        if learner_id in self._dealt:
            lost.append(self._dealt.pop(learner_id))
        for each in lost:
            self._log.portion(each, Outcome.LOST)
        if self._dealing is not None:
            self._dealing.lost(learner_id)
        self._channel.do(Op.DISCARD, a=learner_id, b=seq)

    def _answer(self) -> None:
        for learner_id, counts in list(self._waiting.items()):
            told = self._next_of(learner_id)
            if told is not None:
                del self._waiting[learner_id]
                self._since_s[learner_id] = self._channel.now_s()
                self._channel.deal(learner_id, self.clock, told, counts=counts)

    def _next_of(self, learner_id: int) -> int | None:
        if self._stop:
            self._present.discard(learner_id)
            self._stopped.append(learner_id)
            return self._stop
        dealing = self._dealing
        if dealing is None:
            return None
        held = self._held.get(learner_id)
        if held and (len(held) >= self._options.push_every or dealing.exhausted):
            self._leaving[learner_id] = self._held.pop(learner_id)
            self._told[learner_id] += 1
            return PUSH_NOW
        portion = dealing.ask(learner_id)
        if portion is not None:
            copy = dealing.is_copy(portion, learner_id)
            self._dealt[learner_id] = Dealt(self.clock, portion, learner_id, copy, self._channel.now_s())
        return portion
