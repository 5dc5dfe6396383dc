"""Both ends of an exchange, as configured."""

from __future__ import annotations

from mpisgd.comm.communicator import Communicator
from mpisgd.config import Config
from mpisgd.exchange.both_ways import piecewise
from mpisgd.exchange.both_ways.duplex import DuplexChannel
from mpisgd.exchange.both_ways.prefetch import PrefetchChannel
from mpisgd.exchange.both_ways.streamed import StreamedChannel, StreamedShardChannel
from mpisgd.exchange.channel import LearnerChannel, Slices
from mpisgd.exchange.deltas import Held
from mpisgd.exchange.gathering import GatheringShardChannel
from mpisgd.exchange.layerwise import AheadChannel, LayerwiseChannel, PipelinedChannel
from mpisgd.exchange.roles import Roles
from mpisgd.exchange.shard_channel import ShardChannel
from mpisgd.gradient import stages
from mpisgd.gradient.straggler import Delays
from mpisgd.job.roles.agreement import AgreeingChannel, AgreeingPipelinedChannel
from mpisgd.rules.protocol import Protocol
from mpisgd.vectors.computing import Updates
from mpisgd.vectors.memory import Memory


def slices_of(config: Config, memory: Memory, bounds: list[tuple[int, int]], *, in_pieces: bool = False) -> Slices:
    held = Held(memory.weights, bounds, apart=stages.moves_weights(config)) if config.pull_format == "bfloat16" else None
    return Slices(memory.weights, memory.gradients, bounds, memory.cuts, held, in_pieces)


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
        return PrefetchChannel(wire, roles, learner_id, memory, bounds, rounded=rounded, in_pieces=piecewise.fits(roles))
    in_pieces = config.exchange == "duplex" and piecewise.fits(roles)
    ends = wire, roles, learner_id, slices_of(config, memory, bounds, in_pieces=in_pieces)
    consistent = protocol.consistent
    if config.exchange == "duplex":
        return DuplexChannel(*ends, consistent=False)
    if config.exchange == "streamed":
        return StreamedChannel(*ends, consistent=consistent)
    if config.exchange == "whole":
        whole = AgreeingChannel if config.agrees else LearnerChannel
        return whole(*ends, consistent=consistent, interruptible=protocol.aborts)
    delays = Delays(config.straggler, config.seed, learner_id)
    if config.protocol.alike and not (config.agrees or tolerant):
        return AheadChannel(*ends, delays, protocol.next_clock, memory, consistent=consistent)
    kind = PipelinedChannel if consistent or config.protocol.rejects else LayerwiseChannel
    if config.agrees:
        kind = AgreeingPipelinedChannel
    return kind(*ends, delays, consistent=consistent)


def shard_channel(config: Config, wire: Communicator, roles: Roles, shard: int, update: Updates) -> ShardChannel:
    rounded, gathered = config.pull_format == "bfloat16", config.receive == "gathered"
    if config.exchange == "streamed":
        return StreamedShardChannel(wire, roles, shard, rounded=rounded)
    ends = wire, roles, shard
    if not (config.both_ways and piecewise.fits(roles)):
        return GatheringShardChannel(*ends, update.rooms) if gathered else ShardChannel(*ends, duplex=config.both_ways)
    channel = (
        piecewise.PiecewiseGatheringShardChannel(*ends, update.rooms)
        if gathered
        else piecewise.PiecewiseShardChannel(*ends, duplex=True)
    )
    if not rounded:
        channel.cut(update.weights)
    return channel
