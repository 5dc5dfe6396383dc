"""The gradient of a mini-batch: sample, forward, loss, backward into the flat vector, clip: the first stage of all."""

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
from mpisgd.vectors.memory import Memory, staging, wait_for


class Gradient(Travels):
    """A learner's gradient; after `compute`, it is in `memory`.

    Args:
        memory: the model's own; else weights are copied from there and the gradient is copied there, each time: it is of pinned
            vectors, beside a GPU, or the model is lent from one virtual learner to the next.
        clip_norm: global L2 norm that gradients are clipped to [Chen16 A.3]; 0 = off.
        tell_nonfinite: give a gradient that is not finite the loss NaN, so that all shards drop it. Were each to look at its
            own slice only, one might drop what another counts, and their clocks, samples and waiting learners part.
        tell_skipped: say of which parameters there is no gradient (`vectors/skipped.py`).
        take_turn: called before each mini-batch, where the model is lent (`kept_state.Turns`).

    Attributes:
        objective: the loss, or the user's own step.
    """

    together = False
    """Whether a mini-batch is passed through several models, or pieces of one."""

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
        self._checked = False
        self._told_loss = None if model.weights.device.type == "cpu" else staging(model.weights.new_zeros(()))
        self.samples = 0
        self._prepared: tuple[int, Any, int] | None = None
        self._ahead: ReadAhead | None = None
        self._scale = LossScale() if model.overflows else None
        if self._scale is not None:
            self.scaled = self._scale.scaled

    def read_ahead(self) -> None:
        """From now on workers fetch mini-batches in the order in which they are prepared, where the data have workers."""
        workers = getattr(self._split, "workers", None)
        if workers is not None and self._sampling.ahead:
            pinned = self._model.weights.device.type == "cuda"
            self._ahead = ReadAhead(self._split, workers, self._named, pinned=pinned)

    def close(self) -> None:
        """End the workers."""
        if self._ahead is not None:
            self._ahead.close()

    def move_out(self) -> None:
        if self._apart is None:
            self._model.move_to(Memory.zeros(self._model.size))

    def interrupt_by(self, check: Callable[[], None]) -> None:
        """Call this between the layers, forward and backward."""

        def between(*_: object) -> None:
            check()

        for module in self._model.module.modules():
            if not list(module.children()):
                module.register_forward_pre_hook(between)
        for parameter in self._model.module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(between)  # type: ignore[no-untyped-call]

    def prepare(self, seq: int) -> None:
        """Do what mini-batch `seq` needs before its weights are known: called while the shards are busy with the last one."""
        if self._sampling.ahead:
            self._draw(seq)

    def _have(self, seq: int) -> None:
        """Mini-batch `seq` is there, and gradients are zero."""
        self._take_turn()
        if not self._sampling.ahead:  # what was drawn under this number before may be of another portion
            self._prepared = None
        if self._prepared is None or self._prepared[0] != seq:
            self._draw(seq)

    def _draw(self, seq: int) -> None:
        self._model.zero_gradients()
        self._prepared = (seq, *self._batch(seq))

    def _batch(self, seq: int) -> tuple[Any, int]:
        """Mini-batch `seq`, its inputs on the model's device, and how many samples were drawn for it."""
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
        """The loss, a scalar tensor, of mini-batch `seq` at the present weights; sets `samples`."""
        with self._model.casting(), self._model.untouched():
            loss = self.step(seq) if isinstance(self.objective, OwnStep) else self.loss_of(*self.output(seq))
        if torch.is_grad_enabled():
            self.check(loss)
        return loss

    def check(self, loss: Tensor) -> None:
        """Raises ConfigError where a loss does not train the model, or depends on parameters that nobody would train."""
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
        """Make the error for a loss from which no gradient comes."""
        return ConfigError(
            f"{self._whose_loss} does not depend on the model's weights by autograd: was it detached, or made a number?"
        )

    @property
    def _whose_loss(self) -> str:
        return "step: its loss" if isinstance(self.objective, OwnStep) else "loss: it"

    def loss_of(self, output: Any, targets: Any) -> Tensor:
        """The user's loss of what `output` gave."""
        assert not isinstance(self.objective, OwnStep)
        return self.objective(output, targets)

    def output(self, seq: int) -> tuple[Any, Any]:
        """Run the model on mini-batch `seq` at the present weights; returns its output and the targets, and sets `samples`."""
        inputs, targets = self._begin(seq)
        return self._model.module(inputs), moved(targets, self._model.weights.device)

    def step(self, seq: int) -> Tensor:
        """The loss that the user's own step gives, as `forward`. Raises ConfigError where it gives none."""
        assert isinstance(self.objective, OwnStep)
        return self.objective.loss(self._model.module, self._begin(seq))

    def _begin(self, seq: int) -> Any:
        """The mini-batch; what model, loss and step draw from now on from the global generators depends on the names alone."""
        batch, self.samples = self._batch(seq)
        seed_all(self._seeds(Domain.DROPOUT, seq))
        return batch

    def compute(self, seq: int) -> float:
        """Compute the gradient of mini-batch `seq`, which was prepared, at the weights that were pulled; returns the loss."""
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
        """After the backward pass: clip the gradient, and hand it over; returns the loss."""
        self._model.take_gradients_back()
        self._clip()
        self.note_skipped()
        value = self._out(loss.detach())
        return math.nan if self._tell_nonfinite and not is_finite(self.memory.gradients) else value

    def note_skipped(self) -> None:
        """Once gradients are there: say of which parameters there is none. Raises ConfigError where shards cannot be told."""
        if not self._tell_skipped:
            return
        self.skipped = skipped_runs(self._model)
        if self.together and len(self.skipped):
            raise unused(self._model, "a group's shards are told of gradients alone")

    def _clip(self) -> None:
        clip(self._model.gradients, self._clip_norm)

    def _out(self, loss: Tensor) -> float:
        """The loss; from a GPU after the only wait for it of a mini-batch, by which the gradient is where MPI is to take it."""
        if self._apart is not None:
            self._apart[1].copy_(self._model.gradients, non_blocking=True)
        if self._told_loss is None:
            return loss.item()
        self._told_loss.copy_(loss, non_blocking=True)
        wait_for(loss)
        return self._told_loss.item()


def unused(model: FlatModel, why: str) -> ConfigError:
    """Make the error for parameters without a gradient, which zeros would move, where torch passes over them."""
    return ConfigError(
        f"model: a mini-batch gave no gradient to {', '.join(model.skipped_names[:3])}, which torch would leave as they are, and"
        f" {why}: expected all parameters used in each mini-batch, frozen ones (requires_grad=False), or SGD without momentum and"
        " weight decay"
    )


def parameters_of(loss: Tensor) -> set[nn.Parameter]:
    """The parameters that autograd would give gradients."""
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
    """Say of parameters that they would not be trained, and what to write instead."""
    return (
        f"parameters that are not the model's ({', '.join(names[:3])}), which would not be trained: expected them in the model, and"
        " a step that calls both, step = lambda model, batch: model.loss(model(batch[0]), batch[1])"
    )


def pair(batch: Any) -> tuple[Any, Any]:
    """The inputs and targets of a batch, for a loss. Raises ConfigError where it is no pair."""
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    raise ConfigError(f"data: a batch is {described(batch)}, expected a pair (inputs, targets) for a loss; `step` takes any batch")


def moved(batch: Any, device: torch.device) -> Any:
    """A batch on this device."""
    return nest.mapped(batch, lambda _, value: value.to(device, non_blocking=True))
