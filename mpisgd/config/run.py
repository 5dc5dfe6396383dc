"""Choices of how a run goes: stragglers, evaluation, log, checkpoints, faults."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from mpisgd.base.checks import at_least, require
from mpisgd.config.data import Part


@dataclass(frozen=True)
class StragglerOptions:
    """Stragglers put in on purpose. The delay of learner l at mini-batch seq depends on (seed, l, seq) alone."""

    slowdown: dict[int, float] = field(default_factory=dict)
    """Slow learners down: learner_id factor learner_id factor ... A mini-batch takes factor (>= 1) times as long."""
    delay: Literal["none", "constant", "normal", "exponential", "lognormal", "pareto"] = "none"
    """Delay every mini-batch. The tail of pareto is heavy."""
    delay_mean_s: float = 0.01
    """Mean of that delay, in seconds."""
    delay_spread: float = 1.0
    """Spread of that delay. normal: deviation/mean; lognormal: sigma of the logarithm; pareto: shape (> 1; small = heavy)."""
    delay_probability: float = 1.0
    """Share of mini-batches that are delayed, 0 to 1."""
    pause_learner: int = -1
    """Let this learner pause now and then; -1 = none."""
    pause_every: int = 100
    """Mini-batches from one pause to the next."""
    pause_s: float = 1.0
    """Length of a pause, in seconds."""
    rest_mean_s: float = 0.0
    """Mean of one more delay of every mini-batch, in seconds. No slowdown multiplies it. `plan` sets it to what a cycle takes
    besides computing and messages."""
    rest_deviation_s: float = 0.0
    """Standard deviation of that, in seconds; 0 = constant. Log-normal."""

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
            "a shape above 1 for pareto (its mean is infinite at 1)",
        )
        for learner_id, factor in self.slowdown.items():
            require(factor >= 1 and math.isfinite(factor), f"straggler.slowdown[{learner_id}]", factor, "a factor >= 1")

    @property
    def active(self) -> bool:
        return bool(self.slowdown) or self.delay != "none" or self.pause_learner >= 0 or self.rest_mean_s > 0


@dataclass(frozen=True)
class StagesOptions:
    """Where a model is cut into the stages of a group."""

    at: tuple[str, ...] = ()
    """Begin stages at these modules of the model, by name: one less than group_size. Of a torch.nn.Sequential, or a list: names of
    its children, "2" say. Any other model is cut by torch.distributed.pipelining before them, "layers.2" say: it traces a
    micro-batch with torch.export."""
    balance: Literal["parameters", "seconds"] = "parameters"
    """Balance stages by this, where `at` does not say where they begin. seconds: learner 0 measures each child of the model before
    the run, in one micro-batch, forward and backward; the run's config.toml then has `at`, so that resume and replay cut alike."""

    def __post_init__(self) -> None:
        require(len(set(self.at)) == len(self.at), "stages.at", list(self.at), "each name once")


ON_VALIDATION = "validation_"
"""Before the name of what is found on samples set aside."""


@dataclass(frozen=True)
class EvaluationOptions:
    """Evaluation of snapshots. Learners and shards never wait for it."""

    every_epochs: float = 1.0
    """Epochs between snapshots; 0 = evaluate only the last weights. Those are always evaluated."""
    train: bool = False
    """Measure loss and error on the training data, too."""
    batch: int = 500
    """Samples per evaluation batch."""
    buffers: Literal["learner", "recalibrate", "initial"] = "learner"
    """Whose batch-norm statistics are evaluated, and saved. learner: all buffers are learner 0's, as of when it first pulled these
    weights. recalibrate: batch norm's are measured at the weights, on training mini-batches that are drawn at random by the seed,
    the others are learner 0's. initial: batch norm's are as the factory made them."""
    recalibrate_batches: int = 20
    """Mini-batches to recalibrate with, of `batch` samples. They are distinct: 10,000 samples by default, or all if there
    are fewer."""
    best: str = ""
    """Keep the best weights by error, loss or a metric. They are in best.pt of the run's directory: those of the best evaluation
    on test data, of the weights or of their average; with validation_ before the name, on samples set aside (`data.validation`)."""
    higher: bool = False
    """Higher values of `best` are better."""
    patience: int = 0
    """End training after so many evaluations that were no better; 0 = never. By `best`. It needs evaluator = true: who evaluates
    after training can end nothing. The weights that there are then are evaluated, too."""
    min_delta: float = 0.0
    """Better, for `patience`, is better by more than this."""

    def __post_init__(self) -> None:
        at_least(self, "evaluation.", every_epochs=0, batch=1, recalibrate_batches=1, patience=0, min_delta=0)
        if self.patience > 0:
            expected = "error, loss or a metric beside evaluation.patience > 0"
            require(bool(self.best), "evaluation.best", self.best, expected)
            require(self.every_epochs > 0, "evaluation.every_epochs", self.every_epochs, "above 0 beside evaluation.patience > 0")

    @property
    def judged(self) -> tuple[Part, str]:
        """On which samples `best` judges, and by what."""
        name = self.best.removeprefix(ON_VALIDATION)
        return (Part.TEST if name == self.best else Part.VALIDATION), name


@dataclass(frozen=True)
class LogOptions:
    """Run log (HDF5) and progress line."""

    enabled: bool = True
    """Write the run log. Without it there is no report, and no proof."""
    flush_rows: int = 256
    """Flush a shard's file after this many rows."""
    flush_s: float = 2.0
    """Flush a shard's file after this many seconds."""
    progress: Literal["auto", "bar", "plain", "off"] = "auto"
    """Show progress: a bar, lines, or none. auto: a bar on a terminal, lines elsewhere."""
    progress_s: float = 10.0
    """Seconds between plain lines."""
    quiet_s: float = 60.0
    """Say what a rank waits for after so many seconds; 0 = never. Again after twice the time, four times, and so on."""

    def __post_init__(self) -> None:
        at_least(self, "log.", flush_rows=1, flush_s=0, progress_s=0, quiet_s=0)


@dataclass(frozen=True)
class CheckpointOptions:
    """Checkpoints, from which `mpisgd train --resume` goes on. Virtual jobs write none: run them again."""

    every_updates: int = 0
    """Write a checkpoint every so many updates; 0 = at signals only. Each shard writes its slice when its clock is a multiple
    (sandblaster: at the end of the iteration that comes to one); a signal that interrupts the run leads to one in any case."""
    partner_updates: int = 0
    """Keep each shard's newest state in memory besides, on its node and on a partner's, every so many updates; 0 = off. `--resume`
    takes it where it is newer: a node may be lost, and little was computed in vain, without a checkpoint in the run's directory
    every minute. `every_updates` is a multiple of it, or 0."""
    keep: int = 2
    """Keep this many complete checkpoints. Those that the run was continued from are kept besides."""

    def __post_init__(self) -> None:
        at_least(self, "checkpoint.", every_updates=0, partner_updates=0, keep=1)
        fits = self.partner_updates == 0 or self.every_updates % self.partner_updates == 0
        expected = f"a divisor of checkpoint.every_updates = {self.every_updates}, or 0"
        require(fits, "checkpoint.partner_updates", self.partner_updates, expected)

    @property
    def regular(self) -> bool:
        """Checkpoints or states on nodes come at regular clocks, without a signal."""
        return self.every_updates > 0 or self.partner_updates > 0


@dataclass(frozen=True)
class FaultOptions:
    """Learners that die or hang. Virtual jobs have `failures`."""

    mode: Literal["auto", "tolerant", "fail-fast"] = "auto"
    """Go on without learners that die, or end the job. auto: go on where that can be. tolerant needs an MPI that tells of
    failures (Open MPI 5: `mpirun --with-ft ulfm`), and learners that are neither shards nor in teams."""
    patience_s: float = 60.0
    """Seconds of silence after which a rank is given up. A rank is silent when it is stopped or its link is down, not while it
    computes. fail-fast: the job ends, as it does in any mode for a silent shard, and where all are silent who could go on.
    tolerant: a learner that owes a push or a pull for longer is excluded, until it asks for weights again; give more than a
    mini-batch ever takes."""

    def __post_init__(self) -> None:
        require(math.isfinite(self.patience_s) and self.patience_s > 0, "faults.patience_s", self.patience_s, "seconds > 0")
