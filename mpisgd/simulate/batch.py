"""Gradients of many virtual learners, each at its own weights, computed as one batch (torch.func.vmap).

Equal within float tolerance, not bit for bit. Models that draw random numbers or change buffers in training are
refused.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mpisgd.base.draws import seeds_of
from mpisgd.base.errors import ConfigError
from mpisgd.base.streams import Domain
from mpisgd.config import Config
from mpisgd.data import DataSet, Split, fetch_each
from mpisgd.data.loader import CollatedSplit
from mpisgd.data.sampling import Sampling
from mpisgd.gradient.gradient import moved, unused
from mpisgd.gradient.objective import Objective, OwnStep
from mpisgd.vectors.flat import FlatModel, clip, is_finite

TOGETHER = 64
"""Most gradients per batch: beyond, memory grows and speed does not."""


class Batch:
    def __init__(self, config: Config, model: FlatModel, loss: Objective, data: DataSet, sampling: Sampling) -> None:
        self._config = config
        self._model = model
        device = model.weights.device
        self._train = data.train.on(device) if type(data.train) is Split else data.train
        self._sampling = sampling
        self._loss: Any = loss
        self._wanted: dict[int, tuple[int, Tensor, Tensor]] = {}
        self._there: dict[int, tuple[int, float]] = {}
        assert not isinstance(loss, OwnStep)  # `compatibility`
        if isinstance(data.train, CollatedSplit):
            raise ConfigError(
                "virtual.batched = True: expected False beside a collate_fn (batches of any shape), and beside samples"
                " that are no pairs of tensors"
            )

        def loss_of(weights: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
            return loss(torch.func.functional_call(model.module, model.views(weights), (inputs,)), targets)

        self._compute: Any = torch.func.vmap(torch.func.grad_and_value(loss_of))

    def check(self) -> None:
        """Compute two mini-batches. Raises ConfigError: the model cannot be batched."""
        weights = self._model.weights
        if self._config.moves_at_zero:
            self._check_used()
        for learner_id in range(2):
            self.add(learner_id % self._config.virtual.learners, learner_id, weights.clone(), torch.empty_like(weights))
        try:
            self._compute_wanted()
        except (RuntimeError, ValueError, TypeError) as error:
            raise ConfigError(f"virtual.batched = True: torch.func.vmap refuses this model: {error}") from error
        self._there.clear()

    def _check_used(self) -> None:
        """Raise ConfigError for parameters unused by the first mini-batch: vmap gives them zeros."""
        batch = fetch_each(self._train, [self._sampling.indices(0, 0)], lambda at: seeds_of(Domain.SAMPLES, at))
        inputs, targets = moved(batch, self._model.weights.device)
        self._model.zero_gradients()
        self._loss(self._model.module(inputs), targets).backward()
        if self._model.skipped_names:
            raise unused(self._model, "gradients of several learners at once are zeros there")

    def add(self, learner_id: int, seq: int, weights: Tensor, gradients: Tensor) -> None:
        """Begin a learner's mini-batch at `weights`, (parameters,) float32; forget its last."""
        self._there.pop(learner_id, None)
        self._wanted[learner_id] = (seq, weights, gradients)

    def result(self, learner_id: int) -> tuple[int, float]:
        """Return samples and loss; the gradient is in place."""
        if learner_id not in self._there:
            self._compute_wanted()
        return self._there.pop(learner_id)

    def _compute_wanted(self) -> None:
        names = list(self._wanted)
        for start in range(0, len(names), TOGETHER):
            self._compute_some(names[start : start + TOGETHER])
        self._wanted.clear()

    def _compute_some(self, learner_ids: list[int]) -> None:
        wanted = [self._wanted[learner_id] for learner_id in learner_ids]
        indices = [self._sampling.indices(learner_id, wanted[at][0]) for at, learner_id in enumerate(learner_ids)]
        mu = len(indices[0])
        config, names = self._config, [(learner_id, wanted[at][0]) for at, learner_id in enumerate(learner_ids)]
        batch = fetch_each(self._train, indices, lambda at: seeds_of(Domain.SAMPLES, config.seed, *names[at]))
        inputs, targets = moved(batch, self._model.weights.device)
        inputs = inputs.reshape(len(wanted), mu, *inputs.shape[1:])
        targets = targets.reshape(len(wanted), mu, *targets.shape[1:])
        pulled = moved([weights for _, weights, _ in wanted], self._model.weights.device)
        gradients, losses = self._compute(torch.stack(pulled), inputs, targets)
        for learner_id, (_, _, into), gradient, loss in zip(learner_ids, wanted, gradients, losses.tolist(), strict=True):
            clip(gradient, config.clip_norm)
            into.copy_(gradient)
            pushed = math.nan if config.nonfinite == "drop" and not is_finite(gradient) else loss
            self._there[learner_id] = (mu, pushed)
