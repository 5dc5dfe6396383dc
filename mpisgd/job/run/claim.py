"""The run's directory, which rank 0 claims or opens again; and, where learners may die, the ushers that see the ranks out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

from mpisgd.base.errors import ConfigError, MpisgdError
from mpisgd.comm.mpi.library import MPI
from mpisgd.comm.mpi.siblings import Siblings
from mpisgd.config import config_file
from mpisgd.job import naming, parts, resume
from mpisgd.job.building.setup import Setup
from mpisgd.job.parts import Brought
from mpisgd.job.provenance import environment
from mpisgd.job.resume import Resumption
from mpisgd.job.run.start import Start
from mpisgd.liveness import usher
from mpisgd.liveness.guard import AgreedError, agree
from mpisgd.records import directory
from mpisgd.records.checkpoint.snapshots import check_spool
from mpisgd.records.lock import Lock
from mpisgd.records.log import schema


class Claim:
    """A directory that this job alone writes to.

    Raises AgreedError on every rank alike where it cannot be had.

    Attributes:
        setup: what was agreed on at the start, and from where the run goes on.
    """

    def __init__(self, comm: MPI.Intracomm, start: Start, brought: Brought, resumed: bool) -> None:
        self.setup: Setup = start.setup
        self._comm = comm
        self._start = start
        self._brought = brought
        self._lock: Lock | None = None
        self._running = self.setup.path.absolute() / schema.RUNNING
        self._job = usher.name(start.ranks.hosts[0], start.ranks.pids[0], self.setup.config.out)
        try:
            resumption = agree(comm, lambda: self._claim(resumed))
            self.setup = dataclasses.replace(self.setup, resumption=resumption)
            self.setup = dataclasses.replace(self.setup, saved=agree(comm, self._load))
            if start.tolerant:
                agree(comm, self._call_usher)
        except AgreedError:
            self.unlock()
            self.leave()
            raise

    def unlock(self) -> None:
        """By rank 0: others may have the directory."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def leave(self, away: Iterable[int] = ()) -> None:
        """All is said: nobody needs to see this rank out; `away`: ranks that were given up, or are lost."""
        ranks = self._start.ranks
        if self._start.tolerant:
            if ranks.rank == 0:
                usher.retract(self._running, self._job)
            usher.leave(self._job, given_up=any(ranks.hosts[rank] != ranks.hosts[0] for rank in away))

    def _claim(self, resumed: bool) -> Resumption | None:
        """Rank 0 makes the directory, or finds out from where to go on in it; then every rank sees that it is there."""
        problem: MpisgdError | None = None
        resumption: Resumption | None = None
        path = self.setup.path
        if self._start.rank == 0:
            try:
                if resumed:
                    resumption = self._open_again()
                else:
                    self._open_new()
                if self._start.tolerant:
                    usher.announce(self._running, self._job)
            except MpisgdError as error:
                problem = error
        problem, resumption = self._comm.bcast((problem, resumption), root=0)
        if problem is not None:
            raise problem
        if not (path / schema.CONFIG).is_file():
            out = self.setup.config.out
            raise ConfigError(f"out = {out!r}: made by rank 0, but not seen here; it must lie on a shared file system")
        return resumption

    def _open_new(self) -> None:
        config, path = self.setup.config, self.setup.path
        self._lock = directory.claim(path, overwrite=config.overwrite)
        directory.write_config(path, config_file.dumps(config, self._environment()))

    def _open_again(self) -> Resumption:
        setup, config, path = self.setup, self.setup.config, self.setup.path
        self._lock = Lock(path)
        found = resume.find(path, config)
        resume.check_teams(path, setup.roles.teams)
        found = resume.lay_out(found, config, setup.roles.lambda_, setup.bounds, setup.fingerprint, config.averaging > 0)
        resume.forget_newer(path, found.checkpoint.clock)
        environment = found.environment(self._environment(), config)
        directory.write_config(path, config_file.dumps(config, environment))
        return found

    def _load(self) -> dict[int, dict[str, np.ndarray]]:
        """A shard's tensors from the checkpoint, where the run is continued; its snapshots must be there, too."""
        setup, rank = self.setup, self._start.rank
        if setup.resumption is None or rank not in setup.roles.shard_ranks:
            return {}
        shard, checkpoint = setup.roles.index(rank), setup.resumption.checkpoint
        start, end = setup.bounds[shard]
        vectors = 2 if setup.config.averaging > 0 else 1
        check_spool(setup.spool(shard), checkpoint.parts[shard].account.snapshots, 4 * vectors * (end - start))
        return {shard: checkpoint.tensors(shard)}

    def _call_usher(self) -> None:
        """By the first rank of each node, once rank 0 has said that the job runs."""
        rank, hosts, all_pids = self._start.rank, self._start.ranks.hosts, self._start.ranks.pids
        if rank == hosts.index(hosts[rank]):
            pids = [pid for pid, host in zip(all_pids, hosts, strict=True) if host == hosts[rank]]
            usher.call(self._running, self._job, pids, pids[0] * (rank == 0), Siblings().launcher_of_this_job)

    def _environment(self) -> dict[str, Any]:
        setup, start, tensors = self.setup, self._start, self._start.tensors
        return environment(
            setup.config,
            setup.roles,
            start.ranks.hosts,
            setup.meta,
            brought=naming.described(setup.config, self._brought),
            mpi=MPI.Get_library_version().split("\n")[0].strip("\0 "),
            cores_per_node=start.ranks.cores,
            parameters=start.parameters,
            parameter_nbytes=4 * start.parameters,
            batch_norm_policy=tensors.batch_norm_policy,
            **parts.layer_names(parts.cut(setup.config, tensors.model)),
        )
