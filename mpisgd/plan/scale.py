"""The fitted configuration, changed to what is to be predicted: another protocol, more learners, other shards."""

from __future__ import annotations

import dataclasses
from typing import Literal

from mpisgd import protocols
from mpisgd.config import BackupOptions, Config, ProtocolOptions, SoftsyncOptions, TimeoutOptions, VersionedOptions, replace

Placement = Literal["packed", "spread"]
PLACEMENTS: tuple[Placement, ...] = ("packed", "spread")


def with_shards(config: Config, shards: int, placement: Placement) -> Config:
    """The parameters in so many slices."""
    return replace(config, shards=shards, placement=placement)


def with_learners(config: Config, learners: int) -> Config:
    """Take the same protocol to more or fewer learners; learner l is like the run's learner l modulo its λ, also as a straggler.

    backup keeps its share of backup learners, n-softsync its n, others what they wait for, where there are as many learners;
    λ-softsync, where every gradient is an update, stays one.
    """
    lambda_ = config.virtual.learners
    slowdown = config.straggler.slowdown
    if slowdown:
        slowdown = {
            learner_id: slowdown[learner_id % lambda_] for learner_id in range(learners) if learner_id % lambda_ in slowdown
        }
    pausing = config.straggler.pause_learner
    return replace(
        config,
        protocol=_rescaled(config.protocol, lambda_, learners),
        virtual=dataclasses.replace(config.virtual, learners=learners),
        straggler=dataclasses.replace(config.straggler, slowdown=slowdown, pause_learner=pausing if pausing < learners else -1),
    )


def _rescaled(protocol: ProtocolOptions, lambda_: int, learners: int) -> ProtocolOptions:
    match protocol:
        case SoftsyncOptions(n=n):
            return dataclasses.replace(protocol, n=learners if n == lambda_ else min(n, learners))
        case BackupOptions():
            share = 1 - protocols.wanted(protocol, lambda_) / lambda_
            return dataclasses.replace(protocol, N=None, b=min(round(share * learners), learners - 1))
        case TimeoutOptions(N=gradients, N_min=least):
            wanted = None if gradients is None else min(gradients, learners)
            return dataclasses.replace(protocol, N=wanted, N_min=min(least, learners))
        case VersionedOptions(grads_to_wait=int(gradients)):
            return dataclasses.replace(protocol, grads_to_wait=min(gradients, learners))
    return protocol
