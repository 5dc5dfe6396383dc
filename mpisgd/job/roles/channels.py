"""Both ends of an exchange, as configured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpisgd.comm.communicator import Communicator
from mpisgd.config import Config
from mpisgd.exchange.deltas import Held
from mpisgd.exchange.learner_channel import LearnerChannel, Slices
from mpisgd.exchange.roles import Roles
from mpisgd.exchange.rounds import DUPLEX, EARLY, LAYERWISE, PIPELINED, PLAIN, PREFETCH
from mpisgd.exchange.shard_channel import ShardChannel
from mpisgd.exchange.survivors import Survivors
from mpisgd.exchange.travel.in_place import InPlaceShardChannel
from mpisgd.exchange.travel.streamed import StreamedChannel, StreamedShardChannel
from mpisgd.exchange.ways import GATHERED, STREAMED
from mpisgd.gradient import stages
from mpisgd.gradient.straggler import Delays
from mpisgd.rules.protocol import Protocol
from mpisgd.vectors.computing import Updates
from mpisgd.vectors.memory import Memory

MOST_KEPT = 4
"""Limit on pieces kept by MPI, in vectors of the model's size; beyond, bodies travel whole."""


def in_pieces(roles: Roles) -> bool:
    """Return whether bodies travel in pieces between nodes, where links carry both ways (`comm/pieces.py`)."""
    # MPI's question for a whole gradient's receive waits behind weights on the same connection: 0.45 s between two nodes at
    # 1 Gbit/s both ways, in pieces 0.38. MPI keeps early pieces, at most a slice per learner.
    return len(roles.learner_ranks) <= MOST_KEPT * len(roles.shard_ranks)


def slices_of(
    config: Config, memory: Memory, bounds: list[tuple[int, int]], *, in_pieces: bool = False, early: bool = False
) -> Slices:
    """Return a learner's slices; `early`: weights arrive before the gradient's last use of older weights."""
    prefetch, rounded = config.ahead == 2, config.pull_format == "bfloat16"
    apart = prefetch or (early and not rounded)  # rounded weights arrive apart anyway
    travels = memory.another() if apart else memory
    held = Held(travels.weights, bounds, apart=not prefetch and stages.moves_weights(config)) if rounded else None
    return Slices(
        travels.weights,
        travels.gradients if prefetch else memory.gradients,
        bounds,
        memory.cuts,
        held,
        computed_from=memory.weights if apart else None,
        computed_into=memory.gradients if prefetch else None,
        in_pieces=in_pieces,
        in_place=len(memory.outboxes) > 0,
    )


def learner_channel(
    config: Config,
    protocol: Protocol,
    wire: Communicator,
    roles: Roles,
    learner_id: int,
    memory: Memory,
    bounds: list[tuple[int, int]],
    *,
    apart: bool,
) -> LearnerChannel:
    """Return a learner's end; layers are pulled whole if shards promise a common clock, or reject.

    `apart`: weights may arrive before the gradient's last use of older weights.
    """
    # Fault-tolerant runs ask nothing ahead: a missed learner's pull says that it is back, and must follow its push.
    early = config.per_layer and config.protocol.alike and not (config.agrees or roles.tolerant)
    cut = config.ahead > 0 and in_pieces(roles)
    ends = wire, roles, learner_id, slices_of(config, memory, bounds, in_pieces=cut, early=early or apart)
    if config.way == STREAMED:
        return StreamedChannel(*ends, consistent=protocol.consistent, next_clock=protocol.next_clock, chunks=config.chunks)
    if early:
        when = EARLY._replace(next_clock=protocol.next_clock)
    elif config.per_layer:
        when = PIPELINED if protocol.consistent or config.protocol.rejects else LAYERWISE
    else:
        when = (PLAIN, DUPLEX, PREFETCH)[config.ahead]
    return LearnerChannel(
        *ends,
        consistent=protocol.consistent and config.ahead == 0,
        interruptible=protocol.aborts and config.plain,
        agrees=config.agrees,
        when=when._replace(delays=Delays(config.straggler, config.seed, learner_id)),
    )


def shard_channel(
    config: Config,
    wire: Communicator,
    roles: Roles,
    shard: int,
    update: Updates,
    survivors: Survivors | None,
    outboxes: Sequence[Sequence[Any]] = (),
) -> ShardChannel:
    """Return a shard's end; `outboxes`: its slice of each learner's, if shared."""
    rounded = config.pull_format == "bfloat16"
    if outboxes:
        return InPlaceShardChannel(wire, roles, shard, [[update.bodies.at(each) for each in own] for own in outboxes])
    if config.way == STREAMED:
        return StreamedShardChannel(wire, roles, shard, rounded=rounded)
    gathered, cut = config.way == GATHERED, config.ahead > 0 and in_pieces(roles)
    answers = update.weights if cut and not rounded else None  # rounded weights, of unknown size, travel whole
    ends = wire, roles, shard
    return ShardChannel(*ends, duplex=config.ahead > 0, gathered=gathered, in_pieces=cut, cut=answers, survivors=survivors)
