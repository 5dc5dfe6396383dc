"""The ranks of a job, in a world of their own: the roles that `job/roles/` builds, on a virtual MPI.

Shard, rules, channels, the tolerant wire, faults, records, checkpoints, the learner's and the evaluator's loops, the
end where all meet, the heartbeat: all are the package's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpisgd.base.errors import MpisgdError, PeerError, RunInterrupted
from mpisgd.comm.communicator import Group
from mpisgd.comm.signals import HEARD
from mpisgd.config.config_file import dumps
from mpisgd.exchange.ways import choose
from mpisgd.gradient import stages
from mpisgd.gradient.aggregate import SharedMemory
from mpisgd.job import interruption, parts, placement, resume
from mpisgd.job.finish import accounts_of, all_checked, check_books, end_of, finish, outcome_of, refusals
from mpisgd.job.parts import NO_OBJECTS
from mpisgd.job.provenance import environment
from mpisgd.job.roles import RankRole, build
from mpisgd.job.tensors import Tensors
from mpisgd.job.world import Setup, World
from mpisgd.pipeline.stage import Stage
from mpisgd.records import directory
from mpisgd.records.checkpoint.checkpoints import Share
from mpisgd.records.checkpoint.snapshots import check_spool
from mpisgd.records.lock import Lock
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from mpisgd.records.log.writer import TableFile
from mpisgd.simulate.passes import Passes, Shares
from mpisgd.update.device_update import make_update
from mpisgd.update.slice_update import SliceUpdate
from mpisgd.vectors.computing import Computes, Travels
from mpisgd.vectors.flat import first_layers
from mpisgd.vectors.memory import Memory
from tests.virtual.storm import package
from tests.virtual.storm.draw import COMPUTE_S, PATIENCE_S, Draw, Fault, config_of
from tests.virtual.storm.machine import Machine, Process
from tests.virtual.storm.mpi import equip
from tests.virtual.storm.package import VIRTUAL
from tests.virtual.storm.standins import Computing, Delayed, Heartbeat, Passing, Works, computing

_BEGUN = itertools.count()
"""Number of a job, as a process has a second at which it began."""


class Remembered(TableFile):
    """A coordinator's file, of which what it says of portions is kept, in memory."""

    def __init__(self, rows: list[tuple[Any, ...]]) -> None:
        super().__init__(None, shard=-1, flush_rows=1, flush_s=1e9, tables=schema.COORDINATOR)
        self._portions = rows

    def append(self, name: str, row: tuple[float, ...]) -> int:
        if name == "portions":
            self._portions.append(row)
        return super().append(name, row)


class Ranks(World):
    """The ranks of one attempt.

    Args:
        faults: what will befall them; here, which disks break.
        resumed: go on from the newest checkpoint.
    """

    def __init__(self, drawn: Draw, path: Path, dice: random.Random, faults: tuple[Fault, ...], *, resumed: bool = False) -> None:
        self.drawn, self.path, self.dice, self.faults = drawn, path, dice, faults
        shards, learners = drawn.again if resumed and drawn.again[0] else (drawn.shards, drawn.learners)
        self.config = config = config_of(drawn, path, shards)
        size = shards + drawn.is_batch + learners * drawn.group_size + drawn.evaluator
        self.hosts = [f"node-{rank}" for rank in range(size)]
        roles, protocol = placement.on_ranks(config, self.hosts)
        self.roles = roles.made_tolerant() if drawn.tolerant else roles
        data, model, loss, self.initial = computing(drawn.samples, in_groups=drawn.group_size > 1)
        self.meta = parts.meta_of(data)
        self.tensors: Tensors = Tensors(config, self.meta, loss, model, parts.make_sampling(config, self.meta, learners), data)
        bounds = parts.bounds(config, model)
        self.config = choose(config, self.roles, self.hosts, bounds, lambda: (math.inf, math.inf))
        self.machine = equip(
            Machine(
                size,
                dice,
                tells=drawn.tolerant or dice.random() < 0.3,
                latency_ns=drawn.latency_ns,
                eager_nbytes=drawn.eager_nbytes,
                reorders=drawn.reorders,
            )
        )
        self.wires: dict[int, Any] = {}
        self.built: dict[int, RankRole] = {}
        self.why: dict[int, str] = {}
        """Per rank that failed, what it said."""
        self.interrupted = ""
        self.portions: list[tuple[Any, ...]] = []
        """Rows of this attempt, where there is no log."""
        self._next_s: dict[int, Callable[[], float]] = {}
        """Per rank that exchanges layer by layer, what its next mini-batch takes."""
        self.files: dict[int, list[TableFile]] = {rank: [] for rank in range(size)}
        self.broken: dict[tuple[str, int], float] = {}
        """Until which second the log ("full"), or the checkpoints ("unsaved"), of a rank cannot be written, or wait ("hang")."""
        self.begun = f"{next(_BEGUN)}"
        for fault in faults:
            if fault.what == "jump" and fault.at_s == 0:
                self.machine.wall_s[fault.rank] += fault.by_s
        path.mkdir(parents=True, exist_ok=True)
        self.setup = Setup(self.config, config, self.roles, protocol, self.hosts, self.meta, bounds, stages=self.tensors.stages)
        with package.dated(self.machine, self.begun):
            self._open(model.fingerprint, resumed)

    def _open(self, fingerprint: str, resumed: bool) -> None:
        """What `start.Claim` does."""
        config, path, roles = self.setup.asked, self.path, self.roles
        told = environment(self.setup, NO_OBJECTS, mpi="virtual", commits=False, **self.tensors.facts)
        self.lock = Lock(path)
        try:
            if resumed:
                found = resume.find(path, config)
                found = resume.lay_out(found, config, roles.lambda_, self.setup.bounds, fingerprint, config.averaging > 0)
                resume.forget_newer(path, found.checkpoint.clock)
                told = found.environment(told, config)
                self.setup = dataclasses.replace(self.setup, resumption=found)
        except MpisgdError:
            self.lock.release()
            raise
        directory.write_config(path, dumps(config, told))

    # --------------------------------------------------------------------------------------------------------------- the world

    saves = True

    def wire(self, rank: int) -> Any:
        return self.wires[rank]

    def gradient(self, rank: int, shared: SharedMemory | None = None, group: Group | None = None) -> Travels:
        learner_id = self.roles.index(rank)
        if group is not None:
            return self._stage(rank, learner_id, group)
        again = f":{self.setup.attempt}" if self.setup.attempt else ""
        seconds = random.Random(f"{self.drawn.seed}:{learner_id}{again}")  # no mini-batch takes as long as in another attempt
        pace = seconds.choice((0.5, 1.0, 1.0, 3.0)) * COMPUTE_S
        memory, next_s = Memory.zeros(self.tensors.model.size), lambda: pace * seconds.uniform(0.5, 1.5)
        if self.config.per_layer:
            self._next_s[rank], next_s = next_s, lambda: 0.0
        return Computing(self.tensors.gradient(learner_id, memory), next_s)

    def group(self, rank: int, ranks: Sequence[int]) -> Group:
        told: Group = self.wires[rank].group(ranks) if self.drawn.tolerant else super().group(rank, ranks)
        return told

    def _stage(self, rank: int, learner_id: int, group: Group) -> Stage:
        """A rank's stage, of a model of its own."""
        config, ranks = self.config, self.roles.groups[learner_id]
        own = dataclasses.replace(self.tensors, model=parts.build_model(config, self.meta, NO_OBJECTS))
        seconds = random.Random(f"{self.drawn.seed}:{rank}:{self.setup.attempt}")
        pace = seconds.choice((0.5, 1.0, 1.0, 3.0)) * COMPUTE_S / config.group_size / config.micro_batches
        passes = Passing(own.passes(learner_id, self.roles.stage(rank)), lambda: pace * seconds.uniform(0.5, 1.5))
        return Stage(self.wires[rank], ranks, passes, config.micro_batches, alternating=self.drawn.alternating)

    def by_layers(self, rank: int, computed: Any, pushed: Travels, channel: Any) -> Computes:
        layers, next_s = self.tensors.model.layers, self._next_s[rank]
        firsts = first_layers(layers, self.setup.bounds)
        held, count = stages.held(self.config), self.config.accumulation
        shares = Shares.of(self.config.virtual, layers)
        return Passes(pushed, Works(), lambda: round(next_s() * 1e9), firsts, shares, channel, held=held, count=count)

    def update(self, rank: int, gradients_per_update: float) -> SliceUpdate:
        setup, shard = self.setup, self.roles.index(rank)
        start, end = setup.bounds[shard]
        samples = self.meta.train_samples
        update = make_update(self.config, self.initial[start:end], gradients_per_update=gradients_per_update, train_samples=samples)
        saved = setup.account(shard)
        if setup.resumption is not None and saved is not None:
            check_spool(setup.spool(shard), saved.snapshots, 4 * (end - start))
            update.restore(self.saved(rank), saved.samples)
        return update

    def weights(self, bounds: tuple[int, int]) -> torch.Tensor:
        return self.initial[slice(*bounds)].clone()

    def saved(self, rank: int) -> dict[str, torch.Tensor]:
        assert self.setup.resumption is not None
        tensors = self.setup.resumption.checkpoint.tensors(self.roles.index(rank))
        return {name: torch.from_numpy(array) for name, array in tensors.items()}

    def checkpoints(self, rank: int, update: Any, rows: list[list[int]]) -> Delayed:
        setup, shard = self.setup, self.roles.index(rank)
        share = Share(
            self.path,
            shard,
            setup.bounds[shard],
            self.config.shards,
            self.roles.lambda_,
            self.tensors.model.fingerprint,
            attempt=setup.attempt,
            continues=rows,
            pinned=() if setup.resumption is None else setup.resumption.pinned,
            coordinated=self.config.protocol.batch,
        )
        beside = [self.path / schema.shard_file(shard, setup.attempt), setup.spool(shard)]
        checkpoints = Delayed(share, self.config.checkpoint, update, beside=beside)
        checkpoints.process, checkpoints.broken = self.machine.processes[rank], lambda: self._is_broken("unsaved", rank)
        checkpoints.hangs_ns = lambda: self._hangs_ns(rank)
        return checkpoints

    def open_file(self, path: Path | None, **fields: Any) -> TableFile:
        """The log file of the rank that runs now, in the place of `roles.base.TableFile`."""
        rank = self.machine.rank
        if path is None:
            return Remembered(self.portions) if fields["tables"] is schema.COORDINATOR else TableFile(path, **fields)
        file = TableFile(path, **fields)
        self.files[rank].append(file)
        if ("full", rank) in self.broken or any(fault.what == "full" and fault.rank == rank for fault in self.faults):
            write = file._write

            def fails() -> None:
                if ("full", rank) in self.broken:
                    raise OSError(28, "No space left on device")
                write()

            file._write = fails  # type: ignore[method-assign]
        if any(fault.what == "hang" and fault.rank == rank for fault in self.faults):
            flush = file.flush

            def waits() -> list[int]:
                while self._hangs_ns(rank) > 0:
                    self.machine.pause(self._hangs_ns(rank))
                return flush()

            file.flush = waits  # type: ignore[method-assign]
        return file

    # --------------------------------------------------------------------------------------------------------------- the ranks

    def fails(self, process: Process, why: str) -> None:
        self.why.setdefault(process.rank, why)

    def _hangs_ns(self, rank: int) -> int:
        return round(1e9 * self.broken.get(("hang", rank), 0.0)) - self.machine.now_ns

    def _is_broken(self, what: str, rank: int) -> bool:
        return self.machine.now_ns * 1e-9 < self.broken.get((what, rank), -1.0)

    def _rank(self, rank: int) -> None:
        roles = self.roles
        heartbeat = Heartbeat(self.machine.processes[rank], self.fails)
        if self.drawn.tolerant:
            vital = roles.vital_ranks
            wire = VIRTUAL.tolerant.TolerantWire(
                self.machine.comms[0][rank], polite=True, vital=vital, describe=roles.describe, patience_s=PATIENCE_S
            )
            heartbeat.tolerate(vital, wire.waiting, wire.presence)
        else:
            wire = VIRTUAL.wire.Wire(self.machine.comms[0][rank], polite=True)
        self.wires[rank] = wire
        self.machine.processes[rank].begin(heartbeat.serve)
        self.built[rank] = built = build(self.setup, self, rank)
        wire.clock.begin(wire.meet, self.setup.begins_s)
        built.train()
        said = built.end()
        built.close()
        wire.meet()
        built.leave()
        built.expendable = False
        self._end(rank, wire, said)

    def _end(self, rank: int, wire: Any, said: np.ndarray) -> None:
        """What `run.Rank._end` does."""
        interrupted, accounts = accounts_of(wire, said, self.roles.shard_ranks)
        outcome = outcome_of(self.path, accounts)
        if interrupted:
            self._interrupted(rank, wire, outcome.clocks)
        if self.drawn.logged:
            for shard, its_rank in enumerate(self.roles.shard_ranks):
                if rank == its_rank:
                    check_books(Run(self.path), shard, int(said[0]))
            all_checked(wire, self.path)
        given_up: Iterable[int] = ()
        if rank == 0:
            outcome = finish(outcome, Run(outcome.path) if self.drawn.logged else None)
            for spool in self.path.glob(f"{schema.SPOOL}*"):
                spool.unlink(missing_ok=True)
            given_up = wire.presence.given_up()
        _, given_up = end_of(wire, outcome.diverged, given_up, len(self.hosts))
        wire.part()
        for other in given_up:
            self.machine.processes[other].dead = True  # by its node's rank, or the launcher
        why = refusals(accounts, self.roles.describe)
        if why:
            raise PeerError(why)

    def _interrupted(self, rank: int, wire: Any, clocks: tuple[int, ...]) -> None:
        text = "no checkpoint"
        if rank == 0:
            with contextlib.suppress(MpisgdError):
                text = interruption.farewell(self.path, HEARD[0], clocks, "again")
        wire.settle(np.array([0]), lambda said: said.max(axis=0), 1)
        wire.settle(np.zeros(0, np.int64), lambda _: np.array([0]), 1)
        wire.part()
        raise RunInterrupted(text)
