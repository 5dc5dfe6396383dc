"""Parts of a model that compute, for a real rank, all virtual ranks, or a replay."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mpisgd.base.draws import kept
from mpisgd.base.errors import ConfigError
from mpisgd.comm.communicator import Group
from mpisgd.config import Config
from mpisgd.data import DataSet
from mpisgd.data.sampling import Sampling
from mpisgd.evaluator import EarlyStopping, Evaluator, OnEvaluation, StagedEvaluator
from mpisgd.exchange.evaluator_channel import EvaluatorChannel
from mpisgd.exchange.roles import Role, Roles
from mpisgd.gradient import stages
from mpisgd.gradient.gradient import Gradient
from mpisgd.gradient.measure import Unmeasured, batch_norm_policy, batch_norms
from mpisgd.gradient.objective import Loss, Objective, OwnStep, function_of, scalar
from mpisgd.job import parts
from mpisgd.job.parts import Meta, UserObjects
from mpisgd.models.in_pieces import InPieces, Needed
from mpisgd.models.interleaved import Dealt
from mpisgd.models.partition import Partition
from mpisgd.models.partitioned import Partitioned
from mpisgd.pipeline import balance, partitioned_gradient
from mpisgd.pipeline.micro_batches import Pieces, StagePasses, make_passes, output_shapes
from mpisgd.pipeline.partitioned_gradient import PartitionedGradient, PartitionGradient, joined, kind_of_gradient
from mpisgd.pipeline.rounds import Rounds
from mpisgd.pipeline.stage_messages import WireLinks
from mpisgd.records.best import Best
from mpisgd.records.checkpoint.buffers import Given
from mpisgd.records.checkpoint.snapshots import Snapshots
from mpisgd.records.log import schema
from mpisgd.records.log.progress import Evaluations
from mpisgd.records.log.writer import EvaluatorLog
from mpisgd.update.device_update import DeviceUpdate, make_update
from mpisgd.update.groups import Segment, within
from mpisgd.update.slice_update import SliceUpdate
from mpisgd.vectors.computing import Charges, Copied
from mpisgd.vectors.cut import Stages, cut_between_pieces, cut_into_stages
from mpisgd.vectors.flat import FlatModel
from mpisgd.vectors.kept_state import Turns, check_saving, state_kept
from mpisgd.vectors.memory import Memory, host_vector, host_view

EVALUATOR = -1
"""Number of the evaluating rank."""


def _nothing() -> None:
    """Do nothing: a rank with its own model takes no turns."""


@dataclass
class Tensors:
    """The parts.

    Attributes:
        shard_device: "cpu", or a rank's GPU.
        evaluated: snapshots are evaluated, not only pulled.
        evaluator: makes the evaluator of a whole model.
        metrics: of an own step, after `check`.
        dealt: exchanges of a model's pieces (`dealt_between`), after `check`.
        own: this rank's piece of each layer, as a model, after first use.
        turns: of virtual ranks with this model in common.
    """

    config: Config
    meta: Meta
    loss: Objective
    model: FlatModel
    sampling: Sampling
    data: DataSet | None
    shard_device: str = "cpu"
    evaluated: bool = True
    evaluator: Callable[..., Evaluator] = Evaluator
    metrics: tuple[str, ...] = ()
    dealt: Sequence[Sequence[Dealt]] = ()
    own: FlatModel | None = None
    rules: int = schema.RULES
    turns: Turns | None = None

    @classmethod
    def load(
        cls, config: Config, user_objects: UserObjects, data: DataSet, ranks: int, rules: int = schema.RULES, device: str = "cpu"
    ) -> Tensors:
        meta = parts.meta_of(data, config)
        model, loss = parts.build_model(config, meta, user_objects, device, rules=rules), parts.load_loss(config, user_objects)
        return cls(config, meta, loss, model, parts.make_sampling(config, meta, ranks), data, rules=rules)

    @property
    def facts(self) -> dict[str, Any]:
        policy = batch_norm_policy(self.model.module, self.config, self.meta.train_samples)
        bounds = parts.bounds(self.config, self.model, self.rules)
        return parts.facts_of_model(self.config, self.model.layers, bounds, policy)

    @cached_property
    def segments(self) -> list[Segment]:
        return parts.segments_of(self.config, self.model)

    @cached_property
    def stages(self) -> Stages | None:
        return parts.stages_of(self.config, self.model)

    @property
    def in_pieces(self) -> InPieces | None:
        """The model, if not whole on this rank."""
        module = self.model.module
        return module if isinstance(module, InPieces) and not module.whole else None

    @property
    def partly(self) -> Partitioned | None:
        """The model, if this rank has only a piece of each layer."""
        module = self.model.module
        return module if isinstance(module, Partitioned) and not module.whole else None

    def gradient(self, number: int, memory: Memory | None = None) -> Gradient:
        """Return a gradient of the whole model; for a batch, draws depend on the portion alone."""
        assert self.data is not None
        number = 0 if self.config.protocol.batch else number
        kind = kind_of_gradient(self.config, self.model, self.stages)
        kind = partial(kind, tell_skipped=self.config.moves_at_zero and self.rules > 5, take_turn=turn_of(self, number))
        return stages.make_gradient(self.config, self.model, self.loss, self.data, self.sampling, number, memory, kind)

    def passes(self, number: int, stage: int) -> StagePasses:
        assert self.data is not None
        return make_passes(self.config, self._taken_out(stage), self.loss, self.data, self.sampling, number, stage)

    def of_piece(self, number: int, place: int, links: WireLinks | Rounds, group: Group | None = None) -> PartitionGradient:
        assert self.data is not None
        model, others = self._own(place), (self.loss, self.data.train, self.sampling)
        return partitioned_gradient.make_gradient(self.config, model, self.partition(place), links, group, *others, number=number)

    def partition(self, place: int) -> Partition:
        assert isinstance(self.model.module, Partitioned)
        return self.model.module.partitions[place]

    def _own(self, place: int) -> FlatModel:
        if self.own is None:
            self.own = self._taken_out(place)
            if self.partly is not None:
                self.model.forget()
        return self.own

    def _taken_out(self, stage: int) -> FlatModel:
        """Return a stage; its parameters leave the model until evaluation."""
        assert self.stages is not None
        return self.stages.model_of(self.model, stage, self.config.memory_format, self.config.autocast)

    def check(self, number: int = 0) -> float:
        """Return the loss of the first mini-batch, after all checks. Raises ConfigError, DataError.

        `number`: of this rank's stream of mini-batches.
        """
        assert self.data is not None
        _ = self.segments
        parts.check_stream(self.config, self.data.train, self.sampling, number)
        if self.in_pieces is not None:
            return math.nan  # `check_pieces_fit` looks at shapes
        check_saving(self.model.module)
        loss = parts.check_first_batch(self.config, self.meta, self.model, self.gradient(0), twice=number == 0)
        self.dealt = dealt_between(self.model, self.gradient(0))
        self.metrics = parts.check_metrics(self.config, self.model, self.loss, self.data)
        self.data.train.forget()
        return loss

    def check_pieces_fit(self) -> None:
        """Check shapes of pieces, data and loss, if no rank has the whole model. Raises ConfigError.

        For a single rank: torch's imports take 75 MB, and seconds.
        """
        if (pieces := self.in_pieces) is not None:
            assert self.data is not None and self.stages is not None and not isinstance(self.loss, OwnStep)  # a step has no stages
            _check_shapes(self.config, self.meta, pieces, self.stages, self.loss, self.data)

    def update(
        self,
        bounds: tuple[int, int],
        gradients_per_update: float,
        *,
        streamed: int = 0,
        direct: bool = False,
        charges: Charges | None = None,
    ) -> SliceUpdate:
        """Return a slice's update; `streamed`: in so many chunks, `direct`: MPI takes GPU memory, `charges`: of a virtual shard."""
        kind: Callable[..., SliceUpdate] | None = partial(SliceUpdate, streamed=streamed) if streamed else None
        if charges is not None:  # all ranks are in this process: no copies for MPI
            kind = partial(kind or (DeviceUpdate if direct else SliceUpdate), charges=charges)
        if self.rules < 6:
            kind = partial(kind or SliceUpdate, fused=True)
        if self.rules < 7 and streamed:
            kind = partial(kind or SliceUpdate, measured=False)
        return make_update(
            self.config,
            self.model.weights[slice(*bounds)],
            gradients_per_update=gradients_per_update,
            train_samples=self.meta.train_samples,
            device=self.shard_device,
            direct=direct,
            segments=[] if self.config.local_steps else list(within(self.segments, *bounds)),  # segments are of own steps
            kind=kind,
        )

    def snapshots(self, path: Path, update: Copied, resumed: Sequence[Sequence[float]]) -> Snapshots:
        every, vectors = self.config.evaluation.every_epochs, 1 if update.averaged is None else 2
        return Snapshots(path, every_epochs=every, vectors=vectors, size=len(update.weights), resumed=resumed)

    def evaluate(
        self,
        channel: Callable[..., EvaluatorChannel],
        log: EvaluatorLog,
        begins: tuple[int, np.ndarray],
        progress: Any,
        on_evaluation: Sequence[OnEvaluation] = (),
        of_piece: Callable[..., Evaluator] | None = None,
    ) -> None:
        """Evaluate all snapshots.

        Args:
            channel: called with the memory to pull into: `weights`, `averaged`.
            begins: first number, and earlier rows of `evaluations`.
            of_piece: makes the evaluator of a piece, if a group evaluates together.
        """
        config, options, data = self.config, self.config.evaluation, self.data
        assert data is not None
        pieces, model = self.in_pieces, self.own if of_piece is not None else self._whole()
        assert model is not None
        measure = parts.make_measure(config, model, self.loss, data) if self.evaluated else Unmeasured()
        vectors = 2 if config.averaging > 0 else 1
        pulled = [host_vector(model.size) for _ in range(vectors)]  # of a model in pieces, never touched
        if of_piece is not None:
            pulled[0] = model.weights
        # Initial, periodic and last weights.
        snapshots = 2 + math.floor(config.epochs / options.every_epochs if options.every_epochs > 0 else 0.0)
        splits = [data.part(part) for part in config.evaluated]
        batches = len(pulled) * sum(math.ceil(len(each) / (each.loaded_in or options.batch)) for each in splits)
        asks = channel(weights=host_view(pulled[0]), averaged=host_view(pulled[1]) if len(pulled) > 1 else None)
        shown = Evaluations(progress, snapshots, batches, config.log.progress_s, "" if config.step else config.loss)
        kind = of_piece or self.evaluator
        if pieces is not None:
            assert self.stages is not None
            own: dict[str, Any] = {"stages": self.stages, "pieces": pieces, "loss": self.loss, "data": data}
            kind = partial(StagedEvaluator, **own, batch=options.batch, seed=config.seed, vectors=vectors)
        given = Given(model.module, Path(config.out), turn_of(self, EVALUATOR)) if config.hands_state_on else None
        evaluator = kind(
            asks,
            model,
            pulled,
            measure,
            log,
            evaluated=config.evaluated,
            train_samples=self.meta.train_samples,
            progress=shown,
            given=given,
            after_training=not config.evaluator and self.in_pieces is None and of_piece is None,
        )
        first, before = begins
        callbacks: list[OnEvaluation] = []
        if options.best and self.evaluated:
            callbacks.append(Best(options, Path(config.out) / schema.BEST).offer)
        if options.patience and self.evaluated:
            callbacks.append(EarlyStopping(options, before, asks, shown))
        evaluator.evaluate_all(Path(config.out) / schema.WEIGHTS, first, [*callbacks, *on_evaluation])

    def _whole(self) -> FlatModel:
        """Return the model for evaluation: the whole, if any rank has it."""
        if (partly := self.partly) is not None:
            partly.complete()
            self.model, self.own = FlatModel(partly, self.config.memory_format, autocast=self.config.autocast), None
        elif self.stages is not None and self.in_pieces is None:
            self.model.reclaim()
        return self.model


def turn_of(tensors: Tensors, number: int) -> Callable[[], None]:
    """Return a call that gives the model a rank's state."""
    return _nothing if tensors.turns is None else partial(tensors.turns.take, number)


def check_piece(tensors: Tensors, place: int, rounds: Rounds, number: int = 0) -> float:
    """Check a rank's piece as `Tensors.check`, with its group."""
    config, data, partition = tensors.config, tensors.data, tensors.partition(place)
    assert data is not None
    parts.check_stream(config, data.train, tensors.sampling, number)
    gradient = tensors.of_piece(0, place, rounds)
    assert tensors.own is not None
    with joined(tensors.own.module, partition, rounds):
        loss = parts.check_first_batch(config, tensors.meta, tensors.own, gradient)
    check_backward(tensors.own, gradient)
    with joined(tensors.own.module, partition, rounds):
        tensors.metrics = parts.check_metrics(config, tensors.own, tensors.loss, data)
    data.train.forget()
    return loss


def check_pieces(config: Config, module: nn.Module) -> None:
    """Raise ConfigError for options that want the whole model on a rank."""
    if not isinstance(module, InPieces) or module.whole:
        return
    beside = "beside a list of factories (no rank makes all pieces)"
    if config.init_from:
        raise ConfigError(f"init_from = {config.init_from!r}: expected none {beside}: the file is of a whole model")
    if config.evaluation.best:
        raise ConfigError(f"evaluation.best = {config.evaluation.best!r}: expected '' {beside}: these would be all weights at once")
    if config.buffers_evaluated == "recalibrate" and batch_norms(module):
        buffers = config.evaluation.buffers
        raise ConfigError(f"evaluation.buffers = {buffers!r}: expected 'initial' {beside}, for a model with batch norm")
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            raise ConfigError(f"model: parameter {name} is frozen, expected trainable parameters {beside}")


def _check_shapes(config: Config, meta: Meta, module: InPieces, stages: Stages, loss: Loss, data: DataSet) -> None:
    """Check shapes without values (`parts.check_first_batch`). Raises ConfigError.

    Models that need values (an `if`) are not checked; only training tells whether the loss is finite.
    """
    inputs, targets = parts.first_micro_batch(config, data)
    where = f"the first micro-batch, inputs of shape {(config.mu // config.micro_batches, *meta.input_shape)}"
    try:
        output = output_shapes(stages.runs(module.skeleton()), inputs)
        if isinstance(output, Tensor) and isinstance(targets, Tensor):
            try:
                scalar(loss(output, targets.to("meta")), "loss")
            except (*parts.WRONG, AttributeError) as error:
                if _wants_values(error):
                    return
                raise parts.failing_loss(where, output, targets, error) from error
    except ConfigError as error:  # of a later stage
        if error.__cause__ is None or not _wants_values(error.__cause__):
            raise
    except parts.WRONG as error:
        if not _wants_values(error):
            raise parts.failing_model(where, error) from error


def _wants_values(error: BaseException) -> bool:
    return isinstance(error, NotImplementedError) or "meta" in str(error)


def stage_of(roles: Roles, stages: Stages, rank: int) -> int:
    role = roles.of(rank)
    if role is Role.SHARD:
        return stages.of_shard(roles.index(rank))
    return roles.stage(rank) if role is Role.LEARNER else -1


def pieces_needed_by(config: Config, roles: Roles, rank: int) -> Needed | None:
    """Return the pieces that a rank needs; None = all.

    Of pieces at work together, the evaluator needs all, as does any rank with `init_from`.
    """
    if not config.in_groups or (config.partitioned and (config.init_from or roles.of(rank) is Role.EVALUATOR)):
        return None

    def needed(skeleton: nn.Sequential) -> range:
        if config.partitioned:
            stages = cut_between_pieces(skeleton, config.shards)
        else:
            stages = cut_into_stages(skeleton, config.group_size, config.shards, config.stages.at)
        stage = stage_of(roles, stages, rank)
        return range(0) if stage < 0 else stages.children[stage]

    return needed


def stages_begin_at(config: Config, meta: Meta, user_objects: UserObjects, data: DataSet, loss: Objective) -> tuple[str, ...]:
    """Return `stages.at` for stages even in measured seconds of a micro-batch.

    Of a list of factories, a single piece exists at a time. Raises ConfigError, DataError.
    """
    assert not isinstance(loss, OwnStep)  # a step goes with no stages
    module = parts.make_module(config, meta, user_objects, needed=lambda _: ())
    inputs, targets = parts.first_micro_batch(config, data)

    def child(at: int) -> nn.Module:
        return module.make(at) if isinstance(module, InPieces) else list(module._modules.values())[at]  # type: ignore[return-value]

    with kept():
        return balance.begun_at(config, module, child, inputs, targets, loss)


def with_measured_stages(config: Config, user_objects: UserObjects) -> Config:
    """Measure the stages of a virtual cluster. Raises ConfigError, DataError."""
    if not balance.measures_stages(config):
        return config
    data = parts.load_data(config, user_objects)
    names = stages_begin_at(config, parts.meta_of(data), user_objects, data, parts.load_loss(config, user_objects))
    return balance.with_stages_at(config, names)


def crossing_nbytes(model: FlatModel, gradient: Gradient) -> list[int]:
    """Return bytes from each stage to the next, of a micro-batch."""
    if not isinstance(gradient, Pieces):
        return []
    with state_kept(model.module, function_of(gradient.objective)), torch.no_grad():
        gradient.prepare(0)
        gradient.output(0)
    return gradient.crossed


def dealt_between(model: FlatModel, gradient: Gradient) -> list[list[Dealt]]:
    """Return the exchanges of a model's pieces in a micro-batch. Raises as `check_backward`."""
    if not isinstance(gradient, PartitionedGradient):
        return []
    check_backward(model, gradient)
    return gradient.dealt


def check_backward(model: FlatModel, gradient: Gradient) -> None:
    """Compute the first gradient, and leave the model as it was.

    Raises ConfigError if this fails, or pieces disagree in calls or loss.
    """
    with state_kept(model.module, function_of(gradient.objective)):
        try:
            gradient.compute(0)
        except parts.WRONG as error:
            raise parts.failing_model("the first mini-batch, forward and backward", error) from error
