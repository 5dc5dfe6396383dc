"""Agreement of the ranks before the first message, and claim of the directory; errors are alike on all (`guard.agree`)."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable
from typing import Any, cast

import numpy as np
import torch

from mpisgd.base import terminal
from mpisgd.base.errors import CheckpointError, ConfigError, MpisgdError
from mpisgd.base.storage import cause
from mpisgd.comm.mpi.library import MPI
from mpisgd.comm.mpi.node_processes import NodeProcesses
from mpisgd.config import Config, config_file, replace
from mpisgd.data import DataSet, check_workers
from mpisgd.exchange.roles import Roles
from mpisgd.job import parts, placement, resume, user_code
from mpisgd.job.parts import Meta, UserObjects
from mpisgd.job.provenance import environment
from mpisgd.job.resume import Resumption
from mpisgd.job.run.partners import bring_home, near_of
from mpisgd.job.run.same_inputs import INITIAL, Facts, of_data, of_loss, of_model, require_alike
from mpisgd.job.tensors import (
    Tensors,
    check_piece,
    check_pieces,
    pieces_needed_by,
    stage_of,
    stages_begin_at,
)
from mpisgd.job.world import Setup
from mpisgd.liveness import cores, reaper, tolerance
from mpisgd.liveness.guard import AgreedError, agree, ranges
from mpisgd.liveness.heartbeat import Heartbeat
from mpisgd.liveness.ranks import MEND, Ranks, connections, look_around, make_room, refuse_singletons
from mpisgd.models.in_pieces import InPieces
from mpisgd.pipeline import balance
from mpisgd.pipeline.rounds import Rounds
from mpisgd.protocols import Protocol
from mpisgd.records import directory, loggers
from mpisgd.records.checkpoint.near import Near
from mpisgd.records.checkpoint.snapshots import check_spool
from mpisgd.records.lock import Lock
from mpisgd.records.log import schema
from mpisgd.vectors.flat import FlatModel


def agree_on(
    config: Config, comm: MPI.Intracomm, user_objects: UserObjects, heartbeat: Heartbeat, *, resumed: bool
) -> tuple[Ranks, Setup, Tensors]:
    """Agree on the job; each rank makes its own parts. Raises AgreedError."""
    ranks = look_around(comm)
    config = user_code.with_user_objects(config, user_objects)
    roles, protocol = agree(comm, lambda: place(config, ranks))
    ranks = _bind(config, comm, ranks, roles)
    _make_room(comm, ranks, roles)
    config = replace(config, shards=len(roles.shard_ranks))
    told = ranks.rank in (roles.shard_ranks[0], roles.evaluator_rank)
    agree(comm, lambda: loggers.check(config.loggers, used=told))
    heartbeat.know(ranks, lambda rank: name(roles, ranks, rank))
    torch.set_num_threads(config.threads or ranks.threads)
    learns, first = ranks.rank in roles.computing_ranks, roles.learner_ranks[0]
    computes = learns or roles.may_evaluate(ranks.rank)
    data: DataSet | None = agree(comm, lambda: _load_data(config, user_objects, computes))
    meta: Meta = comm.bcast(parts.meta_of(data, config) if data is not None and ranks.rank == first else None, root=first)
    if data is not None and ranks.rank == first and data.train.advice:
        terminal.warn(data.train.advice)
    require_alike(comm, "data", agree(comm, lambda: None if data is None else of_data(data, config.seed)), root=first)
    loss = agree(comm, lambda: parts.load_loss(config, user_objects))
    if balance.measures_stages(config):  # a single rank measures for all
        own = agree(
            comm,
            lambda: stages_begin_at(config, meta, user_objects, data, loss) if data is not None and ranks.rank == first else (),
        )
        config = balance.with_stages_at(config, comm.bcast(own, root=first))
    device, shard_device = agree(comm, lambda: _devices(config, roles, ranks, computes))
    needed = pieces_needed_by(config, roles, ranks.rank)
    model: FlatModel = agree(comm, lambda: parts.build_model(config, meta, user_objects, device, resumed=resumed, needed=needed))
    agree(comm, lambda: check_pieces(config, model.module))
    bounds = agree(comm, lambda: parts.bounds(config, model))
    sampling = agree(comm, lambda: parts.make_sampling(config, meta, roles.streams))
    tensors = Tensors(config, meta, loss, model, sampling, data, shard_device)
    _require_models_alike(comm, roles, ranks.rank, tensors)
    agree(comm, lambda: tensors.segments)  # before a shard gives up its model
    number = roles.stream(ranks.rank) if learns else None
    group = _group(comm, roles, ranks.rank) if config.partitioned and not config.init_from else None
    require_alike(comm, "loss", agree(comm, lambda: _check(tensors, number, group)), root=first)
    if group is not None:
        group.Free()
    agree(comm, lambda: tensors.check_pieces_fit() if roles.may_evaluate(ranks.rank) else None)
    tensors.metrics = comm.bcast(tensors.metrics, root=first)  # a dedicated evaluator has not checked
    # A rank that may evaluate alone, or keeps the best weights, needs all.
    jointly = config.partitioned and not (roles.dedicated_evaluator or roles.tolerant or config.evaluation.best)
    setup = Setup(config, roles, protocol, ranks.hosts, meta, bounds, stages=tensors.stages, jointly=jointly)
    agree(comm, setup.check_schedule)
    return ranks, setup, tensors


def _bind(config: Config, comm: MPI.Intracomm, ranks: Ranks, roles: Roles) -> Ranks:
    told = f"{ranks.badly_bound}: {MEND}" if ranks.badly_bound else ""
    if config.binding == "roles":
        ranks, told = cores.bind(comm, ranks, roles)
    if told and ranks.rank == 0:
        terminal.warn(told)
    return ranks


def _make_room(comm: MPI.Intracomm, ranks: Ranks, roles: Roles) -> None:
    """Make room for files and connections; warn of low limits: a fast network needs few."""
    lacks = comm.allgather(make_room(connections(ranks.rank, ranks.hosts, roles.shard_ranks)))
    short = [rank for rank, lack in enumerate(lacks) if lack]
    if short and ranks.rank == 0:
        text = f"rank {ranges(short)} {lacks[short[0]]}: over TCP, connections would fail"
        terminal.warn(f"{text}; raise the hard limit, `ulimit -Hn`, on all nodes, before the ranks are started")


def _require_models_alike(comm: MPI.Intracomm, roles: Roles, rank: int, tensors: Tensors) -> None:
    """Compare models; of a model in pieces, between ranks of the same piece. Raises AgreedError."""
    facts, stages, config = of_model(tensors.model), tensors.stages, tensors.config
    if stages is None or not (isinstance(tensors.model.module, InPieces) or (config.partitioned and not config.init_from)):
        require_alike(comm, "model", facts, root=0)
        return
    require_alike(comm, "model", {name: fact for name, fact in facts.items() if not name.startswith(INITIAL)}, root=0)
    own = stage_of(roles, stages, rank)
    for stage, shards in enumerate(stages.shards):
        require_alike(comm, "model", facts if stage == own else None, root=roles.shard_ranks[shards.start])


def name(roles: Roles, ranks: Ranks, rank: int) -> str:
    return f"{roles.describe(rank)} (rank {rank} on {ranks.hosts[rank]})"


def place(config: Config, ranks: Ranks) -> tuple[Roles, Protocol]:
    refuse_singletons(ranks)
    roles, protocol = placement.on_ranks(config, ranks.hosts)
    return roles.made_tolerant() if tolerance.of(config) else roles, protocol


def _load_data(config: Config, user_objects: UserObjects, computes: bool) -> DataSet | None:
    return parts.load_data(config, user_objects) if computes else None


def _group(comm: MPI.Intracomm, roles: Roles, rank: int) -> MPI.Intracomm | None:
    """Return the ranks that have a model together, by piece; collective over all ranks."""
    if rank not in roles.computing_ranks:
        comm.Split(MPI.UNDEFINED)
        return None
    return cast("MPI.Intracomm", comm.Split(roles.index(rank), roles.stage(rank)))


def _check(tensors: Tensors, number: int | None, group: MPI.Intracomm | None) -> Facts | None:
    """Check the first mini-batch, the same on all learners.

    `number`: of this rank's stream, None = no learner; `group`: has the model together.
    """
    if number is None or tensors.data is None:
        return None
    check_workers(tensors.data.train)
    if group is None:
        loss = tensors.check(number)
        return None if tensors.in_pieces is not None else of_loss(loss)
    rounds = Rounds(group)
    found = rounds.run(lambda: check_piece(tensors, group.rank, rounds, number))
    return None if found is None else of_loss(found)


def _devices(config: Config, roles: Roles, ranks: Ranks, computes: bool) -> tuple[str, str]:
    serves = ranks.rank in roles.shard_ranks and config.shard_device == "cuda"
    device = _gpu(config, roles, ranks, "device") if computes and config.device == "cuda" else "cpu"
    return device, _gpu(config, roles, ranks, "shard_device") if serves else "cpu"


def _gpu(config: Config, roles: Roles, ranks: Ranks, field: str) -> str:
    """Return this rank's GPU, made current: pinned memory and MPI's buffers belong there."""
    if not torch.cuda.is_available():
        raise ConfigError(f"{field} = 'cuda': torch finds no CUDA device on this rank")
    learners, shards = config.device == "cuda", config.shard_device == "cuda"
    gpu = roles.turn_at_gpus(ranks.rank, ranks.hosts, learners=learners, shards=shards) % torch.cuda.device_count()
    torch.cuda.set_device(gpu)
    return f"cuda:{gpu}"


def _bound(setup: Setup, ranks: Ranks) -> dict[str, Any]:
    if not ranks.bound:
        return {}
    threads = setup.config.threads or ranks.threads_of(setup.roles.learner_ranks[0])
    return {"cores": [ranges(sorted(each)) for each in ranks.bound], "threads": threads}


class Claim:
    """A directory that this job alone writes to. Raises AgreedError.

    Attributes:
        ranks, setup, tensors: as agreed; the model may go, if a rank needs its slice alone.
        saved: this shard's tensors from the checkpoint.
    """

    def __init__(self, comm: MPI.Intracomm, agreed: tuple[Ranks, Setup, Tensors], user_objects: UserObjects, resumed: bool) -> None:
        self.ranks, self.setup, self.tensors = agreed
        self._comm = comm
        self._brought = user_objects
        self._lock: Lock | None = None
        self._ushered = self.setup.roles.tolerant or len(set(self.ranks.hosts)) > 1
        """The end of the job must be brought to ranks and launchers that cannot hear of it."""
        self._running = self.setup.path.absolute() / schema.RUNNING
        self._job = ""
        self._near: Near | None = None
        try:
            brought_home = self._bring_home() if resumed else (-1, "")
            self.setup = dataclasses.replace(self.setup, resumption=agree(comm, lambda: self._claim(resumed, *brought_home)))
            self.saved: dict[str, np.ndarray] = agree(comm, self._load)
            if self._near is not None:
                self._near.forget()
            if self._ushered:
                agree(comm, self._call_reaper)
        except AgreedError:
            self.unlock()
            self.leave()
            raise

    def unlock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def leave(self, away: Iterable[int] = ()) -> None:
        if self._ushered:
            hosts, rank = self.ranks.hosts, self.ranks.rank
            if rank == 0:
                reaper.retract(self._running, self._job)
            node = hosts.index(hosts[rank])  # named by its first rank, which called
            reaper.leave(self._job, given_up=any(hosts[each] != hosts[0] for each in away), node=node)

    def _bring_home(self) -> tuple[int, str]:
        """Lock the run; then find newer states on nodes."""
        agree(self._comm, self._take_lock)
        self._near = agree(self._comm, lambda: near_of(self.setup.path, self.ranks.hosts[self.ranks.rank]))
        return bring_home(self._comm, self._near, self.setup.path, self.ranks.hosts, self.setup.roles.shard_ranks)

    def _take_lock(self) -> None:
        if self.ranks.rank == 0:
            self._lock = Lock(self.setup.path)

    def _claim(self, resumed: bool, clock: int, note: str) -> Resumption | None:
        """Open the directory on rank 0; every rank must see it then."""
        problem: MpisgdError | None = None
        resumption: Resumption | None = None
        if self.ranks.rank == 0:
            try:
                resumption = self._open(resumed, clock, note)
                if self._ushered:
                    self._job = reaper.name()
                    reaper.announce(self._running, self._job)
            except MpisgdError as error:
                problem = error
        problem, resumption, self._job = self._comm.bcast((problem, resumption, self._job), root=0)
        if problem is not None:
            raise problem
        if not (self.setup.path / schema.CONFIG).is_file():
            out = self.setup.config.out
            raise ConfigError(f"out = {out!r}: made by rank 0, but not seen here; expected a directory on a shared file system")
        return resumption

    def _open(self, resumed: bool, clock: int, note: str) -> Resumption | None:
        setup, config, path, tensors = self.setup, self.setup.config, self.setup.path, self.tensors
        version = MPI.Get_library_version().split("\n")[0].strip("\0 ")
        told = environment(
            setup, self._brought, mpi=version, cores_per_node=self.ranks.cores, **_bound(setup, self.ranks), **tensors.facts
        )
        found: Resumption | None = None
        if resumed:
            found = resume.find(path, config, whole=(clock,))
            found = dataclasses.replace(found, notes=[*found.notes, *filter(None, [note])])
            resume.check_teams(path, setup.roles.teams)
            fingerprint, averaged = tensors.model.fingerprint, config.averaging > 0
            found = resume.lay_out(found, config, setup.roles.lambda_, setup.bounds, fingerprint, averaged)
            resume.forget_newer(path, found.checkpoint.clock)
            told = found.environment(told, config)
        else:
            self._lock = directory.claim(path, overwrite=config.overwrite)
        directory.write_config(path, config_file.dumps(config, told))
        return found

    def _load(self) -> dict[str, np.ndarray]:
        """Return a shard's tensors from the checkpoint; its snapshots must exist, too."""
        setup, rank = self.setup, self.ranks.rank
        if setup.resumption is None or rank not in setup.roles.shard_ranks:
            return {}
        shard, checkpoint = setup.roles.index(rank), setup.resumption.checkpoint
        start, end = setup.bounds[shard]
        vectors = 2 if setup.config.averaging > 0 else 1
        check_spool(setup.spool(shard), checkpoint.parts[shard].account.snapshots, 4 * vectors * (end - start))
        copy = self._near.files(checkpoint.clock, shard)[0] if self._near is not None else None
        with contextlib.suppress(CheckpointError):
            if copy is not None and copy.is_file():
                return checkpoint.tensors_at(copy, shard)
        return checkpoint.tensors(shard)

    def _call_reaper(self) -> None:
        """Call the reaper from each node's first rank, once rank 0 has announced the job."""
        rank, hosts = self.ranks.rank, self.ranks.hosts
        if rank == hosts.index(hosts[rank]):
            pids = [pid for pid, host in zip(self.ranks.pids, hosts, strict=True) if host == hosts[rank]]
            first, launcher = pids[0] * (rank == 0), NodeProcesses().launcher_of_this_job
            try:
                reaper.call(self._running, self._job, pids, first, launcher, node=rank, nodes=len(set(hosts)))
            except OSError as error:
                raise ConfigError(f"no socket can be made in /tmp, or where TMPDIR is: {cause(error)}") from error
