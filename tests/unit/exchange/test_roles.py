"""World rank -> role: nobody is left out, nobody has two roles, and what cannot be is refused with its numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpisgd.base.errors import ConfigError
from mpisgd.config import Config, kind_of
from mpisgd.exchange.roles import Role, assign, double, of_job, world_size
from mpisgd.job.placement import on_ranks
from mpisgd.protocols import (
    AllreduceOptions,
    AsyncOptions,
    BackupOptions,
    DownpourOptions,
    HardsyncOptions,
    ProtocolOptions,
    SoftsyncOptions,
    SspOptions,
    TimeoutOptions,
    VersionedOptions,
)
from tests.effort import examples


@pytest.mark.deeper
@settings(max_examples=examples(400, of=8), deadline=None)
@given(data=st.data(), shards=st.integers(1, 6), evaluator=st.booleans(), placement=st.sampled_from(["packed", "spread"]))
def test_every_rank_has_one_role(data: st.DataObject, shards: int, evaluator: bool, placement: str) -> None:
    size = shards + evaluator + data.draw(st.integers(1, 8))
    hosts = data.draw(st.lists(st.sampled_from("abc"), min_size=size, max_size=size))
    roles = assign(size, shards=shards, evaluator=evaluator, placement=placement, hosts=hosts)
    ranks = [*roles.shard_ranks, *roles.learner_ranks, *([roles.evaluator_rank] if evaluator else [])]
    assert sorted(ranks) == list(range(size))
    assert len(roles.shard_ranks) == shards
    assert roles.lambda_ == len(roles.learner_ranks) == size - shards - evaluator
    assert list(roles.learner_ranks) == sorted(roles.learner_ranks)
    assert roles.dedicated_evaluator is evaluator
    for shard, rank in enumerate(roles.shard_ranks):
        assert (roles.of(rank), roles.index(rank), roles.describe(rank)) == (Role.SHARD, shard, f"shard {shard}")
    for learner_id, rank in enumerate(roles.learner_ranks):
        assert (roles.of(rank), roles.index(rank), roles.describe(rank)) == (Role.LEARNER, learner_id, f"learner {learner_id}")
    if evaluator:
        rank = roles.evaluator_rank
        assert (roles.of(rank), roles.index(rank), roles.describe(rank)) == (Role.EVALUATOR, 0, "evaluator")
    else:
        assert roles.evaluator_rank == roles.learner_ranks[0]


@pytest.mark.parametrize(
    ("placement", "hosts", "shard_ranks"),
    [
        ("packed", "aaabbb", (0, 1)),
        ("spread", "aaabbb", (0, 3)),
        ("spread", "ababab", (0, 1)),
        ("spread", "aaaaab", (0, 5)),
        ("spread", "aaaaaa", (0, 1)),
    ],
)
def test_spread_shards_lie_on_different_nodes(placement: str, hosts: str, shard_ranks: tuple[int, ...]) -> None:
    assert assign(6, shards=2, evaluator=False, placement=placement, hosts=hosts).shard_ranks == shard_ranks


def test_more_shards_than_nodes_go_round() -> None:
    assert assign(6, shards=3, evaluator=False, placement="spread", hosts="aaabbb").shard_ranks == (0, 3, 1)


@pytest.mark.parametrize(
    ("size", "evaluator", "numbers"),
    [
        (2, False, r"found 2, needed at least 3 = 2 shard\(s\) \+ 1 learner; start with: mpirun .*-n 3"),
        (3, True, r"found 3, needed at least 4 = 2 shard\(s\) \+ 1 learner \+ 1 evaluator; start with: mpirun .*-n 4"),
    ],
)
def test_too_few_ranks_say_how_many_are_needed(size: int, evaluator: bool, numbers: str) -> None:
    with pytest.raises(ConfigError, match=numbers):
        assign(size, shards=2, evaluator=evaluator, placement="packed", hosts="a" * size)
    assert assign(size + 1, shards=2, evaluator=evaluator, placement="packed", hosts="a" * (size + 1)).lambda_ == 1


# --------------------------------------------------------------------------------------------- learners double as shards


@pytest.mark.parametrize("learners", [1, 2, 5])
@pytest.mark.parametrize("evaluator", [False, True])
@pytest.mark.parametrize("placement", ["packed", "spread"])
def test_in_an_allreduce_every_rank_is_learner_and_shard(
    learners: int, evaluator: bool, placement: Literal["packed", "spread"]
) -> None:
    config = Config(protocol=AllreduceOptions(), evaluator=evaluator, placement=placement)
    size = world_size(config, learners)
    assert size == learners + evaluator
    roles = of_job(config, "a" * size)
    assert roles.learner_ranks == roles.shard_ranks == tuple(range(learners))
    assert roles.evaluator_rank == (learners if evaluator else 0)
    assert roles.dedicated_evaluator is evaluator
    for rank in range(learners):
        assert (roles.of(rank), roles.index(rank), roles.describe(rank)) == (Role.BOTH, rank, f"learner and shard {rank}")
    if evaluator:
        assert roles.describe(learners) == "evaluator"


def test_elsewhere_roles_are_assigned_as_the_configuration_says() -> None:
    config = Config(protocol=SoftsyncOptions(), shards=2, evaluator=True, placement="spread")
    assert world_size(config, 3) == 6
    assert of_job(config, "aaabbb") == assign(6, shards=2, evaluator=True, placement="spread", hosts="aaabbb")


def test_an_allreduce_has_as_many_shards_as_learners() -> None:
    """A run's own configuration says so; whoever asks for another number is refused."""
    for shards in (1, 4):
        assert len(of_job(Config(protocol=AllreduceOptions(), shards=shards), "aaaa").shard_ranks) == 4
    with pytest.raises(ConfigError, match="shards = 2: allreduce has as many shards as learners, 4; leave shards out"):
        of_job(Config(protocol=AllreduceOptions(), shards=2), "aaaa")
    with pytest.raises(ConfigError, match=r"found 1, needed at least 2 = 1 learner [+] 1 evaluator; start with: mpirun -n 2"):
        of_job(Config(protocol=AllreduceOptions(), evaluator=True), "a")


# --------------------------------------------------------------------------------------------------------- teams of a node


@pytest.mark.parametrize(
    ("hosts", "options", "teams"),
    [
        ("aaaaa", {}, [(1, 2, 3, 4)]),
        ("aaabb", {}, [(1, 2), (3, 4)]),
        ("abbbb", {}, [(1, 2, 3, 4)]),  # the shard has a node of its own
        ("aabbb", {}, [(1,), (2, 3, 4)]),
        ("ababab", {}, [(1, 3, 5), (2, 4)]),
        ("bbaaba", {}, [(1, 4), (2, 3, 5)]),  # numbered by their leaders, not by names
        ("aaabbb", {"shards": 2, "placement": "spread"}, [(1, 2), (4, 5)]),
        ("aaabbb", {"evaluator": True}, [(1, 2), (3, 4)]),
        ("aaaab", {"evaluator": True}, [(1, 2, 3)]),  # the evaluator is alone there
        ("aaaaaaaa", {"team_size": 3}, [(1, 2, 3), (4, 5), (6, 7)]),
        ("aaaaabb", {"team_size": 2}, [(1, 2), (3, 4), (5, 6)]),
        ("babababab", {"team_size": 2}, [(1, 3), (2, 4), (5, 7), (6, 8)]),
        ("aaaaabb", {"team_size": 1}, [(1,), (2,), (3,), (4,), (5,), (6,)]),
    ],
)
def test_ranks_that_compute_on_one_node_are_a_team(hosts: str, options: dict[str, Any], teams: list[tuple[int, ...]]) -> None:
    roles = of_job(Config(aggregation="node", **options), hosts)
    assert list(roles.teams) == teams
    assert roles.learner_ranks == tuple(team[0] for team in teams), "the leader stands for its team"
    assert roles.lambda_ == len(teams)
    alone = of_job(Config(**{**options, "team_size": 0}), hosts)
    assert roles.computing_ranks == alone.learner_ranks
    assert (roles.shard_ranks, roles.evaluator_rank) == (alone.shard_ranks, alone.evaluator_rank)
    for learner_id, team in enumerate(teams):
        assert [roles.describe(rank) for rank in team] == [
            f"learner {learner_id}",
            *(f"member {place} of learner {learner_id}" for place in range(1, len(team))),
        ]
        assert [roles.of(rank) for rank in team] == [Role.LEARNER] + [Role.MEMBER] * (len(team) - 1)
        assert {roles.index(rank) for rank in team} == {learner_id}
    assert [roles.number(rank) for rank in roles.computing_ranks] == list(range(len(roles.computing_ranks)))


def test_alone_each_learner_is_its_own_team() -> None:
    roles = of_job(Config(), "aaab")
    assert roles.teams == ((1,), (2,), (3,))
    assert [roles.number(rank) for rank in roles.learner_ranks] == [0, 1, 2]


ASYNCHRONOUS = [SoftsyncOptions(), AsyncOptions(), SspOptions(), DownpourOptions(), VersionedOptions()]


@pytest.mark.parametrize(
    ("protocol", "way_out"),
    [
        *((options, "hardsync, backup, timeout") for options in ASYNCHRONOUS),
        (BackupOptions(b=1, abort=True), "protocol.abort = False"),
        (BackupOptions(b=1, late="apply"), "protocol.late = 'drop'"),
    ],
)
def test_teams_are_refused_where_their_gradients_are_not_of_one_clock(protocol: ProtocolOptions, way_out: str) -> None:
    name = kind_of(protocol)
    expected = f"aggregation = 'node': expected 'none' beside protocol {name} \\(takes .*; allowed with {way_out}$"
    with pytest.raises(ConfigError, match=expected):
        on_ranks(Config(protocol=protocol, aggregation="node"), "aaa")
    on_ranks(Config(protocol=protocol), "aaa")


@pytest.mark.parametrize("protocol", [HardsyncOptions(), TimeoutOptions(), BackupOptions(b=1)])
def test_and_go_with_the_others(protocol: ProtocolOptions) -> None:
    roles, _ = on_ranks(Config(protocol=protocol, aggregation="node"), "aaabb")
    assert roles.teams == ((1, 2), (3, 4))


def test_an_allreduce_has_no_teams() -> None:
    config = Config(protocol=AllreduceOptions())
    assert of_job(config, "aaa").teams == ((0,), (1,), (2,))
    with pytest.raises(ConfigError, match="team_size = 2: expected 0 beside learners in no teams"):
        on_ranks(replace(config, team_size=2), "aaa")


def test_a_size_of_teams_without_teams_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"team_size = 2: expected 0 .*; say aggregation = 'node'"):
        on_ranks(Config(team_size=2), "aaa")
    with pytest.raises(ConfigError, match="team_size = -1: expected a finite number >= 0"):
        Config(team_size=-1)


def test_ranks_of_a_host_take_its_gpus_in_turn() -> None:
    """First those that compute, so that a node with a GPU for each learner gives each one its own; then shards."""
    roles, hosts = assign(8, shards=2, evaluator=True, placement="spread", hosts="aaaabbbb"), "aaaabbbb"
    assert roles.shard_ranks == (0, 4)
    gpus = {rank: roles.turn_at_gpus(rank, hosts, learners=True, shards=True) for rank in range(8)}
    assert gpus == {1: 0, 2: 1, 3: 2, 0: 3, 5: 0, 6: 1, 7: 2, 4: 3}
    assert [roles.turn_at_gpus(rank, hosts, learners=True, shards=False) for rank in (1, 2, 3, 5)] == [0, 1, 2, 0]
    assert [roles.turn_at_gpus(rank, hosts, learners=False, shards=True) for rank in (0, 4)] == [0, 0]
    both = double(3, evaluator=False)
    assert [both.turn_at_gpus(rank, "aaa", learners=True, shards=True) for rank in range(3)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("hosts", "size", "groups"),
    [
        ("aaaaaa", 2, ((2, 3), (4, 5))),
        ("aaabbb", 2, ((2, 5), (3, 4))),
        ("aaaaabbbb", 3, ((3, 4, 8), (5, 6, 7))),
        ("aababbabab", 2, ((2, 4), (3, 6), (5, 7), (8, 9))),
    ],
)
def test_groups_have_their_ranks_on_one_node_where_they_can(hosts: str, size: int, groups: Any) -> None:
    """As many shards as stages come first. Whoever is left on a node goes with others that are."""
    roles = of_job(Config(shards=size, group_size=size, placement="packed"), hosts)
    assert roles.groups == groups
    assert roles.evaluator_rank == roles.groups[0][0] == min(roles.computing_ranks)
    assert list(roles.learner_ranks) == [group[0] for group in groups] == sorted(roles.learner_ranks)
