"""Push, pull and stop: the learner's end, in any round of `rounds.py`.

                 learner                                    shard
    push         PUSH header, GRADIENT slice          ->    takes pushes in turn
    pull         posts ANSWER, WEIGHTS; PULL header   ->    keeps the request until the protocol allows an answer
                 <- ANSWER header, WEIGHTS in chunks        or ANSWER with an ending, without weights
                                                            (rounded weights travel whole: `deltas.py`)
    interrupt    INTERRUPT header                      ->   ends the run, whichever rank heard the signal
    notice       may post NOTICE                      <-    tells a computing learner of an update
    goodbye      GOODBYE header                       ->    forgets the learner; drains after all goodbyes

No deadlock: `no-deadlock.md`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpisgd.base.errors import PeerError, ProtocolError
from mpisgd.comm import pieces
from mpisgd.comm.communicator import Communicator, is_far
from mpisgd.comm.messages import Ending, PushFields, Tag
from mpisgd.exchange.deltas import Held
from mpisgd.exchange.exchange import Answers, Interrupted, Report
from mpisgd.exchange.roles import Roles
from mpisgd.exchange.rounds import PLAIN, At, Departures, Round
from mpisgd.rules.portions import NO_PORTION
from mpisgd.rules.verdict import Kind
from mpisgd.vectors.chunks import chunks_of
from mpisgd.vectors.computing import Exchanges
from mpisgd.vectors.flat import norm_of_parts
from mpisgd.vectors.memory import copy_into
from mpisgd.vectors.skipped import NOTHING, Runs, within

# Plain integers for every gradient: a look into the enumeration costs time.
_PUSH: int = Tag.PUSH
_PULL: int = Tag.PULL
_ANSWER: int = Tag.ANSWER
_GOES_ON: int = Ending.NONE
_LAST_ENDING: int = Ending.INTERRUPTED
_REJECT: int = Kind.REJECT


def bodies_of(runs: Runs) -> tuple[Any, ...]:
    """Return the skipped runs as bodies of a push; usually none."""
    return (runs.ravel(),) if len(runs) else ()


@dataclass(frozen=True, slots=True)
class Slices:
    """A learner's memory, divided among its shards.

    Attributes:
        weights: (parameters,) float32 host memory for pulled slices.
        gradients: (parameters,) float32 host memory of pushed slices; or words of `push_format.py`.
        cuts: bounds in `gradients`, where different.
        held: h of `weights`, where pulls are rounded (`deltas.py`).
        computed_from: (parameters,) memory to copy pulled slices to, where `weights` is only memory of arrival.
        computed_into: like `gradients`, memory to copy pushes from, where `gradients` is only memory of departure.
        in_pieces: whether both reach other nodes in pieces (`comm/pieces.py`); rounded weights do not.
        in_place: whether shards see this memory (`travel/in_place.py`).
    """

    weights: np.ndarray
    gradients: np.ndarray
    bounds: list[tuple[int, int]]
    cuts: Sequence[tuple[int, int]] = ()
    held: Held | None = None
    computed_from: np.ndarray | None = None
    computed_into: np.ndarray | None = None
    in_pieces: bool = False
    in_place: bool = False


class Notices:
    """Receives of notices, two per shard: an answer allows one, and the previous may be under way."""

    def __init__(self, wire: Communicator, ranks: list[int], *, expected: bool) -> None:
        self._wire = wire
        self._ranks = ranks
        self._posted: list[deque[Any]] = [deque() for _ in ranks]
        self._taken = [0] * len(ranks)
        self.expected = expected

    def post(self, shards: list[int]) -> None:
        for shard in shards:
            while len(self._posted[shard]) < 2:
                self._posted[shard].append(self._wire.post(self._ranks[shard], Tag.NOTICE))

    def take_all(self, shard: int, count: int) -> None:
        while self._taken[shard] < count:
            self._take(shard)

    def take_newer(self, clocks: list[int]) -> bool:
        """Return whether any arrived notice has a newer clock."""
        for shard, posted in enumerate(self._posted):
            while posted and posted[0].arrived():
                if self._take(shard) > clocks[shard]:
                    return True
        return False

    def _take(self, shard: int) -> int:
        """Return its clock."""
        if not self._posted[shard]:
            raise PeerError(f"ANSWER of rank {self._ranks[shard]}: more notices than this rank can have sent")
        posted = self._posted[shard].popleft()
        fields: tuple[int, int] = self._wire.header(posted)
        self._wire.finish(posted)
        self._taken[shard] += 1
        return fields[1]

    def withdraw(self) -> None:
        for posted in self._posted:
            while posted:
                posted.popleft().withdraw()


class LearnerChannel(Exchanges):
    """A learner's end.

    Args:
        interruptible: by notices of late gradients.
        agrees: shards need the norm of the whole average (`job/roles/agreement.py`).
    """

    exchanging_ns = 0
    _portion = _offered = NO_PORTION
    _signal_told = False
    _min_clock = 0
    """Least clock of weights needed in this mini-batch, or requested for the next."""
    _stopped: int = _GOES_ON
    _left: tuple[Any, Any] = (NOTHING, NOTHING)
    """Memory of departure, and computed gradient, where apart."""
    _agreed = 0
    """Pushes with a norm told."""

    def __init__(
        self,
        wire: Communicator,
        roles: Roles,
        learner_id: int,
        slices: Slices,
        *,
        consistent: bool,
        interruptible: bool = False,
        agrees: bool = False,
        when: Round = PLAIN,
    ) -> None:
        weights, gradients, bounds = slices.weights, slices.gradients, slices.bounds
        self._wire = wire
        self.now_ns = wire.clock.now_ns
        self._ranks = list(roles.shard_ranks)
        self._notices = Notices(wire, self._ranks, expected=interruptible)
        self._learner_id = learner_id
        self._team = len(roles.teams[learner_id])
        self._held = held = slices.held
        rooms = [chunks_of(weights[start:end]) for start, end in bounds] if held is None else [[room] for room in held.rooms]
        self._weights = [tuple(each) for each in rooms]
        self._gradients = [gradients[start:end] for start, end in slices.cuts or bounds]
        self._pushed: list[tuple[Any, ...]] = [(each,) for each in self._gradients]
        """Bodies of a push to each shard."""
        if slices.in_place:
            self._weights, self._pushed = ([()] * len(bounds) for _ in range(2))
        if slices.in_pieces:
            self._cut_for(shard for shard, rank in enumerate(self._ranks) if is_far(wire, rank))
        self._weights_nbytes = [weights[start:end].nbytes for start, end in bounds]
        self._bounds = bounds
        self._consistent = consistent and len(bounds) > 1
        self._shards = list(range(len(bounds)))
        self._numbers = list(range(roles.first_shard, roles.first_shard + len(bounds)))
        """Shard numbers stated in answers."""
        self._clocks = [-1] * len(bounds)
        # Set here, not as defaults of the class: in CPython 3.11 an attribute that many instances set later slows down all others.
        # So does a 31st.
        self._pushes = self._snapshots = 0
        self._rejected = False
        self.push_ns = self._wait_ns = self._pull_ns = 0
        """Wait for the first answer, then transfer until all weights are in place; 0 after a push."""
        self.draw: Callable[[int], None] | None = None
        """Listener to the next portion."""
        self.duplex = when.send is At.PULL
        self._noted: list[tuple[PushFields, Runs]] = []
        """Headers and skipped runs of a gradient to send during the next pull."""
        self._departures = Departures(wire.clock, when, len(bounds), gradients.nbytes) if when.outlasts_calls else None
        self._agrees = agrees
        self._copied: list[tuple[Any, Any]] = []
        """Slices to compute from, and of arrival."""
        if slices.computed_from is not None:
            self._copied = [(slices.computed_from[start:end], weights[start:end]) for start, end in bounds]
        if slices.computed_into is not None:
            self._left = gradients, slices.computed_into

    def _cut_for(self, shards: Iterable[int]) -> None:
        for shard in shards:
            self._pushed[shard] = pieces.bodies(self._pushed[shard])
            if self._held is None:
                self._weights[shard] = pieces.bodies(self._weights[shard])

    def sleep(self, seconds: float) -> None:
        self._wire.clock.sleep(seconds)

    @property
    def pulls_within(self) -> bool:
        """Weights come during the computation, after `pull`."""
        return self._departures is not None and self._departures.within

    @property
    def pushed(self) -> list[int]:
        return [self._pushes for _ in self._shards]

    @property
    def newest_clock(self) -> int:
        """Newest clock received; -1 before the first."""
        return max(self._clocks)

    def push(self, report: Report, meanwhile: Callable[[], None] | None = None) -> None:
        """Send each slice with the clock of its weights, or wait until all have left; duplex, prefetch: note the gradient.

        The header reports the durations of the previous pull and push. With duplex, the gradient must not change until the next
        pull returns. Raises ProtocolError: a second push without a pull.
        """
        if self._departures is not None:
            self._wire.clock.hold()
        start_ns = self.now_ns()
        transfers = self._note(report, meanwhile) if self.duplex else self._send(report)
        if meanwhile is not None:
            meanwhile()
        self.push_ns = self._see_out(transfers, start_ns)
        self._wait_ns = self._pull_ns = 0

    def _send(self, report: Report) -> list[Any]:
        self._pushes += 1
        if self._departures is not None:
            return self._departures.take_sent()
        transfers = []
        for shard in self._shards:  # no comprehension, here and below: it would cost a call
            transfers.append(self._send_slice(shard, report))
        return transfers

    def _send_slice(self, shard: int, report: Report) -> Any:
        bodies, runs = self._pushed[shard], NOTHING
        if len(report.skipped):
            runs = within(report.skipped, *self._bounds[shard])
            bodies = (*bodies_of(runs), *bodies)
        return self._wire.start(self._ranks[shard], _PUSH, self._told(shard, report, runs), *bodies)

    def _note(self, report: Report, meanwhile: Callable[[], None] | None) -> list[Any]:
        """Note a gradient for the next pull, copied for prefetch. Return no transfers."""
        if self._noted or meanwhile is not None:
            raise ProtocolError(f"ahead = {1 if self._departures is None else 2}: two pushes, no pull in between")
        if self._departures is not None:
            for transfer in self._departures.take_sent():
                self._wire.finish(transfer)
            copy_into(*self._left)
        runs = [within(report.skipped, *bounds) for bounds in self._bounds]
        self._noted = [(self._told(shard, report, runs[shard]), runs[shard]) for shard in self._shards]
        return []

    def _send_noted(self) -> list[Any]:
        noted, self._noted = self._noted, []
        self._pushes += 1
        sent = zip(self._ranks, noted, self._pushed, strict=True)
        return [self._wire.start(rank, _PUSH, told, *bodies_of(runs), *bodies) for rank, (told, runs), bodies in sent]

    def _see_out(self, transfers: list[Any], start_ns: int) -> int:
        for transfer in transfers:
            self._wire.finish(transfer)
        ns = self.now_ns() - start_ns
        if self._departures is None:
            return ns
        self._departures.pushed_for(ns)
        return self._departures.pushing_ns

    def need(self, shard: int) -> None:
        """Wait for a slice's weights, whatever other slices' clocks, unless all are in place. Raises Interrupted: stop."""
        departures = self._departures
        if departures is None or not departures.within:
            return
        start_ns = self.now_ns()
        departures.note_need(shard, start_ns)
        self._stopped, began_ns = self._take_answers([shard], self._ask([shard], self._min_clock), self._min_clock)
        if self._stopped:
            raise Interrupted
        end_ns = self.now_ns()
        departures.pulled_for(end_ns - start_ns)
        self._wait_ns += began_ns - start_ns
        self._pull_ns += end_ns - began_ns

    def leave(self, shard: int, seq: int, samples: int, loss: float, rounded: float, scale: float, skipped: Runs) -> None:
        departures, clock = self._departures, self._wire.clock
        assert departures is not None
        clock.hold()
        compute_ns, delay_ns = departures.of_push(shard, seq)
        start_ns = self.now_ns()
        report = Report(seq, samples, loss, compute_ns, delay_ns, rounded=rounded, scale=scale, skipped=skipped)
        departures.sent.append(self._send_slice(shard, report))
        if departures.next_clock is not None:
            departures.asked[shard] = self._ask([shard], departures.next_clock(self._clocks[shard]))[0]
        departures.pushed_for(self.now_ns() - start_ns)
        if departures.moves:
            clock.let_move()

    def _told(self, shard: int, report: Report, runs: Runs = NOTHING) -> PushFields:
        """Return a push header, valid until newer weights arrive."""
        return (
            self._learner_id,
            self._clocks[shard],
            report.seq,
            report.samples,
            self._team,
            report.compute_ns,
            report.delay_ns,
            self.push_ns,
            self._wait_ns,
            self._pull_ns,
            report.neighbour_ns,
            self._gradients[shard].nbytes,
            self._portion,
            len(runs),
            report.rounded,
            report.scale,
            report.loss,
        )

    def pull(self, min_clock: int, meanwhile: Callable[[], None] | None = None) -> Answers:
        """Receive all weights; a consistent protocol asks lagging shards again, and no shard waits for another (law 2).

        Duplex: send the noted gradient, then call `meanwhile`; `push_ns` is the excess. Layerwise: return the last known clocks,
        -1 = none, and a shard's stop.
        """
        if self._wire.signal > 0:
            self._tell_of_signal()
        if self._agrees and self._agreed < self._pushes:
            return self._agree_and_pull(min_clock, meanwhile)
        departures = self._departures
        if departures is not None:
            if departures.within:
                answers = self._begin_within(min_clock, meanwhile)
            elif self.duplex:
                answers = self._prefetch(departures, min_clock, meanwhile)
            else:
                answers = self._pull_all(min_clock, meanwhile)
            departures.begin()
            return answers
        if not self._noted:
            return self._pull_all(min_clock, meanwhile)
        transfers: list[Any] = []
        answers = self._pull_all(min_clock, lambda: transfers.extend(self._send_noted()))
        self.push_ns = self._see_out(transfers, self.now_ns())
        if meanwhile is not None:
            meanwhile()
        return answers

    def _agree_and_pull(self, min_clock: int, meanwhile: Callable[[], None] | None) -> Answers:
        """Pull, after the shards have agreed on the norm of the last update."""
        self._agreed = self._pushes
        start_ns = self.now_ns()
        telling = self._agree(meanwhile)
        agreed_ns = self.now_ns() - start_ns
        answers = self.pull(min_clock)
        for transfer in telling:
            self._wire.finish(transfer)
        self._wait_ns += agreed_ns
        return answers

    def _agree(self, meanwhile: Callable[[], None] | None) -> list[Any]:
        """Ask all shards for norms, and begin to tell the whole norm, unless the run is over; return transfers to finish.

        Raises PeerError for a wrong answer.
        """
        wire, ranks, clock, norms, goes_on = self._wire, self._ranks, self._clocks[0], list[float](), True
        asked = [wire.ask(rank, Tag.NORM_PULL, (self._learner_id, clock), Tag.NORM_ANSWER) for rank in ranks]
        if meanwhile is not None:
            meanwhile()
        for rank, number, answer in zip(ranks, self._numbers, asked, strict=True):
            sender, ending, norm = wire.header(answer)
            wire.finish(answer)
            if sender != number or ending > Ending.INTERRUPTED:
                raise PeerError(f"rank {rank} answers as shard {sender}, ending {ending}: expected {number}", rank)
            goes_on = goes_on and ending == Ending.NONE
            norms.append(norm)
        told = (self._learner_id, clock, norm_of_parts(norms))
        return [wire.start(rank, Tag.NORM_TOLD, told) for rank in ranks] if goes_on else []

    def _prefetch(self, departures: Departures, min_clock: int, meanwhile: Callable[[], None] | None) -> Answers:
        """Take weights requested a mini-batch ago, request the next, begin to send the noted gradient."""
        answers = self._pull_all(self._min_clock if departures.asked else min_clock, None)
        if not answers.stop:
            self._min_clock = min_clock
            for shard, answer in zip(self._shards, self._ask(self._shards, min_clock), strict=True):
                departures.asked[shard] = answer
        if self._noted:
            departures.sent = self._send_noted()
        if meanwhile is not None:
            meanwhile()
        self._wire.clock.let_move()
        return answers

    def _begin_within(self, min_clock: int, meanwhile: Callable[[], None] | None) -> Answers:
        self._min_clock = min_clock
        if meanwhile is not None:
            meanwhile()
        self._wait_ns = self._pull_ns = 0
        return Answers(tuple(self._clocks), self._stopped, False, self._snapshots)

    def _pull_all(self, min_clock: int, meanwhile: Callable[[], None] | None) -> Answers:
        shards, departures = self._shards, self._departures
        start_ns = self.now_ns()
        self._rejected = False
        asked = (departures.take_asked() if departures is not None else None) or self._ask(shards, min_clock)
        if meanwhile is not None:
            meanwhile()
        stop, began_ns = self._take_answers(shards, asked, min_clock)
        while self._consistent and not stop and len(set(self._clocks)) > 1:
            newest = max(self._clocks)
            lagging = [shard for shard in shards if self._clocks[shard] < newest]
            stop, _ = self._take_answers(lagging, self._ask(lagging, newest), newest)
        for computed_from, arrived in () if stop else self._copied:
            copy_into(computed_from, arrived)
        self._wait_ns, self._pull_ns = began_ns - start_ns, self.now_ns() - began_ns
        if self._offered != NO_PORTION and not (stop or self._rejected):  # a repeated mini-batch keeps its portion
            self._portion = self._offered
            if self.draw is not None:
                self.draw(self._portion)
        return Answers(tuple(self._clocks), stop, self._rejected, self._snapshots)

    def _tell_of_signal(self) -> None:
        if self._signal_told:
            return
        self._signal_told = True
        wire = self._wire
        for rank in self._ranks:
            wire.finish(wire.start(rank, Tag.INTERRUPT, (wire.signal,)))

    def _ask(self, shards: list[int], min_clock: int) -> list[Any]:
        wire, ranks, weights = self._wire, self._ranks, self._weights
        question = (self._learner_id, min_clock)
        if self._notices.expected:
            self._notices.post(shards)
        asked = []
        for shard in shards:
            asked.append(wire.ask(ranks[shard], _PULL, question, _ANSWER, weights[shard]))
        return asked

    def _take_answers(self, shards: list[int], asked: list[Any], min_clock: int) -> tuple[int, int]:
        """Return the answers' ending, and the nanosecond of the first."""
        wire, held = self._wire, self._held
        stop, began_ns = _GOES_ON, 0
        for shard, answer in zip(shards, asked):  # noqa: B905 - half the cost of strict
            sender, clock, stopped, verdict, notices, portion, snapshots, nbytes = wire.header(answer)
            began_ns = began_ns or self.now_ns()
            if sender != self._numbers[shard] or stopped or clock < min_clock or nbytes != self._weights_nbytes[shard]:
                self._check(shard, sender, clock, stopped, nbytes, min_clock)
            wire.finish(answer)
            if notices:  # sent before the answer, for a finished mini-batch
                self._notices.take_all(shard, notices)
            if stopped:  # shards may differ: the run is over, and the others will say so, too
                stop = min(stop, stopped) if stop else stopped
            else:
                self._clocks[shard] = clock
                if sender == 0:
                    self._snapshots = snapshots
                if held is not None:
                    held.take(shard, nbytes)
                if verdict == _REJECT:
                    self._rejected = True
                if portion != NO_PORTION:  # the shard deals
                    self._offered = portion
        return stop, began_ns

    def _check(self, shard: int, sender: int, clock: int, stopped: int, nbytes: int, min_clock: int) -> None:
        """Raise PeerError for an impossible answer; an ending is possible, and a delta after the first weights."""
        expected = 0 if stopped else self._weights_nbytes[shard]
        if self._held is not None and self._clocks[shard] >= 0 and not stopped and self._held.takes(shard, nbytes):
            expected = nbytes
        number = self._numbers[shard]
        if sender != number or nbytes != expected or (clock < min_clock and not stopped) or stopped > _LAST_ENDING:
            raise PeerError(
                f"ANSWER of rank {self._ranks[shard]}: shard {sender}, {nbytes} bytes, clock {clock}, ending {stopped};"
                f" expected shard {number}, {expected} bytes, clock >= {min_clock}, ending <= {_LAST_ENDING}"
            )

    def check(self) -> None:
        """Raise Interrupted after a notice of an update without the current gradient.

        Do nothing after the goodbye: evaluation uses the model, and a shard behind the stop may yet send a notice.
        """
        if self._notices.expected and self._notices.take_newer(self._clocks):
            raise Interrupted

    def interrupt_by_notices(self) -> None:
        """Look for notices during sleep (and, in virtual time, computing)."""
        self._wire.clock.interrupt_by(self.check)

    def gave_up(self, seq: int) -> None:
        """Tell of a given-up mini-batch; layerwise, shards have said so."""
        if self.pulls_within:
            return
        wire = self._wire
        for rank in self._ranks:
            wire.finish(wire.start(rank, Tag.GAVE_UP, (self._learner_id, seq)))

    def withdraw(self) -> None:
        """Withdraw receives of unsent notices, once all ranks have met at the end."""
        self._notices.withdraw()

    def goodbye(self, *, ending: int) -> None:
        if self.duplex and self._departures is not None:  # prefetch: weights of a mini-batch that will not be
            self._wire.clock.hold()
            if asked := self._departures.take_asked():
                self._take_answers(self._shards, asked, self._min_clock)
            for transfer in self._departures.take_sent():
                self._wire.finish(transfer)
        wire, fields = self._wire, (self._learner_id, self._pushes, ending)
        self._notices.expected = False
        for rank in self._ranks:
            wire.finish(wire.start(rank, Tag.GOODBYE, fields))
