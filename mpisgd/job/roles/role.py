"""Common ground of all roles: place in the job, log, evaluation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpisgd.comm.communicator import Group
from mpisgd.evaluator import Evaluator
from mpisgd.exchange.evaluator_channel import EvaluatorChannel, Here
from mpisgd.exchange.shard_channel import ShardChannel
from mpisgd.exchange.survivors import Survivors
from mpisgd.exchange.travel.in_place import OUTBOXES, ranks_of
from mpisgd.exchange.ways import IN_MEMORY, IN_PLACE
from mpisgd.gradient import stages
from mpisgd.gradient.aggregate import Member, SharedMemory
from mpisgd.gradient.straggler import Delays
from mpisgd.job.finish import account
from mpisgd.job.tensors import turn_of
from mpisgd.job.world import Setup, World
from mpisgd.learner import KEEPS_NOTHING
from mpisgd.records.callbacks import UpdateTeller
from mpisgd.records.checkpoint import buffers
from mpisgd.records.checkpoint.snapshots import Nowhere, Snapshots
from mpisgd.records.log import schema
from mpisgd.records.log.continuing import evaluated, rows_evaluated
from mpisgd.records.log.progress import Progress
from mpisgd.records.log.rank_file import appointed_of
from mpisgd.records.log.writer import EvaluatorLog, ShardLog, TableFile
from mpisgd.records.shard_records import ShardRecords
from mpisgd.sandblaster.shard import BatchShard
from mpisgd.serving.fail_fast import FAIL_FAST, FailFast
from mpisgd.serving.fault_tolerant import FaultTolerant
from mpisgd.shard import Shard
from mpisgd.vectors.computing import Copied, Keeps, Travels
from mpisgd.vectors.kept_state import is_stateful


class RankRole:
    """A rank's role: `train`, `end` and `close` after the clock's start; `leave` once all ranks have met.

    Attributes:
        expendable: the others can go on without this rank, now.
        leaves_by: goodbye of a learner that can leave alone; else None.
    """

    def __init__(self, setup: Setup, world: World, rank: int) -> None:
        self.setup = setup
        self.world = world
        self.rank = rank
        self.wire = world.wire(rank)
        self.index = setup.roles.index(rank)
        tensors = world.tensors
        self._hands_state_on = tensors is not None and setup.config.hands_state_on and is_stateful(tensors.model.module)
        """Learner 0 hands on its state beside parameters."""
        self.expendable = False
        self.leaves_by: Callable[..., None] | None = None

    def train(self) -> None:
        """Compute, or serve, until the run is over."""

    def end(self) -> np.ndarray:
        """Finish; return this rank's account (`finish.account`)."""
        return account()

    def close(self) -> None:
        """Close the files, after a failure too: the last rows matter most then."""

    def leave(self) -> None:
        """Give back memory that others could use until all have met."""

    def newest_clock(self) -> int | None:
        return None

    def waits_for(self) -> str:
        """Name the rank waited for, if the wire cannot."""
        return ""

    def _keeper(self, *, late: bool = False) -> Keeps:
        given_up = self.setup.protocol.aborts
        setup, tensors = self.setup, self.world.tensors
        if tensors is None or not self._hands_state_on:
            return KEEPS_NOTHING
        module, path, resumption = tensors.model.module, setup.path, setup.resumption
        begun, own = -1, turn_of(tensors, setup.roles.number(self.rank))
        if resumption is not None:
            begun = resumption.checkpoint.clock
            own()  # other virtual ranks have this module, too
            buffers.begin(path, resumption.attempt, self.index, begun, module)
        options = setup.config.checkpoint
        every = (options.partner_updates or options.every_updates, options.every_updates) if self.world.saves else (0, 0)
        return buffers.Keeper(module, path, own, learner_id=self.index, every=every, begun=begun, late=late, given_up=given_up)

    def _gradient_of(self, shared: SharedMemory | None = None, group: Group | None = None) -> Travels:
        return stages.accumulated(self.setup.config, self.world.gradient(self.rank, shared, group))

    def _in_place(self) -> SharedMemory | None:
        """Share memory with the node's learners and shards, where vectors stay in place."""
        config = self.setup.config
        if config.way not in IN_MEMORY:
            return None
        copied = config.way == IN_PLACE and config.device == "cuda"
        return self.world.shared(self.rank, ranks_of(self.setup.roles), 0, 1 if copied else OUTBOXES)

    def _join_team(self) -> Member:
        """Join the team, until all ranks have met: learner 0 still evaluates in its memory."""
        setup, world, rank = self.setup, self.world, self.rank
        team = setup.roles.teams[self.index]
        shared = world.shared(rank, team, Member.words_of(len(team)))
        delays = Delays(setup.config.straggler, setup.config.seed, setup.roles.number(rank))
        return Member(shared, self._gradient_of(shared), delays, self.wire, world.sum_cost(rank, len(team)))

    def _evaluate(
        self,
        here: Here | None = None,
        of_piece: Callable[..., Evaluator] | None = None,
    ) -> None:
        """Evaluate all snapshots; `here`: the shard on this rank, `of_piece`: as in `Tensors.evaluate`."""
        setup, config, resumption = self.setup, self.setup.config, self.setup.resumption
        roles, bounds = (setup.roles, setup.bounds) if of_piece is None else setup.seen_by(self.rank)[:2]
        fields: dict[str, Any] = {"bounds": bounds, "here": here, "to_first": setup.roles.tolerant and here is None}
        channel = functools.partial(EvaluatorChannel, self.wire, roles, **fields)
        follows = of_piece is not None and self.rank != setup.roles.evaluator_rank
        first, before = 0, list[list[int]]()
        if resumption is not None and config.log.enabled and not follows:
            snapshots = min(len(part.account.snapshots) for part in resumption.checkpoint.parts)
            rows_each = (2 if config.averaging > 0 else 1) * len(config.evaluated)
            warn = functools.partial(self.world.warn, self.rank)
            first, before = evaluated(setup.path, resumption.begun, snapshots, rows_each, warn)
        name, metrics = schema.evaluator_file(setup.attempt), () if self.world.tensors is None else self.world.tensors.metrics

        def begin() -> TableFile:
            """Replace the file of a lost evaluator; such an evaluator writes none."""
            appointed = int(setup.roles.tolerant and here is not None)
            followed = setup.roles.tolerant and appointed_of(setup.path / name) > appointed
            return self._open("" if followed or follows else name, -1, before, appointed=appointed, metrics=metrics)

        log = EvaluatorLog(begin)
        if self.world.tensors is None:
            log.begin()
            EvaluatorChannel(self.wire, setup.roles, weights=np.empty(0), averaged=None, **fields).goodbye()
        else:
            rows = rows_evaluated(setup.path, before)
            on_evaluation = [] if self.world.callbacks.on_evaluation is None else [self.world.callbacks.tell_evaluation]
            progress = "off" if follows else self.world.progress
            self.world.tensors.evaluate(channel, log, (first, rows), progress, on_evaluation, of_piece)
        log.close()

    def _open(
        self,
        name: str,
        shard: int,
        before: list[list[int]],
        *,
        appointed: int = 0,
        metrics: Sequence[str] = (),
    ) -> TableFile:
        """Open a log file after these rows; "" = none."""
        log, resumption = self.setup.config.log, self.setup.resumption
        attributes = {} if resumption is None else resumption.attributes(before)
        config = self.setup.config
        tables = schema.tables_of_shard(
            config.sampling,
            in_groups=config.in_groups,
            scaled=config.autocast == "float16",
            early=self.world.early and stages.leaves_early(config),
        )
        return TableFile(
            self.setup.path / name if log.enabled and name else None,
            shard=shard,
            flush_rows=log.flush_rows,
            flush_s=log.flush_s,
            attributes=attributes | ({"appointed": appointed} if appointed else {}),
            instead=shard < 0 and self.setup.roles.tolerant,
            tables=tables if shard >= 0 else schema.TABLES | {"evaluations": schema.wider("evaluations", metrics)},
        )


class ServingRole(RankRole):
    server: Shard | BatchShard

    def train(self) -> None:
        self.server.serve(lambda: self._evaluate(self.server))

    def close(self) -> None:
        records, setup = self.server.records, self.setup
        self._file.close()
        records.progress.close()
        goes_on = setup.resumption is not None or setup.config.checkpoint.regular  # possible until DONE
        records.snapshots.close(keep=records.checkpoints is not None and (goes_on or self.server.rules.interrupted))

    def newest_clock(self) -> int:
        return self.server.rules.clock

    def _account(self, samples: int, *, diverged: bool = False) -> np.ndarray:
        server, rules, refused = self.server, self.server.rules, self.server.refusals
        interrupted = rules.interrupted and not rules.finished
        return account(rules.clock, samples, diverged, server.updated_s, refused.total, refused.most, interrupted)

    def _survivors(self) -> Survivors | None:
        return Survivors(self.wire, self.setup.roles, self.index) if self.setup.roles.tolerant else None

    def _presence(self, kind: Callable[..., FaultTolerant], channel: ShardChannel, survivors: Survivors | None) -> FailFast:
        setup = self.setup
        if survivors is None:
            return FAIL_FAST
        name = f"shard {self.index} on {setup.hosts[self.rank]}"
        return kind(channel, survivors, setup.roles.lambda_, setup.config.faults.patience_s, name)

    def _make_records(self, copied: Copied, kept: Any) -> ShardRecords:
        """Open log, snapshots, and checkpoints of `kept`."""
        setup, world, config, shard = self.setup, self.world, self.setup.config, self.index
        before = setup.account(shard)
        snapshots: Snapshots = Nowhere()
        taken, rows = ((), []) if before is None else (before.snapshots, before.rows)
        if world.tensors is not None:
            snapshots = world.tensors.snapshots(setup.spool(shard), copied, taken)
        self._file = self._open(schema.shard_file(shard, setup.attempt), shard, rows)
        tells = shard == 0 and not config.protocol.batch  # a coordinator tells people
        progress = Progress(world.progress if tells else "off", config.epochs, config.log.progress_s)
        if shard == 0 and (told := world.callbacks.on_update) is not None:
            progress.on_update = UpdateTeller(told)
        log = ShardLog(self._file, shard, duplex=config.ahead > 0)
        return ShardRecords(log, progress, snapshots, world.checkpoints(self.rank, kept, rows))
