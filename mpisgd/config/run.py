"""Options of a run's course: stragglers, evaluation, log, checkpoints, faults."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from mpisgd.base.checks import at_least, require
from mpisgd.config.data import Part


@dataclass(frozen=True)
class StragglerOptions:
    """Stragglers put in on purpose. A delay depends on (seed, learner_id, seq) alone."""

    slowdown: dict[int, float] = field(default_factory=dict)
    """Slow learners down: learner_id factor learner_id factor ... Mini-batches take factor (>= 1) times as long."""
    delay: Literal["none", "constant", "normal", "exponential", "lognormal", "pareto"] = "none"
    """Delay every mini-batch. pareto has a heavy tail."""
    delay_mean_s: float = 0.01
    """Mean delay, in seconds."""
    delay_spread: float = 1.0
    """Spread of delays. normal: deviation/mean; lognormal: sigma of the logarithm; pareto: shape (> 1; small = heavy)."""
    delay_probability: float = 1.0
    """Share of delayed mini-batches, 0 to 1."""
    pause_learner: int = -1
    """Let this learner pause now and then; -1 = none."""
    pause_every: int = 100
    """Mini-batches between pauses."""
    pause_s: float = 1.0
    """Seconds of a pause."""
    rest_mean_s: float = 0.0
    """Mean of a further delay of each mini-batch, in seconds. No slowdown multiplies it. `plan` sets the mean to a cycle's seconds
    besides computing and messages."""
    rest_deviation_s: float = 0.0
    """Standard deviation of the further delay, in seconds; 0 = constant. Log-normal."""

    def __post_init__(self) -> None:
        at_least(self, "straggler.", delay_mean_s=0, delay_spread=0, delay_probability=0, pause_every=1, pause_s=0)
        at_least(self, "straggler.", rest_mean_s=0, rest_deviation_s=0)
        some = self.rest_mean_s > 0 or self.rest_deviation_s == 0
        require(some, "straggler.rest_deviation_s", self.rest_deviation_s, "0, or straggler.rest_mean_s above 0")
        require(self.delay_probability <= 1, "straggler.delay_probability", self.delay_probability, "at most 1")
        require(
            self.delay != "pareto" or self.delay_spread > 1,
            "straggler.delay_spread",
            self.delay_spread,
            "a shape above 1 for pareto (at 1 the mean is infinite)",
        )
        for learner_id, factor in self.slowdown.items():
            require(factor >= 1 and math.isfinite(factor), f"straggler.slowdown[{learner_id}]", factor, "a factor >= 1")

    @property
    def active(self) -> bool:
        return bool(self.slowdown) or self.delay != "none" or self.pause_learner >= 0 or self.rest_mean_s > 0


@dataclass(frozen=True)
class StagesOptions:
    """Cuts of a model into a group's stages."""

    at: tuple[str, ...] = ()
    """Begin stages at these modules, by name: group_size - 1. Of a torch.nn.Sequential or list: children, like "2". Of any other
    model, like "layers.2": torch.distributed.pipelining cuts there, tracing a micro-batch by torch.export."""
    balance: Literal["parameters", "seconds"] = "parameters"
    """Balance stages by this, without `at`. seconds: learner 0 first measures each child of the model, forward and backward over a
    micro-batch; the run's config.toml then has `at`, for the same cuts in resume and replay."""

    def __post_init__(self) -> None:
        require(len(set(self.at)) == len(self.at), "stages.at", list(self.at), "each name once")


ON_VALIDATION = "validation_"
"""Prefix of measures on samples set aside."""


@dataclass(frozen=True)
class EvaluationOptions:
    """Evaluation of snapshots. Learners and shards never wait."""

    every_epochs: float = 1.0
    """Epochs between snapshots; 0 = none. The last weights are always evaluated."""
    train: bool = False
    """Measure loss and error on training data, too."""
    batch: int = 500
    """Samples per evaluation batch."""
    buffers: Literal["learner", "recalibrate", "initial"] = "learner"
    """Batch-norm statistics to evaluate and save. learner: all buffers of learner 0, at its first pull of the weights. recalibrate:
    measured at the weights, on random training mini-batches by the seed; other buffers are learner 0's. initial: the factory's."""
    recalibrate_batches: int = 20
    """Mini-batches to recalibrate with, of `batch` samples. All distinct: 10,000 by default, or all if fewer."""
    best: str = ""
    """Keep the best weights by error, loss or a metric. The run's best.pt has the best on test data, of weights or average; with
    validation_ before the name, on samples set aside (`data.validation`)."""
    higher: bool = False
    """Higher values of `best` are better."""
    patience: int = 0
    """End training after this many evaluations without a better `best`; 0 = never. Needs evaluator = true, since later evaluation
    ends nothing. The final weights are evaluated, too."""
    min_delta: float = 0.0
    """Better, for `patience`, is by more than this."""

    def __post_init__(self) -> None:
        at_least(self, "evaluation.", every_epochs=0, batch=1, recalibrate_batches=1, patience=0, min_delta=0)
        if self.patience > 0:
            expected = "error, loss or a metric beside evaluation.patience > 0"
            require(bool(self.best), "evaluation.best", self.best, expected)
            require(self.every_epochs > 0, "evaluation.every_epochs", self.every_epochs, "above 0 beside evaluation.patience > 0")

    @property
    def judged(self) -> tuple[Part, str]:
        """Samples and measure of `best`."""
        name = self.best.removeprefix(ON_VALIDATION)
        return (Part.TEST if name == self.best else Part.VALIDATION), name


@dataclass(frozen=True)
class LogOptions:
    """Run log (HDF5) and progress line."""

    enabled: bool = True
    """Write the run log. Without: no report, no proof."""
    flush_rows: int = 256
    """Flush a shard's file after this many rows."""
    flush_s: float = 2.0
    """Flush a shard's file after this many seconds."""
    progress: Literal["auto", "bar", "plain", "off"] = "auto"
    """Show progress: a bar, lines, or none. auto: a bar on a terminal, lines elsewhere."""
    progress_s: float = 10.0
    """Seconds between plain lines."""
    quiet_s: float = 60.0
    """Name a rank's wait after this many seconds; 0 = never. Again after twice, four times as long, and so on."""

    def __post_init__(self) -> None:
        at_least(self, "log.", flush_rows=1, flush_s=0, progress_s=0, quiet_s=0)


@dataclass(frozen=True)
class CheckpointOptions:
    """Checkpoints for `mpisgd train --resume`. Virtual jobs have none: run the job again."""

    every_updates: int = 0
    """Updates between checkpoints; 0 = at signals only. Shards write at multiples of their clock (sandblaster: at the end of the
    iteration that reaches a multiple). An interrupting signal always causes a checkpoint."""
    partner_updates: int = 0
    """Updates between in-memory copies of each shard's state, on its node and a partner's; 0 = off. `--resume` takes newer copies:
    a lost node costs little, without writing the run's directory every minute. A divisor of `every_updates`, or `every_updates` is
    0."""
    keep: int = 2
    """Keep this many complete checkpoints. Checkpoints resumed from are kept, too."""

    def __post_init__(self) -> None:
        at_least(self, "checkpoint.", every_updates=0, partner_updates=0, keep=1)
        fits = self.partner_updates == 0 or self.every_updates % self.partner_updates == 0
        expected = f"a divisor of checkpoint.every_updates = {self.every_updates}, or 0"
        require(fits, "checkpoint.partner_updates", self.partner_updates, expected)

    @property
    def regular(self) -> bool:
        """Checkpoints or copies in memory come at regular clocks, without a signal."""
        return self.every_updates > 0 or self.partner_updates > 0


@dataclass(frozen=True)
class FaultOptions:
    """Learners that die or hang. Virtual jobs: `failures`."""

    mode: Literal["auto", "tolerant", "fail-fast"] = "auto"
    """Go on without dead learners, or end the job. auto: go on if possible. tolerant needs an MPI that reports failures (Open MPI
    5: `mpirun --with-ft ulfm`), and learners neither shards nor in teams."""
    patience_s: float = 60.0
    """Seconds of silence until a rank is given up. Silent is a stopped or cut-off rank, not a computing one. fail-fast: the job
    ends, as in any mode for a silent shard, or if nobody is left to go on. tolerant: a learner that owes a push or pull for longer
    is excluded until it asks for weights again; allow more than any mini-batch."""

    def __post_init__(self) -> None:
        require(math.isfinite(self.patience_s) and self.patience_s > 0, "faults.patience_s", self.patience_s, "seconds > 0")
