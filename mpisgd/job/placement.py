"""Roles and protocol of a job on given hosts: all checks before torch is imported or a job is queued."""

from __future__ import annotations

from collections.abc import Sequence

from mpisgd.base.checks import require
from mpisgd.base.errors import ConfigError
from mpisgd.config import Config, compatibility
from mpisgd.exchange.roles import Roles, of_job, world_size
from mpisgd.protocols import Protocol


def on_ranks(config: Config, hosts: Sequence[str], *, virtual: bool = False) -> tuple[Roles, Protocol]:
    """Check the configuration against itself and the ranks' hosts.

    Raises ConfigError: options that exclude each other (`compatibility`), too few ranks, a misfit of protocol or straggler.
    """
    compatibility.check(config, virtual=virtual)
    roles = of_job(config, hosts)
    protocol = config.protocol.make(roles.lambda_)
    _check_stragglers(config, roles.streams)
    return roles, protocol


def on_virtual_ranks(config: Config, hosts: Sequence[str] | None = None) -> tuple[list[str], list[int], Roles, Protocol]:
    """Place ranks on a virtual cluster, or on these hosts; return each rank's host and node, too. Raises ConfigError."""
    nodes, spare = virtual_nodes(config), config.virtual.spare_nodes
    last = set() if hosts or not spare else set(range(len(nodes))[-spare:])
    if hosts:
        nodes = [[*dict.fromkeys(hosts)].index(host) for host in hosts]
    hosts = list(hosts or virtual_hosts(nodes))
    roles, protocol = on_ranks(config, hosts, virtual=True)
    expected = f"placement = 'spread', and at least as many shards as nodes, {nodes[-1] + 1}"
    require(last <= set(roles.shard_ranks), "virtual.spare_nodes", spare, expected)
    _check_named(config, [nodes[rank] for rank in roles.computing_ranks], roles.streams)
    for node, factor in config.network.slow_links.items():
        require(node in nodes, f"network.slow_links[{node}]", factor, f"a node, from 0 to {nodes[-1]}")
    return hosts, nodes, roles, protocol


def virtual_nodes(config: Config) -> list[int]:
    """Return each rank's node. Raises ConfigError: too many spare nodes."""
    options, ranks = config.virtual, world_size(config, config.virtual.learners)
    full, spare = ranks - options.spare_nodes, options.spare_nodes
    require(spare == 0 or spare < config.shards, "virtual.spare_nodes", spare, f"fewer than shards = {config.shards}")
    nodes = [rank // options.ranks_per_node for rank in range(full)]
    return nodes + [nodes[-1] + 1 + number for number in range(spare)]


def virtual_hosts(nodes: Sequence[int]) -> list[str]:
    return [f"node-{node}" for node in nodes]


def _check_named(config: Config, nodes: Sequence[int], learners: int) -> None:
    among = f"a node of learners, from {min(nodes)} to {max(nodes)}"
    for node, factor in config.virtual.slow_nodes.items():
        require(node in nodes, f"virtual.slow_nodes[{node}]", factor, among)
    for learner_id, at_s in config.failures.at_s.items():
        expected = f"a learner_id from 0 to {learners - 1}"
        require(0 <= learner_id < learners, f"failures.at_s[{learner_id}]", at_s, expected)


def _check_stragglers(config: Config, ranks: int) -> None:
    straggler = config.straggler
    named = {f"straggler.slowdown[{learner_id}]": learner_id for learner_id in straggler.slowdown}
    for field, learner_id in {**named, "straggler.pause_learner": straggler.pause_learner}.items():
        if learner_id >= ranks:
            raise ConfigError(f"{field}: there is no learner {learner_id}, expected 0 ... {ranks - 1}")
