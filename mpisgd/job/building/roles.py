"""Each role of a rank, built from its world and ready to run: the only place that knows them all (DESIGN 3)."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from mpisgd.exchange.channel import ShardChannel
from mpisgd.exchange.evaluator_channel import EvaluatorChannel
from mpisgd.exchange.roles import Role
from mpisgd.gradient.aggregate import Leader, Member, follow
from mpisgd.gradient.straggler import Delays
from mpisgd.job import parts
from mpisgd.job.allreduce import Collective
from mpisgd.job.building import files
from mpisgd.job.building.setup import Setup
from mpisgd.job.building.world import World
from mpisgd.job.finish import account, blown_up
from mpisgd.learner import learn
from mpisgd.liveness import watchdog
from mpisgd.records.log import schema
from mpisgd.rules.rules import Rules
from mpisgd.shard import Shard
from mpisgd.vectors.computing import Updates


def build(setup: Setup, world: World, rank: int) -> Built:
    """Make a rank's role. Nothing is sent before it runs, but what ranks of a node need to share memory."""
    return _KINDS[setup.roles.of(rank)](setup, world, rank)


class Built(ABC):
    """A rank's role, ready to run.

    Attributes:
        index: the shard number or learner_id, of a member that of its team.
        expendable: the others can go on without this rank, now.
    """

    def __init__(self, setup: Setup, world: World, rank: int) -> None:
        self.setup = setup
        self.world = world
        self.rank = rank
        self.wire = world.wire(rank)
        self.index = setup.roles.index(rank)
        self.expendable = False

    @abstractmethod
    def run(self) -> np.ndarray:
        """From the start of the clock to this rank's last word; returns its account (`finish.account`)."""

    def leave(self) -> None:  # noqa: B027 - most hold nothing
        """All ranks have met at the end: give back what others could still use until then."""

    def newest_clock(self) -> int | None:
        """The newest clock that this rank knows of."""
        return None

    def waits_for(self, hosts: Sequence[str]) -> str:
        """Whom this rank waits for, where its wire cannot say it; `hosts` of each rank."""
        return ""

    def _start_clock(self) -> None:
        self.wire.start_clock(self.setup.begins_s)

    def _join_team(self) -> Member:
        """This rank's place in its team, until all ranks have met at the end: learner 0 still evaluates in that memory."""
        setup, world, rank = self.setup, self.world, self.rank
        node = self.wire.node(setup.roles.teams[self.index])
        delays = Delays(setup.config.straggler, setup.config.seed, setup.roles.number(rank))
        return Member(node, world.gradient(rank), delays, self.wire, world.sum_cost(rank, node.places))

    def _evaluate(self, serve_here: Callable[[], None] | None = None) -> None:
        setup, world = self.setup, self.world
        channel = functools.partial(
            EvaluatorChannel,
            self.wire,
            setup.roles,
            bounds=setup.bounds,
            serve_here=serve_here,
            to_first=world.tolerance.tolerant,
        )
        first, log = files.evaluator_log(setup, world, self.rank)
        world.evaluate(channel, log, setup.path / schema.WEIGHTS, first)
        log.close()


class BuiltShard(Built):
    """A shard; `server` is its loop."""

    server: Shard

    def __init__(self, setup: Setup, world: World, rank: int) -> None:
        super().__init__(setup, world, rank)
        make = functools.partial(self._make_server, self._make_update())
        self.server = world.tolerance.server(self.wire, setup.roles, self.index, make)

    def run(self) -> np.ndarray:
        self._start_clock()
        self.server.serve()
        return self._account()

    def newest_clock(self) -> int:
        return self.server.rules.clock

    def waits_for(self, hosts: Sequence[str]) -> str:
        return watchdog.of_shard(self.server, self.setup.roles, hosts)

    def _make_update(self) -> Updates:
        update: Any = self.world.update(self.rank, self.setup.gradients_per_update)
        before = self.setup.account(self.index)
        if before is not None:
            saved = self.setup.saved.pop(self.index)
            update.restore({name: torch.from_numpy(array) for name, array in saved.items()}, before.samples)
        made: Updates = update
        return made

    def _make_server(self, update: Updates, channel: ShardChannel) -> Shard:
        """The shard, with its log and all that it writes to."""
        setup, world = self.setup, self.world
        config, lambda_ = setup.config, setup.roles.lambda_
        protocol = config.protocol.make(lambda_)
        records = files.shard_records(setup, world, self.rank, update)
        server = Shard(
            channel,
            Rules(protocol, lambda_, parts.budget_samples(config, protocol, setup.meta.train_samples)),
            update,
            records,
            nonfinite=config.nonfinite,
            timeout_s=config.protocol.deadline_s,
        )
        goes_on = setup.resumption is not None or config.checkpoint.every_updates > 0  # it may have to, until it is DONE
        world.closing.callback(lambda: records.snapshots.close(keep=world.saves and (goes_on or server.rules.interrupted)))
        if setup.resumption is not None:
            server.restore(setup.resumption.checkpoint.parts[self.index].account, setup.resumption.checkpoint.next_seq)
        return server

    def _account(self) -> np.ndarray:
        server, rules, refused = self.server, self.server.rules, self.server.refusals
        interrupted = rules.interrupted and not rules.finished
        return account(
            rules.clock, server.update.samples, blown_up(server), server.updated_s, refused.total, refused.most, interrupted
        )


class BuiltBoth(BuiltShard):
    """A learner that doubles as a shard."""

    def __init__(self, setup: Setup, world: World, rank: int) -> None:
        Built.__init__(self, setup, world, rank)
        self._gradient, update = world.gradient(rank), self._make_update()
        self._channel = parts.team_channel(setup.config, self.wire, setup.roles, self.index, self._gradient, update, setup.bounds)
        self.server = self._make_server(update, self._channel)

    def run(self) -> np.ndarray:
        setup, learner_id = self.setup, self.index
        self._start_clock()
        delays = Delays(setup.config.straggler, setup.config.seed, learner_id)
        with self.world.failing(self.rank, None):
            collective = Collective(self._channel, self.server)
            learn(collective, setup.protocol, self._gradient, delays, first_seq=setup.first_seq(learner_id))
        if self.rank == setup.roles.evaluator_rank:
            self._evaluate(self.server.serve_one)
        self.server.serve_on()
        return self._account()

    def waits_for(self, hosts: Sequence[str]) -> str:
        return ""


class BuiltLearner(Built):
    """A learner, which may be the leader of a team."""

    def __init__(self, setup: Setup, world: World, rank: int) -> None:
        super().__init__(setup, world, rank)
        config, protocol = setup.config, setup.protocol
        self._member = self._join_team() if config.in_teams else None
        self._leader = None if self._member is None else Leader(self._member, config.nonfinite == "drop")
        computed = self._leader or parts.with_local_steps(config, world.gradient(rank), setup.meta.train_samples)
        pushed = parts.as_pushed(config, computed)
        self._channel = parts.learner_channel(config, protocol, self.wire, setup.roles, self.index, pushed, setup.bounds)
        by_layers = config.exchange == "layerwise"
        self._gradient = world.by_layers(rank, pushed, self._channel) if by_layers else pushed

    def run(self) -> np.ndarray:
        setup, world, channel, learner_id = self.setup, self.world, self._channel, self.index
        config, protocol, roles = setup.config, setup.protocol, setup.roles
        world.tolerance.before_learning(channel)
        self._start_clock()
        self.expendable = world.tolerance.tolerant
        share = parts.share_of(config, protocol, setup.meta.train_samples, roles.lambda_, learner_id)
        delays = parts.loop_delays(config, learner_id)
        with world.failing(self.rank, channel):
            learn(channel, protocol, self._gradient, delays, share, setup.first_seq(learner_id))
        if self._leader is not None:
            self._leader.stop()
        if world.tolerance.is_to_evaluate(channel, chosen=self.rank == roles.evaluator_rank):
            self._evaluate()
        return account()

    def leave(self) -> None:
        if self._member is not None:
            self._member.disband()
        if self.setup.protocol.aborts:
            self._channel.withdraw()

    def newest_clock(self) -> int:
        return self._channel.newest_clock


class BuiltMember(Built):
    """A member of a learner's team."""

    def __init__(self, setup: Setup, world: World, rank: int) -> None:
        super().__init__(setup, world, rank)
        self._member = self._join_team()

    def run(self) -> np.ndarray:
        self._start_clock()
        with self.world.failing(self.rank, None):
            follow(self._member)
        return account()

    def leave(self) -> None:
        self._member.disband()


class BuiltEvaluator(Built):
    """The evaluator that does nothing else."""

    def run(self) -> np.ndarray:
        self._start_clock()
        self.expendable = self.world.tolerance.tolerant
        self._evaluate()
        return account()


_KINDS: dict[Role, Callable[[Setup, World, int], Built]] = {
    Role.SHARD: BuiltShard,
    Role.BOTH: BuiltBoth,
    Role.LEARNER: BuiltLearner,
    Role.MEMBER: BuiltMember,
    Role.EVALUATOR: BuiltEvaluator,
}
