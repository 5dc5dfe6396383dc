"""Options of a run: one frozen dataclass per component, nested in `Config`.

The first sentence of each field's text is what `--help` shows; the text says its unit and source. A component that comes in kinds
(protocol, model, data, optimizer, schedule) has one dataclass per kind and a table from the kind's name to it; `config_file.py`
reads them from TOML, `cli/` from the command line. Checks that need no other component are made here, when the dataclass is made;
the rest in `mpisgd.job.run`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mpisgd.base.checks import at_least, expanded, require
from mpisgd.base.errors import ConfigError
from mpisgd.base.speech import visible
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
)
from mpisgd.config.run import CheckpointOptions, EvaluationOptions, FaultOptions, LogOptions, StagesOptions, StragglerOptions
from mpisgd.protocols import BATCH_PROTOCOLS, PROTOCOLS, HardsyncOptions, OwnProtocolOptions, ProtocolOptions


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
    """Optimiser on the shards. One that you name has torch's defaults; none named is SGD with momentum 0.9 [Zhang16 4.1]."""
    inner_optimizer: OptimizerOptions = field(default_factory=AdamwOptions)
    """Optimiser of learners' own steps, where local_steps > 0."""
    groups: GroupOptions = field(default_factory=GroupOptions)
    """Groups of parameters, by their names."""
    schedule: ScheduleOptions = field(default_factory=ConstantOptions)
    """Learning-rate schedule, driven by samples applied."""
    stages: StagesOptions = field(default_factory=StagesOptions)
    """Cuts of a model into stages, where group_size > 1."""
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
    """simulate: costs of a shard's own work."""
    failures: FailureOptions = field(default_factory=FailureOptions)
    """simulate: learners that fail."""

    shards: int = 1
    """Number of shard ranks S [Zhang16 2.3]. Each owns one contiguous slice of the flat parameter vector. Not to be given for
    allreduce, where each learner is one."""
    exchange: Literal["whole", "layerwise", "streamed", "duplex", "prefetch"] = "whole"
    """Exchange vectors. whole: pull all weights, compute, push the whole gradient. layerwise: shards own whole layers, or parts
    of those that are large; an asynchronous learner pulls each slice as its forward pass reaches it, and every learner
    pushes each as its backward pass leaves it [Chen16 2, A.3]; at its end, where clip_norm or nonfinite = 'drop' need the whole
    gradient. Of an allreduce, slices stay as they are; parts of at least 2 MiB leave during the backward pass and come back
    during the next forward pass; same bits. streamed: whole vectors in chunks, of which a shard sends back the first while the
    last come in, for slow links;
    hardsync, same bits. duplex: whole vectors, pushed while the next weights are pulled, for slow links; softsync and async, with
    one more of staleness. prefetch: both while the next gradient is computed, from weights two rounds older; a learner keeps two
    more vectors."""
    receive: Literal["in-turn", "gathered"] = "in-turn"
    """Receive gradients. in-turn: a shard takes one after the other, and changes its weights when its answers have left.
    gathered: those of all learners at the same time, each into memory of its own, and weights change while answers leave: a
    learner behind a slow link holds up nobody but who waits for its gradient. A shard keeps up to lambda + 2 more slices. Not with
    fault tolerance, streamed, nor shards on a GPU."""
    push_format: Literal["float32", "bfloat16", "topk"] = "float32"
    """Push gradients in this format. bfloat16 is half of the bytes: a learner adds what it rounds off to its next gradient (error
    feedback, arXiv:1901.09847), for which it keeps one more vector. For slow networks: `mpisgd bench train --ways hardsync
    hardsync-bfloat16 hardsync-bfloat16-both` tells where it pays. topk: of each slice only the elements that are largest by
    magnitude, with their indices; all others it adds to its next gradient (arXiv:1809.07599), but not with compensation,
    nor shards on a GPU."""
    topk_share: float = 0.01
    """Share of a slice's elements that topk pushes. Rounded up to whole elements; each takes 8 bytes."""
    pull_format: Literal["float32", "bfloat16"] = "float32"
    """Pull weights in this format. bfloat16 is half of the bytes: a shard sends by how much its weights differ from what the
    learner holds, and what it rounds off comes with the next pull. A learner keeps one more vector, two with own steps; a shard one
    more slice, of asynchronous protocols one for each learner. Not with compensation, nor shards on a GPU."""
    evaluator: bool = False
    """Give one rank to evaluation. Without it learner 0 evaluates after the run, or shard 0 where learners may be lost."""
    aggregation: Literal["none", "node"] = "none"
    """Sum gradients on each node in shared memory. node: ranks that compute on one node are a team; one of them pulls and pushes
    for all [Chen16 6]. lambda, N, b and N_min then count teams. For hardsync, backup (late = drop, no abort) and timeout. In an
    allreduce on one node, weights and gradients lie in memory that all learners share, and nothing is sent."""
    team_size: int = 0
    """Most ranks in one team; 0 = all that compute on a node. Fewer make teams of a node's sockets, say."""
    group_size: int = 1
    """Ranks of a learner, K: each holds one stage of the model [Dean12 3]. Stages are runs of the children of a
    torch.nn.Sequential, or of the list of modules that a factory returns; or pieces of any model, between modules that
    `stages.at` names. Each has shards of its own, in proportion to its parameters. lambda, N, b and N_min count groups."""
    micro_batches: int = 1
    """Parts of a mini-batch that pass the stages one behind the other, M; a divisor of mu. The gradient is the mean of theirs, also
    where a learner is one rank. Batch norm's statistics are of each part."""
    group_form: Literal["stages", "partition"] = "stages"
    """What the ranks of a group do. stages: pass each mini-batch on, from layers to later layers. partition: all are at work on the
    same layer, each on its piece of it [Dean12 3]: your factory takes a parameter `partition`, whose calls join the pieces."""
    pipeline: Literal["gpipe", "1f1b"] = "gpipe"
    """Order of a group's passes: gpipe, all parts forward, then all back; or 1f1b, one forward, one back, so that a rank keeps the
    activations of at most K parts, instead of M. The bits are the same."""
    placement: Literal["packed", "spread"] = "spread"
    """Spread shards over the nodes, or pack them. Spread, they are beside learners, and the links of all nodes carry alike; packed,
    they are the first ranks."""
    binding: Literal["none", "roles"] = "none"
    """Bind ranks to cores by their roles, or leave them where the launcher has bound them. roles: of the cores that the ranks of a
    node may use, each shard takes one, and those that compute take equal shares of the rest, with a torch thread for each; no share
    crosses NUMA domains where there are as many that compute. For nodes that no other job shares."""
    out: str = "results/run"
    """Directory of the run, which is made. `~` and `$VARIABLES` are expanded, in other paths, too."""
    loggers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()
    """Write losses and metrics for these: tensorboard, wandb, mlflow. Each is an extra: mpisgd[wandb]. They lie in the run's
    directory, W&B's offline runs beside it; nothing is sent. For real runs: `simulate` leaves them aside."""
    callbacks: str = ""
    """Your own a.b:Class with methods that are told how a run goes. They are some of on_update, on_evaluation and on_end, as
    `mpisgd.train` takes them. Made without arguments on every rank. For real runs: `simulate` leaves them aside."""
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
    accumulation: int = 1
    """Mini-batches whose mean is one gradient. All are computed at the same weights: for batches that do not fit into memory. To
    all else they are one mini-batch of so many times mu samples; clip_norm is of the mean."""
    alpha0: float = 0.05
    """Base learning rate [Zhang16 eq. 3]."""
    local_steps: int = 0
    """Own steps of a learner between two pulls, H; 0 = off [DiLoCo Alg. 1]. It pushes the weights it pulled less those it came to,
    an outer gradient, which optimizer steps along at the constant rate alpha0; the paper's is SGD with Nesterov momentum 0.9, at
    0.7. schedule, groups and clip_norm are of own steps. A push is one mini-batch of H mu samples to all else."""
    inner_alpha0: float = 0.0004
    """Base learning rate of own steps [DiLoCo 3]."""
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
    modulate: Literal["gradient", "rate"] = "gradient"
    """Multiply each stale gradient by its weight, or the update's rate. gradient: in the sum, before the optimiser; all but sgd
    divide by the gradients' size, where it cancels. rate: an update has the learning rate times the mean of its gradients' weights
    [ElasticDL]. `protocol.modulation` says what weights are."""
    clip_norm: float = 0.0
    """Clip each gradient to this global L2 norm; 0 = off [Chen16 A.3]."""
    clip_average: float = 0.0
    """Clip an update's averaged gradient to this L2 norm; 0 = off. `clip_average_of` says whose norm that is."""
    clip_average_of: Literal["model", "slice"] = "model"
    """Whose norm clip_average is of. model: of the whole, as torch.nn.utils.clip_grad_norm_ does; several shards agree on it by way
    of the learners, which costs one more round trip for each update (hardsync, allreduce). slice: each shard clips its own slice
    by the slice's norm alone. The whole is then at most sqrt(S) times as long, and slices may be shortened differently."""
    sampling: Literal["epoch", "own", "replacement", "stream", "dealt"] = "epoch"
    """Deal out samples. epoch: one permutation for each epoch is split over them. own: each draws from neighbouring
    samples that no other draws, without replacement [Dean12 4.1]. replacement: each batch is drawn anew [Zhang16 2.1]. stream:
    of an `IterableDataset` each reads its own shard, as a worker of a DataLoader does. dealt: shard 0 deals portions, and deals
    again what was lost, dropped or is overdue: each is applied once [ElasticDL]."""
    epoch_samples: int = 0
    """Samples that count as an epoch of a stream; 0 = its __len__."""
    init_from: str = ""
    """Begin with these weights: a run's directory, .pt or .safetensors. Of a run, its last ones; a .pt is a state dict. Names and
    shapes must be the model's; buffers that the file has not are as the factory makes them. Replay wants the same file."""
    loss: str = "cross_entropy"
    """Function of torch.nn.functional, or your own a.b:callable. It takes (output, target) and returns a scalar."""
    step: str = ""
    """Your own a.b:step in place of the loss. It takes (model, batch) and returns a scalar, or a dict of `loss` and metrics, as
    `mpisgd.train` takes it."""
    nonfinite: Literal["stop", "drop", "continue"] = "stop"
    """Treat gradients that are not finite. drop logs it; continue reports the run as diverged."""
    memory_format: Literal["channels_last", "contiguous"] = "channels_last"
    """Memory format of 4-d inputs and weights. channels_last is faster on CPUs and most GPUs."""
    autocast: Literal["off", "bfloat16", "float16"] = "off"
    """Training passes under torch.autocast. Torch chooses what gains by it; weights, gradients and evaluations stay float32.
    float16, for GPUs without bfloat16: each learner scales its loss, and computes a gradient that overflows again at half the
    scale."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Compute gradients on the CPU or on a GPU."""
    shard_device: Literal["cpu", "cuda"] = "cpu"
    """Sum and update on the CPU or on a GPU. A GPU that learners compute on is shared with them."""
    threads: int = 0
    """torch threads per rank; 0 = cores of the node / ranks on it. At least 1."""

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
        require(self.averaging < 1, "averaging", self.averaging, "a number below 1")
        require(self.compensation_memory < 1, "compensation_memory", self.compensation_memory, "a number below 1")
        require(self.mu % self.micro_batches == 0, "micro_batches", self.micro_batches, f"a divisor of mu = {self.mu}")
        require(0 < self.topk_share <= 1, "topk_share", self.topk_share, "a number above 0, at most 1")
        require(self.epochs > 0, "epochs", self.epochs, "a number above 0")
        require(bool(self.out), "out", self.out, "the path of a directory")
        require(self.seed < 2**64, "seed", self.seed, "a number below 2^64")
        judged, best = self.evaluation.judged[0], self.evaluation.best
        require(judged in self.evaluated, "evaluation.best", best, "data.validation > 0 beside it, or a name without validation_")

    @property
    def evaluated(self) -> tuple[Part, ...]:
        """List the parts of the data that weights are evaluated on, in order."""
        trained, aside = self.evaluation.train, self.data.validation > 0
        return (Part.TEST, *[Part.TRAINING] * trained, *[Part.VALIDATION] * aside)

    @property
    def mini_batches_per_push(self) -> int:
        """Number of mini-batches that a push is made of."""
        return self.protocol.mini_batches_per_push * max(1, self.local_steps) * self.accumulation

    @property
    def both_ways(self) -> bool:
        """Whether learners push and pull at the same time."""
        return self.exchange in ("duplex", "prefetch")

    @property
    def by_layers(self) -> bool:
        """Whether slices are cut by layers, each of which learners exchange with its shard by itself."""
        return self.exchange == "layerwise" and not self.protocol.collective

    @property
    def in_buckets(self) -> bool:
        """Whether the gradients of an allreduce leave part by part (`vectors/buckets.py`)."""
        return self.exchange == "layerwise" and self.protocol.collective

    @property
    def agrees(self) -> bool:
        """Whether shards agree on the norm of each averaged gradient (`job/roles/agreement.py`)."""
        several = self.shards > 1 or self.protocol.collective
        return several and self.clip_average > 0 and self.clip_average_of == "model"

    @property
    def hands_state_on(self) -> bool:
        """Whether learner 0 leaves what it keeps beside its parameters to whoever evaluates: not a group, each with a part of it,
        nor a learner of a batch, which trains nothing by itself."""
        return not (self.in_groups or self.protocol.batch)

    @property
    def buffers_evaluated(self) -> str:
        """As `evaluation.buffers`, where learner 0 can hand its own on."""
        buffers = self.evaluation.buffers
        return "recalibrate" if buffers == "learner" and not self.hands_state_on else buffers

    @property
    def moves_at_zero(self) -> bool:
        """Whether zeros for a gradient move weights, by momentum or weight decay: torch passes over parameters that have none."""
        options: Any = self.inner_optimizer if self.local_steps else self.optimizer
        decays = options.weight_decay > 0 or any(self.groups.weight_decay.values())
        return decays or not isinstance(options, AdagradOptions | SgdOptions) or getattr(options, "momentum", 0.0) > 0

    @property
    def in_groups(self) -> bool:
        """Whether learners are groups of ranks, each with a stage of the model."""
        return self.group_size > 1

    @property
    def partitioned(self) -> bool:
        """Whether these ranks are all at work on the same layer."""
        return self.in_groups and self.group_form == "partition"

    @property
    def in_teams(self) -> bool:
        """Whether learners are teams of ranks, which pull and push together."""
        return self.aggregation == "node" and not self.protocol.collective


def _check_texts(options: Any, where: str) -> None:
    """Raises ConfigError where a text has control characters, which whoever reads the run would be shown."""
    for each in dataclasses.fields(options):
        value = getattr(options, each.name)
        if dataclasses.is_dataclass(value):
            _check_texts(value, f"{where}{each.name}.")
        elif each.name != "kwargs":
            texts = value if isinstance(value, Mapping | tuple) else (value,)
            for text in (text for text in texts if isinstance(text, str)):
                require(visible(text) == text, f"{where}{each.name}", visible(text), "a text without control characters")


#: The components that come in kinds, and the kinds of each.
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
    """The name under which `options` stands in its table of kinds, e.g. `"softsync"`."""
    for kinds in KINDS.values():
        for name, cls in kinds.items():
            if type(options) is cls:
                return name
    raise TypeError(f"{type(options).__name__} is no component that comes in kinds")


def make_options(component: str, name: str, **fields: Any) -> Any:
    """Default options of one kind; `package.module:factory` names the user's own, and a scheduler of torch is a kind of schedule.

    Raises ConfigError where `name` is no kind of `component`.
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
    """`dataclasses.replace`, which checks again."""
    return dataclasses.replace(config, **changes)
