"""What links carry: numbers worked out by hand, and what is said of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from mpisgd.config import Config, replace
from mpisgd.exchange.link_load import busiest, carried, said, shares_of, sizes_of
from mpisgd.exchange.roles import of_job
from mpisgd.protocols import AllreduceOptions


@pytest.mark.parametrize(
    ("learners", "shards", "carried"),
    [
        ("ab", "c", ("c", 2)),  # takes two pushes, gives two answers
        ("ab", "ab", ("a", 1)),  # each way: half a vector pushed, half a vector answered
        ("bb", "aa", ("a", 2)),
        ("ab", "a", ("a", 1)),
        ("abcd", "abcd", ("a", 1.5)),
        ("aabb", "ab", ("a", 2)),
        ("aab", "b", ("b", 2)),
        ("aa", "aa", ("", 0)),
    ],
)
def test_the_busiest_link(learners: str, shards: str, carried: tuple[str, float]) -> None:
    assert busiest(learners, shards, [1 / len(shards)] * len(shards), 1.0, 1.0) == carried


def test_each_way_is_counted_by_itself() -> None:
    assert busiest("ab", "c", [1.0], 0.5, 1.0) == ("c", 2.0), "answers leave whole"
    assert busiest("ab", "c", [1.0], 1.0, 0.5) == ("c", 2.0), "pushes come whole"
    assert busiest("ab", "ab", [0.25, 0.75], 1.0, 0.0) == ("a", 0.75), "learner 0 pushes three quarters to shard 1"


@pytest.mark.parametrize(
    ("hosts", "change", "text", "warning"),
    [
        ("aaaa", {}, "", ""),
        ("aabb", {}, "links carry up to 4 MB one way for a push and a pull of each learner (a): at least 0.032 s at 1 Gbit/s", ""),
        ("aabb", {"push_format": "bfloat16"}, "links carry up to 3 MB one way for a push and a pull of each learner (a):", ""),
        (
            "aabb",
            {"placement": "packed"},
            "links carry up to 8 MB one way for a push and a pull of each learner (a): at least 0.064 s at 1 Gbit/s",
            "the link of a carries 8 MB one way in each round; a shard beside the learners of each node (--shards 2 --placement"
            " spread) would have 4 MB for as many learners",
        ),
        (
            "aabbcc",
            {"placement": "packed"},
            "links carry up to 16 MB one way for a push and a pull of each learner (a): at least 0.128 s at 1 Gbit/s",
            "the link of a carries 16 MB one way in each round; a shard beside the learners of each node (--shards 3"
            " --placement spread) would have 7.111 MB for as many learners",
        ),
        ("aabb", {"push_format": "bfloat16", "pull_format": "bfloat16"}, "links carry up to 2 MB one way", ""),
        ("ab", {"protocol": AllreduceOptions(), "shards": 1}, "links carry up to 4 MB one way", ""),
    ],
)
def test_what_is_said_at_the_start(hosts: str, change: dict[str, object], text: str, warning: str) -> None:
    config = replace(Config(), **({"shards": 2} | change))
    roles, size = of_job(config, hosts), 1_000_000
    step = size // len(roles.shard_ranks)
    bounds = [(start, start + step) for start in range(0, size, step)]
    carried, wasted = said(config, roles, hosts, bounds)
    assert carried.startswith(text)
    assert bool(carried) == bool(text)
    assert wasted == warning


@pytest.mark.parametrize("nodes", [3, 4, 8, 16])
@pytest.mark.parametrize("spare", [1, 2])
def test_a_spare_node_has_the_share_of_the_theorem(nodes: int, spare: int) -> None:
    """[BytePS 3, Theorem 1]: of a learner on each node; no other shares load links less."""
    learners = [str(node) for node in range(nodes)]
    shards = [*learners, *(f"spare {number}" for number in range(spare))]
    shares = shares_of(learners, shards, 1.0, 1.0)
    assert shares[-1] == pytest.approx(2 * (nodes - 1) / (nodes**2 + spare * nodes - 2 * spare))
    assert sum(shares) == pytest.approx(1)
    least = busiest(learners, shards, shares, 1.0, 1.0)[1]
    assert {round(each, 9) for each in loads(learners, shards, shares)} == {round(least, 9)}
    assert least == pytest.approx(nodes * shares[-1])


def loads(learners: Sequence[str], shards: Sequence[str], shares: Sequence[float]) -> list[float]:
    return [max(each.sent, each.received) for each in carried(learners, shards, shares, 1.0, 1.0).values()]


@pytest.mark.parametrize(
    ("learners", "shards"),
    [
        ("abcd", "abcd"),
        ("aabbccdd", "abcdef"),
        ("aabcdefg", "abcdefgh"),
        ("abcd", "aabcdef"),  # a node's shards have equal shares
        ("abcd", "efgh"),
        ("abcdefgh", "abij"),
    ],
)
@pytest.mark.parametrize("ways", [(1.0, 1.0), (0.5, 1.0), (1.0, 0.6)])
def test_no_little_change_of_shares_loads_links_less(learners: str, shards: str, ways: tuple[float, float]) -> None:
    shares = shares_of(learners, shards, *ways)
    least = busiest(learners, shards, shares, *ways)[1]
    assert min(shares) >= 0.02 / len(shards) - 1e-9
    for one, other in itertools.permutations(range(len(shards)), 2):
        moved = [share + 0.01 * ((place == one) - (place == other)) for place, share in enumerate(shares)]
        if min(moved) >= 0.02 / len(shards):
            assert busiest(learners, shards, moved, *ways)[1] > least - 1e-9


@pytest.mark.parametrize(("learners", "shards"), [("ab", "abc"), ("aab", "abc"), ("a", "ab"), ("aa", "a")])
def test_half_of_the_learners_on_a_node_have_even_slices(learners: str, shards: str) -> None:
    assert shares_of(learners, shards, 1.0, 1.0) == []


@pytest.mark.parametrize(
    ("hosts", "shards", "megabytes"),
    [
        ("aabbccddef", 6, (0.4, 0.4, 0.4, 0.4, 1.2, 1.2)),
        ("aabbccdd", 4, ()),
        ("aabbccdde", 5, (0.667, 0.667, 0.667, 0.667, 1.333)),
        ("aabbccddee", 5, ()),
        ("aabbc", 3, ()),
    ],
)
def test_slices_load_links_alike_where_that_gains(hosts: str, shards: int, megabytes: tuple[float, ...]) -> None:
    config = replace(Config(), shards=shards)
    sizes = sizes_of(config, of_job(config, hosts), hosts, 1_000_003)
    assert sum(sizes) in (0, 1_000_003)
    assert sizes == pytest.approx([250_000 * each for each in megabytes], rel=0.01)


def test_uneven_slices_are_said() -> None:
    sizes, hosts = (100_000, 100_000, 100_000, 100_000, 300_000, 300_000), "aabbccddef"
    config = replace(Config(), shards=6, slices=sizes)
    bounds = list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))
    carried, _ = said(config, of_job(config, hosts), hosts, bounds)
    assert carried.startswith("links carry up to 4.8 MB one way")
    assert carried.endswith("at least 0.0384 s at 1 Gbit/s, with slices of 0.4 MB to 1.2 MB")


def test_by_default_shards_are_spread() -> None:
    assert of_job(replace(Config(), shards=2), "aaabbb").shard_ranks == (0, 3)
