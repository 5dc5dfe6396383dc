"""Changes of the fitted configuration for a prediction: more learners, other shards."""

from __future__ import annotations

import dataclasses
from typing import Literal

from mpisgd.config import Config, replace
from mpisgd.exchange.roles import Roles, of_job
from mpisgd.job.placement import virtual_hosts, virtual_nodes

Placement = Literal["packed", "spread"]
PLACEMENTS: tuple[Placement, ...] = ("packed", "spread")


def with_learners(config: Config, learners: int) -> Config:
    """Take the protocol (`ProtocolOptions.among`) to other learners; learner l is like the run's l modulo λ, also as a
    straggler."""
    lambda_ = config.virtual.learners
    slowdown = config.straggler.slowdown
    if slowdown:
        slowdown = {
            learner_id: slowdown[learner_id % lambda_] for learner_id in range(learners) if learner_id % lambda_ in slowdown
        }
    pausing = config.straggler.pause_learner
    more = replace(
        config,
        protocol=config.protocol.among(lambda_, learners),
        virtual=dataclasses.replace(config.virtual, learners=learners),
        straggler=dataclasses.replace(config.straggler, slowdown=slowdown, pause_learner=pausing if pausing < learners else -1),
    )
    return with_slow_links(more, config)


def with_slow_links(config: Config, before: Config) -> Config:
    """Move slow links to where learners behind them are now; a node's first learner counts."""
    now, then = nodes_of_learners(config), nodes_of_learners(before)
    factors = before.network.slow_links
    if not factors or now == then:
        return config
    slow_links = {}
    for learner_id, node in reversed(list(enumerate(now))):
        slow_links[node] = factors.get(then[learner_id % len(then)], 1.0)
    slow_links = {node: factor for node, factor in slow_links.items() if factor != 1.0}
    return replace(config, network=dataclasses.replace(config.network, slow_links=slow_links))


def nodes_of_learners(config: Config) -> list[int]:
    nodes, roles = layout(config)
    return [nodes[rank] for rank in roles.learner_ranks]


def layout(config: Config) -> tuple[list[int], Roles]:
    nodes = virtual_nodes(config)
    return nodes, of_job(config, virtual_hosts(nodes))
