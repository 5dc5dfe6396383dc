"""World rank -> role: which ranks are shards, which are learners, which is the evaluator, and on which nodes (DESIGN 1, 2)."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mpisgd.config import AllreduceOptions, Config
from mpisgd.errors import ConfigError


class Role(enum.Enum):
    SHARD = "shard"
    LEARNER = "learner"
    BOTH = "learner and shard"
    EVALUATOR = "evaluator"


@dataclass(frozen=True)
class Roles:
    """The ranks of each role. `shard_ranks[s]` is the rank of shard s, `learner_ranks[l]` that of learner l.

    Where learners double as shards, both are the same ranks.
    """

    shard_ranks: tuple[int, ...]
    learner_ranks: tuple[int, ...]
    evaluator_rank: int
    """The dedicated evaluator; without one, the rank of learner 0, which evaluates after its own goodbye."""

    @property
    def lambda_(self) -> int:
        return len(self.learner_ranks)

    @property
    def dedicated_evaluator(self) -> bool:
        return self.evaluator_rank not in self.learner_ranks

    def of(self, rank: int) -> Role:
        if rank in self.shard_ranks:
            return Role.BOTH if rank in self.learner_ranks else Role.SHARD
        if rank in self.learner_ranks:
            return Role.LEARNER
        return Role.EVALUATOR

    def index(self, rank: int) -> int:
        """The shard number or learner_id of `rank`; 0 for the evaluator."""
        for ranks in (self.shard_ranks, self.learner_ranks):
            if rank in ranks:
                return ranks.index(rank)
        return 0

    def describe(self, rank: int) -> str:
        """For messages: `"learner 3"`."""
        role = self.of(rank)
        return role.value if role is Role.EVALUATOR else f"{role.value} {self.index(rank)}"


def world_size(config: Config, learners: int) -> int:
    """How many ranks a job of so many learners has."""
    shards = 0 if isinstance(config.protocol, AllreduceOptions) else config.shards
    return shards + learners + int(config.evaluator)


def of_job(config: Config, hosts: Sequence[str]) -> Roles:
    """The roles of the ranks of a job; `hosts` are their host names.

    Raises ConfigError: too few ranks; shards asked for where learners double as shards.
    """
    if not isinstance(config.protocol, AllreduceOptions):
        return assign(len(hosts), shards=config.shards, evaluator=config.evaluator, placement=config.placement, hosts=hosts)
    roles = double(len(hosts), evaluator=config.evaluator)
    if config.shards not in (1, roles.lambda_):  # as many is what a run writes into its own config.toml
        raise ConfigError(f"shards = {config.shards}: allreduce has as many shards as learners, {roles.lambda_}; leave it out")
    return roles


def double(world_size: int, *, evaluator: bool) -> Roles:
    """Every rank is a learner and a shard; the last is the evaluator, where one is given to it.

    Raises ConfigError: fewer ranks than 1 learner (+ 1 evaluator).
    """
    if world_size < 1 + int(evaluator):
        raise ConfigError(
            f"too few ranks: found {world_size}, needed at least 2 = 1 learner + 1 evaluator; start with: mpirun -n 2 ..."
        )
    ranks = tuple(range(world_size - int(evaluator)))
    return Roles(shard_ranks=ranks, learner_ranks=ranks, evaluator_rank=world_size - 1 if evaluator else 0)


def assign(world_size: int, *, shards: int, evaluator: bool, placement: Literal["packed", "spread"], hosts: Sequence[str]) -> Roles:
    """Give every rank its role.

    packed: shards are the first ranks. spread: one shard on each node in turn, so that their network links add up
    [Zhang16 2.3]. The evaluator is the last rank that is no shard; learners are the rest, in rank order.

    Args:
        world_size: number of ranks.
        shards: number of shards, >= 1.
        evaluator: whether a rank is given to evaluation.
        placement: see above.
        hosts: host name of each rank, length `world_size`.

    Raises:
        ConfigError: fewer ranks than shards + 1 learner (+ 1 evaluator).
    """
    needed = shards + 1 + int(evaluator)
    if world_size < needed:
        raise ConfigError(
            f"too few ranks: found {world_size}, needed at least {needed} = {shards} shard(s) + 1 learner"
            f"{' + 1 evaluator' if evaluator else ''}; start with: mpirun -n {needed} ..."
        )
    shard_ranks = tuple(range(shards)) if placement == "packed" else _spread(shards, hosts)
    rest = [rank for rank in range(world_size) if rank not in shard_ranks]
    evaluator_rank = rest.pop() if evaluator else rest[0]
    return Roles(shard_ranks=shard_ranks, learner_ranks=tuple(rest), evaluator_rank=evaluator_rank)


def _spread(shards: int, hosts: Sequence[str]) -> tuple[int, ...]:
    """The first rank of every node, then the second of every node, and so on, until there are enough."""
    nodes: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        nodes.setdefault(host, []).append(rank)
    turns = max(len(ranks) for ranks in nodes.values())
    order = [ranks[turn] for turn in range(turns) for ranks in nodes.values() if turn < len(ranks)]
    return tuple(order[:shards])
