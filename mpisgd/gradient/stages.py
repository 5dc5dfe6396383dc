"""The stages of a learner's gradient, from a configuration: one chain for real ranks, virtual ranks and replay.

compute    forward and backward pass, clipped (`gradient.py`); by slices or buckets (`by_layers`); in micro-batches, by the stages
           of a cut model (`pipeline/micro_batches.py`)
several    mini-batches as one push (`mini_batches.py`): their mean, or with the learner's own steps
node sum   over a team's ranks (`aggregate.py`), after their straggler delays
rounding   to bfloat16, or the largest elements (`rounding.py`); per slice where exchanged in turn
delay      a straggler's, before the first push (`straggler.py`)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpisgd.config import Config
from mpisgd.data import DataSet
from mpisgd.data.sampling import Sampling
from mpisgd.gradient.gradient import Gradient
from mpisgd.gradient.mini_batches import Accumulated, InnerSteps, LocalSteps
from mpisgd.gradient.objective import Objective
from mpisgd.gradient.rounding import Rounded
from mpisgd.gradient.straggler import NO_DELAYS, Delays
from mpisgd.update import schedule
from mpisgd.update.groups import Segment, in_pieces
from mpisgd.vectors.buckets import Bucket, buckets
from mpisgd.vectors.computing import Travels
from mpisgd.vectors.flat import FlatModel, Layer
from mpisgd.vectors.memory import Memory, as_tensor, wait_for
from mpisgd.vectors.push_format import PushFormat


def place(config: Config, model: FlatModel, shared: Memory | None = None, *, direct: bool = False) -> Memory:
    """Return a real rank's memory: `shared`, to which a model on its device moves; else the model's, or pinned beside a GPU.

    `direct`: MPI takes GPU memory; a gradient pushed as computed stays there.
    """
    if shared is not None:
        if as_tensor(shared.weights).device == model.weights.device:
            model.move_to(shared)
            wait_for(model.weights)  # before shards move in
        return shared
    direct = direct and pushes_from_gpu(config)
    return model.memory if direct or model.weights.device.type == "cpu" else model.memory.pinned()


def make_gradient(
    config: Config,
    model: FlatModel,
    loss: Objective,
    data: DataSet,
    sampling: Sampling,
    number: int,
    memory: Memory | None = None,
    kind: Callable[..., Gradient] = Gradient,
) -> Gradient:
    """Return the gradient of a rank, or of all stages of a group (`kind`), by default in the model's memory.

    `number` names the stream of mini-batches: learner_id, or `Roles.number` in a team.
    """
    return kind(
        model,
        loss,
        data.train,
        sampling,
        memory or model.memory,
        seed=config.seed,
        learner_id=number,
        clip_norm=config.clip_norm if config.accumulation == 1 else 0.0,
        tell_nonfinite=config.nonfinite == "drop",
    )


def accumulated(config: Config, gradient: Travels) -> Travels:
    if config.accumulation == 1:
        return gradient
    return Accumulated(gradient, config.accumulation, clip_norm=config.clip_norm, tell_nonfinite=config.nonfinite == "drop")


def buckets_of(
    config: Config, layers: Sequence[Layer], bounds: Sequence[tuple[int, int]], nbytes: int | None = None
) -> list[Bucket]:
    """Return an allreduce's buckets, each of `nbytes` if given; none where gradients leave whole."""
    return buckets(layers, bounds, nbytes) if config.in_buckets else []


def chain(
    config: Config,
    computed: Travels,
    bounds: Sequence[tuple[int, int]],
    train_samples: int,
    gradients_per_update: float,
    segments: Sequence[Segment] = (),
    pieces: Sequence[tuple[int, int]] = (),
    *,
    fused: bool = False,
) -> Travels:
    """Return the stages from `computed` to the push; `segments`: parameter groups.

    `pieces`: parts of the vector: buckets, or a group's stages where one process computes all pushes.
    """
    if steps_by_itself(config):
        protocol = config.protocol
        alpha = config.alpha0 if protocol.own_alpha is None else protocol.own_alpha
        factor, samples = schedule.of_run(config, 1, train_samples), schedule.samples_per_update(config, 1)
        rate: Callable[[int], float] = lambda clock: alpha * factor(clock * samples / train_samples)  # noqa: E731
        computed = LocalSteps(computed, protocol.mini_batches_per_push, rate, segments)
    if config.local_steps:
        inner_rate = schedule.of_inner_steps(config, gradients_per_update, train_samples)
        count, drops, own = config.local_steps, config.nonfinite == "drop", in_pieces(segments, pieces)
        options = config.inner_optimizer
        computed = InnerSteps(computed, count, options, inner_rate, segments=own, tell_nonfinite=drops, fused=fused)
    if config.push_format != "float32":
        by_itself, how = bounds if config.per_layer else pieces, PushFormat.of(config)
        drops, told = config.nonfinite == "drop", config.in_buckets
        computed = Rounded(computed, by_itself, tell_nonfinite=drops, push_format=how, slices=bounds, told_at_once=told)
    return computed


def pushes_what_it_computes(config: Config) -> bool:
    """Tell whether gradients are pushed where they are computed: no team, own steps or rounding."""
    alone = not (config.in_teams or config.protocol.collective)
    return alone and config.push_format == "float32" and not moves_weights(config)


def pushes_from_gpu(config: Config) -> bool:
    """Tell whether a CUDA-aware MPI can take gradients from a GPU."""
    return pushes_what_it_computes(config) and config.pull_format == "float32" and config.ahead < 2 and not config.protocol.batch


def stays_on_gpu(config: Config) -> bool:
    """Tell whether virtual ranks exchange vectors in GPU memory.

    Team sums, rounded or sparse vectors, and several vectors at a time lie on the host.
    """
    one_by_one = config.way in ("whole", "in-place", "on-gpu") and config.plain
    return config.device == "cuda" and one_by_one and pushes_from_gpu(config)


def steps_by_itself(config: Config) -> bool:
    """Tell whether own weights go on between two pulls."""
    return config.protocol.mini_batches_per_pull > 1


def moves_weights(config: Config) -> bool:
    """Tell whether a mini-batch changes the pulled weights."""
    return steps_by_itself(config) or config.local_steps > 0


def leaves_early(config: Config) -> bool:
    """Tell whether streamed chunks leave during the backward pass, and weights come."""
    alone = pushes_what_it_computes(config) and not (held(config) or config.micro_batches > 1)
    return config.way == "streamed" and alone and config.pull_format == "float32" and not config.straggler.active


def held(config: Config) -> bool:
    """Tell whether slices wait for the whole gradient: clipped or dropped as a whole, or made of several backward passes."""
    return config.clip_norm > 0 or config.nonfinite == "drop" or config.accumulation > 1 or config.autocast == "float16"


def loop_delays(config: Config, learner_id: int) -> Delays:
    """Return the delays of a learner's loop; none where a team's rank waits before the sum, or the channel waits by layers."""
    by_itself = not (config.per_layer or config.in_teams)
    return Delays(config.straggler, config.seed, learner_id) if by_itself else NO_DELAYS
