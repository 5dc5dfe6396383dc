"""What all ranks of a job know before it starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from mpisgd.config import Config
from mpisgd.exchange.roles import Roles
from mpisgd.job import parts
from mpisgd.job.parts import Meta
from mpisgd.job.resume import Resumption
from mpisgd.protocols import Protocol
from mpisgd.records.checkpoint.checkpoint import Account
from mpisgd.records.log import schema


@dataclass(frozen=True)
class Setup:
    """The configuration, the roles, the slices, and from where the run goes on.

    Attributes:
        bounds: the slice of each shard.
        fingerprint: of the model (`FlatModel.fingerprint`), for checkpoints.
        resumption: None where the run begins.
        saved: tensors of shards from the checkpoint, where the run goes on: each is taken out once.
    """

    config: Config
    roles: Roles
    protocol: Protocol
    meta: Meta
    bounds: list[tuple[int, int]]
    fingerprint: str = ""
    resumption: Resumption | None = None
    saved: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)

    @cached_property
    def path(self) -> Path:
        """The run's directory."""
        return Path(self.config.out)

    @property
    def gradients_per_update(self) -> float:
        return parts.gradients_per_update(self.protocol, self.roles.lambda_, len(self.roles.computing_ranks))

    @property
    def begins_s(self) -> float:
        """Seconds that have passed before this attempt."""
        return 0.0 if self.resumption is None else self.resumption.checkpoint.now_s

    @property
    def attempt(self) -> int:
        return 0 if self.resumption is None else self.resumption.attempt

    def account(self, shard: int) -> Account | None:
        """What the checkpoint says of a shard, where the run goes on."""
        return None if self.resumption is None else self.resumption.checkpoint.parts[shard].account

    def first_seq(self, learner_id: int) -> int:
        return 0 if self.resumption is None else self.resumption.checkpoint.next_seq[learner_id]

    def spool(self, shard: int) -> Path:
        """The scratch file of a shard's snapshots."""
        return self.path / schema.spool_file(shard, 0 if self.resumption is None else self.resumption.layout)
