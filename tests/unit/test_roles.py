"""World rank -> role: nobody is left out, nobody has two roles, and too small a world is refused with its numbers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpisgd.errors import ConfigError
from mpisgd.roles import Role, assign


@settings(max_examples=200, deadline=None)
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
        (2, False, r"found 2, needed at least 3 = 2 shard\(s\) \+ 1 learner; start with: mpirun -n 3"),
        (3, True, r"found 3, needed at least 4 = 2 shard\(s\) \+ 1 learner \+ 1 evaluator; start with: mpirun -n 4"),
    ],
)
def test_too_few_ranks_say_how_many_are_needed(size: int, evaluator: bool, numbers: str) -> None:
    with pytest.raises(ConfigError, match=numbers):
        assign(size, shards=2, evaluator=evaluator, placement="packed", hosts="a" * size)
    assert assign(size + 1, shards=2, evaluator=evaluator, placement="packed", hosts="a" * (size + 1)).lambda_ == 1
