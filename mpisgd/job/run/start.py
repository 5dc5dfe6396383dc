"""What the ranks agree on before the first message is sent; what is wrong is refused alike on all of them (`guard.agree`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mpisgd.base.errors import ConfigError
from mpisgd.comm.mpi.library import MPI
from mpisgd.config import Config, replace
from mpisgd.data import DataSet
from mpisgd.exchange.roles import Roles
from mpisgd.job import naming, parts, placement
from mpisgd.job.alike import Facts, of_data, of_loss, of_model, require_alike
from mpisgd.job.building.setup import Setup
from mpisgd.job.building.tensors import Tensors
from mpisgd.job.parts import Brought, Meta
from mpisgd.liveness import tolerance
from mpisgd.liveness.guard import agree
from mpisgd.liveness.pulse import Pulse
from mpisgd.liveness.world import World, look_around, refuse_singletons
from mpisgd.protocols import Protocol
from mpisgd.vectors.flat import FlatModel


@dataclass(frozen=True)
class Start:
    """What was agreed on.

    Attributes:
        ranks: where they are.
        name: what a rank is called in messages.
        tolerant: the others go on when a learner dies.
        tensors: this rank's own; where it has no other use for the model than its slice, that goes.
    """

    ranks: World
    name: Callable[[int], str]
    tolerant: bool
    setup: Setup
    tensors: Tensors
    parameters: int

    @property
    def rank(self) -> int:
        return self.ranks.rank


def agree_on(config: Config, comm: MPI.Intracomm, brought: Brought, pulse: Pulse) -> Start:
    """Every rank calls this. Raises AgreedError on all alike where the job cannot start."""
    ranks = look_around(comm)
    config = naming.as_brought(config, brought)
    roles, protocol, tolerant = agree(comm, lambda: place(config, ranks))
    config = replace(config, shards=len(roles.shard_ranks))
    rank, first = ranks.rank, roles.learner_ranks[0]
    name = functools.partial(_name, roles, ranks.hosts)
    pulse.know(ranks, name)
    learns = rank in roles.computing_ranks
    computes = learns or rank == roles.evaluator_rank
    torch.set_num_threads(config.threads or ranks.threads)
    data: DataSet | None = agree(comm, lambda: _load_data(config, brought, computes))
    meta: Meta = comm.bcast(parts.meta_of(data) if data is not None and rank == first else None, root=first)
    require_alike(comm, "data", agree(comm, lambda: None if data is None else of_data(data, config.seed)), root=first)
    loss = agree(comm, lambda: parts.load_loss(config, brought))
    device, shard_device = agree(comm, lambda: _devices(config, roles, ranks))
    model: FlatModel = agree(comm, lambda: parts.build_model(config, meta, brought, device))
    require_alike(comm, "model", of_model(model), root=0)
    bounds = agree(comm, lambda: parts.bounds(config, model))
    sampling = parts.make_sampling(config, meta, len(roles.computing_ranks))
    tensors = Tensors(config, meta, loss, model, sampling, data, device, shard_device)
    require_alike(comm, "loss", agree(comm, lambda: _check(tensors, learns)), root=first)
    setup = Setup(config, roles, protocol, meta, bounds, model.fingerprint)
    return Start(ranks, name, tolerant, setup, tensors, model.size)


def place(config: Config, ranks: World) -> tuple[Roles, Protocol, bool]:
    """The roles, the protocol, and whether the run is fault-tolerant. Raises ConfigError."""
    refuse_singletons(ranks)
    return *placement.on_ranks(config, ranks.hosts), tolerance.of(config)


def _load_data(config: Config, brought: Brought, computes: bool) -> DataSet | None:
    return parts.load_data(config, brought) if computes else None


def _check(tensors: Tensors, learns: bool) -> Facts | None:
    """All that learn look at the same mini-batch."""
    return of_loss(tensors.check()) if learns else None


def _devices(config: Config, roles: Roles, ranks: World) -> tuple[str, str]:
    """The device that this rank computes on, and the one that it serves on. Raises ConfigError."""
    computes = ranks.rank in (*roles.computing_ranks, roles.evaluator_rank)
    device = _gpu(config, roles, ranks, "device") if computes and config.device == "cuda" else "cpu"
    serves = ranks.rank in roles.shard_ranks and config.shard_device == "cuda"
    return device, _gpu(config, roles, ranks, "shard_device") if serves else "cpu"


def _name(roles: Roles, hosts: Sequence[str], rank: int) -> str:
    return f"{roles.describe(rank)} (rank {rank} on {hosts[rank]})"


def _gpu(config: Config, roles: Roles, ranks: World, field: str) -> str:
    """This rank's, which is made the current one: pinned memory, and what MPI is given, belong to that."""
    if not torch.cuda.is_available():
        raise ConfigError(f"{field} = 'cuda': torch finds no CUDA device on this rank")
    learners, shards = config.device == "cuda", config.shard_device == "cuda"
    gpu = roles.turn_at_gpus(ranks.rank, ranks.hosts, learners=learners, shards=shards) % torch.cuda.device_count()
    torch.cuda.set_device(gpu)
    return f"cuda:{gpu}"
