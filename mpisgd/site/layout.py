"""Nodes and ranks per node for a configuration's roles; impossible sizes are refused before a job queues."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass

from mpisgd.base.checks import require
from mpisgd.base.errors import ConfigError
from mpisgd.config import Config
from mpisgd.exchange.roles import Roles
from mpisgd.job.placement import on_ranks


@dataclass(frozen=True)
class Wishes:
    """Sizes from the user; None = derived."""

    nodes: int | None = None
    tasks_per_node: int | None = None
    learners: int | None = None
    gpus_per_node: int = 0

    def __post_init__(self) -> None:
        for name, least in {"nodes": 1, "tasks_per_node": 1, "learners": 1, "gpus_per_node": 0}.items():
            value = getattr(self, name)
            require(value is None or value >= least, name, value, f"a number >= {least}")


@dataclass(frozen=True)
class Layout:
    """Ranks = shards + learners (+ evaluator), `tasks_per_node` per node; only the last node may have fewer.

    LSF and mpirun fill nodes in this way. `shards` is 0 where learners double as shards (allreduce); with node aggregation or
    groups, `learners` are all computing ranks.
    """

    nodes: int
    tasks_per_node: int
    shards: int
    learners: int
    evaluator: bool

    @property
    def ranks(self) -> int:
        return self.shards + self.learners + int(self.evaluator)

    @property
    def equation(self) -> str:
        """E.g. `ranks = shards + learners (+ 1 evaluator), here 1 + 16 + 1 = 18`."""
        terms = [f"{self.shards} + "] * bool(self.shards) + [str(self.learners)]
        terms += [" + 1"] * self.evaluator
        words = "shards + learners (+ 1 evaluator)" if self.shards else "learners, also the shards (+ 1 evaluator)"
        return f"ranks = {words}, here {''.join(terms)}" + (f" = {self.ranks}" if len(terms) > 1 else "")

    @property
    def hosts(self) -> tuple[str, ...]:
        """Node of each rank: batch systems fill node by node."""
        return tuple(f"node {rank // self.tasks_per_node}" for rank in range(self.ranks))


def fit(config: Config, wishes: Wishes) -> Layout:
    """Return the least layout for roles and wishes.

    Raises ConfigError: misfits of ranks, nodes or GPUs, or a refusal by `train`.
    """
    for field in ("device", "shard_device"):
        device = getattr(config, field)
        require(device == "cpu" or wishes.gpus_per_node > 0, field, device, "'cpu' where no --gpus-per-node are asked for")
    shards = 0 if config.protocol.collective else config.shards
    fixed = shards + int(config.evaluator)
    nodes, tasks, learners = wishes.nodes, wishes.tasks_per_node, wishes.learners
    if learners is None:
        learners = _learners(wishes, fixed)
    ranks = fixed + learners
    if nodes is None:
        nodes = -(-ranks // tasks) if tasks else -(-learners // (wishes.gpus_per_node or learners))
    if tasks is None:
        tasks = -(-ranks // nodes)
    what = f"{ranks} ranks = {shards} shards + {learners} learners + {int(config.evaluator)} evaluators"
    require(ranks <= nodes * tasks, "tasks_per_node", tasks, f"at least {-(-ranks // nodes)}: {what} on {nodes} nodes")
    needed = -(-ranks // tasks)
    require(nodes == needed, "nodes", nodes, f"{needed}: {what}, {tasks} on a node, need no more")
    layout = Layout(nodes, tasks, shards, learners, config.evaluator)
    started = dataclasses.replace(config, device="cuda", placement="spread") if wishes.gpus_per_node else config
    assigned, _ = on_ranks(started, layout.hosts)
    if wishes.gpus_per_node:
        _check_gpus(layout, assigned, wishes.gpus_per_node)
    return layout


def _learners(wishes: Wishes, fixed: int) -> int:
    nodes = wishes.nodes or 1
    if wishes.tasks_per_node is None:
        if not wishes.gpus_per_node:
            raise ConfigError("learners = None: expected --learners, --tasks-per-node or --gpus-per-node")
        return nodes * wishes.gpus_per_node
    left = nodes * wishes.tasks_per_node - fixed
    expected = f"at least {-(-(fixed + 1) // nodes)}: {fixed} shards and evaluators and 1 learner on {nodes} nodes"
    require(left >= 1, "tasks_per_node", wishes.tasks_per_node, expected)
    return min(left, nodes * wishes.gpus_per_node) if wishes.gpus_per_node else left


def _check_gpus(layout: Layout, assigned: Roles, gpus: int) -> None:
    counts = Counter(layout.hosts[rank] for rank in assigned.computing_ranks)
    node, most = max(counts.items(), key=lambda item: item[1], default=("", 0))
    expected = (
        f"at least {most}, a GPU for each learner of {node}; or fewer learners; shards and evaluator are dealt to the nodes"
        f" evenly where their number, {layout.ranks - layout.learners}, is a multiple of nodes = {layout.nodes}"
    )
    require(most <= gpus, "gpus_per_node", gpus, expected)
