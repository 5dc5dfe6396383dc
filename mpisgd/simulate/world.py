"""The two virtual worlds, with tensors or with sizes alone, and their costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpisgd.base.errors import ConfigError, PeerError
from mpisgd.comm.communicator import Group
from mpisgd.comm.messages import Ending
from mpisgd.comm.virtual.network import Network
from mpisgd.comm.virtual.wire import VirtualWire
from mpisgd.config import Config, compatibility, replace
from mpisgd.data import DataSet
from mpisgd.exchange.roles import Roles
from mpisgd.exchange.ways import choose, chunks_of_slices, travel_asked
from mpisgd.gradient import stages
from mpisgd.gradient.aggregate import SharedMemory
from mpisgd.job import parts
from mpisgd.job.parts import Meta, UserObjects
from mpisgd.job.roles import RankRole
from mpisgd.job.tensors import Tensors, crossing_nbytes, dealt_between
from mpisgd.job.world import World
from mpisgd.models.interleaved import Dealt
from mpisgd.records.log import schema
from mpisgd.simulate import compute
from mpisgd.simulate.batch import TOGETHER, Batch
from mpisgd.simulate.failures import Failures, LearnerFailed
from mpisgd.simulate.passes import Passes, Shares
from mpisgd.simulate.piece_seconds import PieceSeconds, WholeGroup, program_of
from mpisgd.simulate.sized import SizedGradient, SizedUpdate
from mpisgd.simulate.stage_seconds import StageSeconds
from mpisgd.simulate.timed import BatchedGradient, Service, Timed
from mpisgd.update import schedule
from mpisgd.update.slice_update import SliceUpdate, Weighting
from mpisgd.vectors import buckets
from mpisgd.vectors.buckets import Bucket
from mpisgd.vectors.chunks import parts_of
from mpisgd.vectors.computing import Charges, Travels
from mpisgd.vectors.cut import Stages
from mpisgd.vectors.flat import FlatModel, Layer, cut_by_layers, first_layers, slice_bounds
from mpisgd.vectors.kept_state import Turns
from mpisgd.vectors.memory import Memory, SizedVector
from mpisgd.vectors.push_format import PushFormat

_NS = 10**9


class VirtualWorld(World):
    """Common part of both worlds; `nodes`: the node of each rank.

    Attributes:
        wires: of all ranks; filled before roles are built.
        stages: of a group's model, with bytes between stages in `crossing`, or between pieces in `dealt`.
        facts: for config.toml.
        computing: how gradients are computed, for the first line; "" or ", ..."
    """

    meta: Meta
    parameters: int
    bounds: list[tuple[int, int]]
    layers: list[Layer]
    stages: Stages | None = None
    crossing: Sequence[int] = ()
    dealt: Sequence[Sequence[Dealt]] = ()
    computing = ""
    facts: dict[str, Any]

    @property
    def rules(self) -> int:
        """Version of the rules of the run (`schema.RULES`)."""
        return schema.RULES

    def __init__(self, config: Config, roles: Roles, nodes: list[int]) -> None:
        self._hosts = [str(node) for node in nodes]
        computing = [nodes[rank] for rank in roles.computing_ranks]
        self._compute = compute.make(config.compute, config.virtual, seed=config.seed, lambda_=len(computing), nodes=computing)
        self._failures = Failures(config.failures, config.seed)
        self.may_leave = config.failures.then == "leave"
        self.config = config
        self.roles = roles
        self.network = Network(config.network, nodes)
        self.wires: list[VirtualWire] = []
        self._wholes: dict[int, WholeGroup] = {}
        self._slots: list[Memory] = []

    def _cut(self, bounds: list[tuple[int, int]]) -> None:
        self.config = config = choose(self.config, self.roles, self._hosts, bounds, self.network.rates, travel=travel_asked())
        self.bounds = slice_bounds(bounds[-1][1], config.shards, config.slices) if config.slices else bounds

    def wire(self, rank: int) -> VirtualWire:
        return self.wires[rank]

    def shared(self, rank: int, ranks: Sequence[int], words: int, outboxes: int = 0) -> SharedMemory:
        """Share memory in no time; a virtual rank computes beside its outbox."""
        if not outboxes:
            return super().shared(rank, ranks, words)
        if not self._slots:
            first = self._memory(ranks[0])
            own = [first, *(self._memory(each) for each in ranks[1:])]
            self._slots = [Memory(first.weights, each.gradients, shared=True, outboxes=[each.gradients]) for each in own]
        return dataclasses.replace(SharedMemory.of(self.wires[rank], ranks, words, 0), slots=self._slots)

    def _memory(self, rank: int) -> Memory:
        vector = SizedVector(self.parameters)
        return Memory(vector, vector)

    def buckets(self) -> list[Bucket]:
        nbytes = buckets.OLDER_NBYTES if self.rules < 4 else None
        return stages.buckets_of(self.config, self.layers, self.bounds, nbytes)

    def by_layers(self, rank: int, computed: Any, pushed: Travels, channel: Any) -> Passes:
        bounds = parts_of(self.bounds, self.config.chunks) if stages.leaves_early(self.config) else self.bounds
        firsts = [bucket.first for bucket in self.buckets()] or first_layers(self.layers, bounds)
        return Passes(
            pushed,
            self.wires[rank],
            self._next_ns(rank),
            firsts,
            Shares.of(self.config.virtual, self.layers),
            channel,
            held=stages.held(self.config),
            count=self.config.accumulation,
        )

    def sum_cost(self, rank: int, places: int) -> Callable[[], None]:
        """Return the cost of a team's sum: others' gradients are read at the node's bandwidth."""
        nbytes, bandwidth = 4 * self.parameters, self.config.network.local_bandwidth
        wire, ns = self.wires[rank], round(nbytes / places * (places - 1) / bandwidth * _NS)
        return lambda: wire.work(ns)

    def _service_ns(self, shard: int) -> tuple[int, int]:
        """Return a shard's cost of a gradient, and of an update."""
        service, (start, end) = self.config.service, self.bounds[shard]
        nbytes = 4 * (end - start)
        gradient_s = service.gradient_s + service.gradient_s_per_byte * nbytes
        return round(gradient_s * _NS), round((service.update_s + service.update_s_per_byte * nbytes) * _NS)

    def charges(self, rank: int) -> Charges:
        return Service(self.wires[rank], *self._service_ns(self.roles.index(rank)))

    def _whole_ns(self, rank: int) -> Callable[[], int] | None:
        """Return `_next_ns`, or None where time passes by layers."""
        by_layers = self.config.per_layer or self.config.in_buckets or stages.leaves_early(self.config)
        return None if by_layers else self._next_ns(rank)

    def _next_ns(self, rank: int) -> Callable[[], int]:
        """Return a function of the next mini-batch's cost, which raises LearnerFailed."""
        number, wire = self.roles.stream(rank), self.wires[rank]
        cost = self._compute.nanoseconds(self.roles.number(rank)).__next__
        fails_ns = self._failures.nanosecond_of(number)
        if fails_ns is None:
            return cost

        def cost_until_failure() -> int:
            ns, left = cost(), fails_ns - wire.clock.now_ns()
            if left <= ns:
                wire.work(max(0, left))
                raise LearnerFailed(number, wire.clock.now_ns())
            return ns

        return cost_until_failure

    def _stage(self, rank: int, team: Group, memory: Memory, whole: Callable[[], Travels | None]) -> Travels:
        """Return a rank's stage, or piece, within its group's memory; `whole` computes the group's gradient there."""
        assert self.stages is not None
        learner_id, stage = self.roles.index(rank), self.roles.stage(rank)
        group, (start, end) = self.roles.groups[learner_id], self.stages.bounds[stage]
        cost, share = self._next_ns(rank), (end - start) / self.parameters
        own, next_ns = Memory(memory.weights[start:end], memory.gradients[start:end]), lambda: round(share * cost())
        if self.config.partitioned:
            if learner_id not in self._wholes:
                self._wholes[learner_id] = WholeGroup(whole(), len(group))
            program, clips = program_of(self.dealt[stage]), team if self.config.clip_norm > 0 else None
            return PieceSeconds(self.wires[rank], group, own, next_ns, self.config, program, self._wholes[learner_id], clips)
        passes = StageSeconds(
            self.wires[rank],
            own,
            next_ns,
            self.config,
            crossing=(0, *self.crossing, 0)[stage : stage + 2],
            whole=whole() if rank == group[-1] else None,
        )
        return self._staged(rank, passes, team)

    def part_with(self, role: RankRole, failure: LearnerFailed) -> None:
        """Let a failed learner leave after `notice_s`, with a goodbye on its behalf; or end the job."""
        if role.leaves_by is None or self.config.failures.then == "stop":
            raise PeerError(f"{failure}: the job is ended, as a fail-fast run is") from failure
        role.wire.clock.interrupt_by(None)
        role.wire.clock.sleep(self.config.failures.notice_s)
        role.leaves_by(ending=Ending.NONE)


class TensorWorld(VirtualWorld):
    """Real gradients on this machine: one model and one copy of the data for all virtual learners."""

    tensors: Tensors

    def __init__(self, config: Config, user_objects: UserObjects, roles: Roles, nodes: list[int], evaluated: bool) -> None:
        super().__init__(config, roles, nodes)
        data = parts.load_data(config, user_objects)
        device = gpu_of("device") if config.device == "cuda" else "cpu"
        self.tensors = tensors = Tensors.load(config, user_objects, data, roles.streams, self.rules, device)
        self._cut(parts.bounds(config, tensors.model, self.rules))
        self._device = device if stages.stays_on_gpu(self.config) else "cpu"
        tensors.shard_device = self._shard_device()
        tensors.evaluated = evaluated
        self.meta = tensors.meta
        self.parameters = tensors.model.size
        self.layers = tensors.model.layers
        self.facts = tensors.facts
        self._check(tensors)
        Shares.of(config.virtual, self.layers)
        self.stages = tensors.stages
        self.crossing, self.dealt = crossing_nbytes(tensors.model, tensors.gradient(0)), tensors.dealt
        self._of_groups: dict[int, Memory] = {}
        self._batch = self._at_once(data)
        if device != "cpu":
            self.computing = f", gradients on a GPU, {f'up to {TOGETHER} at once' if self._batch else 'one by one'}"
        tensors.turns = Turns(tensors.model.module)

    def _memory(self, rank: int) -> Memory:
        return Memory.zeros(self.parameters, self._device)

    def _shard_device(self) -> str:
        return self._device

    def _updates_as_real(self) -> bool:
        return False

    def _at_once(self, data: DataSet) -> Batch | None:
        """Return the batch of gradients: where asked for, or on a GPU where the model allows. Raises ConfigError."""
        config, tensors = self.config, self.tensors
        wanted = replace(config, virtual=dataclasses.replace(config.virtual, batched=True))
        if not config.virtual.batched and (config.device == "cpu" or compatibility.refused(wanted, virtual=True)):
            return None
        try:
            batch = Batch(wanted, tensors.model, tensors.loss, data, tensors.sampling)
            batch.check()
        except ConfigError:
            if config.virtual.batched:
                raise
            return None
        return batch

    def _check(self, tensors: Tensors) -> None:
        """Look at the first mini-batch. Raises ConfigError, DataError."""
        tensors.check()

    def gradient(self, rank: int, shared: SharedMemory | None = None, group: Group | None = None) -> Travels:
        if group is not None:
            learner_id = self.roles.index(rank)
            memory = self._of_groups.setdefault(learner_id, Memory.zeros(self.parameters))
            return self._stage(rank, group, memory, lambda: self.tensors.gradient(learner_id, memory))
        memory = self._memory(rank) if shared is None else shared.own
        number, wire, next_ns = self.roles.number(rank), self.wires[rank], self._whole_ns(rank)
        gradient: Travels = self.tensors.gradient(number, memory)
        if self._batch is not None:
            gradient = BatchedGradient(memory, wire, self._batch, number)
        return gradient if next_ns is None else Timed(gradient, wire, next_ns)

    def update(self, rank: int, gradients_per_update: float) -> SliceUpdate:
        shard = self.roles.index(rank)
        streamed = chunks_of_slices(self.config, self.bounds)
        how: dict[str, Any] = {"streamed": streamed, "direct": self._updates_as_real(), "charges": self.charges(rank)}
        return self.tensors.update(self.bounds[shard], gradients_per_update, **how)


def gpu_of(field: str) -> str:
    """Return the device. Raises ConfigError: none."""
    if not torch.cuda.is_available():
        raise ConfigError(f"{field} = 'cuda': torch finds no CUDA device here")
    return "cuda:0"


class SizedWorld(VirtualWorld):
    """Sizes alone, for timing and staleness at any scale."""

    tensors = None

    def __init__(self, config: Config, user_objects: UserObjects, roles: Roles, nodes: list[int]) -> None:
        super().__init__(config, roles, nodes)
        options = config.virtual
        self.meta = Meta(options.train_samples, 0, (), 0)
        measured = [Layer(name, size) for name, size in options.layers.items()]
        data, model = (None, None) if options.parameters or measured else _model(config, user_objects)
        self.parameters = options.parameters or sum(options.layers.values()) if model is None else model.size
        bounds = slice_bounds(self.parameters, config.shards, config.slices) if model is None else parts.bounds(config, model)
        if measured and config.per_layer:
            bounds = cut_by_layers(measured, config.shards, within=len(measured) != config.shards)
        self._cut(bounds)
        if config.in_groups and model is not None:
            self.stages = parts.stages_of(config, model)
            self.crossing, self.dealt = _crossing(config, user_objects, roles, data, model)
        # where only the model's size is known, each slice, or streamed chunk, is one layer
        chunks = parts_of(self.bounds, self.config.chunks) if stages.leaves_early(self.config) else self.bounds
        self.layers = measured or [Layer(f"layer {number}", end - start) for number, (start, end) in enumerate(chunks)]
        if model is not None:
            self.layers = model.layers
            parts.segments_of(config, model)  # refuse patterns without a match, as a real run does
        Shares.of(options, self.layers)
        self.facts = parts.facts_of_model(config, self.layers, self.bounds, "no gradients were computed")

    def shared(self, rank: int, ranks: Sequence[int], words: int, outboxes: int = 0) -> SharedMemory:
        if outboxes:
            return super().shared(rank, ranks, words, outboxes)
        return dataclasses.replace(SharedMemory.of(self.wires[rank], ranks, words, 0), slots=[self._memory(each) for each in ranks])

    def gradient(self, rank: int, shared: SharedMemory | None = None, group: Group | None = None) -> Travels:
        if group is not None:
            return self._stage(rank, group, self._memory(rank), lambda: None)
        memory = self._memory(rank) if shared is None else shared.own
        return SizedGradient(memory, self.config.mu, self.wires[rank], self._whole_ns(rank))

    def update(self, rank: int, gradients_per_update: float) -> SizedUpdate:
        config, shard = self.config, self.roles.index(rank)
        start, end = self.bounds[shard]
        return SizedUpdate(
            end - start,
            learning_rate=config.alpha0 * (gradients_per_update if config.linear_scaling else 1),
            schedule=schedule.of_run(config, gradients_per_update, self.meta.train_samples),
            train_samples=self.meta.train_samples,
            push_format=PushFormat.of(config),
            rank=self.wires[rank],
            service_ns=self._service_ns(shard),
            weighting=Weighting(config.modulate),
            streamed=chunks_of_slices(config, self.bounds),
        )


def _crossing(
    config: Config, user_objects: UserObjects, roles: Roles, data: DataSet | None, model: FlatModel
) -> tuple[list[int], Sequence[Sequence[Dealt]]]:
    """Return the bytes between stages, or pieces, from one micro-batch."""
    assert data is not None
    meta = parts.meta_of(data, config)
    sampling = parts.make_sampling(config, meta, roles.streams)
    tensors = Tensors(replace(config, init_from=""), meta, parts.load_loss(config, user_objects), model, sampling, data)
    return crossing_nbytes(model, tensors.gradient(0)), dealt_between(model, tensors.gradient(0))


def _model(config: Config, user_objects: UserObjects) -> tuple[DataSet, FlatModel]:
    try:
        config = replace(config, init_from="")
        data = parts.load_data(config, user_objects)
        return data, parts.build_model(config, parts.meta_of(data, config), user_objects)
    except ConfigError as error:
        raise ConfigError(f"virtual.parameters = 0: the model's are counted, but {error}") from error
