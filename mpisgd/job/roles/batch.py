"""Ranks of a batch optimisation (`sandblaster/`): coordinator, shards, learners."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import cast

import numpy as np

from mpisgd.base.terminal import say, warn
from mpisgd.data.sampling import PortionSampling
from mpisgd.exchange.learner_channel import LearnerChannel, Slices
from mpisgd.exchange.roles import Role
from mpisgd.exchange.shard_channel import ShardChannel
from mpisgd.gradient import stages
from mpisgd.job.finish import account
from mpisgd.job.roles.role import RankRole, ServingRole
from mpisgd.job.roles.sgd import EvaluatorRole
from mpisgd.job.tensors import Tensors
from mpisgd.job.world import Setup, World
from mpisgd.protocols import SandblasterOptions
from mpisgd.records.coordinator_records import Coordinated, CoordinatorLog
from mpisgd.records.log import schema
from mpisgd.records.log.writer import TableFile
from mpisgd.rules.rules import Rules
from mpisgd.sandblaster.channels import CoordinatorChannel, PortionChannel, Receipts
from mpisgd.sandblaster.coordinator import Coordinator
from mpisgd.sandblaster.evaluations import Evaluations
from mpisgd.sandblaster.learner import Sum, learn
from mpisgd.sandblaster.membership import Membership
from mpisgd.sandblaster.noted import Noted
from mpisgd.sandblaster.shard import BatchShard
from mpisgd.sandblaster.slots import Slots


def options_of(setup: Setup) -> SandblasterOptions:
    return cast(SandblasterOptions, setup.config.protocol)


def tensors_of(world: World) -> Tensors:
    """Return the tensors; sizes alone, without a loss, are refused."""
    assert world.tensors is not None
    return world.tensors


class CoordinatorRole(RankRole):
    def __init__(self, setup: Setup, world: World, rank: int) -> None:
        super().__init__(setup, world, rank)
        config, options, sampling = setup.config, options_of(setup), cast(PortionSampling, tensors_of(world).sampling)
        begun = setup.resumption.checkpoint.coordinator if setup.resumption is not None else {}
        path = setup.path / schema.coordinator_file(setup.attempt) if config.log.enabled else None
        file = TableFile(
            path,
            shard=-1,
            flush_rows=config.log.flush_rows,
            flush_s=config.log.flush_s,
            attributes={} if setup.resumption is None else setup.resumption.of_coordinator,
            tables=schema.COORDINATOR,
        )
        self._log = log = CoordinatorLog(file, path)
        saves = Coordinated(
            setup.path,
            log,
            attempt=setup.attempt,
            every=config.checkpoint.every_updates,
            continues=begun.get("rows", []),
            complain=functools.partial(world.warn, rank),
        )
        channel = CoordinatorChannel(self.wire, setup.roles)
        first_seq = [setup.first_seq(learner_id) for learner_id in range(setup.roles.lambda_)]
        self._evaluations = Evaluations(
            channel,
            options,
            sampling.portions,
            first_seq,
            log,
            clock=begun.get("clock", 0),
            patience_s=config.faults.patience_s if setup.roles.tolerant else math.inf,
            warn=lambda text: warn(f"mpisgd: coordinator, {text}"),
        )
        commands = Noted(channel, self.newest_clock, log.command) if options.log_commands else channel
        self._coordinator = Coordinator(
            commands,
            self._evaluations,
            options,
            setup.bounds[-1][1],
            log.iteration,
            on_iteration=self._tell,
            warn=warn,
            saves=saves if world.saves else None,
            begun=begun,
        )
        self._told_s = 0.0

    def _tell(self, iteration: int, loss: float, gradient: float, evaluations: int, now_s: float) -> None:
        config = self.setup.config
        last = iteration == options_of(self.setup).iterations
        if self.world.progress == "off" or (now_s - self._told_s < config.log.progress_s and not last):
            return
        self._told_s = now_s
        say(
            f"iteration {iteration}/{options_of(self.setup).iterations}: loss {loss:.6g}, gradient at most {gradient:.2g},"
            f" {evaluations:,} evaluations, {now_s:.0f} s"
        )

    def train(self) -> None:
        self._coordinator.run()

    def close(self) -> None:
        self._log.close()

    def newest_clock(self) -> int:
        return self._evaluations.clock

    def waits_for(self) -> str:
        return f"at clock {self._evaluations.clock} waits for learners"


class BatchShardRole(ServingRole):
    server: BatchShard

    def __init__(self, setup: Setup, world: World, rank: int) -> None:
        super().__init__(setup, world, rank)
        slots = Slots(world.weights(setup.bounds[self.index]))
        records, survivors = self._make_records(slots, slots.kept), self._survivors()
        channel = ShardChannel(self.wire, setup.roles, self.index, survivors=survivors)
        rules = Rules(setup.config.protocol.make(setup.roles.lambda_), setup.roles.lambda_, np.inf)
        presence = self._presence(Membership, channel, survivors)
        samples, coordinator = setup.meta.train_samples, setup.roles.coordinator_rank
        self.server = BatchShard(channel, coordinator, rules, slots, records, samples, world.charges(rank), presence)
        if setup.resumption is not None and (before := setup.account(self.index)) is not None:
            self.server.restore(before, setup.resumption.checkpoint.next_seq, world.saved(rank))

    def end(self) -> np.ndarray:
        return self._account(self.server.slots.samples)

    def waits_for(self) -> str:
        rank = self.setup.roles.coordinator_rank
        return f"at clock {self.server.rules.clock} waits for the coordinator (rank {rank} on {self.setup.hosts[rank]}) or learners"


class BatchLearnerRole(RankRole):
    def __init__(self, setup: Setup, world: World, rank: int) -> None:
        super().__init__(setup, world, rank)
        self._gradient = self._gradient_of()
        self._sum = Sum(self._gradient, alone=options_of(setup).push_every == 1)
        self._coordinator = PortionChannel(self.wire, setup.roles, self.index)
        slices = Slices(self._gradient.memory.weights, self._sum.vector, setup.bounds)
        self._channel = LearnerChannel(self.wire, setup.roles, self.index, slices, consistent=False)
        # sends of a lost rank may not arrive
        self._receipts = Receipts(self.wire, setup.roles.shard_ranks if setup.roles.tolerant else ())
        self.leaves_by = self._leave

    def _leave(self, *, ending: int) -> None:
        """Leave; others take this learner's portions."""
        self._coordinator.leave(self._channel.pushed[0])
        self._channel.goodbye(ending=ending)

    def train(self) -> None:
        self.expendable = self.setup.roles.tolerant
        delays = stages.loop_delays(self.setup.config, self.index)
        first_seq = self.setup.first_seq(self.index)
        learn(self._coordinator, self._channel, self._receipts, self._gradient, self._sum, delays, first_seq=first_seq)

    def end(self) -> np.ndarray:
        if self.rank == self.setup.roles.evaluator_rank:
            self._evaluate()
        return account()

    def newest_clock(self) -> int:
        return self._channel.newest_clock


KINDS: dict[Role, Callable[[Setup, World, int], RankRole]] = {
    Role.COORDINATOR: CoordinatorRole,
    Role.SHARD: BatchShardRole,
    Role.LEARNER: BatchLearnerRole,
    Role.EVALUATOR: EvaluatorRole,
}
