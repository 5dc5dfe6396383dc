"""Each role of a rank, built from its world: the only place that knows them all (DESIGN 3)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpisgd.exchange import deltas
from mpisgd.exchange.evaluator_channel import EvaluatorChannel
from mpisgd.exchange.layerwise import learner_channel
from mpisgd.exchange.roles import Role
from mpisgd.exchange.shard_channel import ShardChannel
from mpisgd.exchange.shared_team import team_channel
from mpisgd.exchange.tolerant_channel import TolerantShardChannel
from mpisgd.gradient import stages
from mpisgd.gradient.aggregate import Leader, Member, SharedMemory, follow
from mpisgd.gradient.straggler import Delays
from mpisgd.job import parts
from mpisgd.job.allreduce import Collective
from mpisgd.job.finish import account, blown_up
from mpisgd.job.world import Setup, World
from mpisgd.learner import learn
from mpisgd.liveness import watchdog
from mpisgd.records.callbacks import UpdateTeller
from mpisgd.records.checkpoint.snapshots import Nowhere, Snapshots
from mpisgd.records.log import schema
from mpisgd.records.log.bounded import open_tables
from mpisgd.records.log.continuing import counted, evaluated, rows_evaluated
from mpisgd.records.log.progress import Progress
from mpisgd.records.log.rank_file import appointed_of
from mpisgd.records.log.writer import EvaluatorLog, ShardLog, TableFile
from mpisgd.records.shard_records import ShardRecords
from mpisgd.rules.rules import Rules
from mpisgd.serving.faults import Faults
from mpisgd.serving.succession import Succession
from mpisgd.shard import Shard
from mpisgd.vectors.computing import Computes, Travels, Updates


def build(setup: Setup, world: World, rank: int) -> Built:
    """Make a rank's role. Nothing is sent before the clock starts, but what ranks of a node need to share memory."""
    return _KINDS[setup.roles.of(rank)](setup, world, rank)


class Built:
    """A rank's role. When the clock has started: `train`, `end`, `close`; when all ranks have met then, `leave`.

    Attributes:
        expendable: the others can go on without this rank, now.
        leaves_by: says goodbye for a learner that can leave alone; None = nobody could go on then.
    """

    def __init__(self, setup: Setup, world: World, rank: int) -> None:
        self.setup = setup
        self.world = world
        self.rank = rank
        self.wire = world.wire(rank)
        self.index = setup.roles.index(rank)
        self.expendable = False
        self.leaves_by: Callable[..., None] | None = None

    def train(self) -> None:
        """Compute, or serve, until the run is over."""

    def end(self) -> np.ndarray:
        """Do what is left to be done; returns this rank's account (`finish.account`)."""
        return account()

    def close(self) -> None:
        """Close the files, after a failure too: the last rows are what one wants to see then."""

    def leave(self) -> None:
        """Give back what others could still use until all have met."""

    def newest_clock(self) -> int | None:
        """The newest clock that this rank knows of."""
        return None

    def waits_for(self) -> str:
        """Whom this rank waits for, where its wire cannot say it."""
        return ""

    def _gradient_of(self, shared: SharedMemory | None = None) -> Travels:
        """This rank's own."""
        return stages.accumulated(self.setup.config, self.world.gradient(self.rank, shared))

    def _join_team(self) -> Member:
        """This rank's place in its team, until all ranks have met at the end: learner 0 still evaluates in that memory."""
        setup, world, rank = self.setup, self.world, self.rank
        shared = world.shared(self.wire.node(setup.roles.teams[self.index]))
        delays = Delays(setup.config.straggler, setup.config.seed, setup.roles.number(rank))
        return Member(shared, self._gradient_of(shared), delays, self.wire, world.sum_cost(rank, shared.node.places))

    def _evaluate(self, serve_here: Callable[[], None] | None = None, appointed: int = 0) -> None:
        """Evaluate all snapshots; `appointed`: as the how-manieth, where who evaluates may change."""
        setup, config, resumption = self.setup, self.setup.config, self.setup.resumption
        fields: dict[str, Any] = {"bounds": setup.bounds, "serve_here": serve_here, "to_first": setup.tolerant}
        channel = functools.partial(EvaluatorChannel, self.wire, setup.roles, **fields)
        first, before = 0, list[list[int]]()
        if resumption is not None and config.log.enabled:
            snapshots = min(len(part.account.snapshots) for part in resumption.checkpoint.parts)
            rows_each = (2 if config.averaging > 0 else 1) * (2 if config.evaluation.train else 1)
            warn = functools.partial(self.world.warn, self.rank)
            first, before = evaluated(setup.path, resumption.checkpoint.attempts, snapshots, rows_each, warn)
        name, metrics = schema.evaluator_file(setup.attempt), () if self.world.tensors is None else self.world.tensors.metrics

        def begin() -> TableFile:
            """Who follows one that died or hangs replaces its file, and evaluates all again; who was followed writes none."""
            followed = setup.tolerant and appointed_of(setup.path / name) > appointed
            return self._open("" if followed else name, -1, before, appointed=appointed, metrics=metrics)

        log = EvaluatorLog(begin)
        if self.world.tensors is None:
            log.begin()
            EvaluatorChannel(self.wire, setup.roles, weights=np.empty(0), averaged=None, **fields).goodbye()
        else:
            rows = rows_evaluated(setup.path, before)
            hearers = [] if self.world.callbacks.on_evaluation is None else [self.world.callbacks.tell_evaluation]
            self.world.tensors.evaluate(channel, log, (first, rows), self.world.progress, hearers)
        log.close()

    def _open(
        self,
        name: str,
        shard: int,
        before: list[list[int]],
        counts: Sequence[int] = (),
        *,
        appointed: int = 0,
        metrics: Sequence[str] = (),
    ) -> TableFile:
        """A log file of this attempt, which continues the rows before, and these counts; -1 is the evaluator's. "": none."""
        log, resumption = self.setup.config.log, self.setup.resumption
        attributes = {} if resumption is None else resumption.attributes(before)
        return open_tables(
            self.setup.path / name if log.enabled and name else None,
            max_bytes=log.max_bytes if shard >= 0 else 0,
            counts=counts,
            shard=shard,
            flush_rows=log.flush_rows,
            flush_s=log.flush_s,
            attributes=attributes | ({"appointed": appointed} if appointed else {}),
            instead=shard < 0 and self.setup.tolerant,
            metrics=metrics,
        )


class BuiltShard(Built):
    """A shard; `server` is its loop."""

    def __init__(self, setup: Setup, world: World, rank: int) -> None:
        super().__init__(setup, world, rank)
        update = world.update(rank, setup.gradients_per_update)
        if not setup.tolerant:
            duplex = setup.config.exchange == "duplex"
            self.server = self._make_server(ShardChannel(self.wire, setup.roles, self.index, duplex=duplex), update)
            return
        channel = TolerantShardChannel(self.wire, setup.roles, self.index)
        self.server = self._make_server(channel, update)
        succession = Succession(dedicated=setup.roles.dedicated_evaluator) if self.index == 0 else None
        name = f"shard {self.index} on {setup.hosts[rank]}"
        Faults(self.server, channel, setup.config.faults.patience_s, succession, name)

    def train(self) -> None:
        self.server.serve()

    def end(self) -> np.ndarray:
        server, rules, refused = self.server, self.server.rules, self.server.refusals
        interrupted = rules.interrupted and not rules.finished
        return account(
            rules.clock, server.update.samples, blown_up(server), server.updated_s, refused.total, refused.most, interrupted
        )

    def close(self) -> None:
        records, setup = self.server.records, self.setup
        self._file.close()
        records.progress.close()
        goes_on = setup.resumption is not None or setup.config.checkpoint.every_updates > 0  # it may have to, until it is DONE
        records.snapshots.close(keep=records.checkpoints is not None and (goes_on or self.server.rules.interrupted))

    def newest_clock(self) -> int:
        return self.server.rules.clock

    def waits_for(self) -> str:
        return watchdog.of_shard(self.server, self.setup.roles, self.setup.hosts)

    def _make_server(self, channel: ShardChannel, update: Updates) -> Shard:
        """The shard, with its log and all that it writes to."""
        setup, world, shard = self.setup, self.world, self.index
        config, lambda_ = setup.config, setup.roles.lambda_
        before = setup.account(shard)
        snapshots: Snapshots = Nowhere()
        if world.tensors is not None:
            snapshots = world.tensors.snapshots(setup.spool(shard), update, () if before is None else before.snapshots)
        rows, counts = ([], []) if before is None else (before.rows, before.counts)
        if before is not None and config.log.max_bytes and not counts:  # it had no bound: its rows are all there to count
            counts = counted(setup.path, shard, rows)
        self._file = self._open(schema.shard_file(shard, setup.attempt), shard, rows, counts)
        progress = Progress(world.progress if shard == 0 else "off", config.epochs, config.log.progress_s)
        if shard == 0 and (told := world.callbacks.on_update) is not None:
            progress.hear = UpdateTeller(told)
        protocol = config.protocol.make(lambda_)  # of its own: what it keeps is of this shard
        log = ShardLog(self._file, shard, duplex=channel.duplex)
        server = Shard(
            channel,
            Rules(protocol, lambda_, parts.budget_samples(config, protocol, setup.meta.train_samples)),
            update,
            ShardRecords(log, progress, snapshots, world.checkpoints(self.rank, update, rows)),
            nonfinite=config.nonfinite,
            timeout_s=config.protocol.deadline_s,
            deltas=deltas.of_run(config, protocol, update.weights),
        )
        if setup.resumption is not None and before is not None:
            server.restore(before, setup.resumption.checkpoint.next_seq)
        return server


class BuiltBoth(BuiltShard):
    """A learner that doubles as a shard."""

    def __init__(self, setup: Setup, world: World, rank: int) -> None:
        Built.__init__(self, setup, world, rank)
        in_memory = setup.config.aggregation == "node"
        shared = world.shared(self.wire.node(setup.roles.learner_ranks)) if in_memory else None
        self._gradient, update = self._gradient_of(shared), world.update(rank, setup.gradients_per_update)
        self._channel = team_channel(self.wire, setup.roles, self.index, self._gradient, update, setup.bounds, shared)
        self.server = self._make_server(self._channel, update)

    def train(self) -> None:
        setup, learner_id = self.setup, self.index
        collective, delays = Collective(self._channel, self.server), stages.loop_delays(setup.config, learner_id)
        learn(collective, setup.protocol, self._gradient, delays, first_seq=setup.first_seq(learner_id))

    def end(self) -> np.ndarray:
        if self.rank == self.setup.roles.evaluator_rank:
            self._evaluate(self.server.serve_one)
        self.server.serve_on()
        return super().end()

    def waits_for(self) -> str:
        return ""


class BuiltLearner(Built):
    """A learner, which may be the leader of a team."""

    def __init__(self, setup: Setup, world: World, rank: int) -> None:
        super().__init__(setup, world, rank)
        config = setup.config
        self._member = self._join_team() if config.in_teams else None
        self._leader = None if self._member is None else Leader(self._member, config.nonfinite == "drop")
        computed = self._leader or self._gradient_of()
        segments = world.tensors.segments if world.tensors is not None else ()
        pushed = stages.chain(config, computed, setup.bounds, setup.meta.train_samples, setup.gradients_per_update, segments)
        memory, protocol = pushed.memory, setup.protocol
        self._channel = learner_channel(config, protocol, self.wire, setup.roles, self.index, memory, setup.bounds)
        self.leaves_by = self._channel.goodbye
        self._gradient: Computes = pushed
        if config.exchange == "layerwise":
            self._gradient = world.by_layers(rank, computed, pushed, self._channel)
        if setup.tolerant:
            self._channel.ask_for_duty()

    def train(self) -> None:
        setup, learner_id, protocol = self.setup, self.index, self.setup.protocol
        self.expendable = setup.tolerant
        share = parts.share_of(setup.config, protocol, setup.meta.train_samples, setup.roles.lambda_, learner_id)
        delays = stages.loop_delays(setup.config, learner_id)
        learn(self._channel, protocol, self._gradient, delays, share, setup.first_seq(learner_id))

    def end(self) -> np.ndarray:
        if self._leader is not None:
            self._leader.stop()
        if self.setup.tolerant:
            if appointed := self._channel.duty():
                self._evaluate(appointed=appointed)
        elif self.rank == self.setup.roles.evaluator_rank:
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

    def train(self) -> None:
        follow(self._member)

    def leave(self) -> None:
        self._member.disband()


class BuiltEvaluator(Built):
    """The evaluator that does nothing else."""

    def end(self) -> np.ndarray:
        self.expendable = self.setup.tolerant
        self._evaluate()
        return account()


_KINDS: dict[Role, Callable[[Setup, World, int], Built]] = {
    Role.SHARD: BuiltShard,
    Role.BOTH: BuiltBoth,
    Role.LEARNER: BuiltLearner,
    Role.MEMBER: BuiltMember,
    Role.EVALUATOR: BuiltEvaluator,
}
