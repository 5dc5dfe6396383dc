"""World of an MPI rank: its own process, real seconds, torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpisgd.base.terminal import warn
from mpisgd.comm.communicator import Group
from mpisgd.comm.mpi.library import takes_gpu_memory
from mpisgd.comm.mpi.tolerant import TolerantWire
from mpisgd.comm.mpi.wire import Wire
from mpisgd.exchange.roles import Role
from mpisgd.exchange.travel import on_gpu
from mpisgd.exchange.travel.in_place import seen_by
from mpisgd.exchange.ways import IN_PLACE, ON_GPU, chunks_of_slices
from mpisgd.gradient import stages
from mpisgd.gradient.aggregate import SharedMemory
from mpisgd.gradient.by_layers.parts import GradientInParts
from mpisgd.gradient.gradient import Gradient
from mpisgd.job.run.partners import Partners
from mpisgd.job.run.start import Claim
from mpisgd.job.tensors import Tensors
from mpisgd.job.world import World
from mpisgd.pipeline import partitioned_gradient
from mpisgd.records.callbacks import Callbacks
from mpisgd.records.checkpoint.checkpoints import Checkpoints, Share
from mpisgd.records.log import schema
from mpisgd.update.slice_update import SliceUpdate
from mpisgd.vectors.buckets import Bucket
from mpisgd.vectors.chunks import parts_of
from mpisgd.vectors.computing import Computes, Travels
from mpisgd.vectors.memory import Memory, pin, unpin


class MpiWorld(World):
    saves = True

    def __init__(self, claim: Claim, wire: Wire, partners: Partners | None, callbacks: Callbacks) -> None:
        self._setup = claim.setup
        self.config, self.roles = config, roles = claim.setup.config, claim.setup.roles
        self.callbacks = callbacks
        self.tensors: Tensors = claim.tensors
        self._fingerprint = claim.tensors.model.fingerprint
        self._saved = claim.saved
        self._wire = wire
        self._partners = partners
        self._gradient: Gradient | None = None
        self.progress = config.log.progress
        self.early = config.device == "cpu"  # a GPU computes behind the host, which would wait for each part
        on_gpu = "cuda" in (config.device, config.shard_device)
        self._direct = on_gpu and takes_gpu_memory() and not roles.tolerant
        """MPI gets GPU memory; not if ranks may be lost: a transfer given up keeps its memory."""
        self._in_place: SharedMemory | None = None
        self._pinned: list[np.ndarray] = []

    def wire(self, rank: int) -> Wire:
        return self._wire

    def gradient(self, rank: int, shared: SharedMemory | None = None, group: Group | None = None) -> Travels:
        if group is not None:
            return self._stage(rank, group)
        own = None if shared is None else shared.own
        memory = stages.place(self.config, self.tensors.model, own, direct=self._direct)
        gradient = self.tensors.gradient(self.roles.number(rank), memory)
        if not self.config.protocol.batch:  # portions of a batch have no order of their own
            gradient.read_ahead()
        self._gradient = gradient
        return gradient

    def shared(self, rank: int, ranks: Sequence[int], words: int, outboxes: int = 0) -> SharedMemory:
        """Share memory; with outboxes until `disband`, pinned beside a GPU. Raises ConfigError: impossible."""
        size, serves = self._setup.bounds[-1][1], rank in self.roles.shard_ranks
        if self.config.way == ON_GPU:
            device = self.tensors.shard_device if serves else str(self.tensors.model.weights.device)
            shared = on_gpu.share(self._wire, self.roles, words, size, device)
        else:
            shared = SharedMemory.of(self._wire, ranks, words, size, outboxes)
        if outboxes:
            self._in_place = shared
        beside = self.config.shard_device if serves else self.config.device
        if outboxes and self.config.way == IN_PLACE and beside == "cuda":
            self._pinned = seen_by(shared, self.roles, rank)
        for vector in self._pinned:
            pin(vector)
        return shared

    def disband(self) -> None:
        if self._in_place is None:
            return
        if self._gradient is not None:  # the user's model goes on, and no other rank looks at its outboxes any more
            self._gradient.move_out(Memory(*self._in_place.own.outboxes) if self.config.device == "cpu" else None)
        for vector in self._pinned:
            unpin(vector)
        self._in_place.segment.disband()

    def _stage(self, rank: int, team: Group) -> Travels:
        """Return a stage, or piece; the rest of the model may go."""
        roles, learner_id = self.roles, self.roles.index(rank)
        names = roles.stream(rank), roles.stage(rank)
        if self.config.partitioned:
            links = partitioned_gradient.links_of(self._wire, roles.groups[learner_id])
            self._gradient = gradient = self.tensors.of_piece(*names, links, team)
            gradient.read_ahead()
            if not (self._setup.jointly and learner_id == 0):
                self._drop_model()
            return gradient
        self._gradient = passes = self.tensors.passes(*names)
        if self._keeps_model and self.tensors.in_pieces is not None:
            self.tensors.model.forget()
        self._drop_model()
        return self._staged(rank, passes, team)

    def group(self, rank: int, ranks: Sequence[int]) -> Group:
        return self._wire.group(ranks) if isinstance(self._wire, TolerantWire) else super().group(rank, ranks)

    def weights(self, bounds: tuple[int, int]) -> Tensor:
        weights = super().weights(bounds)
        self._drop_model()
        return weights

    def close(self) -> None:
        if self._gradient is not None:
            self._gradient.close()

    def buckets(self) -> list[Bucket]:
        return stages.buckets_of(self.config, self.tensors.model.layers, self._setup.bounds)

    def by_layers(self, rank: int, computed: Any, pushed: Travels, channel: Any) -> Computes:
        streamed = self.early and stages.leaves_early(self.config)
        bounds, own = parts_of(self._setup.bounds, self.config.chunks) if streamed else self._setup.bounds, list[int]()
        if buckets := self.buckets():
            place = self.roles.learner_ranks.index(rank)
            bounds = [(bucket.start, bucket.end) for bucket in buckets]
            own = [number for number, bucket in enumerate(buckets) if bucket.owner == place]
        how: dict[str, Any] = {"held": stages.held(self.config), "own": own, "streamed": streamed}
        return GradientInParts(computed, pushed, self.tensors.model, bounds, channel, **how)

    def update(self, rank: int, gradients_per_update: float) -> SliceUpdate:
        """Make the update; a mere shard may drop the model."""
        setup, alone = self._setup, self.roles.of(rank) is Role.SHARD
        shard, direct = setup.roles.index(rank), (self._direct and alone) or self.config.way == ON_GPU
        streamed = chunks_of_slices(self.config, setup.bounds)
        update = self.tensors.update(setup.bounds[shard], gradients_per_update, streamed=streamed, direct=direct)
        if alone:
            self._drop_model()
        before = setup.account(shard)
        if before is not None:
            update.restore(self.saved(rank), before.samples)
        return update

    def saved(self, rank: int) -> dict[str, Tensor]:
        saved = {name: torch.from_numpy(array) for name, array in self._saved.items()}
        self._saved.clear()
        return saved

    def checkpoints(self, rank: int, update: Any, rows: list[list[int]]) -> Checkpoints:
        """Return checkpoints, also if only a signal asks."""
        setup, config, shard = self._setup, self.config, self.roles.index(rank)
        share = Share(
            setup.path,
            shard,
            bounds=setup.bounds[shard],
            shards=config.shards,
            learners=setup.roles.lambda_,
            model=self._fingerprint,
            attempt=setup.attempt,
            continues=rows,
            pinned=() if setup.resumption is None else setup.resumption.pinned,
            coordinated=config.protocol.batch,
        )
        log = [setup.path / schema.shard_file(shard, setup.attempt)] if config.log.enabled else []
        beside = [*log, setup.spool(shard)]
        near = None if self._partners is None else self._partners.keep
        complain: Callable[[str], None] = lambda text: self.warn(rank, text)  # noqa: E731
        return Checkpoints(share, config.checkpoint, update, beside=beside, complain=complain, near=near)

    def warn(self, rank: int, text: str) -> None:
        warn(f"mpisgd: rank {rank} ({self.roles.describe(rank)}) on {self._setup.hosts[rank]}: {text}")

    @property
    def _keeps_model(self) -> bool:
        return self.roles.may_evaluate(self._wire.rank)

    def _drop_model(self) -> None:
        if not self._keeps_model:
            del self.tensors.model
