"""What links carry: numbers worked out by hand, and what is said of them."""

from __future__ import annotations

import pytest

from mpisgd.config import Config, replace
from mpisgd.exchange.link_load import busiest, said
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


def test_by_default_shards_are_spread() -> None:
    assert of_job(replace(Config(), shards=2), "aaabbb").shard_ranks == (0, 3)
