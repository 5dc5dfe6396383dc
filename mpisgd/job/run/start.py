"""Agreements of the ranks before the first message, and claim of the directory (`guard.agree`)."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
import torch

from mpisgd.base import terminal
from mpisgd.base.draws import exact_kernels
from mpisgd.base.errors import CheckpointError, ConfigError, MpisgdError
from mpisgd.base.storage import cause
from mpisgd.comm.mpi.library import MPI, takes_gpu_memory
from mpisgd.comm.mpi.node_processes import NodeProcesses
from mpisgd.comm.mpi.wire import Wire
from mpisgd.config import Config, config_file, replace
from mpisgd.data import check_workers
from mpisgd.exchange.roles import Roles
from mpisgd.exchange.travel.in_place import OUTBOXES, ranks_of
from mpisgd.exchange.travel.on_gpu import share
from mpisgd.exchange.ways import IN_PLACE, ON_GPU, choose, travel_asked
from mpisgd.gradient.aggregate import SharedMemory
from mpisgd.job import parts, placement, resume, user_code
from mpisgd.job.parts import Meta, UserObjects
from mpisgd.job.provenance import environment
from mpisgd.job.resume import Resumption
from mpisgd.job.run.link_rate import rates_of
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
from mpisgd.records.callbacks import given
from mpisgd.records.checkpoint.near import Near
from mpisgd.records.checkpoint.snapshots import check_spool
from mpisgd.records.lock import Lock
from mpisgd.records.log import schema

T = TypeVar("T")


class Start:
    """Agreements before the first message, in order. Raises AgreedError, on all ranks, if any refuses."""

    def __init__(
        self, config: Config, comm: MPI.Intracomm, user_objects: UserObjects, heartbeat: Heartbeat, *, resumed: bool
    ) -> None:
        self.config = config
        self.comm = comm
        self.user_objects = user_objects
        self.resumed = resumed
        self._heartbeat = heartbeat

        self._take_callbacks()
        self._find_ranks()
        self._give_roles()
        self._bind()
        self._make_room()
        self._find_loggers()
        self._load_data()
        self._load_loss()
        self._measure_stages()
        self._choose_devices()
        self._build_model()
        self._cut_slices()
        self._compare_models()
        self._group_parameters()
        self._try_first_batch()
        self._check_schedule()

    def _take_callbacks(self) -> None:
        self.callbacks = self._agree(lambda: given(self.config.callbacks, self.user_objects.callbacks))

    def _find_ranks(self) -> None:
        self.ranks = look_around(self.comm)

    def _give_roles(self) -> None:
        """Refuse options that exclude each other, and too few ranks."""
        self.config = user_code.with_user_objects(self.config, self.user_objects)
        self.roles, self.protocol = self._agree(lambda: place(self.config, self.ranks))
        self.config = replace(self.config, shards=len(self.roles.shard_ranks))
        if self.config.shard_device == "cuda" and (why := self.config.stays_on_host):
            self.config = replace(self.config, shard_device="cpu")
            if self._rank == 0:
                terminal.warn(f"shard_device = 'cuda': shards stay on the host, where {why}")

    def _bind(self) -> None:
        """Bind ranks to cores by role; warn of too few cores."""
        told = f"{self.ranks.badly_bound}: {MEND}" if self.ranks.badly_bound else ""
        if self.config.binding == "roles":
            self.ranks, told = cores.bind(self.comm, self.ranks, self.roles)
        if told and self._rank == 0:
            terminal.warn(told)

    def _make_room(self) -> None:
        """Make room for files and connections; warn of low limits: a fast network needs few."""
        lacks = self.comm.allgather(make_room(connections(self._rank, self.ranks.hosts, self.roles.shard_ranks)))
        short = [rank for rank, lack in enumerate(lacks) if lack]
        if short and self._rank == 0:
            text = f"rank {ranges(short)} {lacks[short[0]]}: over TCP, connections would fail"
            terminal.warn(f"{text}; raise the hard limit, `ulimit -Hn`, on all nodes, before the ranks are started")

    def _find_loggers(self) -> None:
        told = self._rank in (self.roles.shard_ranks[0], self.roles.evaluator_rank)
        self._agree(lambda: loggers.check(self.config.loggers, used=told))

    def _load_data(self) -> None:
        config, comm = self.config, self.comm
        self._heartbeat.know(self.ranks, partial(name, self.roles, self.ranks))
        serves = self._rank in self.roles.shard_ranks and (config.device, config.shard_device) == ("cuda", "cpu")
        fair = self.ranks.threads_beside_gpus(self.roles.shard_ranks) if serves else self.ranks.threads
        torch.set_num_threads(config.threads or fair)
        computes = self._learns or self._evaluates
        self.data = data = self._agree(lambda: parts.load_data(config, self.user_objects) if computes else None)
        own = data if self._rank == self._first else None
        self.meta: Meta = comm.bcast(None if own is None else parts.meta_of(own, config), root=self._first)
        if own is not None:
            parts.warn_at_start(config, own)
        require_alike(comm, "data", self._agree(lambda: None if data is None else of_data(data, config.seed)), root=self._first)

    def _load_loss(self) -> None:
        self.loss = self._agree(lambda: parts.load_loss(self.config, self.user_objects))

    def _measure_stages(self) -> None:
        if not balance.measures_stages(self.config):
            return

        def measure() -> tuple[str, ...]:
            if self.data is None or self._rank != self._first:
                return ()
            return stages_begin_at(self.config, self.meta, self.user_objects, self.data, self.loss)

        self.config = balance.with_stages_at(self.config, self.comm.bcast(self._agree(measure), root=self._first))

    def _choose_devices(self) -> None:
        if self.config.deterministic:
            exact_kernels()
        computes, serves = self.data is not None, self._rank in self.roles.shard_ranks
        self.device, self.shard_device = self._agree(
            lambda: (self._device("device", used=computes), self._device("shard_device", used=serves))
        )

    def _build_model(self) -> None:
        own = self.config, self.meta, self.user_objects, self.device
        needed = pieces_needed_by(self.config, self.roles, self._rank)
        self.model = self._agree(lambda: parts.build_model(*own, resumed=self.resumed, needed=needed))
        self._agree(lambda: check_pieces(self.config, self.model.module))

    def _cut_slices(self) -> None:
        self.asked = config = self.config
        self.bounds = self._agree(lambda: parts.bounds(config, self.model))
        asked = self.roles, self.ranks.hosts, self.bounds
        ends = *self.roles.learner_ranks, *self.roles.shard_ranks
        rates = partial(rates_of, self.comm, ends, self.ranks.hosts)
        kept = self._agree(lambda: resume.slices_of(config) if self._rank == 0 else None) if self.resumed else None
        travel, kept = self.comm.bcast((travel_asked(), kept), root=0)
        config = replace(config, slices=kept or ())
        self.config = config = self._agree(lambda: choose(config, *asked, rates, self._shares, travel, cuts=kept is None))
        self.bounds = parts.bounds(config, self.model)
        sampling = self._agree(lambda: parts.make_sampling(config, self.meta, self.roles.streams))
        self.tensors = Tensors(config, self.meta, self.loss, self.model, sampling, self.data, self.shard_device)

    def _compare_models(self) -> None:
        """Refuse other models than rank 0's; pieces are compared with equal pieces."""
        comm, facts, stages = self.comm, of_model(self.model), self.tensors.stages
        if stages is None or not (isinstance(self.model.module, InPieces) or self._pieces_of_layers):
            require_alike(comm, "model", facts, root=0)
            return
        require_alike(comm, "model", {name: fact for name, fact in facts.items() if not name.startswith(INITIAL)}, root=0)
        own = stage_of(self.roles, stages, self._rank)
        for stage, shards in enumerate(stages.shards):
            require_alike(comm, "model", facts if stage == own else None, root=self.roles.shard_ranks[shards.start])

    def _group_parameters(self) -> None:
        self._agree(lambda: self.tensors.segments)  # before a shard gives up its model

    def _try_first_batch(self) -> None:
        """Refuse a misfit of the first mini-batch, or another loss than learner 0's."""
        comm, tensors = self.comm, self.tensors
        group = self._group() if self._pieces_of_layers else None
        require_alike(comm, "loss", self._agree(lambda: self._check(group)), root=self._first)
        if group is not None:
            group.Free()
        self._agree(lambda: tensors.check_pieces_fit() if self._evaluates else None)
        tensors.metrics = comm.bcast(tensors.metrics, root=self._first)  # a dedicated evaluator has not checked

    def _check_schedule(self) -> None:
        config, roles = self.config, self.roles
        # A rank that may evaluate alone, or keeps the best weights, needs all.
        jointly = config.partitioned and not (roles.dedicated_evaluator or roles.tolerant or config.evaluation.best)
        own = self.protocol, self.ranks.hosts, self.meta, self.bounds
        self.setup = Setup(config, self.asked, roles, *own, stages=self.tensors.stages, jointly=jointly)
        self._agree(self.setup.check_schedule)

    # ------------------------------------------------------------------------------------------------------------- parts

    def _agree(self, action: Callable[[], T]) -> T:
        return agree(self.comm, action)

    @property
    def _rank(self) -> int:
        return self.ranks.rank

    @property
    def _first(self) -> int:
        """Rank of learner 0."""
        return self.roles.learner_ranks[0]

    @property
    def _learns(self) -> bool:
        return self._rank in self.roles.computing_ranks

    @property
    def _evaluates(self) -> bool:
        return self.roles.may_evaluate(self._rank)

    @property
    def _pieces_of_layers(self) -> bool:
        """Ranks of a group share each layer."""
        return self.config.partitioned and not self.config.init_from

    def _device(self, field: str, *, used: bool) -> str:
        config, ranks = self.config, self.ranks
        if not used or getattr(config, field) == "cpu":
            return "cpu"
        if not torch.cuda.is_available():
            raise ConfigError(f"{field} = 'cuda': torch finds no CUDA device on this rank")
        learners, shards = config.device == "cuda", config.shard_device == "cuda"
        gpu = self.roles.turn_at_gpus(ranks.rank, ranks.hosts, learners=learners, shards=shards) % torch.cuda.device_count()
        torch.cuda.set_device(gpu)  # pinned memory and MPI's buffers belong there
        return f"cuda:{gpu}"

    def _shares(self, way: str) -> bool:
        """Return whether ranks can share memory so; collective."""
        if way == IN_PLACE and "cuda" in (self.config.device, self.config.shard_device) and takes_gpu_memory():
            return False  # MPI moves vectors between GPUs
        ranks, possible, boxes = ranks_of(self.roles), False, 0 if self.config.protocol.collective else OUTBOXES
        wire, size = Wire(self.comm, polite=True), self.bounds[-1][1]
        device = self.shard_device if self._rank in self.roles.shard_ranks else self.device
        if self._rank in ranks:
            with contextlib.suppress(ConfigError):
                on_gpu = way == ON_GPU
                shared = share(wire, self.roles, 0, size, device) if on_gpu else SharedMemory.of(wire, ranks, 0, size, boxes)
                shared.segment.disband()
                possible = True
        return bool(self.comm.bcast(possible, root=ranks[0]))

    def _group(self) -> MPI.Intracomm | None:
        """Return this rank's group, by piece; collective over all ranks."""
        if not self._learns:
            self.comm.Split(MPI.UNDEFINED)
            return None
        return cast("MPI.Intracomm", self.comm.Split(self.roles.index(self._rank), self.roles.stage(self._rank)))

    def _check(self, group: MPI.Intracomm | None) -> Facts | None:
        tensors = self.tensors
        if not self._learns or tensors.data is None:
            return None
        number = self.roles.stream(self._rank)
        check_workers(tensors.data.train)
        if group is None:
            loss = tensors.check(number)
            return None if tensors.in_pieces is not None else of_loss(loss)
        rounds = Rounds(group)
        found = rounds.run(lambda: check_piece(tensors, group.rank, rounds, number))
        return None if found is None else of_loss(found)


def name(roles: Roles, ranks: Ranks, rank: int) -> str:
    return f"{roles.describe(rank)} (rank {rank} on {ranks.hosts[rank]})"


def place(config: Config, ranks: Ranks) -> tuple[Roles, Protocol]:
    refuse_singletons(ranks)
    roles, protocol = placement.on_ranks(config, ranks.hosts)
    return roles.made_tolerant() if tolerance.of(config) else roles, protocol


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

    def __init__(self, start: Start) -> None:
        comm, resumed = start.comm, start.resumed
        self.ranks, self.setup, self.tensors = start.ranks, start.setup, start.tensors
        self._comm = comm
        self._user_objects = start.user_objects
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
        setup, config, path, tensors = self.setup, self.setup.asked, self.setup.path, self.tensors
        version = MPI.Get_library_version().split("\n")[0].strip("\0 ")
        told = environment(
            setup, self._user_objects, mpi=version, cores_per_node=self.ranks.cores, **_bound(setup, self.ranks), **tensors.facts
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
