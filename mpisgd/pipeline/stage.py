"""The passes of a mini-batch through the stages of a group: activations go up, gradients come down [Dean12 3].

The order is GPipe's (arXiv:1811.06965): the forward passes of all micro-batches, then all backward passes. Or 1F1B's (PipeDream,
arXiv:1806.03377): each stage passes only as many micro-batches ahead as there are stages behind it, and then one back for each one
forward; so it keeps the activations of at most K micro-batches. In both, each stage passes forward, and back, in the order of the
micro-batches: so gradients are summed as in a loop over micro-batches in one process (law 5), to the same bits.

            stage k                                         stage k + 1
    forward     ACTIVATION header, tensors          ->      takes it before its own forward pass
    backward    takes it before its own pass        <-      DELTA header, gradients of those tensors, and the loss

No deadlock, and nothing rests on buffers: a stage finishes what it has sent before it sends the next, and forward messages only go
up. The last stage always takes them, so each stage comes to its backward passes, whose messages only go down, in the same way. In
1F1B, where both go at once, a stage finishes what it has sent before it sends the next of its kind; a pass needs nothing but passes
of smaller micro-batches, or of the same one, earlier on its way through the stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from mpisgd.base.errors import PeerError
from mpisgd.comm.communicator import Communicator
from mpisgd.comm.messages import Tag
from mpisgd.vectors.computing import Travels, Waited
from mpisgd.vectors.memory import Memory


class Passes(Protocol):
    """What computes one stage, with tensors (`pieces.StagePasses`), or in virtual time."""

    memory: Memory
    samples: int

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
    """

    def __init__(
        self, wire: Communicator, ranks: Sequence[int], passes: Passes, micro_batches: int, *, alternating: bool = False
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
        self._under_way: dict[int, list[Any]] = {Tag.ACTIVATION: [], Tag.DELTA: []}
        self._seq, self._loss = 0, 0.0

    def prepare(self, seq: int) -> None:
        self._passes.prepare(seq)

    def compute(self, seq: int) -> float:
        """Compute this stage's gradient of mini-batch `seq`, with its group; returns the loss, which the last stage tells."""
        passes, self._seq = self._passes, seq
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
        return self._loss

    def _pass_on(self, micro: int) -> None:
        received = self._take(Tag.ACTIVATION, self._before, micro)
        self._give(Tag.ACTIVATION, self._after, micro, self._passes.pass_on(micro, received))
        if self._after is None and micro + 1 == self._micro_batches:
            self._loss = self._passes.loss

    def _pass_back(self, micro: int) -> None:
        received = self._take(Tag.DELTA, self._after, micro)
        self._give(Tag.DELTA, self._before, micro, self._passes.pass_back(micro, received))

    def _give(self, tag: int, dest: int | None, micro: int, passed: Any) -> None:
        """Begin to send a tensor, or a tuple of them, once what was sent so before has been taken."""
        if dest is None:
            return
        self._finish(tag)
        count, tensors = self._passes.tensors_of(passed)
        for place, tensor in enumerate(tensors):
            described, body = self._passes.describe(tensor)
            fields = (self._seq, micro, place, count, *described, self._loss)
            self._under_way[tag].append(self._wire.start(dest, tag, fields, *(() if body is None else (body,))))

    def _finish(self, tag: int) -> None:
        start_ns = self._wire.now_ns()
        for sending in self._under_way[tag]:
            self._wire.finish(sending)
        self._under_way[tag].clear()
        self.waited.ns += self._wire.now_ns() - start_ns

    def _take(self, tag: int, source: int | None, micro: int) -> Any:
        """Take what `_give` sent. Raises PeerError where it is of another mini-batch."""
        if source is None:
            return None
        start_ns, found = self._wire.now_ns(), list[Any]()
        while True:
            taken = self._wire.take(((source, tag),))
            assert taken is not None
            seq, of_micro, place, count, *described, loss = taken[2]
            if (seq, of_micro, place) != (self._seq, micro, len(found)):
                raise PeerError(
                    f"{Tag(tag).name} from rank {source}: tensor {place} of micro-batch {of_micro} of mini-batch {seq},"
                    f" expected {len(found)} of {micro} of {self._seq}",
                    source,
                )
            tensor, body = self._passes.room(tuple(described))
            if body is not None:
                self._wire.take_body(body)
            found.append(tensor)
            if len(found) >= count:
                break
        if tag == Tag.DELTA:
            self._loss = loss
        self.waited.ns += self._wire.now_ns() - start_ns
        return tuple(found) if count else found[0]
