"""The first stage: sample, forward, loss, backward into the flat vector, clip."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mpisgd.base.draws import Seeds, seed_all, seeds_of
from mpisgd.base.errors import ConfigError
from mpisgd.base.streams import Domain
from mpisgd.data import Split, fetch
from mpisgd.data.loader import ReadAhead
from mpisgd.data.sampling import Sampling
from mpisgd.gradient.objective import Objective, OwnStep, described
from mpisgd.gradient.scaling import LossScale
from mpisgd.vectors import nest
from mpisgd.vectors.computing import Travels
from mpisgd.vectors.flat import FlatModel, clip, is_finite, pass_back, skipped_runs
from mpisgd.vectors.memory import Memory, as_tensor, outbox_of, staging, wait_for


class Gradient(Travels):
    """A learner's gradient; `compute` leaves the gradient in `memory`.

    Args:
        memory: the model's own; else weights and gradient are copied (pinned vectors beside a GPU; a model lent among virtual
            learners).
        clip_norm: bound of the global L2 norm [Chen16 A.3]; 0 = off.
        tell_nonfinite: report loss NaN for a non-finite gradient: all shards drop the push.
        tell_skipped: report parameters without a gradient (`vectors/skipped.py`).
        take_turn: called before each mini-batch of a lent model.
    """

    together = False
    """A mini-batch passes through several models, or pieces."""

    def __init__(  # noqa: PLR0913 - each by name
        self,
        model: FlatModel,
        loss: Objective,
        split: Split,
        sampling: Sampling,
        memory: Memory,
        *,
        seed: int,
        learner_id: int,
        clip_norm: float = 0.0,
        tell_nonfinite: bool = False,
        tell_skipped: bool = False,
        take_turn: Callable[[], None] = lambda: None,
    ) -> None:
        self._model = model
        self.objective = loss
        self._split = split
        self._sampling = sampling
        self.memory = memory
        self._seed = seed
        self._learner_id = learner_id
        self._clip_norm = clip_norm
        self._tell_nonfinite = tell_nonfinite
        self._tell_skipped = tell_skipped
        self._take_turn = take_turn
        self._apart = None if memory is model.memory else memory.tensors
        self._outboxes = [as_tensor(each) for each in memory.outboxes]
        self._checked = False
        self._told_loss = None if model.weights.device.type == "cpu" else staging(model.weights.new_zeros(()))
        self.samples = 0
        self._prepared: tuple[int, Any, int] | None = None
        self._ahead: ReadAhead | None = None
        self._scale = LossScale() if model.overflows else None
        if self._scale is not None:
            self.scaled = self._scale.scaled

    def read_ahead(self) -> None:
        """Let the data's workers fetch mini-batches ahead, in the order of `prepare`."""
        workers = getattr(self._split, "workers", None)
        if workers is not None and self._sampling.ahead:
            pinned = self._model.weights.device.type == "cuda"
            self._ahead = ReadAhead(self._split, workers, self._named, pinned=pinned)

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()

    def move_out(self, into: Memory | None = None) -> None:
        if self._model.memory is self.memory:
            self._model.move_to(into or Memory.zeros(self._model.size, str(self._model.weights.device)))

    def interrupt_by(self, check: Callable[[], None]) -> None:
        """Call `check` between layers, in both passes."""

        def between(*_: object) -> None:
            check()

        for module in self._model.module.modules():
            if not list(module.children()):
                module.register_forward_pre_hook(between)
        for parameter in self._model.module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(between)  # type: ignore[no-untyped-call]

    def prepare(self, seq: int) -> None:
        """Draw mini-batch `seq` while shards work."""
        if self._sampling.ahead:
            self._draw(seq)

    def _have(self, seq: int) -> None:
        self._take_turn()
        if self._apart is not None and self._outboxes:
            self._apart = self._apart[0], outbox_of(self._outboxes, seq)
        if not self._sampling.ahead:  # the prepared mini-batch may be of another portion
            self._prepared = None
        if self._prepared is None or self._prepared[0] != seq:
            self._draw(seq)

    def _draw(self, seq: int) -> None:
        self._model.zero_gradients(seq)
        self._prepared = (seq, *self._batch(seq))

    def _batch(self, seq: int) -> tuple[Any, int]:
        if self._prepared is not None and self._prepared[0] == seq:
            return self._prepared[1:]
        indices = self._sampling.indices(self._learner_id, seq)
        if self._ahead is None:
            batch = fetch(self._split, indices, lambda: self._seeds(Domain.SAMPLES, seq))
        else:
            batch = self._ahead.get(seq)
        if isinstance(self.objective, OwnStep):
            return self._model.inputs(batch), len(indices)
        inputs, targets = pair(batch)
        return (self._model.inputs(inputs), targets), len(indices)

    def _named(self, seq: int) -> tuple[Any, Seeds]:
        return self._sampling.indices(self._learner_id, seq), self._seeds(Domain.SAMPLES, seq)

    def _seeds(self, domain: Domain, seq: int) -> Seeds:
        return seeds_of(domain, self._seed, self._learner_id, seq)

    def forward(self, seq: int) -> Tensor:
        """Return the scalar loss of mini-batch `seq`; set `samples`."""
        with self._model.casting(), self._model.untouched():
            loss = self.step(seq) if isinstance(self.objective, OwnStep) else self.loss_of(*self.output(seq))
        if torch.is_grad_enabled():
            self.check(loss)
        return loss

    def check(self, loss: Tensor) -> None:
        """Raise ConfigError for a loss without a gradient, or with parameters outside the model."""
        if not loss.requires_grad:
            raise self.detached()
        if self._checked:
            return
        others = parameters_of(loss) - set(self._model.module.parameters())
        strange = sorted(f"of shape {tuple(each.shape)}" for each in others)
        if strange:
            raise ConfigError(f"{self._whose_loss} depends on {not_the_models(strange)}")
        self._checked = True

    def detached(self) -> ConfigError:
        return ConfigError(
            f"{self._whose_loss} does not depend on the model's weights by autograd: was the loss detached, or made a number?"
        )

    @property
    def _whose_loss(self) -> str:
        return "step: the loss" if isinstance(self.objective, OwnStep) else "loss: the result"

    def loss_of(self, output: Any, targets: Any) -> Tensor:
        assert not isinstance(self.objective, OwnStep)
        return self.objective(output, targets)

    def output(self, seq: int) -> tuple[Any, Any]:
        inputs, targets = self._begin(seq)
        return self._model.module(inputs), moved(targets, self._model.weights.device)

    def step(self, seq: int) -> Tensor:
        assert isinstance(self.objective, OwnStep)
        return self.objective.loss(self._model.module, self._begin(seq))

    def _begin(self, seq: int) -> Any:
        """Return mini-batch `seq`; seed the global generators by names alone (law 5)."""
        batch, self.samples = self._batch(seq)
        seed_all(self._seeds(Domain.DROPOUT, seq))
        return batch

    def compute(self, seq: int) -> float:
        model = self._model
        self._have(seq)
        if self._apart is not None:
            model.weights.copy_(self._apart[0], non_blocking=True)
        if self._scale is None:
            loss = self.forward(seq)
            self._prepared = None
            pass_back(model, loss)
        else:
            loss = self._scale.passes(lambda: self.forward(seq), model)
            self._prepared = None
        return self.hand_over(loss)

    def hand_over(self, loss: Tensor) -> float:
        """Clip and hand over the gradient after the backward pass; return the loss."""
        self._model.take_gradients_back()
        self._clip()
        self.note_skipped()
        value = self._out(loss.detach())
        gradients = self._model.gradients if self._apart is None else self._apart[1]
        return math.nan if self._tell_nonfinite and not is_finite(gradients) else value

    def note_skipped(self) -> None:
        """Set `skipped`. Raises ConfigError: a group's shards cannot be told."""
        if not self._tell_skipped:
            return
        self.skipped = skipped_runs(self._model)
        if self.together and len(self.skipped):
            raise unused(self._model, "a group's shards are told of gradients alone")

    def _clip(self) -> None:
        clip(self._model.gradients, self._clip_norm)

    def _out(self, loss: Tensor) -> float:
        """Return the loss. Only here is a GPU waited for; the gradient is then ready for MPI."""
        if self._apart is not None:
            self._apart[1].copy_(self._model.gradients, non_blocking=True)
            wait_for(self._apart[1])
        if self._told_loss is None:
            return loss.item()
        self._told_loss.copy_(loss, non_blocking=True)
        wait_for(loss)
        return self._told_loss.item()


def unused(model: FlatModel, why: str) -> ConfigError:
    return ConfigError(
        f"model: a mini-batch gave no gradient to {', '.join(model.skipped_names[:3])}: torch would not change these, and {why}:"
        " expected all parameters used in each mini-batch, or frozen (requires_grad=False), or SGD without momentum and"
        " weight decay"
    )


def parameters_of(loss: Tensor) -> set[nn.Parameter]:
    nodes, seen, found = [loss.grad_fn], set[Any](), set[nn.Parameter]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter):
            found.add(leaf)
        nodes += [each for each, _ in node.next_functions]
    return found


def not_the_models(names: Sequence[str]) -> str:
    return (
        f"parameters outside the model ({', '.join(names[:3])}), never trained: expected all parameters in the model, and"
        " a step that calls both, step = lambda model, batch: model.loss(model(batch[0]), batch[1])"
    )


def pair(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    raise ConfigError(f"data: a batch is {described(batch)}, expected a pair (inputs, targets) for a loss; `step` takes any batch")


def moved(batch: Any, device: torch.device) -> Any:
    return nest.mapped(batch, lambda _, value: value.to(device, non_blocking=True))
