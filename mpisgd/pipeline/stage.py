"""Passes of a mini-batch through a group's stages: activations go up, gradients come down [Dean12 3].

GPipe's order (arXiv:1811.06965): all forward passes, then all backward passes. 1F1B's (PipeDream, arXiv:1806.03377): as many
forward passes as later stages, then a backward pass after each forward pass, so a stage keeps activations of at most K
micro-batches. Gradients are summed in the order of micro-batches (law 5).

            stage k                                         stage k + 1
    forward     ACTIVATION header, tensors          ->      takes them before its forward pass
    backward    takes them before its own           <-      DELTA header, their gradients, and the loss

No deadlock: a pass needs only passes of smaller micro-batches, or earlier passes of its own.

A given-up mini-batch (`Protocol.aborts`, or a failed stage in virtual time) goes on in as many headers alone. The group agrees
before the push (`group_channel.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mpisgd.base.errors import PeerError
from mpisgd.comm.communicator import Communicator, Group
from mpisgd.comm.messages import MOST_DIMENSIONS, Tag
from mpisgd.exchange.exchange import Interrupted
from mpisgd.vectors.computing import Travels, Waited
from mpisgd.vectors.flat import norm_of_parts
from mpisgd.vectors.memory import Memory

_GIVEN_UP = -1
"""Count of tensors in the headers of a given-up mini-batch."""
_AT_ONCE = 2
"""Micro-batches of a kind with messages under way."""
_NOTHING = (0, 0, -1, *([0] * 2 * MOST_DIMENSIONS))


class Passes(Protocol):
    """Computation of a stage, with tensors (`pieces.StagePasses`) or in virtual time."""

    memory: Memory
    samples: int
    leaves: bool
    """This stage is lost: its mini-batch is given up, and its learner leaves."""

    @property
    def loss(self) -> float:
        """The last stage's loss, after its last forward pass."""

    def prepare(self, seq: int) -> None:
        """Prepare mini-batch `seq` before its weights are known."""

    def begin(self, seq: int) -> None:
        """Begin mini-batch `seq`, with its weights in place."""

    def pass_on(self, micro: int, received: Any) -> Any:
        """Pass a micro-batch forward; return the next stage's input."""

    def pass_back(self, micro: int, received: Any) -> Any:
        """Pass gradients of the output back; return gradients of the input."""

    def norm(self) -> float:
        """Return the L2 norm of this stage's gradient."""

    def clip(self, norm: float) -> None:
        """Clip this stage's part of a gradient of this norm."""

    def reported(self, loss: float) -> float:
        """Return the loss to report: NaN to drop the group's gradient."""

    def interrupt_by(self, check: Callable[[], None]) -> None:
        """Call `check` during passes; it may raise Interrupted."""

    def tensors_of(self, passed: Any) -> tuple[int, Sequence[Any]]:
        """Return the length of a tuple, 0 for a single tensor, and all tensors."""

    def describe(self, tensor: Any) -> tuple[tuple[int, ...], Any]:
        """Return the header's description of a tensor, or of None, and its bytes."""

    def room(self, described: tuple[int, ...]) -> tuple[Any, Any]:
        """Return memory for a described tensor, and its bytes; (None, None) without any."""


class Stage(Travels):
    """A rank's stage of the group's gradient; `clips`: the same ranks, to exchange norms for clipping."""

    def __init__(
        self,
        wire: Communicator,
        ranks: Sequence[int],
        passes: Passes,
        micro_batches: int,
        *,
        alternating: bool = False,
        clips: Group | None = None,
    ) -> None:
        place = ranks.index(wire.rank)
        self.memory = passes.memory
        self.samples = 0
        self.waited = Waited()
        self._wire = wire
        self._before = ranks[place - 1] if place else None
        self._after = ranks[place + 1] if place + 1 < len(ranks) else None
        self._passes = passes
        self._micro_batches = micro_batches
        self._alternating = alternating
        self._ahead = min(micro_batches, len(ranks) - 1 - place) if alternating else micro_batches
        """Forward passes before the first pair of a forward and a backward pass."""
        self._under_way: dict[int, list[list[Any]]] = {Tag.ACTIVATION: [], Tag.DELTA: []}
        self._clips = clips
        self._seq, self._loss = 0, 0.0
        self._given_up = False

    def prepare(self, seq: int) -> None:
        self._passes.prepare(seq)

    @property
    def leaves(self) -> bool:
        return self._passes.leaves

    def interrupt_by(self, check: Callable[[], None]) -> None:
        self._passes.interrupt_by(check)

    def compute(self, seq: int) -> float:
        passes, self._seq, self._given_up = self._passes, seq, False
        passes.begin(seq)
        for micro in range(self._ahead):
            self._pass_on(micro)
        if not self._alternating:
            self._finish(Tag.ACTIVATION)
        for micro in range(self._micro_batches):
            if self._ahead + micro < self._micro_batches:
                self._pass_on(self._ahead + micro)
            self._pass_back(micro)
        self._finish(Tag.ACTIVATION)
        self._finish(Tag.DELTA)
        self.samples = passes.samples
        if self._clips is not None:
            self._clip(self._clips)
        return self._loss if self._given_up else passes.reported(self._loss)

    def _clip(self, group: Group) -> None:
        """Exchange norms and clip, even after giving up: not all stages may know."""
        own, start_ns = self._passes.norm(), self._wire.clock.now_ns()
        norms = group.tell(Tag.NORM, (own,))
        self.waited.ns += self._wire.clock.now_ns() - start_ns
        self._passes.clip(norm_of_parts(norm for (norm,) in norms))

    def _pass_on(self, micro: int) -> None:
        received = self._take(Tag.ACTIVATION, self._before, micro)
        passed = self._unless_given_up(self._passes.pass_on, micro, received)
        self._give(Tag.ACTIVATION, self._after, micro, passed)
        if self._after is None and micro + 1 == self._micro_batches and not self._given_up:
            self._loss = self._passes.loss

    def _pass_back(self, micro: int) -> None:
        received = self._take(Tag.DELTA, self._after, micro)
        passed = self._unless_given_up(self._passes.pass_back, micro, received)
        self._give(Tag.DELTA, self._before, micro, passed)

    def _unless_given_up(self, make_pass: Callable[[int, Any], Any], micro: int, received: Any) -> Any:
        if not (self._given_up or self.leaves):
            try:
                return make_pass(micro, received)
            except Interrupted:
                pass
        self._given_up = True
        return None

    def _give(self, tag: int, dest: int | None, micro: int, passed: Any) -> None:
        """Begin to send, once all sends of this kind but the last are taken."""
        if dest is None:
            return
        self._finish(tag, _AT_ONCE - 1)
        sent = list[Any]()
        self._under_way[tag].append(sent)
        if self._given_up:
            fields = (self._seq, micro, 0, _GIVEN_UP, *_NOTHING, self._loss)
            sent.append(self._wire.start(dest, tag, fields))
            return
        count, tensors = self._passes.tensors_of(passed)
        for place, tensor in enumerate(tensors):
            described, body = self._passes.describe(tensor)
            fields = (self._seq, micro, place, count, *described, self._loss)
            sent.append(self._wire.start(dest, tag, fields, *(() if body is None else (body,))))

    def _finish(self, tag: int, but: int = 0) -> None:
        """Wait until sends are taken, except for the last `but` micro-batches."""
        under_way = self._under_way[tag]
        if len(under_way) <= but:
            return
        start_ns = self._wire.clock.now_ns()
        while len(under_way) > but:
            for sending in under_way.pop(0):
                self._wire.finish(sending)
        self.waited.ns += self._wire.clock.now_ns() - start_ns

    def _take(self, tag: int, source: int | None, micro: int) -> Any:
        if source is None:
            return None
        start_ns, found = self._wire.clock.now_ns(), list[Any]()
        while True:
            taken = self._wire.take(((source, tag),))
            assert taken is not None
            fields = taken[2]
            count = fields[3]
            if fields[:3] != (self._seq, micro, len(found)):
                seq, of_micro, place = fields[:3]
                raise PeerError(
                    f"{Tag(tag).name} from rank {source}: tensor {place} of micro-batch {of_micro} of mini-batch {seq},"
                    f" expected {len(found)} of {micro} of {self._seq}",
                    source,
                )
            if count == _GIVEN_UP:
                self._given_up = True
                break
            tensor, body = self._passes.room(fields[4:-1])
            if body is not None:
                self._wire.take_body(body)
            found.append(tensor)
            if len(found) >= count:
                break
        if tag == Tag.DELTA:
            self._loss = fields[-1]
        self.waited.ns += self._wire.clock.now_ns() - start_ns
        return (tuple(found) if count else found[0]) if found else None
