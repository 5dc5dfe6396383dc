"""The ranks of a job, from the parts of which `job/run.py` makes those of a real one, on a virtual MPI.

Shard, rules, channels, the tolerant wire, faults, succession, records, checkpoints, the learner's and the evaluator's loops, the
end where all meet, the pulse: all are the package's own.
"""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpisgd.base.errors import MpisgdError, PeerError, RunInterrupted
from mpisgd.comm.signals import HEARD
from mpisgd.config.config_file import dumps
from mpisgd.evaluator import Evaluator
from mpisgd.exchange.evaluator_channel import EvaluatorChannel
from mpisgd.exchange.layerwise import learner_channel
from mpisgd.exchange.roles import Roles
from mpisgd.exchange.shard_channel import ShardChannel
from mpisgd.exchange.tolerant_channel import TolerantShardChannel
from mpisgd.gradient import stages
from mpisgd.gradient.measure import batch_norm_policy
from mpisgd.job import interruption, naming, parts, placement, resume
from mpisgd.job.finish import account, blown_up, finish, outcome_of, refusals
from mpisgd.job.parts import NOTHING_BROUGHT
from mpisgd.job.provenance import environment
from mpisgd.job.resume import Resumption
from mpisgd.learner import learn
from mpisgd.records import directory
from mpisgd.records.checkpoint.checkpoints import Share
from mpisgd.records.checkpoint.snapshots import Snapshots, check_spool
from mpisgd.records.log import schema
from mpisgd.records.log.bounded import open_tables
from mpisgd.records.log.continuing import evaluated
from mpisgd.records.log.progress import Progress
from mpisgd.records.log.writer import EvaluatorLog, ShardLog, TableFile
from mpisgd.records.shard_records import ShardRecords
from mpisgd.rules.rules import Rules
from mpisgd.serving.faults import Faults
from mpisgd.serving.succession import Succession
from mpisgd.shard import Shard
from mpisgd.update.device_update import make_update
from mpisgd.vectors.memory import host_vector, host_view
from tests.virtual.storm.draw import COMPUTE_S, PATIENCE_S, Draw, Fault, config_of
from tests.virtual.storm.machine import Machine, Process
from tests.virtual.storm.mpi import equip
from tests.virtual.storm.package import VIRTUAL
from tests.virtual.storm.standins import Computing, Delayed, Pulse, Takes, computing


class Ranks:
    """The ranks of one attempt.

    Args:
        faults: what will befall them; here, which disks break.
        resumed: go on from the newest checkpoint.
    """

    def __init__(self, drawn: Draw, path: Path, dice: random.Random, faults: tuple[Fault, ...], *, resumed: bool = False) -> None:
        self.drawn, self.path, self.dice, self.faults = drawn, path, dice, faults
        shards, learners = drawn.again if resumed and drawn.again[0] else (drawn.shards, drawn.learners)
        self.config = config = config_of(drawn, path, shards)
        size = shards + learners + drawn.evaluator
        self.hosts = [f"node-{rank}" for rank in range(size)]
        self.roles: Roles
        self.roles, self.protocol = placement.on_ranks(config, self.hosts)
        self.data, self.model, self.loss, self.initial = computing()
        self.meta = parts.meta_of(self.data)
        self.bounds = parts.bounds(config, self.model)
        self.sampling = parts.make_sampling(config, self.meta, learners)
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
        self.expendable: dict[int, bool] = {}
        """Whether the others can go on without a rank, now."""
        self.why: dict[int, str] = {}
        """Per rank that failed, what it said."""
        self.interrupted = ""
        self.files: dict[int, list[TableFile]] = {rank: [] for rank in range(size)}
        self.broken: dict[tuple[str, int], float] = {}
        """Until which second the log ("full"), or the checkpoints ("unsaved"), of a rank cannot be written."""
        self.resumption: Resumption | None = None
        if resumed:
            self._open_again()
        else:
            directory.write_config(_made(path), dumps(config, self._environment()))

    def _open_again(self) -> None:
        config, averaged = self.config, self.config.averaging > 0
        found = resume.find(self.path, config)
        found = resume.lay_out(found, config, self.roles.lambda_, self.bounds, self.model.fingerprint, averaged)
        resume.forget_newer(self.path, found.checkpoint.clock)
        directory.write_config(self.path, dumps(config, found.environment(self._environment(), config)))
        self.resumption = found

    def _environment(self) -> dict[str, Any]:
        config = self.config
        return environment(
            config, self.roles, self.hosts, self.meta, brought=naming.described(config, NOTHING_BROUGHT), mpi="virtual",
            parameters=self.model.size, parameter_nbytes=4 * self.model.size,
            batch_norm_policy=batch_norm_policy(self.model.module, config.evaluation, self.meta.train_samples),
        )  # fmt: skip

    # --------------------------------------------------------------------------------------------------------------- the ranks

    def fails(self, process: Process, why: str) -> None:
        self.why.setdefault(process.rank, why)

    def _is_broken(self, what: str, rank: int) -> bool:
        return self.machine.now_ns * 1e-9 < self.broken.get((what, rank), -1.0)

    def _rank(self, rank: int) -> None:
        roles, tolerant = self.roles, self.drawn.tolerant
        pulse = Pulse(self.machine.processes[rank], self.fails)
        if tolerant:
            wire = VIRTUAL.tolerant.TolerantWire(
                self.machine.comms[0][rank], polite=True, vital=roles.shard_ranks, describe=roles.describe, patience_s=PATIENCE_S
            )
            pulse.heed_shards(roles.shard_ranks, wire)
        else:
            wire = VIRTUAL.wire.Wire(self.machine.comms[0][rank], polite=True)
        self.wires[rank] = wire
        self.machine.processes[rank].begin(pulse.serve)
        if rank in roles.shard_ranks:
            said = self._shard(rank, wire)
        elif rank in roles.learner_ranks:
            said = self._learner(rank, wire)
        else:
            wire.start_clock(self._already_s)
            self.expendable[rank] = tolerant
            self._evaluate(rank, wire)
            said = account()
        wire.meet()
        self._end(rank, wire, said)

    @property
    def _already_s(self) -> float:
        return 0.0 if self.resumption is None else self.resumption.checkpoint.now_s

    def _shard(self, rank: int, wire: Any) -> np.ndarray:
        config, roles, resumption = self.config, self.roles, self.resumption
        shard = roles.index(rank)
        start, end = self.bounds[shard]
        protocol = config.protocol.make(roles.lambda_)
        update = make_update(
            config,
            self.initial[start:end],
            gradients_per_update=parts.gradients_per_update(protocol, roles.lambda_, roles.lambda_),
            train_samples=self.meta.train_samples,
        )
        saved = None if resumption is None else resumption.checkpoint.parts[shard].account
        if resumption is not None and saved is not None:
            spool = self.path / schema.spool_file(shard, resumption.layout)
            check_spool(spool, saved.snapshots, 4 * (end - start))
            tensors = {name: torch.from_numpy(array) for name, array in resumption.checkpoint.tensors(shard).items()}
            update.restore(tensors, saved.samples)
        layout, attempt = (0, 0) if resumption is None else (resumption.layout, resumption.attempt)
        spool = self.path / schema.spool_file(shard, layout)
        rows = [] if saved is None else saved.rows
        snapshots = Snapshots(
            spool,
            every_epochs=config.evaluation.every_epochs,
            vectors=1,
            size=end - start,
            resumed=() if saved is None else saved.snapshots,
        )
        file = self._table_file(rank, shard, rows)
        share = Share(
            self.path,
            shard,
            (start, end),
            config.shards,
            roles.lambda_,
            self.model.fingerprint,
            attempt=attempt,
            continues=rows,
            pinned=() if resumption is None else resumption.pinned,
        )
        log = self.path / schema.shard_file(shard, attempt)
        checkpoints = Delayed(share, config.checkpoint, update, beside=[log, spool])
        checkpoints.process, checkpoints.broken = self.machine.processes[rank], lambda: self._is_broken("unsaved", rank)
        channel = (TolerantShardChannel if self.drawn.tolerant else ShardChannel)(wire, roles, shard)
        budget = parts.budget_samples(config, protocol, self.meta.train_samples)
        records = ShardRecords(ShardLog(file, shard), Progress("off", config.epochs, 0.0), snapshots, checkpoints)
        rules = Rules(protocol, roles.lambda_, budget)
        server = Shard(channel, rules, update, records, nonfinite=config.nonfinite, timeout_s=config.protocol.deadline_s)
        if isinstance(channel, TolerantShardChannel):
            succession = Succession(dedicated=roles.dedicated_evaluator) if shard == 0 else None
            Faults(server, channel, PATIENCE_S, succession, f"shard {shard}")
        if resumption is not None and saved is not None:
            server.restore(saved, resumption.checkpoint.next_seq)
        wire.start_clock(self._already_s)
        server.serve()
        file.close()
        snapshots.close(keep=True)
        interrupted = rules.interrupted and not rules.finished
        refused = server.refusals
        return account(rules.clock, update.samples, blown_up(server), server.updated_s, refused.total, refused.most, interrupted)

    def _learner(self, rank: int, wire: Any) -> np.ndarray:
        config, roles, learner_id = self.config, self.roles, self.roles.index(rank)
        protocol, seconds = config.protocol.make(roles.lambda_), random.Random(f"{self.drawn.seed}:{learner_id}")
        pace = seconds.choice((0.5, 1.0, 1.0, 3.0)) * COMPUTE_S
        gradient = Computing(
            self.model,
            stages.make_gradient(config, self.model, self.loss, self.data, self.sampling, learner_id),
            lambda: pace * seconds.uniform(0.5, 1.5),
        )
        own = stages.chain(config, gradient, self.bounds, self.meta.train_samples)
        channel = learner_channel(config, protocol, wire, roles, learner_id, own.memory, self.bounds)
        if self.drawn.tolerant:
            channel.ask_for_duty()
        wire.start_clock(self._already_s)
        self.expendable[rank] = self.drawn.tolerant
        share = parts.share_of(config, protocol, self.meta.train_samples, roles.lambda_, learner_id)
        first = 0 if self.resumption is None else self.resumption.checkpoint.next_seq[learner_id]
        learn(channel, protocol, own, stages.loop_delays(config, learner_id), share, first)
        if channel.duty() if self.drawn.tolerant else rank == roles.evaluator_rank:
            self._evaluate(rank, wire)
        return account()

    def _evaluate(self, rank: int, wire: Any) -> None:
        pulled = [host_vector(self.model.size)]
        channel = EvaluatorChannel(
            wire, self.roles, weights=host_view(pulled[0]), averaged=None, bounds=self.bounds, to_first=self.drawn.tolerant
        )
        measure = parts.make_measure(self.config, self.model, self.loss, self.data)
        first, before = 0, list[list[int]]()
        if self.resumption is not None:
            checkpoint = self.resumption.checkpoint
            taken = min(len(part.account.snapshots) for part in checkpoint.parts)
            first, before = evaluated(self.path, checkpoint.attempts, taken, 1, lambda text: None)
        log = EvaluatorLog(self._table_file(rank, -1, before))
        told = Takes("off", 0, 0, 0.0)
        Evaluator(
            channel, self.model, pulled, measure, log, train=False, train_samples=self.meta.train_samples, told=told
        ).evaluate_all(self.path / schema.WEIGHTS, first)
        log.close()

    def _table_file(self, rank: int, shard: int, before: list[list[int]]) -> TableFile:
        resumption = self.resumption
        attempt = 0 if resumption is None else resumption.attempt
        name = schema.shard_file(shard, attempt) if shard >= 0 else schema.evaluator_file(attempt)
        file = open_tables(
            self.path / name, max_bytes=0, shard=shard, flush_rows=self.drawn.flush_rows, flush_s=1e9,
            attributes={} if resumption is None else resumption.attributes(before), instead=self.drawn.tolerant and shard < 0,
        )  # fmt: skip
        self.files[rank].append(file)
        if ("full", rank) in self.broken or any(fault.what == "full" and fault.rank == rank for fault in self.faults):
            write = file._write

            def fails() -> None:
                if ("full", rank) in self.broken:
                    raise OSError(28, "No space left on device")
                write()

            file._write = fails  # type: ignore[method-assign]
        return file

    def _end(self, rank: int, wire: Any, said: np.ndarray) -> None:
        """What `run.Rank._end` does."""
        self.expendable[rank] = False
        accounts = wire.gather(said)
        outcome = outcome_of(self.path, accounts[list(self.roles.shard_ranks)])
        if accounts[:, -1].any():
            self._interrupted(rank, wire, outcome.clocks)
        told = np.zeros(1 + len(self.hosts), np.int64)
        if rank == 0:
            outcome = finish(outcome, logged=True)
            for spool in self.path.glob(f"{schema.SPOOL}*"):
                spool.unlink(missing_ok=True)
            told[0] = outcome.diverged
            told[[1 + each for each in wire.given_up()]] = 1
        _, *given_up = wire.gather(told)[0].tolist()
        wire.part()
        for other, given in enumerate(given_up):
            if given:
                self.machine.processes[other].dead = True  # by its node's rank, or the launcher
        why = refusals(accounts[list(self.roles.shard_ranks)], self.roles.describe)
        if why:
            raise PeerError(why)

    def _interrupted(self, rank: int, wire: Any, clocks: tuple[int, ...]) -> None:
        text = "no checkpoint"
        if rank == 0:
            with contextlib.suppress(MpisgdError):
                text = interruption.farewell(self.path, HEARD[0], clocks, "again")
        wire.gather(np.array([0]))
        wire.gather(np.array([0]))
        wire.part()
        raise RunInterrupted(text)


def _made(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path
