"""The passes of a mini-batch through the stages of a group: activations go up, gradients come down [Dean12 3].

The order is GPipe's (arXiv:1811.06965): the forward passes of all micro-batches, then all backward passes. Or 1F1B's (PipeDream,
arXiv:1806.03377): each stage passes only as many micro-batches ahead as there are stages behind it, and then one back for each one
forward; so it keeps the activations of at most K micro-batches. In both, each stage passes forward, and back, in the order of the
micro-batches: so gradients are summed as in a loop over micro-batches in one process (law 5), to the same bits.

            stage k                                         stage k + 1
    forward     ACTIVATION header, tensors          ->      takes it before its own forward pass
    backward    takes it before its own pass        <-      DELTA header, gradients of those tensors, and the loss

No deadlock, and nothing rests on buffers: a stage finishes what it has sent before it sends the next but one, and forward messages
only go up. The last stage always takes them, so each stage comes to its backward passes, whose messages only go down, in the same
way. In 1F1B, where both go at once, a stage finishes what it has sent before it sends the next but one of its kind; a pass needs
nothing but passes of smaller micro-batches, or of the same one, earlier on its way through the stages. Two are under way, so that
one is there, for its receiver to take, while the next is made.

A mini-batch that a stage's shards want no more (`Protocol.aborts`), or whose stage fails (in virtual time), is given up: whoever
knows computes no more of it, and what it passes on are headers that say so, one for each micro-batch. So messages are as many as
ever, whoever is told and when, and before the push the group agrees (`group_channel.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mpisgd.base.errors import PeerError
from mpisgd.comm.communicator import Communicator, Group
from mpisgd.comm.messages import MOST_DIMENSIONS, Tag
from mpisgd.exchange.base import Interrupted
from mpisgd.vectors.computing import Travels, Waited
from mpisgd.vectors.flat import norm_of_parts
from mpisgd.vectors.memory import Memory

_GIVEN_UP = -1
"""In the place of the count of tensors: the mini-batch is not wanted, and no tensors come."""
_AT_ONCE = 2
"""Micro-batches of one kind whose messages are under way."""
_NOTHING = (0, 0, -1, *([0] * 2 * MOST_DIMENSIONS))


class Passes(Protocol):
    """What computes one stage, with tensors (`pieces.StagePasses`), or in virtual time."""

    memory: Memory
    samples: int
    leaves: bool
    """This stage is no more: what is under way is given up, and its learner leaves."""

    @property
    def loss(self) -> float:
        """Loss of the mini-batch; of the last stage alone, after the last forward pass."""

    def prepare(self, seq: int) -> None:
        """Do what mini-batch `seq` needs before its weights are known."""

    def begin(self, seq: int) -> None:
        """The weights of mini-batch `seq` are there."""

    def pass_on(self, micro: int, received: Any) -> Any:
        """Pass a micro-batch; `received` is what the stage before has passed on, or None; returns what goes to the next."""

    def pass_back(self, micro: int, received: Any) -> Any:
        """The same with gradients of what `pass_on` returned; returns those of what it had received."""

    def norm(self) -> float:
        """L2 norm of this stage's gradient, after the last backward pass."""

    def clip(self, norm: float) -> None:
        """Clip this stage's gradient, which is a part of one of this norm."""

    def told(self, loss: float) -> float:
        """The loss that is to be told: NaN where this stage's gradient makes all of it one to be dropped."""

    def interrupt_by(self, check: Callable[[], None]) -> None:
        """Call this in passes every now and then; it may raise Interrupted."""

    def tensors_of(self, passed: Any) -> tuple[int, Sequence[Any]]:
        """How many tensors are in a tuple that is passed, 0 for one that is in none; and all of them."""

    def describe(self, tensor: Any) -> tuple[tuple[int, ...], Any]:
        """What a tensor, or None, is for the header, and its bytes, or None."""

    def room(self, described: tuple[int, ...]) -> tuple[Any, Any]:
        """Memory for a tensor that the other end described so, and its bytes; (None, None) where there is none."""


class Stage(Travels):
    """A rank's part in the gradient of its group.

    Args:
        ranks: of the group, in the order of stages; `wire` is that of one of them.
        micro_batches: that a mini-batch is passed in.
        alternating: in the order 1F1B.
        clips: the same ranks, where the gradient is clipped, for which each tells the norm of its part.
    """

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
        """How many forward passes come before the first backward one needs another."""
        self._under_way: dict[int, list[list[Any]]] = {Tag.ACTIVATION: [], Tag.DELTA: []}
        """Of each kind, the messages of the micro-batches that were sent last."""
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
        """Compute this stage's gradient of mini-batch `seq`, with its group; returns the loss, which the last stage tells."""
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
        return self._loss if self._given_up else passes.told(self._loss)

    def _clip(self, group: Group) -> None:
        """All stages tell, also of what was given up: not all may know."""
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
        """Begin to send a tensor, or a tuple of them, once what was sent so before the last has been taken."""
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
        """Wait until what was sent has been taken, but that of the last so many micro-batches."""
        under_way = self._under_way[tag]
        if len(under_way) <= but:
            return
        start_ns = self._wire.clock.now_ns()
        while len(under_way) > but:
            for sending in under_way.pop(0):
                self._wire.finish(sending)
        self.waited.ns += self._wire.clock.now_ns() - start_ns

    def _take(self, tag: int, source: int | None, micro: int) -> Any:
        """Take what `_give` sent. Raises PeerError where it is of another mini-batch."""
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
