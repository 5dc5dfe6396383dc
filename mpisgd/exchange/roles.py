"""Roles of world ranks, and their nodes (DESIGN 1, 2)."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from mpisgd.base.errors import ConfigError
from mpisgd.comm.mpi.launch import words
from mpisgd.config import Config


class Role(enum.Enum):
    SHARD = "shard"
    LEARNER = "learner"
    MEMBER = "member"
    BOTH = "learner and shard"
    EVALUATOR = "evaluator"
    COORDINATOR = "coordinator"


@dataclass(frozen=True)
class Roles:
    """Ranks by role: `shard_ranks[s]` is the rank of shard s, `learner_ranks[l]` of learner l.

    Learners doubling as shards have the same ranks. A learner may be a team of ranks, aggregated on its node (`aggregate.py`), or a
    group of ranks, each with a stage of the model; its rank is the lowest, or the first stage's.
    """

    shard_ranks: tuple[int, ...]
    learner_ranks: tuple[int, ...]
    evaluator_rank: int
    """Dedicated evaluator; else learner 0, after its own goodbye, or shard 0 where learners may be lost."""
    teams: tuple[tuple[int, ...], ...] = ()
    """Ranks computing for each learner, in rank order; by default a single rank."""
    groups: tuple[tuple[int, ...], ...] = ()
    """`groups[l][k]`: rank with stage k for learner l; empty where ranks have whole models."""
    first_shard: int = 0
    """Number of the first of these shards; not always 0 in a stage's view."""

    coordinator_rank: int = -1
    """Coordinator of a batch optimisation; -1 = none."""
    tolerant: bool = False
    """Learners and the evaluator may be lost: shard 0 evaluates where no other rank does."""

    def __post_init__(self) -> None:
        if not self.teams:
            object.__setattr__(self, "teams", tuple((rank,) for rank in self.learner_ranks))

    @property
    def lambda_(self) -> int:
        """Learners as counted by shards, protocols and the log: a team is a single learner."""
        return len(self.learner_ranks)

    @cached_property
    def computing_ranks(self) -> tuple[int, ...]:
        return tuple(sorted(rank for together in self.groups or self.teams for rank in together))

    @property
    def vital_ranks(self) -> tuple[int, ...]:
        return (*self.shard_ranks, self.coordinator_rank) if self.coordinator_rank >= 0 else self.shard_ranks

    @property
    def streams(self) -> int:
        """Number of streams of mini-batches: by computing rank, or by group."""
        return len(self.groups or self.computing_ranks)

    def stream(self, rank: int) -> int:
        return self.index(rank) if self.groups else self.number(rank)

    def stage(self, rank: int) -> int:
        return self.groups[self.index(rank)].index(rank)

    def seen_by(self, stage: int, shards: range, *, jointly: bool = False) -> Roles:
        """Return a stage's view of the roles; `jointly`: the ranks of learner 0 evaluate together."""
        own, ranks = self.shard_ranks[shards.start : shards.stop], tuple(group[stage] for group in self.groups)
        return Roles(own, ranks, ranks[0] if jointly else self.evaluator_rank, first_shard=shards.start)

    def number(self, rank: int) -> int:
        """Return a rank's place among computing ranks: its stream of mini-batches, delays and costs; in a group, costs alone."""
        return self._numbers[rank]

    @cached_property
    def _numbers(self) -> dict[int, int]:
        return {rank: number for number, rank in enumerate(self.computing_ranks)}

    @cached_property
    def _places(self) -> dict[int, tuple[Role, int]]:
        places = {rank: (Role.MEMBER, learner_id) for learner_id, team in enumerate(self.teams) for rank in team}
        places |= {rank: (Role.LEARNER, learner_id) for learner_id, rank in enumerate(self.learner_ranks)}
        places |= {rank: (Role.LEARNER, learner_id) for learner_id, group in enumerate(self.groups) for rank in group}
        if self.coordinator_rank >= 0:
            places[self.coordinator_rank] = (Role.COORDINATOR, 0)
        return places | {rank: (Role.BOTH if rank in places else Role.SHARD, shard) for shard, rank in enumerate(self.shard_ranks)}

    @property
    def dedicated_evaluator(self) -> bool:
        return self.evaluator_rank not in (*self.learner_ranks, *self.shard_ranks)

    def may_evaluate(self, rank: int) -> bool:
        """Return whether a rank evaluates, or may have to."""
        return rank == self.evaluator_rank or (self.tolerant and rank == self.shard_ranks[0])

    def made_tolerant(self) -> Roles:
        """Return the roles in a fault-tolerant run: shard 0, vital to the job, evaluates without a dedicated evaluator."""
        evaluator_rank = self.evaluator_rank if self.dedicated_evaluator else self.shard_ranks[0]
        return dataclasses.replace(self, evaluator_rank=evaluator_rank, tolerant=True)

    def of(self, rank: int) -> Role:
        return self._places.get(rank, (Role.EVALUATOR, 0))[0]

    def index(self, rank: int) -> int:
        """Return a rank's shard number or learner_id (a member's: its team's); 0 for the evaluator."""
        return self._places.get(rank, (Role.EVALUATOR, 0))[1]

    def turn_at_gpus(self, rank: int, hosts: Sequence[str], *, learners: bool, shards: bool) -> int:
        """Return a rank's turn at its host's GPUs: `learners` and the evaluator come first, then `shards`, if these take any."""
        evaluator = {self.evaluator_rank}.difference(self.shard_ranks)
        computing = sorted({*self.computing_ranks, *evaluator}) if learners else []
        others = [each for each in self.shard_ranks if each not in computing]
        serving = others if shards else [each for each in others if learners and self.may_evaluate(each)]
        return [each for each in (*computing, *serving) if hosts[each] == hosts[rank]].index(rank)

    def describe(self, rank: int) -> str:
        """Return a rank's name for messages, such as `"member 1 of learner 3"` (learner 3 itself is member 0)."""
        role, index = self.of(rank), self.index(rank)
        if role is Role.MEMBER:
            return f"member {self.teams[index].index(rank)} of learner {index}"
        if role is Role.LEARNER and self.groups:
            return f"stage {self.stage(rank)} of learner {index}"
        return role.value if role in (Role.EVALUATOR, Role.COORDINATOR) else f"{role.value} {index}"


def world_size(config: Config, learners: int) -> int:
    shards = 0 if config.protocol.collective else config.shards
    return shards + int(config.protocol.batch) + learners * config.group_size + int(config.evaluator)


def of_job(config: Config, hosts: Sequence[str]) -> Roles:
    """Return the roles of a job's ranks, by their host names. Raises ConfigError: a misfit of ranks and options."""
    if not config.protocol.collective:
        roles = assign(
            len(hosts),
            shards=config.shards,
            evaluator=config.evaluator,
            coordinator=config.protocol.batch,
            placement=config.placement,
            hosts=hosts,
        )
        if config.in_groups:
            return in_groups(roles, config.group_size, hosts)
        return in_teams(roles, hosts, config.team_size) if config.in_teams else roles
    roles = double(len(hosts), evaluator=config.evaluator)
    if config.shards not in (1, roles.lambda_):  # a run writes lambda_ into its own config.toml
        raise ConfigError(f"shards = {config.shards}: allreduce has as many shards as learners, {roles.lambda_}; leave shards out")
    return roles


def double(world_size: int, *, evaluator: bool) -> Roles:
    """Make every rank a learner and a shard, except for an evaluator.

    Raises ConfigError: fewer ranks than 1 learner (+ 1 evaluator).
    """
    if world_size < 1 + int(evaluator):
        raise ConfigError(
            f"too few ranks: found {world_size}, needed at least 2 = 1 learner + 1 evaluator; start with: {words(2)} ..."
        )
    ranks = tuple(range(world_size - int(evaluator)))
    return Roles(shard_ranks=ranks, learner_ranks=ranks, evaluator_rank=world_size - 1 if evaluator else 0)


def assign(
    world_size: int,
    *,
    shards: int,
    evaluator: bool,
    placement: Literal["packed", "spread"],
    hosts: Sequence[str],
    coordinator: bool = False,
) -> Roles:
    """Give every rank its role.

    packed: shards are the first ranks. spread: each node in turn gets a shard, to add up their links [Zhang16 2.3]. The first rank
    left is the coordinator, the last the evaluator; learners are the rest, in rank order.

    Raises ConfigError: too few ranks.
    """
    needed = shards + int(coordinator) + 1 + int(evaluator)
    if world_size < needed:
        raise ConfigError(
            f"too few ranks: found {world_size}, needed at least {needed} = {shards} shard(s)"
            f"{' + 1 coordinator' if coordinator else ''} + 1 learner"
            f"{' + 1 evaluator' if evaluator else ''}; start with: {words(needed)} ..."
        )
    shard_ranks = tuple(range(shards)) if placement == "packed" else _spread(shards, hosts)
    rest = [rank for rank in range(world_size) if rank not in shard_ranks]
    coordinator_rank = rest.pop(0) if coordinator else -1
    evaluator_rank = rest.pop() if evaluator else rest[0]
    return Roles(
        shard_ranks=shard_ranks,
        learner_ranks=tuple(rest),
        evaluator_rank=evaluator_rank,
        coordinator_rank=coordinator_rank,
    )


def in_teams(roles: Roles, hosts: Sequence[str], most: int) -> Roles:
    """Join each host's learners into teams of at most `most` ranks, as even as possible; 0 = a single team.

    Learners are numbered by their leaders' ranks.
    """
    nodes: dict[str, list[int]] = {}
    for rank in roles.learner_ranks:
        nodes.setdefault(hosts[rank], []).append(rank)
    teams = sorted(team for ranks in nodes.values() for team in _cut(ranks, most or len(ranks)))
    return dataclasses.replace(roles, learner_ranks=tuple(team[0] for team in teams), teams=tuple(teams))


def in_groups(roles: Roles, size: int, hosts: Sequence[str]) -> Roles:
    """Join learners into groups of `size` ranks: first within nodes, in rank order, then from the ranks left.

    Raises ConfigError: a misfit of ranks or shards.
    """
    shards, ranks = len(roles.shard_ranks), roles.learner_ranks
    if shards < size:
        raise ConfigError(f"shards = {shards}: expected at least group_size = {size}, one for each stage of the model")
    if left := len(ranks) % size:
        fewer = f"{len(ranks) - left} or " if len(ranks) > size else ""
        raise ConfigError(
            f"group_size = {size}: {len(ranks)} computing ranks do not divide into groups of {size}: expected"
            f" {fewer}{len(ranks) - left + size} ranks"
        )
    nodes: dict[str, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(hosts[rank], []).append(rank)
    whole = [_cut_off(own, size) for own in nodes.values()]
    left_over = sorted(rank for own in nodes.values() for rank in own[len(own) - len(own) % size :])
    groups = tuple(sorted(group for groups in (*whole, _cut_off(left_over, size)) for group in groups))
    return dataclasses.replace(roles, learner_ranks=tuple(group[0] for group in groups), teams=(), groups=groups)


def _cut_off(ranks: list[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(ranks[start : start + size]) for start in range(0, len(ranks) - size + 1, size)]


def _cut(ranks: list[int], most: int) -> list[tuple[int, ...]]:
    """Return the fewest teams of at most `most` ranks; the first have an extra rank."""
    count = -(-len(ranks) // most)
    base, larger = divmod(len(ranks), count)
    ends = [base * (at + 1) + min(at + 1, larger) for at in range(count)]
    return [tuple(ranks[end - base - (at < larger) : end]) for at, end in enumerate(ends)]


def _spread(shards: int, hosts: Sequence[str]) -> tuple[int, ...]:
    """Return the first rank of every node, then the second of every node, until there are enough."""
    nodes: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        nodes.setdefault(host, []).append(rank)
    turns = max(len(ranks) for ranks in nodes.values())
    order = [ranks[turn] for turn in range(turns) for ranks in nodes.values() if turn < len(ranks)]
    return tuple(order[:shards])
