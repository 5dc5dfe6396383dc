"""Gradient of a mini-batch in micro-batches, and stage by stage where the model is cut.

`Pieces` computes all in a process, for replay and virtual groups; `StagePasses` a stage, between messages (`stage.py`). The bits
are the same: gradients are summed in the order of micro-batches, each stage has its own autograd graph, tensors keep their strides
on the wire, and draws are named by (seed, learner_id, seq, stage, micro-batch).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mpisgd.base.draws import seed_all, seeds_of
from mpisgd.base.errors import ConfigError
from mpisgd.base.streams import Domain
from mpisgd.config import Config
from mpisgd.data import DataSet
from mpisgd.data.sampling import Sampling
from mpisgd.gradient.gradient import Gradient, moved
from mpisgd.gradient.objective import Objective, described
from mpisgd.pipeline import travelling
from mpisgd.pipeline.travelling import Rooms, travelled
from mpisgd.vectors import nest
from mpisgd.vectors.cut import Stages
from mpisgd.vectors.flat import FlatModel, clip_part, clip_parts, is_finite, norm_of

_MISFIT = (RuntimeError, ValueError, TypeError, IndexError)


class InMicroBatches(Gradient):
    """Common part of both gradients."""

    together = True

    def __init__(self, *arguments: Any, micro_batches: int, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._micro_batches = micro_batches

    def _part(self, batch: Any, micro: int) -> Any:
        parts, samples = self._micro_batches, self.samples
        if parts == 1:
            return batch

        def cut(name: str, value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.dim() or len(value) != samples:
                found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
                raise ConfigError(f"micro_batches = {parts}: batch{name} is of {found}, expected a tensor of {samples} samples")
            return value[samples * micro // parts : samples * (micro + 1) // parts]

        return nest.mapped(batch, cut)

    def _draw_for(self, seq: int, stage: int, micro: int) -> None:
        """Seed a stage's draws by names; stage 0 in micro-batch 0 draws like a whole model."""
        seed_all(seeds_of(Domain.DROPOUT, self._seed, self._learner_id, seq, (micro << 32) + stage))

    def _scaled(self, loss: Tensor) -> Tensor:
        return loss / self._micro_batches if self._micro_batches > 1 else loss


class Pieces(InMicroBatches):
    """A learner's gradient in a single process; `stages` may be the whole `model`, without `bounds`.

    `crossed`: bytes over each border in the last micro-batch.
    """

    def __init__(self, *arguments: Any, stages: Sequence[nn.Module], bounds: Sequence[tuple[int, int]] = (), **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._stages = stages
        self._bounds = bounds
        self.crossed = [0 for _ in stages[1:]]
        self._borders: list[tuple[Any, Any]] = []
        """By border: output of a stage, input of the next."""

    def output(self, seq: int) -> tuple[Any, Any]:
        """Return the first micro-batch's output. Raises ConfigError: a misfit of stages."""
        inputs, targets = self._begin(seq)
        return self._through(self._part(inputs, 0), seq, 0), moved(self._part(targets, 0), self._model.weights.device)

    def compute(self, seq: int) -> float:
        self._have(seq)
        if self._apart is not None:
            self._model.weights.copy_(self._apart[0], non_blocking=True)
        inputs, targets = self._begin(seq)
        self._prepared = None
        losses = []
        for micro in range(self._micro_batches):
            with self._model.casting():
                output = self._through(self._part(inputs, micro), seq, micro)
                loss = self.loss_of(output, moved(self._part(targets, micro), self._model.weights.device))
            if not loss.requires_grad:
                raise self.detached()
            losses.append(loss.detach())
            self._scaled(loss).backward()  # type: ignore[no-untyped-call]
            for output, given in reversed(self._borders):
                _pass_back(output, _mapped(travelled, _gradients_of(given)))
        return self.hand_over(torch.stack(losses).mean())

    def _clip(self) -> None:
        if self._bounds:
            clip_parts(self._model.gradients, self._bounds, self._clip_norm)
        else:
            super()._clip()

    def _through(self, inputs: Any, seq: int, micro: int) -> Any:
        passed = inputs
        self._borders.clear()
        for stage, module in enumerate(self._stages):
            self._draw_for(seq, stage, micro)
            output = _run(module, passed, stage, len(self._stages))
            if stage < len(self.crossed):
                output = crossing(output, stage)
                self.crossed[stage] = sum(each.nbytes for each in _tensors(output))
                self._borders.append((output, _mapped(_entered, output)))
            passed = self._borders[-1][1] if stage < len(self.crossed) else output
        return passed


class StagePasses(InMicroBatches):
    """Passes of a stage, `model`, on the CPU (`stage.Passes`)."""

    leaves = False

    def __init__(self, *arguments: Any, stage: int, stages: int, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._stage = stage
        self._first, self._last = stage == 0, stage == stages - 1
        self._inputs: Any = None
        self._targets: Any = None
        self._seq = 0
        self._kept: dict[int, tuple[Any, Any]] = {}
        """Input and output of each micro-batch not yet passed back."""
        self._losses: list[Tensor] = []
        self._rooms = Rooms()

    @property
    def loss(self) -> float:
        return torch.stack(self._losses).mean().item()

    def read_ahead(self) -> None:
        if self._first or self._last:
            super().read_ahead()

    def prepare(self, seq: int) -> None:
        """Prepare inputs for the first stage, targets for the last; both follow from names, without messages."""
        if self._first or self._last:
            super().prepare(seq)
        else:
            self._model.zero_gradients()
            self._prepared = (seq, (None, None), len(self._sampling.indices(self._learner_id, seq)))

    def begin(self, seq: int) -> None:
        if self._prepared is None or self._prepared[0] != seq:
            self.prepare(seq)
        (self._inputs, self._targets), self.samples = self._batch(seq)
        self._prepared, self._seq = None, seq
        self._losses.clear()
        self._kept.clear()

    def pass_on(self, micro: int, received: Any) -> Any:
        """Return the output; None from the last stage, which computes the loss."""
        inputs = self._part(self._inputs, micro) if self._first else _mapped(_entered, received)
        self._draw_for(self._seq, self._stage, micro)
        with self._model.casting():
            output = self._model.module(inputs)
            if self._last:
                output = self.loss_of(output, self._part(self._targets, micro))
        if not self._last:
            output = crossing(output, self._stage)
        elif not output.requires_grad:
            raise self.detached()
        else:
            self._losses.append(output.detach())
        self._kept[micro] = inputs, output
        return None if self._last else output

    def pass_back(self, micro: int, received: Any) -> Any:
        """Return the input's gradients; None from the first stage."""
        inputs, output = self._kept.pop(micro)
        if self._last:
            self._scaled(output).backward()  # type: ignore[no-untyped-call]
        else:
            _pass_back(output, received)
        return None if self._first else _gradients_of(inputs)

    def norm(self) -> float:
        return norm_of(self._model.gradients)

    def clip(self, norm: float) -> None:
        clip_part(self._model.gradients, norm, self._clip_norm)

    def reported(self, loss: float) -> float:
        self._model.take_gradients_back()
        self.note_skipped()
        return math.nan if self._tell_nonfinite and not is_finite(self.memory.gradients) else loss

    def tensors_of(self, passed: Any) -> tuple[int, Sequence[Any]]:
        return len(passed) if isinstance(passed, tuple) else 0, _tensors(passed)

    def describe(self, passed: Any) -> tuple[tuple[int, ...], Any]:
        return travelling.describe(passed, f"stage {self._stage}")

    def room(self, described: tuple[int, ...]) -> tuple[Any, Any]:
        return self._rooms.room(described)


def _run(module: nn.Module, passed: Any, stage: int, stages: int) -> Any:
    try:
        return module(passed)
    except _MISFIT as error:
        if not stage:
            raise
        shapes = " and ".join(str(tuple(each.shape)) for each in _tensors(passed))
        weights = tuple(next(module.parameters()).shape)
        raise ConfigError(
            f"group_size = {stages}: the output of stage {stage - 1}, of shape {shapes}, does not fit stage"
            f" {stage} with first weights of shape {weights}: {type(error).__name__}: {error}"
        ) from error


def output_shapes(stages: Sequence[nn.Module], inputs: Any) -> Any:
    """Return the stages' output on torch's device "meta". Raises ConfigError: a misfit."""
    passed = nest.mapped(inputs, lambda _, value: value.to("meta"))
    with torch.no_grad():
        for stage, module in enumerate(stages):
            output = _run(module, passed, stage, len(stages))
            passed = crossing(output, stage) if stage + 1 < len(stages) else output
    return passed


def crossing(output: Any, stage: int) -> Any:
    """Return the output as a tensor or a tuple. Raises ConfigError for anything else."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, tuple | list) and output and all(isinstance(each, Tensor) for each in output):
        return tuple(output)
    raise ConfigError(f"stage {stage} of the model returned {described(output)}, expected a tensor or a tuple of tensors")


def _entered(received: Tensor) -> Tensor:
    """Return a copy, free to be changed in place, with its gradient kept as it comes, strides and all."""
    if not received.requires_grad:
        return received
    copy: Tensor = travelled(received.detach()).requires_grad_().clone()
    copy.retain_grad()
    return copy


def _pass_back(output: Any, received: Any) -> None:
    """Pass back gradients of the output; None for a tensor without part in the loss."""
    wanted = [(each, grad) for each, grad in zip(_tensors(output), _tensors(received), strict=True) if grad is not None]
    if wanted:
        torch.autograd.backward([each for each, _ in wanted], [grad for _, grad in wanted])


def _gradients_of(given: Any) -> Any:
    return _mapped(lambda tensor: tensor.grad, given)


def _mapped(function: Callable[[Any], Any], passed: Any) -> Any:
    return tuple(map(function, passed)) if isinstance(passed, tuple) else function(passed)


def _tensors(passed: Any) -> tuple[Any, ...]:
    return passed if isinstance(passed, tuple) else (passed,)


def kind_of_gradient(config: Config, model: FlatModel, stages: Stages | None) -> Callable[..., Gradient]:
    if stages is None and config.micro_batches == 1:
        return Gradient
    pieces = [model.module] if stages is None else stages.modules(model)
    bounds = () if stages is None else stages.bounds
    return functools.partial(Pieces, stages=pieces, bounds=bounds, micro_batches=config.micro_batches)


def make_passes(
    config: Config, model: FlatModel, loss: Objective, data: DataSet, sampling: Sampling, number: int, stage: int
) -> StagePasses:
    """Make a stage's passes; `number` as in `stages.make_gradient`."""
    passes = StagePasses(
        *(model, loss, data.train, sampling, model.memory),
        seed=config.seed,
        learner_id=number,
        clip_norm=config.clip_norm,
        tell_nonfinite=config.nonfinite == "drop",
        tell_skipped=config.moves_at_zero,
        stage=stage,
        stages=config.group_size,
        micro_batches=config.micro_batches,
    )
    passes.read_ahead()
    return passes
