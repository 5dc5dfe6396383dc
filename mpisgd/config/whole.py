"""All options of a run: frozen dataclasses nested in `Config`.

`--help` shows the first sentence of a field's text. A component with kinds has a dataclass per kind, and a table of kinds.
`config_file.py` reads TOML, `cli/options.py` the command line. Each dataclass checks itself when made; `compatibility.py` and
`job/placement.py` check the rest.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mpisgd.base.checks import at_least, below_one, expanded, require
from mpisgd.base.errors import ConfigError
from mpisgd.base.terminal import visible
from mpisgd.config import hints
from mpisgd.config.config_virtual import (
    COMPUTE,
    ComputeOptions,
    ConstantComputeOptions,
    FailureOptions,
    NetworkOptions,
    ServiceOptions,
    VirtualOptions,
)
from mpisgd.config.data import DATA, DataOptions, DigitsOptions, Part
from mpisgd.config.models import MODELS, MlpOptions, ModelOptions
from mpisgd.config.optimizers import (
    OPTIMIZERS,
    SCHEDULES,
    TORCH_SCHEDULERS,
    AdagradOptions,
    AdamwOptions,
    ConstantOptions,
    GroupOptions,
    OptimizerOptions,
    ScheduleOptions,
    SgdOptions,
    TrustRatioOptions,
)
from mpisgd.config.run import CheckpointOptions, EvaluationOptions, FaultOptions, LogOptions, StagesOptions, StragglerOptions
from mpisgd.protocols import BATCH_PROTOCOLS, PROTOCOLS, HardsyncOptions, OwnProtocolOptions, ProtocolOptions

CHOSEN = "chosen"
"""Mark of a field that is no option."""


@dataclass(frozen=True)
class Config:
    """Configuration of a run: `mpirun -n <shards + learners [+ 1]> mpisgd train [job.toml] [--field value ...]`."""

    protocol: ProtocolOptions = field(default_factory=HardsyncOptions)
    """Synchronisation protocol."""
    model: ModelOptions = field(default_factory=MlpOptions)
    """Network."""
    data: DataOptions = field(default_factory=DigitsOptions)
    """Data set."""
    optimizer: OptimizerOptions = field(default_factory=lambda: SgdOptions(momentum=0.9))
    """Optimiser on the shards. A named optimiser has torch's defaults; otherwise SGD with momentum 0.9 [Zhang16 4.1]."""
    inner_optimizer: OptimizerOptions = field(default_factory=AdamwOptions)
    """Optimiser of own steps, with local_steps > 0."""
    groups: GroupOptions = field(default_factory=GroupOptions)
    """Groups of parameters, by name."""
    schedule: ScheduleOptions = field(default_factory=ConstantOptions)
    """Learning-rate schedule, driven by samples applied."""
    stages: StagesOptions = field(default_factory=StagesOptions)
    """Cuts into stages, with group_size > 1."""
    straggler: StragglerOptions = field(default_factory=StragglerOptions)
    """Stragglers put in on purpose."""
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)
    """Evaluation of snapshots."""
    log: LogOptions = field(default_factory=LogOptions)
    """Run log and progress."""
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    """Checkpoints."""
    faults: FaultOptions = field(default_factory=FaultOptions)
    """Dead or hanging learners."""
    virtual: VirtualOptions = field(default_factory=VirtualOptions)
    """simulate: the virtual cluster."""
    compute: ComputeOptions = field(default_factory=ConstantComputeOptions)
    """simulate: seconds per mini-batch."""
    network: NetworkOptions = field(default_factory=NetworkOptions)
    """simulate: latency, bandwidth and contention."""
    service: ServiceOptions = field(default_factory=ServiceOptions)
    """simulate: costs of a shard's own work."""
    failures: FailureOptions = field(default_factory=FailureOptions)
    """simulate: failing learners."""

    shards: int = 1
    """Shard ranks S [Zhang16 2.3]. Each owns a contiguous slice of the flat parameter vector. Not for allreduce, where each learner
    is one."""
    ahead: Literal[0, 1, 2] = 0
    """Pull weights that lack this many of the learner's own gradients; 0 = none. With 1, a gradient is pushed during the next
    pull, for slow links: staleness + 1. With 2, both go on while the next gradient is computed: staleness + 2, and two more
    vectors per learner."""
    per_layer: bool = False
    """Exchange each layer by itself. Shards own whole layers, or parts of large ones, each with its own timestamp. An asynchronous
    learner pulls a layer as its forward pass gets there; every learner pushes a layer as its backward pass leaves it [Chen16 2,
    A.3], or at its end if clip_norm or nonfinite = 'drop' need the whole gradient."""
    push_format: Literal["float32", "bfloat16", "topk"] = "float32"
    """Push gradients in this format. bfloat16: half the bytes; a learner adds rounding errors to its next gradient (error feedback,
    arXiv:1901.09847), kept in another vector. `mpisgd bench train` tells where this pays. topk: only each slice's largest elements
    by magnitude, with indices; the rest joins the next gradient (arXiv:1809.07599)."""
    topk_share: float = 0.01
    """Share of a slice's elements pushed by topk. Rounded up; 8 bytes per element."""
    pull_format: Literal["float32", "bfloat16"] = "float32"
    """Pull weights in this format. bfloat16: half the bytes; a shard sends the difference from the learner's weights, and rounding
    errors with the next pull. One more vector per learner, two with own steps; one more slice per shard, or per learner if
    asynchronous."""
    evaluator: bool = False
    """Give one rank to evaluation. Otherwise learner 0 evaluates after the run, or shard 0 if learners may be lost."""
    aggregation: Literal["none", "node"] = "none"
    """Sum gradients on each node in shared memory. node: computing ranks of a node are a team; a single rank pulls and pushes for
    all [Chen16 6]. lambda, N, b and N_min count teams."""
    team_size: int = 0
    """Most ranks in a team; 0 = all computing ranks of a node. Fewer: teams of sockets, for example."""
    group_size: int = 1
    """Ranks of a learner, K: each holds a stage of the model [Dean12 3]. Stages are runs of children of a torch.nn.Sequential, or
    of a factory's list of modules; or pieces of any model, cut at `stages.at`. A stage has its own shards, in proportion to its
    parameters. lambda, N, b and N_min count groups."""
    micro_batches: int = 1
    """Parts of a mini-batch that pass the stages in turn, M; a divisor of mu. The gradient is the parts' mean, also of a one-rank
    learner. Batch norm's statistics are per part."""
    group_form: Literal["stages", "partition"] = "stages"
    """Work of a group's ranks. stages: layers, from which mini-batches pass on to later layers. partition: pieces of the same layer
    [Dean12 3]; your factory takes a parameter `partition`, whose calls join the pieces."""
    pipeline: Literal["gpipe", "1f1b"] = "gpipe"
    """Order of a group's passes: gpipe, all parts forward, then all back; or 1f1b, one forward, one back, with activations of at
    most K parts per rank, not M. Same bits."""
    placement: Literal["packed", "spread"] = "spread"
    """Spread shards over the nodes, or pack them. Spread: beside learners, with links of all nodes loaded alike. Packed: the first
    ranks."""
    binding: Literal["none", "roles"] = "none"
    """Bind ranks to cores by role, or leave the launcher's binding. roles: of a node's cores, each shard takes one, computing ranks
    share the rest equally, with a torch thread per core; shares cross NUMA domains only if computing ranks are fewer. For nodes
    without other jobs."""
    out: str = "results/run"
    """Directory of the run, to be made. `~` and `$VARIABLES` are expanded, in other paths too."""
    loggers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()
    """Write losses and metrics for these: tensorboard, wandb, mlflow. Each is an extra: mpisgd[wandb]. Files lie in the run's
    directory, W&B's offline runs beside it; nothing is sent. Ignored by `simulate`."""
    callbacks: str = ""
    """Your own a.b:Class of callbacks. Some of on_update, on_evaluation and on_end, as in `mpisgd.train`. Made without arguments on
    every rank. Ignored by `simulate`."""
    overwrite: bool = False
    """Replace an existing run directory."""
    data_dir: str = ""
    """Directory of data files; default: the variable MPISGD_DATA."""
    seed: int = 1
    """Seed of all randomness. Draws are functions of (seed, learner_id, seq); in teams, of the rank's number."""
    epochs: float = 10.0
    """Length of the run: applied samples / training samples."""
    mu: int = 16
    """Mini-batch size per learner, in samples [Zhang16 2.1]. In teams: per rank."""
    accumulation: int = 1
    """Mini-batches averaged into a gradient. At the same weights: for batches beyond memory. All else sees a mini-batch of this
    many times mu samples; clip_norm is of the mean."""
    alpha0: float = 0.05
    """Base learning rate [Zhang16 eq. 3]."""
    local_steps: int = 0
    """Own steps of a learner between two pulls, H; 0 = off [DiLoCo Alg. 1]. A push is an outer gradient, pulled weights less
    weights reached; optimizer steps along it at constant rate alpha0 (the paper: SGD with Nesterov momentum 0.9, at 0.7). schedule,
    groups and clip_norm are of own steps. All else sees a mini-batch of H mu samples."""
    inner_alpha0: float = 0.0004
    """Base learning rate of own steps [DiLoCo 3]."""
    linear_scaling: bool = False
    """Multiply alpha0 by the gradients per update [Chen16 A.2: 0.045 N]. In teams, by all ranks' gradients."""
    averaging: float = 0.0
    """Average the weights with this decay a; 0 = off [Chen16 Alg. 2, 4: 0.9999]. thetabar <- a thetabar + (1 - a) theta per
    update."""
    averaging_bias_correction: bool = False
    """Leave the first weights out of the average. Divides by 1 - a^t, as Adam. For runs below some 5 / (1 - a) updates: after t,
    a^t of theta(0) is left, 37 % after 10,000 at a = 0.9999."""
    compensation: float = 0.0
    """Correct stale gradients: DC-ASGD with this lambda_0; 0 = off. Each becomes g + lambda_t g g (theta - theta_pulled)
    (arXiv:1609.08326). A shard keeps pulled weights: up to lambda_ more copies of its slice."""
    compensation_memory: float = 0.0
    """Use DC-ASGD-a with this m; 0 = DC-ASGD-c, constant. lambda_t is lambda_0 / sqrt(mean square of g) [0.95 in the paper]."""
    modulate: Literal["gradient", "rate"] = "gradient"
    """Multiply each stale gradient by its weight, or the update's rate. gradient: in the sum, before the optimiser; all but sgd
    divide by the gradients' size, and the weight cancels. rate: by the mean weight of an update's gradients [ElasticDL]. Weights:
    `protocol.modulation`."""
    clip_norm: float = 0.0
    """Clip each gradient to this global L2 norm; 0 = off [Chen16 A.3]."""
    clip_average: float = 0.0
    """Clip an update's averaged gradient to this L2 norm; 0 = off. See `clip_average_of`."""
    clip_average_of: Literal["model", "slice"] = "model"
    """Norm for clip_average. model: the whole's, as in torch.nn.utils.clip_grad_norm_; shards agree through the learners, one more
    round trip per update (hardsync, allreduce). slice: each slice's own; the whole is then at most sqrt(S) times as long, and
    slices may be shortened differently."""
    sampling: Literal["epoch", "own", "replacement", "stream", "dealt"] = "epoch"
    """Deal out samples. epoch: split a permutation per epoch. own: each learner draws from neighbouring samples of its own, without
    replacement [Dean12 4.1]. replacement: draw each batch anew [Zhang16 2.1]. stream: each reads its shard of an `IterableDataset`,
    like a DataLoader's worker. dealt: shard 0 deals portions, and lost, dropped or overdue ones again: each is applied once
    [ElasticDL]."""
    epoch_samples: int = 0
    """Samples per epoch of a stream; 0 = its __len__."""
    init_from: str = ""
    """Begin with these weights: a run's directory, .pt or .safetensors. Of a run, the last weights; a .pt is a state dict. Names
    and shapes must be the model's; absent buffers are the factory's. Replay needs the same file."""
    loss: str = "cross_entropy"
    """Function of torch.nn.functional, or your own a.b:callable. From (output, target) to a scalar."""
    step: str = ""
    """Your own a.b:step in place of the loss. From (model, batch) to a scalar, or to a dict of `loss` and metrics, as in
    `mpisgd.train`."""
    nonfinite: Literal["stop", "drop", "continue"] = "stop"
    """Treat nonfinite gradients. drop is logged; continue reports the run as diverged."""
    memory_format: Literal["channels_last", "contiguous"] = "channels_last"
    """Memory format of 4-d inputs and weights. channels_last is faster on CPUs and most GPUs."""
    autocast: Literal["off", "bfloat16", "float16"] = "off"
    """Training passes under torch.autocast. Torch chooses operations; weights, gradients and evaluations stay float32. float16, for
    GPUs without bfloat16: learners scale the loss, and recompute an overflowing gradient at half the scale."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Compute gradients on the CPU or on a GPU."""
    shard_device: Literal["cpu", "cuda"] = "cpu"
    """Sum and update on the CPU or on a GPU, except topk, rounded pulls and sandblaster. Learners may share the GPU."""
    deterministic: bool = False
    """Compute on a GPU by deterministic kernels, without TF32, for `replay --device cuda`."""
    threads: int = 0
    """torch threads per rank; 0 = cores / ranks of the node. At least 1."""

    way: str = field(default="auto", metadata={CHOSEN: True})
    """The program's choice (`exchange/ways.py`)."""
    slices: tuple[int, ...] = field(default=(), metadata={CHOSEN: True})
    """Uneven sizes; () = even."""
    chunks: int = field(default=64, metadata={CHOSEN: True})
    """Wanted chunks of a streamed slice."""

    def __post_init__(self) -> None:
        for name in ("out", "data_dir", "init_from"):
            object.__setattr__(self, name, expanded(os.fspath(getattr(self, name))))
        _check_texts(self, "")
        at_least(
            self,
            "",
            shards=1,
            team_size=0,
            group_size=1,
            micro_batches=1,
            seed=0,
            epochs=0,
            mu=1,
            accumulation=1,
            epoch_samples=0,
            alpha0=0,
            local_steps=0,
            inner_alpha0=0,
            averaging=0,
            compensation=0,
            compensation_memory=0,
            clip_norm=0,
            clip_average=0,
            threads=0,
        )
        below_one(self, "", "averaging", "compensation_memory")
        require(self.mu % self.micro_batches == 0, "micro_batches", self.micro_batches, f"a divisor of mu = {self.mu}")
        require(0 < self.topk_share <= 1, "topk_share", self.topk_share, "a number above 0, at most 1")
        require(self.epochs > 0, "epochs", self.epochs, "a number above 0")
        require(bool(self.out), "out", self.out, "the path of a directory")
        require(self.seed < 2**64, "seed", self.seed, "a number below 2^64")
        judged, best = self.evaluation.judged[0], self.evaluation.best
        require(judged in self.evaluated, "evaluation.best", best, "data.validation > 0, or a name without validation_")

    @property
    def evaluated(self) -> tuple[Part, ...]:
        """Parts of the data for evaluation, in order."""
        trained, aside = self.evaluation.train, self.data.validation > 0
        return (Part.TEST, *[Part.TRAINING] * trained, *[Part.VALIDATION] * aside)

    @property
    def mini_batches_per_push(self) -> int:
        """Mini-batches in a push."""
        return self.protocol.mini_batches_per_push * max(1, self.local_steps) * self.accumulation

    @property
    def plain(self) -> bool:
        """Pulls follow pushes, of whole vectors."""
        return not (self.ahead or self.per_layer)

    @property
    def stays_on_host(self) -> str:
        """Reason of shards to stay on the host; "" = none."""
        if self.protocol.batch:
            return "portions of a batch are summed"
        if self.push_format == "topk":
            return "elements of topk are put in their places"
        return "the weights of learners are rounded" if self.pull_format == "bfloat16" else ""

    @property
    def in_buckets(self) -> bool:
        """An allreduce's gradients leave in parts (`vectors/buckets.py`)."""
        return self.way == "buckets"

    @property
    def agrees(self) -> bool:
        """Shards agree on the average's norm (`job/roles/agreement.py`)."""
        several = self.shards > 1 or self.protocol.collective
        return several and self.clip_average > 0 and self.clip_average_of == "model"

    @property
    def hands_state_on(self) -> bool:
        """Learner 0's state goes to evaluation: a group's rank has only parts, a batch's learner trains nothing."""
        return not (self.in_groups or self.protocol.batch)

    @property
    def buffers_evaluated(self) -> str:
        """`evaluation.buffers`, or recalibrate if learner 0 cannot hand its own on."""
        buffers = self.evaluation.buffers
        return "recalibrate" if buffers == "learner" and not self.hands_state_on else buffers

    @property
    def moves_at_zero(self) -> bool:
        """A zero gradient moves weights (momentum, weight decay); torch skips parameters without one."""
        options: Any = self.inner_optimizer if self.local_steps else self.optimizer
        decays = options.weight_decay > 0 or any(self.groups.weight_decay.values())
        return decays or not isinstance(options, AdagradOptions | SgdOptions) or getattr(options, "momentum", 0.0) > 0

    @property
    def decays_unweighted(self) -> bool:
        """Staleness weights gradients alone."""
        protocol, options = self.protocol, self.optimizer
        weighted = self.modulate == "gradient" and getattr(protocol, "modulation", "none") != "none"
        stale = kind_of(protocol) in ("softsync", "ssp", "async", "downpour") and getattr(protocol, "n", 2) > 1
        decays = options.weight_decay > 0 or (any(self.groups.weight_decay.values()) and not self.local_steps)
        return weighted and stale and decays and not isinstance(options, AdamwOptions | TrustRatioOptions)

    @property
    def norms_of_slices(self) -> bool:
        """Updates depend on where slices are cut."""
        clips = self.clip_average > 0 and self.clip_average_of == "slice"
        return clips or isinstance(self.optimizer, TrustRatioOptions)

    @property
    def in_groups(self) -> bool:
        """Learners are groups of ranks."""
        return self.group_size > 1

    @property
    def partitioned(self) -> bool:
        """A group's ranks compute the same layer."""
        return self.in_groups and self.group_form == "partition"

    @property
    def in_teams(self) -> bool:
        """Learners are teams of ranks with common pulls and pushes."""
        return self.aggregation == "node"


def _check_texts(options: Any, where: str) -> None:
    """Raise ConfigError for control characters, which readers of the run would be shown."""
    for each in dataclasses.fields(options):
        value = getattr(options, each.name)
        if dataclasses.is_dataclass(value):
            _check_texts(value, f"{where}{each.name}.")
        elif each.name != "kwargs":
            texts = value if isinstance(value, Mapping | tuple) else (value,)
            for text in (text for text in texts if isinstance(text, str)):
                require(visible(text) == text, f"{where}{each.name}", visible(text), "a text without control characters")


def options() -> list[dataclasses.Field[Any]]:
    """Return the fields that a user sets."""
    return [each for each in dataclasses.fields(Config) if CHOSEN not in each.metadata]


#: Component -> its kinds.
KINDS: Mapping[str, Mapping[str, type]] = {
    "protocol": {**PROTOCOLS, **BATCH_PROTOCOLS, "custom": OwnProtocolOptions},
    "model": MODELS,
    "data": DATA,
    "optimizer": OPTIMIZERS,
    "inner_optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "compute": COMPUTE,
}


def kind_of(options: object) -> str:
    """Return the kind's name, e.g. `"softsync"`."""
    for kinds in KINDS.values():
        for name, cls in kinds.items():
            if type(options) is cls:
                return name
    raise TypeError(f"{type(options).__name__} is no component with kinds")


def make_options(component: str, name: str, **fields: Any) -> Any:
    """Return options of a kind, the user's `package.module:factory`, or torch's scheduler.

    Raises ConfigError: no kind of `component`.
    """
    kinds = KINDS[component]
    if ":" in name and "custom" in kinds:
        return kinds["custom"](factory=name, **fields)
    if component == "schedule" and name in TORCH_SCHEDULERS:
        return kinds["torch"](scheduler=name, **fields)
    if name not in kinds:
        known = [*kinds, *TORCH_SCHEDULERS] if component == "schedule" else kinds
        raise ConfigError(f"{component} = {name!r} is unknown{hints.kind(component, name, known)}")
    return kinds[name](**fields)


def replace(config: Config, **changes: Any) -> Config:
    """Replace fields, and check again."""
    return dataclasses.replace(config, **changes)
