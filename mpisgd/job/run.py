"""Builds one rank from a configuration and starts its loop; the only place that knows every role (DESIGN 3)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from mpisgd.base.draws import kept
from mpisgd.base.errors import EXIT_FAILED, CheckpointError, ConfigError, MpisgdError, RunInterrupted
from mpisgd.base.speech import say, warn
from mpisgd.base.version import __version__
from mpisgd.comm.mpi import launch
from mpisgd.comm.mpi.library import MPI, takes_gpu_memory
from mpisgd.comm.mpi.siblings import Siblings
from mpisgd.comm.mpi.tolerant import TolerantWire
from mpisgd.comm.mpi.wire import Wire
from mpisgd.comm.signals import Signals, name_of
from mpisgd.config import Config, config_file, replace
from mpisgd.config.trust import resume_line
from mpisgd.data import DataSet
from mpisgd.evaluator import Evaluator
from mpisgd.exchange.evaluator_channel import EvaluatorChannel
from mpisgd.exchange.layerwise import PipelinedChannel, learner_channel
from mpisgd.exchange.roles import Role, Roles
from mpisgd.exchange.shard_channel import ShardChannel
from mpisgd.exchange.shared_team import team_channel
from mpisgd.exchange.tolerant_channel import TolerantShardChannel
from mpisgd.gradient import stages
from mpisgd.gradient.aggregate import Leader, Member, SharedMemory, follow
from mpisgd.gradient.gradient import Gradient, Loss
from mpisgd.gradient.layerwise_gradient import LayerwiseGradient
from mpisgd.gradient.measure import batch_norm_policy
from mpisgd.gradient.straggler import Delays
from mpisgd.job import interruption, naming, parts, placement, resume
from mpisgd.job.alike import Facts, of_data, of_loss, of_model, require_alike
from mpisgd.job.allreduce import Collective
from mpisgd.job.finish import Outcome, account, blown_up, farewell, finish, headline, outcome_of, refusals
from mpisgd.job.parts import NOTHING_BROUGHT, Brought, Meta
from mpisgd.job.provenance import environment
from mpisgd.job.resume import Resumption
from mpisgd.learner import learn
from mpisgd.liveness import tolerance, usher, watchdog
from mpisgd.liveness.guard import AgreedError, agree, failing_fast, is_single
from mpisgd.liveness.pulse import Pulse
from mpisgd.liveness.vigil import Vigil
from mpisgd.liveness.watchdog import Watchdog
from mpisgd.liveness.world import World, look_around, refuse_singletons
from mpisgd.protocols import Protocol
from mpisgd.records import directory
from mpisgd.records.checkpoint.checkpoint import Account, way_on
from mpisgd.records.checkpoint.checkpoints import Checkpoints, Share
from mpisgd.records.checkpoint.snapshots import Snapshots, check_spool
from mpisgd.records.lock import Lock
from mpisgd.records.log import schema
from mpisgd.records.log.bounded import open_tables
from mpisgd.records.log.continuing import counted, evaluated
from mpisgd.records.log.progress import Progress
from mpisgd.records.log.writer import EvaluatorLog, ShardLog, TableFile
from mpisgd.records.shard_records import ShardRecords
from mpisgd.rules.rules import Rules
from mpisgd.serving.faults import Faults
from mpisgd.serving.succession import Succession
from mpisgd.shard import Shard
from mpisgd.update.device_update import make_update
from mpisgd.update.slice_update import SliceUpdate
from mpisgd.vectors.computing import Computes
from mpisgd.vectors.flat import FlatModel
from mpisgd.vectors.memory import host_vector, host_view


def run(config: Config, comm: MPI.Intracomm, brought: Brought = NOTHING_BROUGHT, resumed: bool = False) -> Outcome:
    """Run one rank of a job to its end; every rank of `comm` calls this.

    `resumed`: go on with the run that there is in `config.out`, from its newest checkpoint.

    Raises:
        AgreedError: on every rank alike, where the job cannot start; before the first message is sent.
        RunInterrupted: on every rank alike, where a signal has interrupted the run, and it can go on from a checkpoint.
    Any other failure ends the job (`guard.failing_fast`).
    """
    ranks: list[Rank] = []

    def who() -> str:
        return ranks[0].describe if ranks else "starting"

    def how() -> str:
        return ranks[0].way_on() if ranks else ""

    def expendable() -> bool:
        return bool(ranks) and ranks[0].expendable

    def before_leaving() -> None:
        vigil.stop()
        pulse.stop()

    with (
        failing_fast(comm, who, how, expendable),
        Signals() as signals,
        Vigil(comm, who, how) as vigil,
        Pulse(comm, config.faults.patience_s, how) as pulse,
        kept(),
    ):
        ranks.append(Rank(config, comm, brought, resumed, signals, pulse))
        if ranks[0].tolerant:
            vigil.stop()
        ranks[0].before_leaving = before_leaving
        try:
            return ranks[0].run()
        finally:
            if is_single(comm):  # after a failure the process goes on, and may begin the run anew
                ranks[0].unlock()


class Rank:
    """One rank: agrees with the others on what to do, then does its part."""

    def __init__(
        self, config: Config, comm: MPI.Intracomm, brought: Brought, resumed: bool, signals: Signals, pulse: Pulse
    ) -> None:
        self.comm = comm
        self.signals = signals
        self.pulse = pulse
        self.brought = brought
        self.world: World = look_around(comm)
        config = naming.as_brought(config, brought)
        self.roles, self.protocol = agree(comm, lambda: self._placed(config))
        self.ushered = self.tolerant or len(set(self.world.hosts)) > 1
        """Whether the end of the job must be brought to ranks and launchers that cannot hear of it."""
        self.config = config = replace(config, shards=len(self.roles.shard_ranks))
        self.rank = self.world.rank
        self.role = self.roles.of(self.rank)
        pulse.know(self.world, self._name)
        self.learns = self.rank in self.roles.computing_ranks
        self.computes = self.learns or self.rank == self.roles.evaluator_rank
        torch.set_num_threads(config.threads or self.world.threads)
        self.data: DataSet | None = agree(comm, self._load_data)
        self.meta: Meta = comm.bcast(self._meta(), root=self.roles.learner_ranks[0])
        require_alike(comm, "data", agree(comm, self._facts_of_data), root=self.roles.learner_ranks[0])
        self.loss: Loss = agree(comm, lambda: parts.load_loss(config, brought))
        self.model: FlatModel = agree(comm, self._build_model)
        require_alike(comm, "model", of_model(self.model), root=0)
        self.bounds = agree(comm, lambda: parts.bounds(config, self.model))
        self.sampling = parts.make_sampling(config, self.meta, len(self.roles.computing_ranks))
        require_alike(comm, "loss", agree(comm, self._check), root=self.roles.learner_ranks[0])
        self.fingerprint = self.model.fingerprint
        self.keeps_spool = config.checkpoint.every_updates > 0 or resumed
        """Whether the run may have to be continued until it is DONE."""
        self.describe = self.roles.describe(self.rank)
        self.expendable = False
        """Whether the others can go on without this rank, now."""
        self.before_leaving: Callable[[], None] = lambda: None
        """Called when all ranks have come to their end, before any leaves."""
        self.newest_clock: Callable[[], int | None] = lambda: None
        """The newest clock that this rank knows of."""
        self._at_the_end: list[Callable[[], None]] = []
        self.path = Path(config.out)
        self._running = self.path.absolute() / schema.RUNNING
        self._job = usher.name(self.world.hosts[0], self.world.pids[0], config.out)
        self.lock: Lock | None = None
        self.resumption: Resumption | None = None
        try:
            agree(comm, lambda: self._claim(resumed))
            self.tensors = agree(comm, self._load)
            if self.ushered:
                agree(comm, self._call_usher)
        except AgreedError:
            self.unlock()
            self._leave()
            raise

    # ----------------------------------------------------------------------------------------------- before the start

    def _placed(self, config: Config) -> tuple[Roles, Protocol]:
        refuse_singletons(self.world)
        placed = placement.on_ranks(config, self.world.hosts)
        self.tolerant = tolerance.of(config)
        return placed

    def _load_data(self) -> DataSet | None:
        return parts.load_data(self.config, self.brought) if self.computes else None

    def _meta(self) -> Meta | None:
        return parts.meta_of(self.data) if self.data is not None and self.rank == self.roles.learner_ranks[0] else None

    def _build_model(self) -> FlatModel:
        config, serves = self.config, self.rank in self.roles.shard_ranks
        self.device = self._gpu("device") if self.computes and config.device == "cuda" else "cpu"
        self.shard_device = self._gpu("shard_device") if serves and config.shard_device == "cuda" else "cpu"
        on_gpu = "cuda" in (config.device, config.shard_device)
        self.direct = on_gpu and takes_gpu_memory() and not self.tolerant
        """Whether MPI is given a GPU's memory. Not where ranks may be lost: a transfer that is given up keeps its memory."""
        return parts.build_model(config, self.meta, self.brought, self.device)

    def _gpu(self, field: str) -> str:
        """This rank's, which is made the current one: pinned memory, and what MPI is given, belong to that."""
        if not torch.cuda.is_available():
            raise ConfigError(f"{field} = 'cuda': torch finds no CUDA device on this rank")
        learners, shards = self.config.device == "cuda", self.config.shard_device == "cuda"
        turn = self.roles.turn_at_gpus(self.rank, self.world.hosts, learners=learners, shards=shards)
        gpu = turn % torch.cuda.device_count()
        torch.cuda.set_device(gpu)
        return f"cuda:{gpu}"

    def _facts_of_data(self) -> Facts | None:
        return None if self.data is None else of_data(self.data, self.config.seed)

    def _check(self) -> Facts | None:
        """All that learn look at the same mini-batch."""
        if not self.learns or self.data is None:
            return None
        gradient = stages.make_gradient(self.config, self.model, self.loss, self.data, self.sampling, number=0)
        return of_loss(parts.check_first_batch(self.config, self.meta, self.model, gradient))

    def _claim(self, resumed: bool) -> None:
        """Rank 0 makes the directory, or finds out from where to go on in it; then every rank sees that it is there."""
        problem: MpisgdError | None = None
        if self.rank == 0:
            try:
                if resumed:
                    self.resumption = self._open_again()
                else:
                    self._open_new()
                if self.ushered:
                    usher.announce(self._running, self._job)
            except MpisgdError as error:
                problem = error
        problem, self.resumption = self.comm.bcast((problem, self.resumption), root=0)
        if problem is not None:
            raise problem
        if not (self.path / schema.CONFIG).is_file():
            raise ConfigError(f"out = {self.config.out!r}: made by rank 0, but not seen here; it must lie on a shared file system")

    def _open_new(self) -> None:
        self.lock = directory.claim(self.path, overwrite=self.config.overwrite)
        directory.write_config(self.path, config_file.dumps(self.config, self._environment()))

    def _open_again(self) -> Resumption:
        self.lock = Lock(self.path)
        found = resume.find(self.path, self.config)
        resume.check_teams(self.path, self.roles.teams)
        fingerprint, averaged = self.model.fingerprint, self.config.averaging > 0
        found = resume.lay_out(found, self.config, self.roles.lambda_, self.bounds, fingerprint, averaged)
        resume.forget_newer(self.path, found.checkpoint.clock)
        environment = found.environment(self._environment(), self.config)
        directory.write_config(self.path, config_file.dumps(self.config, environment))
        return found

    def unlock(self) -> None:
        lock, self.lock = self.lock, None
        if lock is not None:
            lock.release()

    def _load(self) -> dict[str, np.ndarray]:
        """A shard's tensors from the checkpoint, where the run is continued; its snapshots must be there, too."""
        if self.resumption is None or self.rank not in self.roles.shard_ranks:
            return {}
        shard, checkpoint = self.roles.index(self.rank), self.resumption.checkpoint
        start, end = self.bounds[shard]
        vectors = 2 if self.config.averaging > 0 else 1
        check_spool(self._spool(shard), checkpoint.parts[shard].account.snapshots, 4 * vectors * (end - start))
        return checkpoint.tensors(shard)

    def _call_usher(self) -> None:
        """By the first rank of each node, once rank 0 has said that the job runs."""
        hosts = self.world.hosts
        if self.rank == hosts.index(hosts[self.rank]):
            pids = [pid for pid, host in zip(self.world.pids, hosts, strict=True) if host == hosts[self.rank]]
            first, launcher = pids[0] * (self.rank == 0), Siblings().launcher_of_this_job
            usher.call(self._running, self._job, pids, first, launcher, node=self.rank)

    def _leave(self, away: Iterable[int] = ()) -> None:
        """All is said: nobody needs to see this rank out; `away`: ranks that were given up, or are lost."""
        if self.ushered:
            if self.rank == 0:
                usher.retract(self._running, self._job)
            hosts = self.world.hosts
            node = hosts.index(hosts[self.rank])  # that of its first rank, which called
            usher.leave(self._job, given_up=any(hosts[rank] != hosts[0] for rank in away), node=node)

    def _environment(self) -> dict[str, Any]:
        return environment(
            self.config,
            self.roles,
            self.world.hosts,
            self.meta,
            brought=naming.described(self.config, self.brought),
            mpi=MPI.Get_library_version().split("\n")[0].strip("\0 "),
            cores_per_node=self.world.cores,
            parameters=self.model.size,
            parameter_nbytes=4 * self.model.size,
            batch_norm_policy=batch_norm_policy(self.model.module, self.config.evaluation, self.meta.train_samples),
            **parts.layer_names(parts.cut(self.config, self.model)),
        )

    # ------------------------------------------------------------------------------------------------------- the parts

    def run(self) -> Outcome:
        """The loop of this rank's role, then the common end."""
        wire = self._wire()
        self.signals.listen(wire.hear)
        if self.rank == 0:
            self.signals.listen(self._tell_the_terminal)
        self._watch(wire, lambda: wire.describe(self._name))
        if self.rank == 0:
            self._say(f"mpisgd {__version__}: {self._headline()}")
            for note in self.resumption.notes if self.resumption is not None else ():
                self._say(f"mpisgd: {note}")
        loops = {
            Role.SHARD: self._shard,
            Role.LEARNER: self._learner,
            Role.MEMBER: self._member,
            Role.BOTH: self._both,
            Role.EVALUATOR: self._evaluator,
        }
        said = loops[self.role](wire)
        wire.meet()
        for action in self._at_the_end:
            action()
        return self._end(wire, said)

    def _wire(self) -> Wire:
        if not self.tolerant:
            return Wire(self.comm, polite=self.world.oversubscribed, ranks_per_core=self.world.ranks_per_core)
        wire = TolerantWire(
            self.comm,
            polite=self.world.oversubscribed,
            vital=self.roles.shard_ranks,
            describe=self.roles.describe,
            patience_s=self.config.faults.patience_s,
        )
        self.pulse.heed_shards(self.roles.shard_ranks, wire)
        return wire

    def _name(self, rank: int) -> str:
        return f"{self.roles.describe(rank)} (rank {rank} on {self.world.hosts[rank]})"

    def _watch(self, wire: Wire, describe: Callable[[], str]) -> None:
        """From now on the watchdog says this of a wait that is long."""
        self.signals.every_second = Watchdog(wire, self.config.log.quiet_s, self._name(self.rank), describe).look

    @property
    def _resuming(self) -> str:
        """The command that goes on with this run, and brings what it was brought."""
        return f"{launch.words(self.world.size)} {resume_line(self.path, self.config)}"

    def way_on(self) -> str:
        """How this run can be continued, as the last words of one that fails."""
        return way_on(self.path, self.newest_clock(), self._resuming)

    def _shard(self, wire: Wire) -> np.ndarray:
        update = self._update()
        del self.model
        kind = TolerantShardChannel if self.tolerant else ShardChannel
        with self._server(kind(wire, self.roles, self.roles.index(self.rank)), update) as server:
            self._watch(wire, lambda: wire.describe(self._name) or watchdog.of_shard(server, self.roles, self.world.hosts))
            self._start_clock(wire)
            server.serve()
        return _account(server)

    def _both(self, wire: Wire) -> np.ndarray:
        config, learner_id = self.config, self.roles.index(self.rank)
        shared = SharedMemory.of(wire.node(self.roles.learner_ranks), self.model.size) if config.aggregation == "node" else None
        gradient, update = self._gradient(shared), self._update()
        channel = team_channel(wire, self.roles, learner_id, gradient, update, self.bounds, shared)
        with self._server(channel, update) as server:
            self._start_clock(wire)
            delays = stages.loop_delays(config, learner_id)
            learn(Collective(channel, server), self.protocol, gradient, delays, first_seq=self._first_seq(learner_id))
            if self.rank == self.roles.evaluator_rank:
                self._evaluate(wire, server.serve_one)
            server.serve_on()
        return _account(server)

    def _update(self) -> SliceUpdate:
        start, end = self.bounds[self.roles.index(self.rank)]
        update = make_update(
            self.config,
            self.model.weights[start:end],
            device=self.shard_device,
            direct=self.direct and self.role is Role.SHARD,
            gradients_per_update=parts.gradients_per_update(self.protocol, self.roles.lambda_, len(self.roles.computing_ranks)),
            train_samples=self.meta.train_samples,
        )
        if self.resumption is not None:
            account = self.resumption.checkpoint.parts[self.roles.index(self.rank)].account
            update.restore({name: torch.from_numpy(array) for name, array in self.tensors.items()}, account.samples)
            self.tensors.clear()
        return update

    def _start_clock(self, wire: Wire) -> None:
        wire.start_clock(0.0 if self.resumption is None else self.resumption.checkpoint.now_s)

    def _first_seq(self, learner_id: int) -> int:
        return 0 if self.resumption is None else self.resumption.checkpoint.next_seq[learner_id]

    @contextmanager
    def _server(self, channel: ShardChannel, update: SliceUpdate) -> Iterator[Shard]:
        """This rank's shard, with its log and all that it writes to; closed at the end."""
        config, shard, resumption = self.config, self.roles.index(self.rank), self.resumption
        account = None if resumption is None else resumption.checkpoint.parts[shard].account
        snapshots = Snapshots(
            self._spool(shard),
            every_epochs=config.evaluation.every_epochs,
            vectors=1 if update.averaged is None else 2,
            size=len(update.weights),
            resumed=() if account is None else account.snapshots,
        )
        file = self._table_file("shard", shard, [] if account is None else account.rows, self._counted(account))
        progress = Progress(config.log.progress if shard == 0 else "off", config.epochs, config.log.progress_s)
        lambda_, budget = self.roles.lambda_, parts.budget_samples(config, self.protocol, self.meta.train_samples)
        checkpoints = self._checkpoints(update, shard, [] if account is None else account.rows)
        server = Shard(
            channel,
            Rules(self.protocol, lambda_, budget),
            update,
            ShardRecords(ShardLog(file, shard), progress, snapshots, checkpoints),
            nonfinite=config.nonfinite,
            timeout_s=config.protocol.deadline_s,
        )
        if isinstance(channel, TolerantShardChannel):
            succession = Succession(dedicated=self.roles.dedicated_evaluator) if shard == 0 else None
            Faults(server, channel, config.faults.patience_s, succession, f"shard {shard} on {self.world.hosts[self.rank]}")
        self.newest_clock = lambda: server.rules.clock
        if resumption is not None and account is not None:
            server.restore(account, resumption.checkpoint.next_seq)
        try:
            yield server
        finally:
            file.close()  # after a failure too: the last rows are what one wants to see then
            progress.close()
            snapshots.close(keep=self.keeps_spool or server.rules.interrupted)

    def _checkpoints(self, update: SliceUpdate, shard: int, rows: list[list[int]]) -> Checkpoints:
        """What writes this shard's checkpoints, after these rows of the log: if nothing else, a signal asks for one."""
        config, resumption = self.config, self.resumption
        attempt = 0 if resumption is None else resumption.attempt
        log = [self.path / schema.shard_file(shard, attempt)] if config.log.enabled else []
        share = Share(
            self.path,
            shard,
            bounds=self.bounds[shard],
            shards=config.shards,
            learners=self.roles.lambda_,
            model=self.fingerprint,
            attempt=attempt,
            continues=rows,
            pinned=() if resumption is None else resumption.pinned,
        )
        return Checkpoints(share, config.checkpoint, update, beside=[*log, self._spool(shard)], complain=self._warn)

    def _spool(self, shard: int) -> Path:
        return self.path / schema.spool_file(shard, 0 if self.resumption is None else self.resumption.layout)

    def _learner(self, wire: Wire) -> np.ndarray:
        config, learner_id = self.config, self.roles.index(self.rank)
        leader = Leader(self._in_team(wire), config.nonfinite == "drop") if config.aggregation == "node" else None
        computed = leader or self._gradient()
        pushed = stages.chain(config, computed, self.bounds, self.meta.train_samples)
        channel = learner_channel(config, self.protocol, wire, self.roles, learner_id, pushed.memory, self.bounds)
        self.newest_clock = lambda: channel.newest_clock
        gradient: Computes = pushed
        if isinstance(channel, PipelinedChannel) and isinstance(computed, Gradient):
            gradient = LayerwiseGradient(computed, pushed, self.model, self.bounds, channel, held=stages.held(config))
        if self.tolerant:
            channel.ask_for_duty()
        self._start_clock(wire)
        self.expendable = self.tolerant
        share = parts.share_of(config, self.protocol, self.meta.train_samples, self.roles.lambda_, learner_id)
        learn(channel, self.protocol, gradient, stages.loop_delays(config, learner_id), share, self._first_seq(learner_id))
        if leader is not None:
            leader.stop()
        if channel.duty() if self.tolerant else self.rank == self.roles.evaluator_rank:
            self._evaluate(wire)
        if self.protocol.aborts:
            self._at_the_end.append(channel.withdraw)
        return account()

    def _member(self, wire: Wire) -> np.ndarray:
        member = self._in_team(wire)
        self._start_clock(wire)
        follow(member)
        return account()

    def _in_team(self, wire: Wire) -> Member:
        """This rank's place in its team, until all ranks have met at the end: learner 0 still evaluates in that memory."""
        shared = SharedMemory.of(wire.node(self.roles.teams[self.roles.index(self.rank)]), self.model.size)
        delays = Delays(self.config.straggler, self.config.seed, self.roles.number(self.rank))
        member = Member(shared, self._gradient(shared), delays, wire)
        self._at_the_end.append(member.disband)
        return member

    def _evaluator(self, wire: Wire) -> np.ndarray:
        self._start_clock(wire)
        self.expendable = self.tolerant
        self._evaluate(wire)
        return account()

    def _evaluate(self, wire: Wire, serve_here: Callable[[], None] | None = None) -> None:
        config, options = self.config, self.config.evaluation
        assert self.data is not None
        pulled = [host_vector(self.model.size) for _ in range(2 if config.averaging > 0 else 1)]
        channel = EvaluatorChannel(
            wire,
            self.roles,
            weights=host_view(pulled[0]),
            averaged=host_view(pulled[1]) if config.averaging > 0 else None,
            bounds=self.bounds,
            serve_here=serve_here,
            to_first=self.tolerant,
        )
        measure = parts.make_measure(config, self.model, self.loss, self.data)
        first, before = self._evaluated(len(pulled) * (2 if options.train else 1))
        log = EvaluatorLog(self._table_file("evaluator", -1, before))
        evaluator = Evaluator(
            channel,
            self.model,
            pulled,
            measure,
            log,
            train=options.train,
            train_samples=self.meta.train_samples,
            told=parts.make_told(config, self.data),
        )
        evaluator.evaluate_all(self.path / schema.WEIGHTS, first)
        log.close()

    def _evaluated(self, rows_each: int) -> tuple[int, list[list[int]]]:
        """The first snapshot that is to be evaluated, and the rows of the log that there are of those before."""
        if self.resumption is None or not self.config.log.enabled:
            return 0, []
        accounts = [part.account for part in self.resumption.checkpoint.parts]
        snapshots = min(len(account.snapshots) for account in accounts)
        return evaluated(self.path, self.resumption.checkpoint.attempts, snapshots, rows_each, self._warn)

    def _gradient(self, shared: SharedMemory | None = None) -> Gradient:
        assert self.data is not None
        memory = stages.place(self.config, self.model, shared.own if shared else None, direct=self.direct)
        number = self.roles.number(self.rank)
        return stages.make_gradient(self.config, self.model, self.loss, self.data, self.sampling, number, memory)

    def _table_file(
        self, kind: Literal["shard", "evaluator"], shard: int, before: list[list[int]], counts: Sequence[int] = ()
    ) -> TableFile:
        """The log file of this rank and attempt, which continues the rows before, and these counts."""
        log, resumption = self.config.log, self.resumption
        attempt = 0 if resumption is None else resumption.attempt
        name = schema.shard_file(shard, attempt) if kind == "shard" else schema.evaluator_file(attempt)
        return open_tables(
            self.path / name if log.enabled else None,
            max_bytes=log.max_bytes if kind == "shard" else 0,
            counts=counts,
            shard=shard,
            flush_rows=log.flush_rows,
            flush_s=log.flush_s,
            attributes={} if resumption is None else resumption.attributes(before),
            instead=self.tolerant and kind == "evaluator",  # one who died has left it; who follows evaluates all again
        )

    def _counted(self, account: Account | None) -> list[int]:
        """What a bounded log has counted until a checkpoint; where the log had no bound before, its rows are all there to count."""
        if account is None or account.counts or not self.config.log.max_bytes:
            return [] if account is None else account.counts
        return counted(self.path, account.shard, account.rows)

    # --------------------------------------------------------------------------------------------------------- the end

    def _end(self, wire: Wire, said: np.ndarray) -> Outcome:
        """Rank 0 joins the logs, checks the books and says DONE; nobody leaves before that."""
        self.expendable = False
        accounts = wire.gather(said)
        outcome = outcome_of(self.path, accounts[list(self.roles.shard_ranks)])
        if accounts[:, -1].any():
            raise self._interrupted(wire, outcome)
        told = np.zeros(1 + self.world.size, np.int64)
        if self.rank == 0:
            outcome = finish(outcome, logged=self.config.log.enabled)
            for spool in self.path.glob(f"{schema.SPOOL}*"):  # those of layouts before, too
                spool.unlink(missing_ok=True)
            self.unlock()
            self._say(farewell(outcome, logged=self.config.log.enabled))
            told[0] = outcome.diverged
            told[[1 + rank for rank in wire.given_up()]] = 1
        diverged, *given_up = wire.gather(told)[0].tolist()
        self._part(wire)
        self.world.end(rank for rank, given in enumerate(given_up) if given)
        why = refusals(accounts[list(self.roles.shard_ranks)], self.roles.describe)
        if why:
            raise AgreedError(f"PeerError: {why}", EXIT_FAILED)
        return dataclasses.replace(outcome, diverged=bool(diverged))

    def _part(self, wire: Wire) -> None:
        self.before_leaving()
        away = wire.away()
        wire.part()
        self._leave(away)

    def _interrupted(self, wire: Wire, outcome: Outcome) -> RunInterrupted | AgreedError:
        """What all ranks raise: rank 0 says how the run can go on, or that it cannot; there is no DONE."""
        signal = int(wire.gather(np.array([self.signals.received]))[:, 0].max())
        text, status = f"{self.path} was interrupted by {name_of(signal)}", 0
        if self.rank == 0:
            try:
                text = interruption.farewell(self.path, signal, outcome.clocks, self._resuming)
                say(text)
                if self.signals.hurried:
                    interruption.tell_terminal(text)
            except CheckpointError as error:
                text, status = f"{type(error).__name__}: {error}", error.exit_status
            self.unlock()
        status = int(wire.gather(np.array([status]))[0, 0])
        self._part(wire)
        return AgreedError(text, status) if status else RunInterrupted(text)

    def _tell_the_terminal(self, signal: int) -> None:
        """Where the launcher is about to kill its ranks, this may be the last that is said; the lock is nobody's any more.

        Without a terminal it was no Ctrl-C: a batch system ends its jobs by the same signals, leaves them half a minute to save,
        and may begin the job anew meanwhile, for which the lock is there.
        """
        if self.signals.hurried and interruption.tell_terminal(interruption.last_words(self.path, signal, self._resuming)):
            self.unlock()

    def _headline(self) -> str:
        learners, ranks = self.roles.lambda_, len(self.roles.computing_ranks)
        return (
            f"{headline(self.config, learners, ranks, self.model.size, self.meta.train_samples)},"
            f" {len(set(self.world.hosts))} host(s)"
            f"{', more ranks than cores: waiting politely' if self.world.oversubscribed else ''};"
            f" {tolerance.said(self.config, self.tolerant, self.pulse.beats)}; log in {self.path}{self._going_on()}"
        )

    def _going_on(self) -> str:
        if self.resumption is None:
            return ""
        clock, attempt = self.resumption.checkpoint.clock, self.resumption.attempt
        bits = "asynchronously"
        if self.protocol.consistent and self.protocol.ordered:
            same = self.resumption.same_layout and self.config.push_format == "float32"
            bits = "to the bits of a run without interruption" if same else "no longer to the bits of a run without interruption"
        return f"; attempt {attempt} goes on at clock {clock:,}, {bits}"

    def _warn(self, text: str) -> None:
        """Said by any rank, and even where progress is off."""
        who = f"rank {self.rank} ({self.roles.describe(self.rank)}) on {self.world.hosts[self.rank]}"
        warn(f"mpisgd: {who}: {text}")

    def _say(self, text: str) -> None:
        if self.config.log.progress != "off":
            say(text)


def _account(server: Shard) -> np.ndarray:
    update, rules, refused = server.update, server.rules, server.refusals
    interrupted = rules.interrupted and not rules.finished
    return account(rules.clock, update.samples, blown_up(server), server.updated_s, refused.total, refused.most, interrupted)
