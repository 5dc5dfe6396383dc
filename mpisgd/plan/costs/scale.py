"""The fitted configuration, changed to what is to be predicted: another protocol, more learners, other shards."""

from __future__ import annotations

import dataclasses
from typing import Literal

from mpisgd.config import Config, replace

Placement = Literal["packed", "spread"]
PLACEMENTS: tuple[Placement, ...] = ("packed", "spread")


def with_learners(config: Config, learners: int) -> Config:
    """Take the same protocol to more or fewer learners; learner l is like the run's learner l modulo its λ, also as a straggler.

    What stays the same of the protocol, it says itself (`ProtocolOptions.among`).
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
        protocol=config.protocol.among(lambda_, learners),
        virtual=dataclasses.replace(config.virtual, learners=learners),
        straggler=dataclasses.replace(config.straggler, slowdown=slowdown, pause_learner=pausing if pausing < learners else -1),
    )
