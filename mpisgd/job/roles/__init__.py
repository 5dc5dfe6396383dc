"""Roles of ranks, built from their world: the only place that knows all roles (DESIGN 3)."""

from __future__ import annotations

from mpisgd.job.roles import batch, sgd
from mpisgd.job.roles.role import RankRole
from mpisgd.job.roles.sgd import ShardRole
from mpisgd.job.world import Setup, World

__all__ = ["RankRole", "ShardRole", "build"]


def build(setup: Setup, world: World, rank: int) -> RankRole:
    """Build a rank's role. Before the clock starts, only ranks of a node talk, to share memory."""
    kinds = batch.KINDS if setup.config.protocol.batch else sgd.KINDS
    return kinds[setup.roles.of(rank)](setup, world, rank)
