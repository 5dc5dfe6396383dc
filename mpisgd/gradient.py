"""One mini-batch's gradient: sample, forward, loss, backward into the flat vector, clip."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from mpisgd.computing import Travels
from mpisgd.data import Split
from mpisgd.data.sampling import Sampling, dropout_seed
from mpisgd.flat import FlatModel, host_view, is_finite

Loss = Callable[[Tensor, Tensor], Tensor]


class Gradient(Travels):
    """What a learner computes; after `compute`, the gradient is in `host_gradients`.

    `host_weights` and `host_gradients`, both (parameters,) float32, are what goes over the wire: the flat vectors themselves
    on a CPU; on a GPU two pinned buffers that are reused.

    Args:
        clip_norm: global L2 norm that gradients are clipped to [Chen16 A.3]; 0 = off.
        tell_nonfinite: give a gradient that is not finite the loss NaN, so that all shards drop it. Were each to look at its
            own slice only, one might drop what another counts, and their clocks, samples and waiting learners part.
    """

    def __init__(
        self,
        model: FlatModel,
        loss: Loss,
        split: Split,
        sampling: Sampling,
        *,
        seed: int,
        learner_id: int,
        clip_norm: float = 0.0,
        tell_nonfinite: bool = False,
    ) -> None:
        self._model = model
        self._loss = loss
        self._split = split
        self._sampling = sampling
        self._seed = seed
        self._learner_id = learner_id
        self._clip_norm = clip_norm
        self._tell_nonfinite = tell_nonfinite
        self._on_host = model.weights.device.type == "cpu"
        self._weights = model.weights if self._on_host else torch.empty_like(model.weights, device="cpu").pin_memory()
        self._gradients = model.gradients if self._on_host else torch.empty_like(model.weights, device="cpu").pin_memory()
        self._told_loss = None if self._on_host else torch.empty((), pin_memory=True)
        self.host_weights, self.host_gradients = host_view(self._weights), host_view(self._gradients)
        self.samples = 0
        self._prepared: tuple[int, tuple[Tensor, Tensor]] | None = None

    def live_in(self, weights: np.ndarray, gradients: np.ndarray) -> None:
        """Let this host memory, each (parameters,) float32, take the place of `host_weights` and `host_gradients`."""
        self.host_weights, self.host_gradients = weights, gradients
        self._weights, self._gradients = torch.from_numpy(weights), torch.from_numpy(gradients)
        if self._on_host:
            self._model.move_to(self._weights, self._gradients)

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
        self._model.zero_gradients()
        self._prepared = (seq, self._batch(seq))

    def _batch(self, seq: int) -> tuple[Tensor, Tensor]:
        if self._prepared is not None and self._prepared[0] == seq:
            return self._prepared[1]
        inputs, targets = self._split.batch(self._sampling.indices(self._learner_id, seq))
        return self._model.inputs(inputs), targets

    def forward(self, seq: int) -> Tensor:
        """The loss, a scalar tensor, of mini-batch `seq` at the present weights; sets `samples`."""
        inputs, targets = self._batch(seq)
        self.samples = len(inputs)
        torch.manual_seed(dropout_seed(self._seed, self._learner_id, seq))
        output = self._model.module(inputs)
        return self._loss(output, targets.to(output.device, non_blocking=True))

    def compute(self, seq: int) -> float:
        """Compute the gradient of mini-batch `seq`, which was prepared, at the weights that were pulled; returns the loss."""
        model = self._model
        if self._prepared is None or self._prepared[0] != seq:
            self.prepare(seq)
        if not self._on_host:
            model.weights.copy_(self._weights, non_blocking=True)
        loss = self.forward(seq)
        self._prepared = None
        loss.backward()  # type: ignore[no-untyped-call]
        if self._clip_norm > 0:
            norm = torch.linalg.vector_norm(model.gradients)
            model.gradients.mul_(torch.clamp(self._clip_norm / (norm + 1e-6), max=1.0))
        value = self._to_host(loss.detach())
        return math.nan if self._tell_nonfinite and not is_finite(self.host_gradients) else value

    def _to_host(self, loss: Tensor) -> float:
        """The loss; from a GPU, with the gradient, and after the only wait for it of a mini-batch."""
        if self._told_loss is None:
            return loss.item()
        self._gradients.copy_(self._model.gradients, non_blocking=True)
        self._told_loss.copy_(loss, non_blocking=True)
        torch.cuda.current_stream(loss.device).synchronize()
        return self._told_loss.item()
