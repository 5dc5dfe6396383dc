"""What a user may choose: one frozen dataclass per component, nested in `Config`.

Every field says its unit and source. A component that comes in kinds (protocol, model, data, optimizer, schedule) has one
dataclass per kind and a table from the kind's name to it; `config_file.py` reads them from TOML, `cli/` from the command line.
Checks that need no other component are made here, when the dataclass is made; the rest in `mpisgd.run`.
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
    """Batch normalisation after each hidden layer."""

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
    """The file; relative paths are looked for below <data-dir> too."""
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
    """package.module:factory, a callable that returns (train, test); see mpisgd.data."""
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
    """Nesterov momentum."""
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
    """Term added to the denominator; what is larger than the gradients makes of RMSprop an SGD of rate alpha0 / eps."""
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
    """Epochs over which the learning rate grows linearly to its value: of k updates, the first has 1/k of it; 0 = off."""

    def __post_init__(self) -> None:
        at_least(self, "schedule.", warmup_epochs=0)


@dataclass(frozen=True)
class StepOptions:
    """The learning rate is divided after given epochs [Zhang16 4.1: by 10 after 120 and 130]."""

    epochs: tuple[float, ...] = (120.0, 130.0)
    """Epochs after which the learning rate is multiplied by `factor`."""
    factor: float = 0.1
    """Multiplier at each of them."""
    warmup_epochs: float = 0.0
    """Epochs over which the learning rate grows linearly to its value: of k updates, the first has 1/k of it; 0 = off."""

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
    """Epochs over which the learning rate grows linearly to its value: of k updates, the first has 1/k of it; 0 = off."""

    def __post_init__(self) -> None:
        at_least(self, "schedule.", beta=0, every_epochs=1e-9, warmup_epochs=0)


@dataclass(frozen=True)
class LinearOptions:
    """The learning rate stays at alpha0 to `start_epochs`, and is then annealed linearly to `end` * alpha0 at the last epoch."""

    start_epochs: float = 0.0
    """Epochs after which annealing begins: 0 = from the start; [Chen16 A.1] anneals the last 10 of 25 epochs: 15."""
    end: float = 0.0
    """Fraction of alpha0 that is left at the end of the run [Chen16 A.1: 0]."""
    warmup_epochs: float = 0.0
    """Epochs over which the learning rate grows linearly to its value: of k updates, the first has 1/k of it; 0 = off."""

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
    """Stragglers put in on purpose; what learner l suffers at mini-batch seq depends on (seed, l, seq) alone."""

    slowdown: dict[int, float] = field(default_factory=dict)
    """learner_id -> factor: its mini-batches take this many times as long (>= 1)."""
    delay: Literal["none", "constant", "normal", "exponential", "lognormal", "pareto"] = "none"
    """Distribution of an extra delay of each mini-batch of every learner; pareto is the heavy tail."""
    delay_mean_s: float = 0.01
    """Mean of the extra delay, in seconds."""
    delay_spread: float = 1.0
    """normal: deviation/mean; lognormal: sigma of the logarithm; pareto: shape (> 1; small = heavy)."""
    delay_probability: float = 1.0
    """Share of mini-batches that are delayed."""
    pause_learner: int = -1
    """learner_id that pauses now and then; -1 = none."""
    pause_every: int = 100
    """Mini-batches from one pause to the next."""
    pause_s: float = 1.0
    """Length of a pause, in seconds."""
    rest_mean_s: float = 0.0
    """Mean of one more delay of each mini-batch of every learner, in seconds, which no slowdown multiplies: what `plan` finds that
    a cycle takes besides computing and messages."""
    rest_deviation_s: float = 0.0
    """Its standard deviation, in seconds: log-normal; 0 = constant."""

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
    """When snapshots are taken and how they are evaluated; learners and shards never wait for it."""

    every_epochs: float = 1.0
    """Epochs between snapshots; the last weights are always evaluated; 0 = only those."""
    train: bool = False
    """Measure loss and error on the training data as well."""
    batch: int = 500
    """Samples per evaluation batch."""
    buffers: Literal["recalibrate", "initial"] = "recalibrate"
    """Batch-norm statistics are never exchanged. recalibrate: measured anew, at the weights to evaluate, on training
    mini-batches that are drawn at random by the seed; initial: left as the model factory made them."""
    recalibrate_batches: int = 20
    """Mini-batches of `batch` distinct training samples used to recalibrate: by default 10,000, or all if there are fewer."""

    def __post_init__(self) -> None:
        at_least(self, "evaluation.", every_epochs=0, batch=1, recalibrate_batches=1)


@dataclass(frozen=True)
class LogOptions:
    """The run log (HDF5) and the progress line."""

    enabled: bool = True
    """Write the run log; without it there is no report, and no proof."""
    flush_rows: int = 256
    """Rows after which a shard flushes its file."""
    flush_s: float = 2.0
    """Seconds after which a shard flushes its file."""
    progress: Literal["auto", "bar", "plain", "off"] = "auto"
    """auto: a live bar on a terminal, a plain line now and then elsewhere."""
    progress_s: float = 10.0
    """Seconds between plain lines."""
    quiet_s: float = 60.0
    """Seconds for which a rank waits in silence; then it says for whom, and again after twice the time (`watchdog`); 0 = never."""

    def __post_init__(self) -> None:
        at_least(self, "log.", flush_rows=1, flush_s=0, progress_s=0, quiet_s=0)


@dataclass(frozen=True)
class CheckpointOptions:
    """What a run writes down to be continued from (`mpisgd train --resume`); virtual jobs pass over it: they are done again."""

    every_updates: int = 0
    """Clocks from one checkpoint to the next: each shard writes its slice when its clock is a multiple; 0 = only where a signal
    interrupts the run."""
    keep: int = 2
    """Complete checkpoints that are kept, besides those that the run was continued from."""

    def __post_init__(self) -> None:
        at_least(self, "checkpoint.", every_updates=0, keep=1)


@dataclass(frozen=True)
class FaultOptions:
    """What becomes of a run whose learners die or hang; virtual jobs have `failures`."""

    mode: Literal["auto", "tolerant", "fail-fast"] = "auto"
    """tolerant: the others go on with those who are left; it needs an MPI that tells of failures (Open MPI 5:
    `mpirun --with-ft ulfm`), and learners that are neither shards nor in teams. fail-fast: the job ends. auto: tolerant where that
    can be."""
    patience_s: float = 60.0
    """How long a rank may be silent: stopped, or behind a link that is down. fail-fast: then the job ends; a rank that computes for
    long is not silent. tolerant: so does it for a shard; a learner that owes a shard a push or a pull for longer is missed: the
    others go on without it, until it asks for weights again. So there more than a mini-batch ever takes."""

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
    """Parameter-server ranks S; each owns one contiguous slice of the flat parameter vector [Zhang16 2.3]. Not to be given for
    allreduce, where each learner is one."""
    exchange: Literal["whole", "layerwise"] = "whole"
    """whole: pull all weights, compute, push the whole gradient. layerwise: shards own whole layers; an asynchronous learner pulls
    each slice as its forward pass reaches it, and every learner pushes each as its backward pass leaves it [Chen16 2, A.3]."""
    push_format: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: gradients are pushed in half of the bytes; what a learner rounds off, it adds to its next gradient (error feedback,
    arXiv:1901.09847), for which it keeps one more vector. Weights are pulled in float32. For slow networks: `mpisgd bench train
    --ways hardsync hardsync-bfloat16` tells where it pays. Neither for allreduce nor for exchange = 'layerwise'."""
    evaluator: bool = False
    """Give one rank to evaluating snapshots; without it learner 0 does so after the run."""
    aggregation: Literal["none", "node"] = "none"
    """node: ranks that compute on one node are a team, which sums its gradients in shared memory; one of them pulls and pushes for
    all [Chen16 6]. lambda, N, b and N_min then count teams. For hardsync, backup (late = drop, no abort) and timeout. In an
    allreduce on one node, weights and gradients lie in memory that all learners share, and nothing is sent."""
    team_size: int = 0
    """aggregation: most ranks in one team; 0 = all that compute on a node. Smaller: the sockets of a large node, say."""
    placement: Literal["packed", "spread"] = "packed"
    """packed: shards are the first ranks; spread: shards land on different nodes."""
    out: str = "results/run"
    """The run directory, made by this run."""
    overwrite: bool = False
    """Replace an existing run directory of mpisgd."""
    data_dir: str = ""
    """Where staged data files lie; default: the environment variable MPISGD_DATA."""
    seed: int = 1
    """Seed of all randomness; every draw is a function of (seed, learner_id, seq); in teams, of the rank's own number."""
    epochs: float = 10.0
    """Length of the run: applied samples / training samples."""
    mu: int = 16
    """Mini-batch size per learner (in teams: per rank), in samples [Zhang16 2.1]."""
    alpha0: float = 0.05
    """Base learning rate [Zhang16 eq. 3]."""
    linear_scaling: bool = False
    """Multiply alpha0 by the number of gradients that make one update [Chen16 A.2: 0.045 N]; in teams, by those of all ranks."""
    averaging: float = 0.0
    """Decay of the averaged weights, thetabar <- a thetabar + (1 - a) theta per update [Chen16 Alg. 2, 4: 0.9999]; 0 = off."""
    averaging_bias_correction: bool = False
    """Leave theta(0), with which thetabar begins, out of it: divide by 1 - a^t, as Adam does. For runs of fewer updates than some
    5 / (1 - a): of theta(0), a^t is left after t updates, 37 % after 10,000 at a = 0.9999."""
    compensation: float = 0.0
    """DC-ASGD (arXiv:1609.08326): lambda_0 of g + lambda_t g g (theta - theta_pulled), for stale gradients g; 0 = off. A shard
    keeps the weights that learners were given: up to lambda_ more copies of its slice in memory."""
    compensation_memory: float = 0.0
    """m of DC-ASGD-a, whose lambda_t is lambda_0 / sqrt(mean square of g) [0.95 in the paper]; 0 = DC-ASGD-c, constant."""
    clip_norm: float = 0.0
    """Learners clip their gradient to this global L2 norm [Chen16 A.3]; 0 = off."""
    sampling: Literal["epoch", "replacement"] = "epoch"
    """epoch: permutations of the training set split over learners; replacement: each mini-batch drawn anew [Zhang16 2.1]."""
    loss: str = "cross_entropy"
    """A function of torch.nn.functional, or package.module:callable of (output, target) -> scalar."""
    nonfinite: Literal["stop", "drop", "continue"] = "stop"
    """A gradient that is not finite: stop the run; drop and log it; or let the experiment run on and report it as diverged."""
    memory_format: Literal["channels_last", "contiguous"] = "channels_last"
    """Memory format of 4-d inputs and weights; channels_last is faster on CPUs and most GPUs."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where learners compute."""
    shard_device: Literal["cpu", "cuda"] = "cpu"
    """Where shards sum and update; a GPU that learners compute on is shared with them."""
    threads: int = 0
    """torch threads per rank; 0 = cores of the node / ranks on it, at least 1."""

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
