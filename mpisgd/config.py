"""Options of a run: one frozen dataclass per component, nested in `Config`.

The first sentence of each field's text is what `--help` shows; the text says its unit and source. A component that comes in kinds
(protocol, model, data, optimizer, schedule) has one dataclass per kind and a table from the kind's name to it; `config_file.py`
reads them from TOML, `cli/` from the command line. Checks that need no other component are made here, when the dataclass is made;
the rest in `mpisgd.run`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mpisgd import hints
from mpisgd.checks import at_least, require
from mpisgd.config_virtual import (
    COMPUTE,
    ComputeOptions,
    ConstantComputeOptions,
    FailureOptions,
    NetworkOptions,
    ServiceOptions,
    VirtualOptions,
)
from mpisgd.errors import ConfigError
from mpisgd.protocols import PROTOCOLS, HardsyncOptions, OwnProtocolOptions, ProtocolOptions

# ------------------------------------------------------------------------------------------------------------- models


@dataclass(frozen=True)
class SoftmaxOptions:
    """Softmax regression: one fully connected layer."""


@dataclass(frozen=True)
class MlpOptions:
    """Multi-layer perceptron with ReLU."""

    hidden: tuple[int, ...] = (128,)
    """Units of each hidden layer."""
    batch_norm: bool = False
    """Add batch normalisation after each hidden layer."""

    def __post_init__(self) -> None:
        require(all(units >= 1 for units in self.hidden), "model.hidden", self.hidden, "positive numbers of units")


@dataclass(frozen=True)
class SmallCnnOptions:
    """Two 3x3 convolutions and one fully connected layer, for tiny images such as the 8x8 digits."""

    channels: tuple[int, int] = (16, 32)
    """Output channels of the two convolutions."""

    def __post_init__(self) -> None:
        require(all(channels >= 1 for channels in self.channels), "model.channels", self.channels, "positive numbers")


@dataclass(frozen=True)
class MnistCnnOptions:
    """The 4-layer 3x3 CNN with weight normalisation of [Chen16 A.1]."""


@dataclass(frozen=True)
class Cifar10FullOptions:
    """Caffe's cifar10_full: 5x5 convolutions of 32, 32, 64 and one fully connected layer, 89,578 parameters [Zhang16 4.1]."""


@dataclass(frozen=True)
class AlexNetOptions:
    """AlexNet for inputs of the ImageNet shape, near the 72 M parameters (289 MB) of [Zhang16 4.1]."""


@dataclass(frozen=True)
class CustomModelOptions:
    """The user's own model, from a factory."""

    factory: str = ""
    """package.module:factory, a callable that returns a torch.nn.Module."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory."""


ModelOptions = (
    SoftmaxOptions | MlpOptions | SmallCnnOptions | MnistCnnOptions | Cifar10FullOptions | AlexNetOptions | CustomModelOptions
)
MODELS: Mapping[str, type] = {
    "softmax": SoftmaxOptions,
    "mlp": MlpOptions,
    "small_cnn": SmallCnnOptions,
    "mnist_cnn": MnistCnnOptions,
    "cifar10_full": Cifar10FullOptions,
    "alexnet": AlexNetOptions,
    "custom": CustomModelOptions,
}


# --------------------------------------------------------------------------------------------------------------- data


@dataclass(frozen=True)
class DigitsOptions:
    """The 1,797 real 8x8 handwritten digits that scikit-learn carries; needs no files."""

    subtract_mean: bool = True
    """Subtract the per-pixel mean of the training inputs [Zhang16 4.1]."""


@dataclass(frozen=True)
class MnistOptions:
    """MNIST in its authors' four IDX files (plain or .gz), below <data-dir>/mnist."""

    subtract_mean: bool = True
    """Subtract the per-pixel mean of the training inputs [Zhang16 4.1]."""


@dataclass(frozen=True)
class FashionMnistOptions:
    """Fashion-MNIST in its authors' four IDX files (plain or .gz), below <data-dir>/fashion_mnist."""

    subtract_mean: bool = True
    """Subtract the per-pixel mean of the training inputs [Zhang16 4.1]."""


@dataclass(frozen=True)
class Cifar10Options:
    """CIFAR-10 in its binary batches, below <data-dir>/cifar10 (folder or tar.gz)."""

    subtract_mean: bool = True
    """Subtract the per-pixel mean of the training inputs [Zhang16 4.1]."""


@dataclass(frozen=True)
class Hdf5Options:
    """Any HDF5 file with inputs and targets."""

    path: str = ""
    """Path of the file. Relative paths are looked for below <data-dir>, too."""
    train_inputs: str = "train/inputs"
    """Data set of the training inputs, first axis = sample."""
    train_targets: str = "train/targets"
    """Data set of the training targets, one integer class (or float vector) per sample."""
    test_inputs: str = "test/inputs"
    """Data set of the test inputs."""
    test_targets: str = "test/targets"
    """Data set of the test targets."""
    subtract_mean: bool = False
    """Subtract the per-pixel mean of the training inputs [Zhang16 4.1]."""


@dataclass(frozen=True)
class SyntheticOptions:
    """Random inputs of a given shape with learnable classes, for timing and tests; a function of the seed."""

    shape: tuple[int, ...] = (3, 32, 32)
    """Shape of one input."""
    classes: int = 10
    """Number of classes."""
    samples: int = 4096
    """Training samples."""
    test_samples: int = 512
    """Test samples."""

    def __post_init__(self) -> None:
        at_least(self, "data.", classes=2, samples=1, test_samples=0)
        require(all(size >= 1 for size in self.shape), "data.shape", self.shape, "positive sizes")


@dataclass(frozen=True)
class CustomDataOptions:
    """The user's own data, from a factory."""

    factory: str = ""
    """package.module:factory, a callable that returns (train, test)."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory."""


DataOptions = (
    DigitsOptions | MnistOptions | FashionMnistOptions | Cifar10Options | Hdf5Options | SyntheticOptions | CustomDataOptions
)
DATA: Mapping[str, type] = {
    "digits": DigitsOptions,
    "mnist": MnistOptions,
    "fashion_mnist": FashionMnistOptions,
    "cifar10": Cifar10Options,
    "hdf5": Hdf5Options,
    "synthetic": SyntheticOptions,
    "custom": CustomDataOptions,
}


# --------------------------------------------------------------------------------------------------------- optimisers


@dataclass(frozen=True)
class SgdOptions:
    """torch.optim.SGD on each shard's slice."""

    momentum: float = 0.9
    """Momentum factor m of v <- m v + g [Zhang16 4.1: 0.9]."""
    nesterov: bool = False
    """Use Nesterov momentum."""
    weight_decay: float = 0.0
    """L2 penalty added to the gradient."""

    def __post_init__(self) -> None:
        at_least(self, "optimizer.", momentum=0, weight_decay=0)
        require(self.momentum < 1, "optimizer.momentum", self.momentum, "a number below 1")
        require(not self.nesterov or self.momentum > 0, "optimizer.nesterov", True, "momentum > 0 beside it")


@dataclass(frozen=True)
class AdagradOptions:
    """torch.optim.Adagrad on each shard's slice [Dean12 4.1]."""

    weight_decay: float = 0.0
    """L2 penalty added to the gradient."""
    eps: float = 1e-10
    """Term added to the denominator."""

    def __post_init__(self) -> None:
        at_least(self, "optimizer.", weight_decay=0, eps=0)


@dataclass(frozen=True)
class RmspropOptions:
    """torch.optim.RMSprop on each shard's slice, with torch's defaults; jobs/chen16-inception.toml has those of [Chen16 A.2]."""

    smoothing: float = 0.99
    """Decay of the running mean of squared gradients (torch's alpha) [Chen16 A.2: 0.9]."""
    momentum: float = 0.0
    """Momentum factor [Chen16 A.2: 0.9]."""
    eps: float = 1e-8
    """Term added to the denominator. Where it exceeds the gradients, RMSprop becomes SGD of rate alpha0 / eps."""
    weight_decay: float = 0.0
    """L2 penalty added to the gradient."""

    def __post_init__(self) -> None:
        at_least(self, "optimizer.", smoothing=0, momentum=0, eps=0, weight_decay=0)
        require(self.smoothing < 1, "optimizer.smoothing", self.smoothing, "a number below 1")
        require(self.momentum < 1, "optimizer.momentum", self.momentum, "a number below 1")


@dataclass(frozen=True)
class AdamOptions:
    """torch.optim.Adam on each shard's slice."""

    beta1: float = 0.9
    """Decay of the running mean of gradients."""
    beta2: float = 0.999
    """Decay of the running mean of squared gradients."""
    eps: float = 1e-8
    """Term added to the denominator."""
    weight_decay: float = 0.0
    """L2 penalty added to the gradient."""

    def __post_init__(self) -> None:
        at_least(self, "optimizer.", beta1=0, beta2=0, eps=0, weight_decay=0)
        require(self.beta1 < 1, "optimizer.beta1", self.beta1, "a number below 1")
        require(self.beta2 < 1, "optimizer.beta2", self.beta2, "a number below 1")


OptimizerOptions = SgdOptions | AdagradOptions | RmspropOptions | AdamOptions
OPTIMIZERS: Mapping[str, type] = {
    "sgd": SgdOptions,
    "adagrad": AdagradOptions,
    "rmsprop": RmspropOptions,
    "adam": AdamOptions,
}


# ---------------------------------------------------------------------------------------------------------- schedules


@dataclass(frozen=True)
class ConstantOptions:
    """The learning rate stays at alpha0."""

    warmup_epochs: float = 0.0
    """Grow the rate linearly over this many epochs; 0 = off. Of k updates, the first has 1/k of it."""

    def __post_init__(self) -> None:
        at_least(self, "schedule.", warmup_epochs=0)


@dataclass(frozen=True)
class StepOptions:
    """The learning rate is divided after given epochs [Zhang16 4.1: by 10 after 120 and 130]."""

    epochs: tuple[float, ...] = (120.0, 130.0)
    """Multiply the learning rate by `factor` after each of these epochs."""
    factor: float = 0.1
    """Multiplier at each of them."""
    warmup_epochs: float = 0.0
    """Grow the rate linearly over this many epochs; 0 = off. Of k updates, the first has 1/k of it."""

    def __post_init__(self) -> None:
        at_least(self, "schedule.", factor=0, warmup_epochs=0)


@dataclass(frozen=True)
class ExponentialOptions:
    """alpha0 * beta^(epochs / every_epochs): [Chen16 A.2] gamma0 beta^(tN/2T), T mini-batches making one epoch."""

    beta: float = 0.94
    """Decay per `every_epochs` epochs [Chen16 A.2]."""
    every_epochs: float = 2.0
    """Epochs per decay [Chen16 A.2: 2]."""
    warmup_epochs: float = 0.0
    """Grow the rate linearly over this many epochs; 0 = off. Of k updates, the first has 1/k of it."""

    def __post_init__(self) -> None:
        at_least(self, "schedule.", beta=0, every_epochs=1e-9, warmup_epochs=0)


@dataclass(frozen=True)
class LinearOptions:
    """The learning rate stays at alpha0 to `start_epochs`, and is then annealed linearly to `end` * alpha0 at the last epoch."""

    start_epochs: float = 0.0
    """Begin annealing after this many epochs. [Chen16 A.1] anneals the last 10 of 25 epochs: 15."""
    end: float = 0.0
    """Fraction of alpha0 at the end of the run [Chen16 A.1: 0]."""
    warmup_epochs: float = 0.0
    """Grow the rate linearly over this many epochs; 0 = off. Of k updates, the first has 1/k of it."""

    def __post_init__(self) -> None:
        at_least(self, "schedule.", start_epochs=0, end=0, warmup_epochs=0)


ScheduleOptions = ConstantOptions | StepOptions | ExponentialOptions | LinearOptions
SCHEDULES: Mapping[str, type] = {
    "constant": ConstantOptions,
    "step": StepOptions,
    "exponential": ExponentialOptions,
    "linear": LinearOptions,
}


# ------------------------------------------------------------------------------------------------- other components


@dataclass(frozen=True)
class StragglerOptions:
    """Stragglers put in on purpose. What learner l suffers at mini-batch seq depends on (seed, l, seq) alone."""

    slowdown: dict[int, float] = field(default_factory=dict)
    """Slow learners down: learner_id factor learner_id factor ... A mini-batch takes factor (>= 1) times as long."""
    delay: Literal["none", "constant", "normal", "exponential", "lognormal", "pareto"] = "none"
    """Delay every mini-batch. pareto has the heavy tail."""
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
class EvaluationOptions:
    """Evaluation of snapshots. Learners and shards never wait for it."""

    every_epochs: float = 1.0
    """Epochs between snapshots; 0 = evaluate only the last weights. Those are always evaluated."""
    train: bool = False
    """Measure loss and error on the training data, too."""
    batch: int = 500
    """Samples per evaluation batch."""
    buffers: Literal["recalibrate", "initial"] = "recalibrate"
    """Measure batch-norm statistics anew, or keep the first ones. They are never exchanged. initial: as the factory made them.
    recalibrate: measured at the weights to evaluate, on training mini-batches that are drawn at random by the seed."""
    recalibrate_batches: int = 20
    """Mini-batches to recalibrate with, of `batch` samples. They are distinct: 10,000 samples by default, or all if there
    are fewer."""

    def __post_init__(self) -> None:
        at_least(self, "evaluation.", every_epochs=0, batch=1, recalibrate_batches=1)


LEAST_LOG_BYTES = 1 << 20
"""Of a bounded log: a few chunks of rows."""


@dataclass(frozen=True)
class LogOptions:
    """Run log (HDF5) and progress line."""

    enabled: bool = True
    """Write the run log. Without it there is no report, and no proof."""
    flush_rows: int = 256
    """Flush a shard's file after this many rows."""
    flush_s: float = 2.0
    """Flush a shard's file after this many seconds."""
    max_bytes: int = 0
    """Most bytes of a shard's file; 0 = without bound. Of each attempt's. When half of the room is filled, every 4th push and
    update is kept, when half of the rest is, every 16th, and so on. Counts stay exact, and all events are kept: they come on top.
    What needs every row (replay, plan, timeline) refuses such a log. At least 1 MiB."""
    progress: Literal["auto", "bar", "plain", "off"] = "auto"
    """Show progress: a live bar, plain lines, or none. auto: a bar on a terminal, lines elsewhere."""
    progress_s: float = 10.0
    """Seconds between plain lines."""
    quiet_s: float = 60.0
    """Say what a rank waits for after so many seconds; 0 = never. Again after twice the time, four times, and so on."""

    def __post_init__(self) -> None:
        at_least(self, "log.", flush_rows=1, flush_s=0, max_bytes=0, progress_s=0, quiet_s=0)
        enough = self.max_bytes == 0 or self.max_bytes >= LEAST_LOG_BYTES
        require(enough, "log.max_bytes", self.max_bytes, f"0 (without bound), or at least {LEAST_LOG_BYTES:,}: room for some rows")


@dataclass(frozen=True)
class CheckpointOptions:
    """Checkpoints, from which `mpisgd train --resume` goes on. Virtual jobs write none: run them again."""

    every_updates: int = 0
    """Write a checkpoint every so many updates; 0 = at signals only. Each shard writes its slice when its clock is a multiple; a
    signal that interrupts the run leads to one in any case."""
    keep: int = 2
    """Keep this many complete checkpoints. Those that the run was continued from are kept besides."""

    def __post_init__(self) -> None:
        at_least(self, "checkpoint.", every_updates=0, keep=1)


@dataclass(frozen=True)
class FaultOptions:
    """Learners that die or hang. Virtual jobs have `failures`."""

    mode: Literal["auto", "tolerant", "fail-fast"] = "auto"
    """Go on without learners that die, or end the job. auto: go on where that can be. tolerant needs an MPI that tells of
    failures (Open MPI 5: `mpirun --with-ft ulfm`), and learners that are neither shards nor in teams."""
    patience_s: float = 60.0
    """Seconds of silence after which a rank is given up. Silent is a rank that is stopped, or behind a link that
    is down; not one that computes for long. fail-fast, and tolerant for a shard: the job ends. tolerant: the others go on without
    a learner that owes a shard a push or a pull for longer, until it asks for weights again; more than a mini-batch ever takes."""

    def __post_init__(self) -> None:
        require(math.isfinite(self.patience_s) and self.patience_s > 0, "faults.patience_s", self.patience_s, "seconds > 0")


# ----------------------------------------------------------------------------------------------------------- the whole


@dataclass(frozen=True)
class Config:
    """One run: `mpirun -n <shards + learners [+ 1]> mpisgd train [job.toml] [--field value ...]`."""

    protocol: ProtocolOptions = field(default_factory=HardsyncOptions)
    """Synchronisation protocol."""
    model: ModelOptions = field(default_factory=MlpOptions)
    """Network."""
    data: DataOptions = field(default_factory=DigitsOptions)
    """Data set."""
    optimizer: OptimizerOptions = field(default_factory=SgdOptions)
    """Optimiser on the shards."""
    schedule: ScheduleOptions = field(default_factory=ConstantOptions)
    """Learning-rate schedule, driven by samples applied."""
    straggler: StragglerOptions = field(default_factory=StragglerOptions)
    """Stragglers put in on purpose."""
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)
    """Evaluation of snapshots."""
    log: LogOptions = field(default_factory=LogOptions)
    """Run log and progress."""
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    """Checkpoints."""
    faults: FaultOptions = field(default_factory=FaultOptions)
    """Learners that die or hang."""
    virtual: VirtualOptions = field(default_factory=VirtualOptions)
    """simulate: the virtual cluster."""
    compute: ComputeOptions = field(default_factory=ConstantComputeOptions)
    """simulate: seconds per mini-batch."""
    network: NetworkOptions = field(default_factory=NetworkOptions)
    """simulate: latency, bandwidth and contention."""
    service: ServiceOptions = field(default_factory=ServiceOptions)
    """simulate: what a shard's own work costs."""
    failures: FailureOptions = field(default_factory=FailureOptions)
    """simulate: learners that fail."""

    shards: int = 1
    """Number of shard ranks S [Zhang16 2.3]. Each owns one contiguous slice of the flat parameter vector. Not to be given for
    allreduce, where each learner is one."""
    exchange: Literal["whole", "layerwise"] = "whole"
    """Exchange whole vectors, or layer by layer. whole: pull all weights, compute, push the whole gradient. layerwise: shards own
    whole layers; an asynchronous learner pulls each slice as its forward pass reaches it, and every learner pushes each as its
    backward pass leaves it [Chen16 2, A.3]."""
    push_format: Literal["float32", "bfloat16"] = "float32"
    """Push gradients as float32, or in half of the bytes. bfloat16: a learner adds what it rounds off to its next gradient (error
    feedback, arXiv:1901.09847), for which it keeps one more vector. Weights are pulled in float32. For slow networks: `mpisgd bench
    train --ways hardsync hardsync-bfloat16` tells where it pays. Neither for allreduce nor for exchange = 'layerwise'."""
    evaluator: bool = False
    """Give one rank to evaluation. Without it learner 0 evaluates after the run."""
    aggregation: Literal["none", "node"] = "none"
    """Sum gradients on each node in shared memory. node: ranks that compute on one node are a team; one of them pulls and pushes
    for all [Chen16 6]. lambda, N, b and N_min then count teams. For hardsync, backup (late = drop, no abort) and timeout. In an
    allreduce on one node, weights and gradients lie in memory that all learners share, and nothing is sent."""
    team_size: int = 0
    """Most ranks in one team; 0 = all that compute on a node. Smaller: the sockets of a large node, say."""
    placement: Literal["packed", "spread"] = "packed"
    """Make the first ranks shards, or spread them over nodes."""
    out: str = "results/run"
    """Directory of the run, which is made."""
    overwrite: bool = False
    """Replace an existing run directory."""
    data_dir: str = ""
    """Directory of data files; default: the variable MPISGD_DATA."""
    seed: int = 1
    """Seed of all randomness. Every draw is a function of (seed, learner_id, seq); in teams, of the rank's own number."""
    epochs: float = 10.0
    """Length of the run: applied samples / training samples."""
    mu: int = 16
    """Mini-batch size per learner, in samples [Zhang16 2.1]. In teams: per rank."""
    alpha0: float = 0.05
    """Base learning rate [Zhang16 eq. 3]."""
    linear_scaling: bool = False
    """Multiply alpha0 by the gradients that make one update [Chen16 A.2: 0.045 N]. In teams, by those of all ranks."""
    averaging: float = 0.0
    """Average the weights with this decay a; 0 = off [Chen16 Alg. 2, 4: 0.9999]. thetabar <- a thetabar + (1 - a) theta per
    update."""
    averaging_bias_correction: bool = False
    """Leave the first weights out of the average. It divides by 1 - a^t, as Adam does. For runs of fewer updates than some 5 / (1 -
    a): of theta(0), a^t is left after t updates, 37 % after 10,000 at a = 0.9999."""
    compensation: float = 0.0
    """Correct stale gradients: DC-ASGD with this lambda_0; 0 = off. They become g + lambda_t g g (theta - theta_pulled)
    (arXiv:1609.08326). A shard keeps the weights that learners were given: up to lambda_ more copies of its slice in memory."""
    compensation_memory: float = 0.0
    """Use DC-ASGD-a with this m; 0 = DC-ASGD-c, constant. lambda_t is lambda_0 / sqrt(mean square of g) [0.95 in the paper]."""
    clip_norm: float = 0.0
    """Clip each gradient to this global L2 norm; 0 = off [Chen16 A.3]."""
    sampling: Literal["epoch", "replacement"] = "epoch"
    """Split the training set over learners, or draw each batch anew [Zhang16 2.1]. epoch: one permutation for each epoch."""
    loss: str = "cross_entropy"
    """Function of torch.nn.functional, or your own a.b:callable. It takes (output, target) and returns a scalar."""
    nonfinite: Literal["stop", "drop", "continue"] = "stop"
    """Treat gradients that are not finite. drop logs it; continue reports the run as diverged."""
    memory_format: Literal["channels_last", "contiguous"] = "channels_last"
    """Memory format of 4-d inputs and weights. channels_last is faster on CPUs and most GPUs."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Compute gradients on the CPU or on a GPU."""
    shard_device: Literal["cpu", "cuda"] = "cpu"
    """Sum and update on the CPU or on a GPU. A GPU that learners compute on is shared with them."""
    threads: int = 0
    """torch threads per rank; 0 = cores of the node / ranks on it. At least 1."""

    def __post_init__(self) -> None:
        at_least(
            self,
            "",
            shards=1,
            team_size=0,
            seed=0,
            epochs=0,
            mu=1,
            alpha0=0,
            averaging=0,
            compensation=0,
            compensation_memory=0,
            clip_norm=0,
            threads=0,
        )
        require(self.averaging < 1, "averaging", self.averaging, "a number below 1")
        require(self.compensation_memory < 1, "compensation_memory", self.compensation_memory, "a number below 1")
        require(self.epochs > 0, "epochs", self.epochs, "a number above 0")
        require(bool(self.out), "out", self.out, "the path of a directory")
        require(self.seed < 2**64, "seed", self.seed, "a number below 2^64")

    @property
    def in_teams(self) -> bool:
        """Whether learners are teams of ranks, which pull and push together."""
        return self.aggregation == "node" and not self.protocol.collective


#: The components that come in kinds, and the kinds of each.
KINDS: Mapping[str, Mapping[str, type]] = {
    "protocol": {**PROTOCOLS, "custom": OwnProtocolOptions},
    "model": MODELS,
    "data": DATA,
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "compute": COMPUTE,
}


def kind_of(options: object) -> str:
    """The name under which `options` stands in its table of kinds, e.g. `"softsync"`."""
    for kinds in KINDS.values():
        for name, cls in kinds.items():
            if type(options) is cls:
                return name
    raise TypeError(f"{type(options).__name__} is no component that comes in kinds")


def make_options(component: str, name: str, **fields: Any) -> Any:
    """Default options of one kind; `package.module:factory` names the user's own model or data.

    Raises ConfigError where `name` is no kind of `component`.
    """
    kinds = KINDS[component]
    if ":" in name and "custom" in kinds:
        return kinds["custom"](factory=name, **fields)
    if name not in kinds:
        raise ConfigError(f"{component} = {name!r} is unknown{hints.kind(component, name, kinds)}")
    return kinds[name](**fields)


def replace(config: Config, **changes: Any) -> Config:
    """`dataclasses.replace`, which checks again."""
    return dataclasses.replace(config, **changes)
