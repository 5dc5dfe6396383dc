"""The stages of a learner's gradient, from a configuration: one chain for real ranks, virtual ones and replay.

compute    forward and backward pass, clipped (`gradient.py`); slice by slice, or by buckets, as layers are left
           (`by_layers`); in micro-batches, and by the stages of a model that is cut (`pipeline/pieces.py`)
accumulate the mean of several mini-batches (`accumulation.py`)
own steps  several mini-batches as one (`local_steps.py`), or with an optimiser of the learner's own (`inner_steps.py`)
node sum   of a team's ranks (`aggregate.py`), each of which has been late on its own before
rounding   to bfloat16 (`rounding.py`), or to the largest elements (`largest.py`), each slice by itself where they are exchanged one
           by one
delay      a straggler's, before the first slice is pushed (`straggler.py`)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpisgd.config import Config
from mpisgd.data import DataSet
from mpisgd.data.sampling import Sampling
from mpisgd.gradient.accumulation import Accumulated
from mpisgd.gradient.gradient import Gradient
from mpisgd.gradient.objective import Objective
from mpisgd.gradient.own_steps.inner_steps import InnerSteps
from mpisgd.gradient.own_steps.local_steps import LocalSteps
from mpisgd.gradient.rounding import Rounded
from mpisgd.gradient.straggler import NO_DELAYS, Delays
from mpisgd.update import schedule
from mpisgd.update.groups import Segment, in_pieces
from mpisgd.vectors.buckets import Bucket, buckets
from mpisgd.vectors.computing import Travels
from mpisgd.vectors.flat import FlatModel, Layer
from mpisgd.vectors.memory import Memory
from mpisgd.vectors.push_format import PushFormat


def place(config: Config, model: FlatModel, shared: Memory | None = None, *, direct: bool = False) -> Memory:
    """Where the gradient of one real rank is to lie: in its model, which moves to `shared` memory; or, beside a GPU, on the host.

    `direct`: MPI takes a GPU's memory; it is given what is pushed as it was computed.
    """
    if model.weights.device.type != "cpu":
        direct = direct and pushes_what_it_computes(config) and config.pull_format == "float32"
        return shared or (model.memory if direct else model.memory.pinned())
    if shared is not None:
        model.move_to(shared)
    return model.memory


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
    """Make the gradient of one rank, or of all stages of a group (`kind`), in `memory`, by default the model's own.

    `number` is that of its stream of mini-batches: its learner_id, or `Roles.number` in a team.
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
    """Make the gradient of one rank of those of its mini-batches."""
    if config.accumulation == 1:
        return gradient
    return Accumulated(gradient, config.accumulation, clip_norm=config.clip_norm, tell_nonfinite=config.nonfinite == "drop")


def buckets_of(
    config: Config, layers: Sequence[Layer], bounds: Sequence[tuple[int, int]], nbytes: int | None = None
) -> list[Bucket]:
    """The parts in which gradients leave in an allreduce, each of `nbytes`, if given; none where they leave as a whole."""
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
    """Make what is pushed of what a rank, or its team, computes; `segments`: the groups of parameters.

    `pieces`: of the vector, those of the stages of a group, where one process computes what all its ranks push; or its buckets.
    `fused`: as in `make_optimizer`.
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
        by_itself, how = bounds if config.by_layers else pieces, PushFormat.of(config)
        drops, told = config.nonfinite == "drop", config.in_buckets
        computed = Rounded(computed, by_itself, tell_nonfinite=drops, push_format=how, slices=bounds, told_at_once=told)
    return computed


def pushes_what_it_computes(config: Config) -> bool:
    """Whether a learner sends its gradient from where it is computed: not a sum of several, in a team or by itself, nor rounded."""
    alone = config.aggregation == "none" and not config.protocol.collective
    return alone and config.push_format == "float32" and not moves_weights(config)


def stays_on_gpu(config: Config) -> bool:
    """Tell whether virtual ranks exchange vectors in the memory of the GPU that they compute on, and not on the host.

    Sums of teams, rounded or sparse vectors, and vectors of which a rank sends and receives several at a time lie on the host.
    """
    one_by_one = config.exchange == "whole" and config.receive == "in-turn"
    return config.device == "cuda" and one_by_one and pushes_what_it_computes(config) and config.pull_format == "float32"


def steps_by_itself(config: Config) -> bool:
    """Whether a learner goes on from its own weights between two pulls."""
    return config.protocol.mini_batches_per_pull > 1


def moves_weights(config: Config) -> bool:
    """Whether a learner's weights are others after a mini-batch than it has pulled."""
    return steps_by_itself(config) or config.local_steps > 0


def held(config: Config) -> bool:
    """Whether no slice may leave before the whole gradient is there: it is clipped, or dropped, as a whole, or made of several
    backward passes."""
    return config.clip_norm > 0 or config.nonfinite == "drop" or config.accumulation > 1 or config.autocast == "float16"


def loop_delays(config: Config, learner_id: int) -> Delays:
    """Make the delays that a learner's loop waits after its mini-batches. In a team each rank waits by itself, before the sum;
    layer by layer the channel does, before the first push."""
    by_itself = not config.by_layers and (config.aggregation == "none" or config.protocol.collective)
    return Delays(config.straggler, config.seed, learner_id) if by_itself else NO_DELAYS
