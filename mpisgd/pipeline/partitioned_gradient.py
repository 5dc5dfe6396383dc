"""Gradient of a model with all pieces at work on the same layer: of a piece, between messages, or of all in a process.

The bits are the same: sums follow the order of pieces, gradients the order of micro-batches, and draws are named by (seed,
learner_id, seq, piece, micro-batch). All pieces compute the loss of the whole output; all but piece 0 begin their backward pass
with zero, so each gradient counts once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mpisgd.base.errors import ConfigError
from mpisgd.comm.communicator import Communicator, Group
from mpisgd.comm.messages import Tag
from mpisgd.config import Config
from mpisgd.gradient.gradient import Gradient
from mpisgd.models.interleaved import Dealt, Interleaved
from mpisgd.models.partition import Links, Partition
from mpisgd.models.partitioned import Partitioned
from mpisgd.pipeline import micro_batches, travelling
from mpisgd.pipeline.micro_batches import InMicroBatches
from mpisgd.pipeline.rounds import Rounds
from mpisgd.pipeline.stage_messages import WireLinks
from mpisgd.pipeline.travelling import Rooms
from mpisgd.vectors.computing import Waited
from mpisgd.vectors.cut import Stages
from mpisgd.vectors.flat import FlatModel, clip_part, clip_parts, norm_of, norm_of_parts


class _Passes(InMicroBatches):
    """Common part of both gradients."""

    def _pass(self, place: int, module: nn.Module, batch: tuple[Any, Any], seq: int, micro: int) -> Tensor:
        inputs, targets = (self._part(each, micro) for each in batch)
        self._draw_for(seq, place, micro)
        with self._model.casting():
            loss = self.loss_of(module(inputs), targets)
        if not loss.requires_grad:
            raise self.detached()
        scaled = self._scaled(loss)
        scaled.backward(None if place == 0 else torch.zeros_like(scaled))  # type: ignore[no-untyped-call]
        return loss.detach()


class PartitionedGradient(_Passes):
    """A learner's gradient in a single process; `model` has all pieces, `dealt` each piece's last parts (`Interleaved.dealt`)."""

    def __init__(self, *arguments: Any, module: Partitioned, bounds: Sequence[tuple[int, int]], **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._module = module
        self._bounds = bounds
        self.dealt: list[list[Dealt]] = []

    def compute(self, seq: int) -> float:
        """Compute the mean over micro-batches. Raises ConfigError as `_alike`."""
        self._have(seq)
        if self._apart is not None:
            self._model.weights.copy_(self._apart[0])
        batch = self._begin(seq)
        self._prepared = None
        losses = []
        for micro in range(self._micro_batches):
            together = Interleaved(self._module.partitions)
            passes = [
                lambda place=place, piece=piece, micro=micro: self._pass(place, piece, batch, seq, micro)
                for place, piece in enumerate(self._module)
            ]
            found = together.run(passes)
            _alike(found, self._module.partitions[0])
            losses.append(found[0])
            self.dealt = together.dealt
        return self.hand_over(torch.stack(losses).mean())

    def _clip(self) -> None:
        clip_parts(self._model.gradients, self._bounds, self._clip_norm)


class PartitionGradient(_Passes):
    """The gradient of a piece of a group, `model`, on the CPU; `clips` as in `Stage`."""

    def __init__(
        self, *arguments: Any, links: WireLinks | Rounds, partition: Partition, clips: Group | None = None, **named: Any
    ) -> None:
        super().__init__(*arguments, **named)
        self._clips = clips
        self.waited = links.waited
        self._links = links
        self._partition = partition
        self._checked = False

    def compute(self, seq: int) -> float:
        """Compute with the group. Raises ConfigError as `_alike`."""
        self._have(seq)
        batch = self._begin(seq)
        self._prepared, self._links.seq = None, seq
        losses = []
        for micro in range(self._micro_batches):
            self._links.micro = micro
            self._partition.begin(self._links)
            losses.append(self._pass(self._partition.place, self._model.module, batch, seq, micro))
            self._partition.end()
            if not self._checked:
                self._check(losses[0])
        return self.hand_over(torch.stack(losses).mean())

    def _clip(self) -> None:
        if self._clips is None:
            return
        norms = self._clips.tell(Tag.NORM, (norm_of(self._model.gradients),))
        clip_part(self._model.gradients, norm_of_parts(norm for (norm,) in norms), self._clip_norm)

    def _check(self, loss: Tensor) -> None:
        """Check the losses once: of other pieces only shapes were known."""
        own = [loss.reshape(1)] * self._partition.places
        _alike([part for part in self._links.deal(-1, own, back=True) if part is not None], self._partition)
        self._checked = True


class _Tensors:
    """Tensor parts (`links.Carrier`)."""

    def __init__(self) -> None:
        self.room = Rooms().room

    def describe(self, part: Tensor) -> tuple[tuple[int, ...], Any]:
        return travelling.describe(part.detach(), "a piece")


def _alike(losses: list[Tensor], partition: Partition) -> None:
    """Raise ConfigError where pieces computed different losses, or no call joins all."""
    first = losses[0].reshape(())
    if not partition.reaches_all:
        raise ConfigError("model: no call of its partition joins all pieces: expected at least one gather or sum in each pass")
    for place, loss in enumerate(losses):
        if loss.item() != first.item() and not (loss.isnan() and first.isnan()):
            raise ConfigError(
                f"model: piece {place} computed the loss {loss.item()!r}, piece 0 {first.item()!r}: expected the same whole output"
                " in all pieces, by partition.gather or sum, without dropout behind"
            )


def kind_of_gradient(config: Config, model: FlatModel, stages: Stages | None) -> Callable[..., Gradient]:
    if isinstance(model.module, Partitioned):
        bounds = () if stages is None else stages.bounds
        return functools.partial(PartitionedGradient, module=model.module, bounds=bounds, micro_batches=config.micro_batches)
    return micro_batches.kind_of_gradient(config, model, stages)


def links_of(wire: Communicator, ranks: tuple[int, ...]) -> WireLinks:
    return WireLinks(wire, ranks, _Tensors(), Waited())


@contextmanager
def joined(module: nn.Module, partition: Partition, links: Links) -> Iterator[None]:
    """Join each call of this piece to a forward pass of all pieces, within the context."""
    begins = module.register_forward_pre_hook(lambda *_: partition.begin(links))
    ends = module.register_forward_hook(lambda *_: partition.end())
    try:
        yield
    finally:
        begins.remove()
        ends.remove()


def make_gradient(
    config: Config,
    model: FlatModel,
    partition: Partition,
    links: WireLinks | Rounds,
    group: Group | None,
    *others: Any,
    number: int,
) -> PartitionGradient:
    """Make the gradient of a piece; `others`: loss, split, sampling; `number` as in `stages.make_gradient`."""
    return PartitionGradient(
        *(model, *others, model.memory),
        seed=config.seed,
        learner_id=number,
        clip_norm=config.clip_norm,
        tell_nonfinite=config.nonfinite == "drop",
        tell_skipped=config.moves_at_zero,
        clips=group if config.clip_norm > 0 else None,
        micro_batches=config.micro_batches,
        links=links,
        partition=partition,
    )
