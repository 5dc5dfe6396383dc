"""One virtual job: the ranks that `job/run/` would run on real nodes, on virtual ones."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import numpy as np
import torch

from mpisgd.base.draws import kept
from mpisgd.base.version import __version__
from mpisgd.base.without_gc import without_gc
from mpisgd.comm.virtual.cluster import Cluster
from mpisgd.comm.virtual.wire import VirtualWire
from mpisgd.config import Config, config_file, replace
from mpisgd.job import naming, parts, placement
from mpisgd.job.building.roles import Built, build
from mpisgd.job.building.setup import Setup
from mpisgd.job.finish import Outcome, farewell, finish, headline, outcome_of
from mpisgd.job.parts import NOTHING_BROUGHT, Brought
from mpisgd.job.provenance import environment
from mpisgd.records import directory
from mpisgd.simulate.costs import Costs
from mpisgd.simulate.sizes import SizedWorld
from mpisgd.simulate.tensors import TensorWorld
from mpisgd.simulate.world import VirtualWorld


def simulate(config: Config, brought: Brought = NOTHING_BROUGHT) -> Outcome:
    """Run a job on a virtual cluster, from set-up to DONE; its directory is that of a real run.

    Raises ConfigError, DataError before anything is written; DeadlockError and whatever a rank raises.
    """
    return Job(config, brought).run()


class Job:
    """A virtual job: its roles, and the world that they live in.

    Args:
        evaluated: whether snapshots are evaluated, or only pulled: that takes no virtual time.
        kept: whether the run is to be looked at later: only then is asked of which commits it is.
    """

    def __init__(self, config: Config, brought: Brought, *, evaluated: bool = True, kept: bool = True) -> None:
        self.brought = brought
        self.kept = kept
        config = naming.as_brought(config, brought)
        torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
        nodes, self.roles, self.protocol = placement.on_virtual_ranks(config)
        self.hosts = placement.virtual_hosts(nodes)
        self.config = config = replace(config, shards=len(self.roles.shard_ranks))
        costs = Costs(config, self.roles, nodes)
        self.world: VirtualWorld = (
            TensorWorld(config, brought, self.roles, costs, evaluated)
            if config.virtual.gradients
            else SizedWorld(config, brought, self.roles, costs)
        )
        self.world.check()
        self.setup = Setup(config, self.roles, self.protocol, self.world.meta, self.world.bounds, self.world.fingerprint)
        self.path = self.setup.path
        self.built: list[Built] = []

    def run(self) -> Outcome:
        """All ranks, then the common end."""
        lock = directory.claim(self.path, overwrite=self.config.overwrite)
        try:
            return self._run()
        finally:
            lock.release()

    def _run(self) -> Outcome:
        config, world, logged, ranks = self.config, self.world, self.config.log.enabled, len(self.roles.computing_ranks)
        directory.write_config(self.path, config_file.dumps(config, self.environment()))
        self._say(
            f"mpisgd {__version__}, virtual cluster:"
            f" {headline(config, self.roles.lambda_, ranks, world.parameters, world.meta.train_samples)},"
            f" {len(set(self.hosts)):,} nodes; log in {self.path}"
        )
        accounts: dict[int, np.ndarray] = {}
        with world.closing, without_gc(), kept():
            cluster = Cluster(self.roles.describe)
            for _ in self.hosts:
                VirtualWire(cluster, world.costs.network, world.wires)
            self.built = [build(self.setup, world, rank) for rank in range(len(self.hosts))]
            cluster.run(world.wires, [_main(built, accounts) for built in self.built])
        outcome = outcome_of(self.path, np.stack([accounts[rank] for rank in self.roles.shard_ranks]))
        outcome = finish(outcome, logged=logged)
        self._say(farewell(outcome, logged=logged))
        return outcome

    def environment(self) -> dict[str, object]:
        """The table [environment] of its config.toml."""
        return environment(
            self.config,
            self.roles,
            self.hosts,
            self.world.meta,
            brought=naming.described(self.config, self.brought),
            mpi="none: a virtual cluster",
            commits=self.kept,
            virtual=True,
            parameters=self.world.parameters,
            parameter_nbytes=4 * self.world.parameters,
            batch_norm_policy=self.world.batch_norm_policy,
            **parts.layer_names(self.world.slices),
        )

    def _say(self, text: str) -> None:
        if self.config.log.progress != "off":
            print(text, file=sys.stderr, flush=True)


def _main(built: Built, accounts: dict[int, np.ndarray]) -> Callable[[], None]:
    def main() -> None:
        accounts[built.rank] = built.run()
        built.wire.meet()
        built.leave()

    return main
