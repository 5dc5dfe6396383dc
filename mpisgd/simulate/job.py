"""One virtual job: the ranks that `job/run.py` would build on real nodes, on virtual ones."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpisgd.base.draws import kept
from mpisgd.base.errors import PeerError
from mpisgd.base.speech import say
from mpisgd.base.version import __version__
from mpisgd.base.without_gc import without_gc
from mpisgd.comm.messages import Ending
from mpisgd.comm.virtual.cluster import Cluster
from mpisgd.comm.virtual.wire import VirtualWire
from mpisgd.config import Config, config_file, replace
from mpisgd.exchange.layerwise import PipelinedChannel, learner_channel
from mpisgd.exchange.roles import Role
from mpisgd.exchange.shard_channel import ShardChannel
from mpisgd.exchange.shared_team import team_channel
from mpisgd.gradient import stages
from mpisgd.gradient.aggregate import Leader, Member, SharedMemory, follow
from mpisgd.gradient.straggler import Delays
from mpisgd.job import naming, parts, placement
from mpisgd.job.allreduce import Collective
from mpisgd.job.finish import Outcome, account, blown_up, farewell, finish, headline, outcome_of
from mpisgd.job.parts import NOTHING_BROUGHT, Brought
from mpisgd.job.provenance import environment
from mpisgd.learner import learn
from mpisgd.records import directory
from mpisgd.records.log import schema
from mpisgd.records.log.bounded import open_tables
from mpisgd.records.log.progress import Progress
from mpisgd.records.log.writer import EvaluatorLog, ShardLog, TableFile
from mpisgd.records.shard_records import ShardRecords
from mpisgd.rules.rules import Rules
from mpisgd.shard import Shard
from mpisgd.simulate.costs import Costs
from mpisgd.simulate.failures import LearnerFailed
from mpisgd.simulate.passes import Passes
from mpisgd.simulate.sizes import Sizes
from mpisgd.simulate.tensors import Tensors, after
from mpisgd.vectors.computing import Computes, Travels


def simulate(config: Config, brought: Brought = NOTHING_BROUGHT) -> Outcome:
    """Run a job on a virtual cluster, from set-up to DONE; its directory is that of a real run.

    Raises ConfigError, DataError before anything is written; DeadlockError and whatever a rank raises.
    """
    return Job(config, brought).run()


class Job:
    """A virtual job: roles, costs, and what its ranks compute.

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
        ranks = len(self.roles.computing_ranks)
        self.config = config = replace(config, shards=len(self.roles.shard_ranks))
        self.costs = Costs(config, self.roles, nodes)
        self.work: Sizes | Tensors = (
            Tensors(config, brought, ranks, evaluated) if config.virtual.gradients else Sizes(config, brought)
        )
        self.work.check()
        self.path = Path(config.out)
        self.accounts = np.stack([account()] * config.shards)

    def run(self) -> Outcome:
        """All ranks, then the common end."""
        lock = directory.claim(self.path, overwrite=self.config.overwrite)
        try:
            return self._run()
        finally:
            lock.release()

    def _run(self) -> Outcome:
        config, logged, ranks = self.config, self.config.log.enabled, len(self.roles.computing_ranks)
        directory.write_config(self.path, config_file.dumps(config, self.environment()))
        self._say(
            f"mpisgd {__version__}, virtual cluster:"
            f" {headline(config, self.roles.lambda_, ranks, self.work.parameters, self.work.meta.train_samples)},"
            f" {len(set(self.hosts)):,} nodes; log in {self.path}"
        )
        with ExitStack() as stack, without_gc(), kept():
            cluster = Cluster(self.roles.describe)
            wires: list[VirtualWire] = []
            for _ in self.hosts:
                VirtualWire(cluster, self.costs.network, wires)
            cluster.run(wires, self._mains(wires, stack))
        outcome = finish(outcome_of(self.path, self.accounts), logged=logged)
        self._say(farewell(outcome, logged=logged))
        return outcome

    def _mains(self, wires: list[VirtualWire], stack: ExitStack) -> list[Callable[[], None]]:
        config = self.config
        mains: dict[int, Callable[[], None]] = {}
        for shard, rank in enumerate(self.roles.shard_ranks):
            build = self._both if self.roles.of(rank) is Role.BOTH else self._shard
            mains[rank] = build(shard, wires[rank], stack)
        for learner_id, rank in enumerate(self.roles.learner_ranks):
            if rank not in mains and not config.in_teams:
                mains[rank] = self._learner(learner_id, wires[rank])
        if config.in_teams:
            mains |= self._teams(wires)
        if self.roles.dedicated_evaluator:
            rank = self.roles.evaluator_rank
            mains[rank] = functools.partial(self._evaluator, wires[rank])
        return [mains[rank] for rank in range(len(wires))]

    # ------------------------------------------------------------------------------------------------------------- ranks

    def _shard(self, shard: int, wire: VirtualWire, stack: ExitStack) -> Callable[[], None]:
        server = self._server(shard, ShardChannel(wire, self.roles, shard), self._update(shard, wire), stack)

        def main() -> None:
            wire.start_clock()
            server.serve()
            self._account(shard, server)
            wire.meet()

        return main

    def _both(self, learner_id: int, wire: VirtualWire, stack: ExitStack) -> Callable[[], None]:
        config = self.config
        shared = self.work.shared(wire.node(self.roles.learner_ranks)) if config.aggregation == "node" else None
        gradient, update = self._computed(learner_id, wire, shared), self._update(learner_id, wire)
        channel = team_channel(wire, self.roles, learner_id, gradient, update, self.work.bounds, shared)
        server = self._server(learner_id, channel, update, stack)
        delays = stages.loop_delays(config, learner_id)

        def main() -> None:
            wire.start_clock()
            try:
                learn(Collective(channel, server), self.protocol, gradient, delays)
            except LearnerFailed as failure:
                raise _fail_fast(failure) from failure
            if wire.rank == self.roles.evaluator_rank:
                self._evaluate(wire, server.serve_one)
            server.serve_on()
            self._account(learner_id, server)
            wire.meet()

        return main

    def _update(self, shard: int, wire: VirtualWire) -> Any:
        wanted = parts.gradients_per_update(self.protocol, self.roles.lambda_, len(self.roles.computing_ranks))
        return self.work.update(shard, wanted, wire, self.costs)

    def _account(self, shard: int, server: Shard) -> None:
        self.accounts[shard] = account(server.rules.clock, server.update.samples, blown_up(server), server.updated_s)

    def _server(self, shard: int, channel: ShardChannel, update: Any, stack: ExitStack) -> Shard:
        """One shard, with its log and all that it writes to, which `stack` closes."""
        config, lambda_ = self.config, self.roles.lambda_
        protocol = config.protocol.make(lambda_)
        snapshots = self.work.snapshots(self.path, shard, update)
        file = self._table_file(schema.shard_file(shard), shard)
        stack.callback(snapshots.close)
        stack.callback(file.close)
        return Shard(
            channel,
            Rules(protocol, lambda_, parts.budget_samples(config, protocol, self.work.meta.train_samples)),
            update,
            ShardRecords(ShardLog(file, shard), Progress("off", config.epochs, 0.0), snapshots),
            nonfinite=config.nonfinite,
            timeout_s=config.protocol.deadline_s,
        )

    def _teams(self, wires: list[VirtualWire]) -> dict[int, Callable[[], None]]:
        """The mains of all ranks that compute in teams."""
        mains = {}
        learner_of = {rank: learner_id for learner_id, team in enumerate(self.roles.teams) for rank in team}
        for number, rank in enumerate(self.roles.computing_ranks):
            wire, learner_id = wires[rank], learner_of[rank]
            member = self._in_team(learner_id, number, wire)
            if rank == self.roles.learner_ranks[learner_id]:
                mains[rank] = self._learner(learner_id, wire, Leader(member, self.config.nonfinite == "drop"))
            else:
                mains[rank] = functools.partial(self._member, member, wire)
        return mains

    def _in_team(self, learner_id: int, number: int, wire: VirtualWire) -> Member:
        shared = self.work.shared(wire.node(self.roles.teams[learner_id]))
        delays = Delays(self.config.straggler, self.config.seed, number)
        member = Member(shared, self._computed(number, wire, shared), delays, wire)
        sum_ns = self.costs.sum_ns(4 * self.work.parameters, shared.node.places)
        member.add = after(member.add, wire, sum_ns)  # type: ignore[method-assign]
        return member

    def _computed(self, number: int, wire: VirtualWire, shared: SharedMemory | None = None) -> Travels:
        memory = None if shared is None else shared.own
        return self.work.gradient(number, wire, self.costs.compute_of(number, wire), memory)

    def _member(self, member: Member, wire: VirtualWire) -> None:
        wire.start_clock()
        try:
            follow(member)
        except LearnerFailed as failure:
            raise _fail_fast(failure) from failure
        wire.meet()

    def _learner(self, learner_id: int, wire: VirtualWire, leader: Leader | None = None) -> Callable[[], None]:
        config, failures = self.config, self.config.failures
        next_ns, bounds = self.costs.compute_of(learner_id, wire), self.work.bounds
        computed = leader or self.work.gradient(learner_id, wire, next_ns if config.exchange == "whole" else None)
        pushed = stages.chain(config, computed, bounds, self.work.meta.train_samples)
        channel = learner_channel(config, self.protocol, wire, self.roles, learner_id, pushed.memory, bounds)
        gradient: Computes = pushed
        if isinstance(channel, PipelinedChannel):
            layers = [len(layers) for layers in self.work.slices]
            gradient = Passes(pushed, wire, next_ns, layers, channel, held=stages.held(config))
        delays = stages.loop_delays(config, learner_id)
        share = parts.share_of(config, self.protocol, self.work.meta.train_samples, self.roles.lambda_, learner_id)

        def main() -> None:
            wire.start_clock()
            try:
                learn(channel, self.protocol, gradient, delays, share)
            except LearnerFailed as failure:
                if failures.then == "stop":
                    raise _fail_fast(failure) from failure
                wire.interrupt_by(None)
                wire.sleep(failures.notice_s)
                channel.goodbye(ending=Ending.NONE)
            if leader is not None:
                leader.stop()
            if wire.rank == self.roles.evaluator_rank:
                self._evaluate(wire)
            wire.meet()

        return main

    def _evaluator(self, wire: VirtualWire) -> None:
        wire.start_clock()
        self._evaluate(wire)
        wire.meet()

    def _evaluate(self, wire: VirtualWire, serve_here: Callable[[], None] | None = None) -> None:
        log = EvaluatorLog(self._table_file(schema.evaluator_file(), -1))
        self.work.evaluate(wire, self.roles, log, self.path / schema.WEIGHTS, serve_here)
        log.close()

    # ----------------------------------------------------------------------------------------------------------- records

    def _table_file(self, name: str, shard: int) -> TableFile:
        log = self.config.log
        path = self.path / name if log.enabled else None
        max_bytes = log.max_bytes if shard >= 0 else 0
        return open_tables(path, max_bytes=max_bytes, shard=shard, flush_rows=log.flush_rows, flush_s=log.flush_s)

    def environment(self) -> dict[str, object]:
        """The table [environment] of its config.toml."""
        return environment(
            self.config,
            self.roles,
            self.hosts,
            self.work.meta,
            brought=naming.described(self.config, self.brought),
            mpi="none: a virtual cluster",
            commits=self.kept,
            virtual=True,
            parameters=self.work.parameters,
            parameter_nbytes=4 * self.work.parameters,
            batch_norm_policy=self.work.batch_norm_policy,
            **parts.layer_names(self.work.slices),
        )

    def _say(self, text: str) -> None:
        if self.config.log.progress != "off":
            say(text)


def _fail_fast(failure: LearnerFailed) -> PeerError:
    return PeerError(f"{failure}: the job is ended, as a fail-fast run is")
