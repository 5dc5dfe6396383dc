"""Ranks of parameter-server SGD."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from mpisgd.exchange import deltas
from mpisgd.exchange.collectives.shared import SharedTeam, team_channel
from mpisgd.exchange.learner_channel import LearnerChannel
from mpisgd.exchange.roles import Role
from mpisgd.exchange.shard_channel import ShardChannel
from mpisgd.exchange.travel.in_place import outboxes_of
from mpisgd.exchange.ways import IN_MEMORY
from mpisgd.gradient import stages
from mpisgd.gradient.aggregate import Leader, follow
from mpisgd.job.allreduce import Collective
from mpisgd.job.finish import account, blown_up
from mpisgd.job.roles import agreement, evaluating
from mpisgd.job.roles.channels import learner_channel, shard_channel, slices_of
from mpisgd.job.roles.role import RankRole, ServingRole
from mpisgd.job.world import Setup, World
from mpisgd.learner import learn
from mpisgd.liveness import watchdog
from mpisgd.pipeline.group_channel import GroupChannel
from mpisgd.records.checkpoint import buffers
from mpisgd.serving.fail_fast import FAIL_FAST, FailFast
from mpisgd.shard import Shard
from mpisgd.update.groups import within
from mpisgd.vectors.computing import Computes, Updates


class ShardRole(ServingRole):
    server: Shard

    def __init__(self, setup: Setup, world: World, rank: int) -> None:
        super().__init__(setup, world, rank)
        update = world.update(rank, setup.gradients_per_update)
        self._seen = setup.seen_by(rank).roles
        survivors = self._survivors()
        self._shared = shared = self._in_place()
        outboxes = outboxes_of(shared, setup.roles, setup.bounds[self.index])
        channel = shard_channel(setup.config, self.wire, self._seen, self.index, update, survivors, outboxes)
        self.server = self._make_server(channel, update, self._presence(world.presence_of(rank), channel, survivors))

    def train(self) -> None:
        if self._shared is not None:  # all learners have moved in
            self.server.update.live_in(self._shared.own.weights[slice(*self.setup.bounds[self.index])])
        super().train()

    def end(self) -> np.ndarray:
        return self._account(self.server.update.samples, diverged=blown_up(self.server))

    def waits_for(self) -> str:
        return watchdog.of_shard(self.server, self._seen, self.setup.hosts)

    def _make_server(self, channel: ShardChannel, update: Updates, presence: FailFast) -> Shard:
        setup, world, shard = self.setup, self.world, self.index
        config, lambda_ = setup.config, setup.roles.lambda_
        records = self._make_records(update, update)
        protocol = config.protocol.make(lambda_)  # its own: it keeps state of this shard
        portions = world.portions_of(self.rank, setup.portions(shard))
        rules_kind, kind = agreement.of_run(config)
        rules = rules_kind(protocol, lambda_, setup.budget_samples(shard), portions)
        if portions is not None and portions.deals:
            channel.numbers.deal(portions.of)
        server = kind(
            channel,
            rules,
            update,
            records,
            nonfinite=config.nonfinite,
            timeout_s=config.protocol.deadline_s,
            deltas=deltas.of_run(config, protocol, update.weights),
            hands_state_on=self._hands_state_on,
            presence=presence,
        )
        if shard == 0:
            buffers.forget(setup.path, records.snapshots.count)
        if setup.resumption is not None and (before := setup.account(shard)) is not None:
            server.restore(before, setup.resumption.checkpoint.next_seq)
        return server


class LearnerShardRole(ShardRole):
    def __init__(self, setup: Setup, world: World, rank: int) -> None:
        RankRole.__init__(self, setup, world, rank)
        ranks, shared = setup.roles.learner_ranks, None
        if setup.config.way in IN_MEMORY:
            shared = world.shared(rank, ranks, SharedTeam.words_of(len(ranks)))
        config, bounds, samples = setup.config, setup.bounds, setup.meta.train_samples
        update = world.update(rank, setup.gradients_per_update)
        computed, buckets = self._gradient_of(shared), world.buckets()
        pieces = [(bucket.start, bucket.end) for bucket in buckets]
        pushed = stages.chain(config, computed, bounds, samples, setup.gradients_per_update, pieces=pieces)
        how: dict[str, Any] = {"rounded": config.pull_format == "bfloat16", "buckets": buckets}
        self._channel = team_channel(self.wire, setup.roles, self.index, pushed, update, bounds, shared, **how)
        self._gradient: Computes = pushed
        if buckets:
            self._gradient = world.by_layers(rank, computed, pushed, self._channel)
        self.server = self._make_server(self._channel, update, FAIL_FAST)

    def train(self) -> None:
        setup, learner_id = self.setup, self.index
        collective, delays = Collective(self._channel, self.server), stages.loop_delays(setup.config, learner_id)
        first_seq = setup.first_seq(learner_id)
        learn(collective, setup.protocol, self._gradient, delays, first_seq=first_seq, keeper=self._keeper())

    def end(self) -> np.ndarray:
        if self.rank == self.setup.roles.evaluator_rank:
            self._evaluate(self.server)
        self.server.serve_on()
        return super().end()

    def waits_for(self) -> str:
        return ""


class LearnerRole(RankRole):
    """A learner, alone, as leader of a team, or as a stage."""

    def __init__(self, setup: Setup, world: World, rank: int) -> None:
        super().__init__(setup, world, rank)
        config = setup.config
        self._member = self._join_team() if config.in_teams else None
        self._leader = None if self._member is None else Leader(self._member, config.nonfinite == "drop")
        self._group = group = world.group(rank, setup.roles.groups[self.index]) if config.in_groups else None
        shared = self._in_place()
        computed = self._leader or self._gradient_of(shared, group)
        seen = setup.seen_by(rank)
        tensors, samples = world.tensors, setup.meta.train_samples
        segments = list(within(tensors.segments, *seen.piece)) if tensors is not None else ()
        fused = tensors is not None and tensors.rules < 6
        pushed = stages.chain(config, computed, seen.bounds, samples, setup.gradients_per_update, segments, fused=fused)
        memory, protocol = pushed.memory, setup.protocol
        early = world.early and stages.leaves_early(config)
        self._channel: LearnerChannel
        if group is not None:
            self._channel = GroupChannel(
                *(self.wire, seen.roles, self.index, slices_of(config, memory, seen.bounds), group),
                consistent=protocol.consistent,
                drops=config.nonfinite == "drop",
                leaves=(lambda: computed.leaves) if world.may_leave else None,
                interruptible=protocol.aborts,
            )
        else:
            ends = self.wire, seen.roles, self.index
            self._channel = learner_channel(config, protocol, *ends, memory, seen.bounds, apart=early)
        self.leaves_by = self._channel.goodbye
        if world.tensors is not None:
            self._channel.draw = functools.partial(world.tensors.sampling.deal, self.index)
        self._move_out = None if shared is None else computed.move_out
        self._gradient: Computes = pushed
        if config.per_layer or early:
            self._gradient = world.by_layers(rank, computed, pushed, self._channel)

    def train(self) -> None:
        setup, learner_id, protocol = self.setup, self.index, self.setup.protocol
        self.expendable = setup.roles.tolerant
        share, first_seq = setup.share(learner_id), setup.first_seq(learner_id)
        delays = stages.loop_delays(setup.config, learner_id)
        keeper = self._keeper(late=self._channel.pulls_within)
        learn(self._channel, protocol, self._gradient, delays, share, first_seq, keeper)

    def end(self) -> np.ndarray:
        if self._leader is not None:
            self._leader.stop()
        if self.setup.jointly and self.index == 0:
            assert self._group is not None
            self._evaluate(of_piece=evaluating.of_piece(self, self._group))
        elif self.rank == self.setup.roles.evaluator_rank:
            if self._move_out is not None:  # shards keep these weights, perhaps to save
                self._move_out()
            self._evaluate()
        return account()

    def leave(self) -> None:
        if self._member is not None:
            self._member.disband()
        self._channel.withdraw()

    def newest_clock(self) -> int:
        return self._channel.newest_clock


class MemberRole(RankRole):
    def __init__(self, setup: Setup, world: World, rank: int) -> None:
        super().__init__(setup, world, rank)
        self._member = self._join_team()

    def train(self) -> None:
        follow(self._member)

    def leave(self) -> None:
        self._member.disband()


class EvaluatorRole(RankRole):
    def end(self) -> np.ndarray:
        self.expendable = self.setup.roles.tolerant
        self._evaluate()
        return account()


KINDS: dict[Role, Callable[[Setup, World, int], RankRole]] = {
    Role.SHARD: ShardRole,
    Role.BOTH: LearnerShardRole,
    Role.LEARNER: LearnerRole,
    Role.MEMBER: MemberRole,
    Role.EVALUATOR: EvaluatorRole,
}
