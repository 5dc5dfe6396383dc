"""Both ends of an exchange, as configured."""

from __future__ import annotations

from mpisgd.comm.communicator import Communicator
from mpisgd.config import Config
from mpisgd.exchange.both_ways.prefetch import PrefetchChannel
from mpisgd.exchange.both_ways.streamed import StreamedChannel, StreamedShardChannel
from mpisgd.exchange.deltas import Held
from mpisgd.exchange.learner_channel import LearnerChannel, Slices
from mpisgd.exchange.roles import Roles
from mpisgd.exchange.shard_channel import ShardChannel
from mpisgd.exchange.survivors import Survivors
from mpisgd.exchange.ways import AHEAD, DUPLEX, LAYERWISE, PIPELINED
from mpisgd.gradient import stages
from mpisgd.gradient.straggler import Delays
from mpisgd.job.roles.agreement import AgreeingChannel
from mpisgd.rules.protocol import Protocol
from mpisgd.vectors.computing import Updates
from mpisgd.vectors.memory import Memory

MOST_KEPT = 4
"""Limit on pieces kept by MPI, in vectors of the model's size; beyond, bodies travel whole."""


def in_pieces(roles: Roles) -> bool:
    """Return whether bodies travel in pieces between nodes, where links carry both ways (`comm/pieces.py`).

    MPI's question for a whole gradient's receive waits behind weights on the same connection: 0.45 s between two nodes at
    1 Gbit/s both ways, in pieces 0.38. MPI keeps early pieces, at most a slice per learner.
    """
    return len(roles.learner_ranks) <= MOST_KEPT * len(roles.shard_ranks)


def slices_of(
    config: Config, memory: Memory, bounds: list[tuple[int, int]], *, in_pieces: bool = False, ahead: bool = False
) -> Slices:
    """Return a learner's slices; `ahead`: weights arrive before the gradient's last use of older weights."""
    if config.pull_format == "bfloat16":
        held = Held(memory.weights, bounds, apart=stages.moves_weights(config))
        return Slices(memory.weights, memory.gradients, bounds, memory.cuts, held, in_pieces=in_pieces)
    weights, computed_from = (memory.another().weights, memory.weights) if ahead else (memory.weights, None)
    return Slices(weights, memory.gradients, bounds, memory.cuts, computed_from=computed_from, in_pieces=in_pieces)


def learner_channel(
    config: Config,
    protocol: Protocol,
    wire: Communicator,
    roles: Roles,
    learner_id: int,
    memory: Memory,
    bounds: list[tuple[int, int]],
    *,
    tolerant: bool,
) -> LearnerChannel:
    """Return a learner's end; layers are pulled whole if shards promise a common clock, or reject.

    Fault-tolerant runs ask nothing ahead: a missed learner's pull says that it is back, and must follow its push.
    """
    if config.exchange == "prefetch":
        rounded = config.pull_format == "bfloat16"
        return PrefetchChannel(wire, roles, learner_id, memory, bounds, rounded=rounded, in_pieces=in_pieces(roles))
    ahead = config.exchange == "layerwise" and config.protocol.alike and not (config.agrees or tolerant)
    cut = config.exchange == "duplex" and in_pieces(roles)
    ends = wire, roles, learner_id, slices_of(config, memory, bounds, in_pieces=cut, ahead=ahead)
    consistent = protocol.consistent
    if config.exchange == "duplex":
        return LearnerChannel(*ends, consistent=False, way=DUPLEX)
    if config.exchange == "streamed":
        return StreamedChannel(*ends, consistent=consistent)
    kind = AgreeingChannel if config.agrees else LearnerChannel
    if config.exchange == "whole":
        return kind(*ends, consistent=consistent, interruptible=protocol.aborts)
    delays = Delays(config.straggler, config.seed, learner_id)
    if ahead:
        return kind(*ends, consistent=consistent, way=AHEAD._replace(delays=delays, next_clock=protocol.next_clock))
    way = PIPELINED if consistent or config.protocol.rejects else LAYERWISE
    return kind(*ends, consistent=consistent, way=way._replace(delays=delays))


def shard_channel(
    config: Config, wire: Communicator, roles: Roles, shard: int, update: Updates, survivors: Survivors | None
) -> ShardChannel:
    rounded, gathered = config.pull_format == "bfloat16", config.receive == "gathered"
    if config.exchange == "streamed":
        return StreamedShardChannel(wire, roles, shard, rounded=rounded)
    rooms, cut = update.rooms if gathered else None, config.both_ways and in_pieces(roles)
    answers = update.weights if cut and not rounded else None  # rounded weights, of unknown size, travel whole
    ends = wire, roles, shard
    return ShardChannel(*ends, duplex=config.both_ways, rooms=rooms, in_pieces=cut, cut=answers, survivors=survivors)
