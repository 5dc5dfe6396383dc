"""A virtual job: the ranks of `job/run/`, on virtual nodes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np
import torch

from mpisgd.base.draws import exact_kernels, kept
from mpisgd.base.terminal import say
from mpisgd.base.version import __version__
from mpisgd.base.without_gc import without_gc
from mpisgd.comm.virtual.cluster import Cluster
from mpisgd.comm.virtual.wire import VirtualWire
from mpisgd.config import Config, config_file, replace
from mpisgd.exchange import link_load, ways
from mpisgd.job import parts, placement, user_code
from mpisgd.job.finish import Outcome, check_books, farewell, finish, headline, outcome_of
from mpisgd.job.parts import NO_OBJECTS, UserObjects
from mpisgd.job.provenance import environment
from mpisgd.job.roles import RankRole, build
from mpisgd.job.tensors import with_measured_stages
from mpisgd.job.world import Setup
from mpisgd.records import directory
from mpisgd.records.checkpoint import buffers
from mpisgd.records.log.reader import Run
from mpisgd.simulate.failures import LearnerFailed
from mpisgd.simulate.world import SizedWorld, TensorWorld, VirtualWorld


def simulate(config: Config, user_objects: UserObjects = NO_OBJECTS) -> Outcome:
    """Run a job on a virtual cluster, from set-up to DONE; its directory is as a real run's.

    Raises ConfigError, DataError before any write; DeadlockError, and any rank's errors.
    """
    return Job(config, user_objects).run()


class Job:
    """A virtual job: its roles, and their world.

    Args:
        evaluated: whether snapshots are evaluated, which takes no virtual time.
        kept: whether the run is for later: only then look up its commits.
        hosts: of all ranks; None = of the configured cluster.
        tolerant: learners may be lost.
    """

    def __init__(
        self,
        config: Config,
        user_objects: UserObjects,
        *,
        evaluated: bool = True,
        kept: bool = True,
        hosts: Sequence[str] | None = None,
        tolerant: bool = False,
    ) -> None:
        self.user_objects = user_objects
        self.kept = kept
        config = user_code.with_user_objects(config, user_objects)
        torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
        if config.deterministic:
            exact_kernels()
        hosts, nodes, roles, protocol = placement.on_virtual_ranks(config, hosts)
        self.roles = roles.made_tolerant() if tolerant else roles
        self.config = config = with_measured_stages(replace(config, shards=len(self.roles.shard_ranks)), user_objects)
        self.world = self._make_world(nodes, evaluated)
        world = self.world
        self.setup = Setup(world.config, config, self.roles, protocol, hosts, world.meta, world.bounds, stages=world.stages)
        self.setup.check_schedule()
        self.path = self.setup.path

    def _make_world(self, nodes: list[int], evaluated: bool) -> VirtualWorld:
        if self.config.virtual.gradients:
            return TensorWorld(self.config, self.user_objects, self.roles, nodes, evaluated)
        return SizedWorld(self.config, self.user_objects, self.roles, nodes)

    def run(self) -> Outcome:
        with ExitStack() as held:
            held.callback(directory.claim(self.path, overwrite=self.config.overwrite).release)
            return self._run()

    def _run(self) -> Outcome:
        config, setup, world = self.config, self.setup, self.world
        directory.write_config(self.path, config_file.dumps(config, self.environment()))
        lambda_, ranks = self.roles.lambda_, self.roles.streams
        carried, wasted = link_load.said(setup.config, self.roles, setup.hosts, setup.bounds)
        self._say(
            f"mpisgd {__version__}, virtual cluster:"
            f" {headline(config, lambda_, ranks, world.parameters, world.meta.train_samples)},"
            f" {len(set(setup.hosts)):,} nodes, {ways.said(setup.config)}{f', {carried}' if carried else ''}"
            f"{world.computing}; log in {self.path}"
        )
        if wasted:
            self._say(f"mpisgd: warning: {wasted}")
        if self.kept and world.tensors is not None and world.tensors.data is not None:
            parts.warn_at_start(config, world.tensors.data)
        with without_gc():
            accounts = self._train()
            world.wires.clear()  # frees all that was made for ranks, without the collector
        outcome = outcome_of(self.path, np.stack([accounts[rank] for rank in self.roles.shard_ranks]))
        buffers.forget(self.path, 0)
        log = Run(self.path) if config.log.enabled else None
        if log is not None:
            for shard, clock in enumerate(outcome.clocks):
                check_books(log, shard, clock)
        outcome = finish(outcome, log)
        self._say(farewell(outcome, log, batch=config.protocol.batch))
        return outcome

    def _train(self) -> dict[int, np.ndarray]:
        setup, world, accounts = self.setup, self.world, dict[int, np.ndarray]()
        with ExitStack() as stack, kept():
            cluster = Cluster(self.roles.describe)
            mains = []
            for rank in range(len(setup.hosts)):
                self._wire(cluster, rank)
            for rank in range(len(setup.hosts)):
                role = build(setup, world, rank)
                stack.callback(role.close)
                mains.append(self._main_of(role, accounts))
            self._let_go(cluster, mains)
        return accounts

    def _let_go(self, cluster: Cluster, mains: list[Callable[[], None]]) -> None:
        cluster.run(self.world.wires, mains)

    def _wire(self, cluster: Cluster, rank: int) -> None:
        VirtualWire(cluster, self.world.network, self.world.wires)

    def _main_of(self, role: RankRole, accounts: dict[int, np.ndarray]) -> Callable[[], None]:
        """Return a Python function: its call needs no room on C's stack, which each switch of ranks copies."""
        wire = self.world.wires[role.rank]

        def main() -> None:
            wire.clock.begin(wire.meet)
            try:
                role.train()
            except LearnerFailed as failure:
                self.world.part_with(role, failure)
            accounts[role.rank] = role.end()
            wire.meet()
            role.leave()

        return main

    def environment(self) -> dict[str, object]:
        facts = self.world.facts
        return environment(self.setup, self.user_objects, mpi="none: a virtual cluster", commits=self.kept, virtual=True, **facts)

    def _say(self, text: str) -> None:
        if self.config.log.progress != "off":
            say(text)
