"""The way in which vectors travel is the program's choice; MPISGD_TRAVEL names another, for measuring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from mpisgd.base.errors import ConfigError
from mpisgd.config import Config, LarsOptions, replace
from mpisgd.exchange.roles import of_job
from mpisgd.exchange.ways import BUCKETS, GATHERED, IN_MEMORY, IN_PLACE, MESSAGES, ON_GPU, SLOW, STREAMED, WHOLE, choose, why_not
from mpisgd.protocols import AllreduceOptions, BackupOptions, HardsyncOptions, SoftsyncOptions, TimeoutOptions
from mpisgd.vectors.buckets import BUCKET_NBYTES
from mpisgd.vectors.chunks import COARSE, FINE

SIZE = 11_000_000
"""Slices of 22 MB."""
ALLREDUCE: dict[str, Any] = {"hosts": "ab", "protocol": AllreduceOptions(), "shards": 1}


def chosen(*arguments: Any, **changes: Any) -> str:
    return choice(*arguments, **changes).way


def choice(
    hosts: str = "aabb",
    size: int = SIZE,
    *,
    tolerant: bool = False,
    rates: tuple[float, float] | None = None,
    shares: Sequence[str] = IN_MEMORY,
    travel: str = "",
    cuts: bool = True,
    **changes: Any,
) -> Config:
    """Return the choice; `rates`: of links, None where nobody may ask; `shares`: possible ways in shared memory."""

    def asked() -> tuple[float, float]:
        assert rates is not None
        return rates

    config = replace(Config(), **({"shards": 2, "protocol": HardsyncOptions()} | changes))
    roles = of_job(config, hosts)
    roles = roles.made_tolerant() if tolerant else roles
    slices = len(roles.shard_ranks)
    bounds = [(size * shard // slices, size * (shard + 1) // slices) for shard in range(slices)]
    return choose(config, roles, hosts, bounds, asked, lambda way: way in shares, travel, cuts=cuts)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"push_format": "bfloat16"},
        {"placement": "packed"},
        {"clip_average": 1.0, "clip_average_of": "slice"},
        {"averaging": 0.99},
    ],
    ids=str,
)
def test_large_slices_of_hardsync_are_streamed_between_nodes(changes: dict[str, Any]) -> None:
    assert chosen(**changes, rates=(1e8, 1e8)) == "streamed"


@pytest.mark.parametrize(
    "changes",
    [
        {"size": 2**21 - 2},
        {"protocol": SoftsyncOptions(n=1), "rates": (1e8, 1e8)},  # chunks are summed when all learners' are there
        {"per_layer": True},
        {"nonfinite": "drop"},
        {"push_format": "topk"},
        {"sampling": "dealt"},
        {"clip_average": 1.0},
        {"tolerant": True},
    ],
    ids=str,
)
def test_else_vectors_are_whole(changes: dict[str, Any]) -> None:
    assert chosen(**changes) == "whole"


def test_slices_are_uneven_where_links_are_streamed_both_ways() -> None:
    spare: dict[str, Any] = {"hosts": "aabbccddef", "shards": 6}
    spare["rates"] = 1e8, 1e8
    slices = choice(**spare).slices
    assert sum(slices) == SIZE
    assert slices[-1] == slices[-2] == pytest.approx(0.3 * SIZE, abs=1)
    assert choice(**spare, clip_average=1.0, clip_average_of="slice").slices == ()
    assert choice(**spare, optimizer=LarsOptions()).slices == (), "norms are of slices"
    assert choice(**spare, protocol=SoftsyncOptions()).slices == (), "whole vectors travel one way at a time"
    assert choice(**spare, cuts=False).slices == ()
    assert choice(**spare, travel=STREAMED).slices == ()
    assert choice(hosts="aabbccdd", shards=4, rates=(1e8, 1e8)).slices == ()


def test_slices_have_fewer_chunks_over_fast_links_or_none() -> None:
    def chunks(**changes: Any) -> tuple[str, int]:
        found = choice(**changes)
        return found.way, found.chunks

    assert chunks(rates=(SLOW, 9 * SLOW)) == (STREAMED, FINE)
    assert chunks(rates=(1.01 * SLOW, 9 * SLOW)) == (STREAMED, COARSE)
    assert chunks(rates=(SLOW, 9 * SLOW), travel=STREAMED) == (STREAMED, FINE)
    assert chunks(hosts="aaaa", travel=STREAMED) == (STREAMED, COARSE)
    assert chunks(way=STREAMED, chunks=7) == (STREAMED, 7), "an attempt's, replayed"


UNEVEN: dict[str, Any] = {"protocol": SoftsyncOptions(n=1), "rates": (1e8, 2e8)}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"ahead": 2},
        {"per_layer": True},
        {"protocol": BackupOptions(b=0)},
        {"protocol": TimeoutOptions()},
        {"push_format": "topk"},
        {"sampling": "dealt"},
        {"accumulation": 2},
    ],
    ids=str,
)
def test_gradients_are_gathered_behind_a_slow_link_that_nobody_need_wait_for(changes: dict[str, Any]) -> None:
    assert chosen(**UNEVEN | changes) == GATHERED
    assert chosen(**UNEVEN | changes | {"rates": (1.01e8, 2e8)}) == WHOLE
    assert chosen(**UNEVEN | changes | {"protocol": HardsyncOptions()}) != GATHERED, "all wait for the link"


@pytest.mark.parametrize(
    "changes",
    [
        {"hosts": "aaaa"},
        {"hosts": "abb"},  # a single learner
        {"protocol": HardsyncOptions(), "size": 1000},  # all wait for it
        {"tolerant": True},
        {"shard_device": "cuda"},
        {"size": 2**15 - 2},
        {"size": 2 * 2**27 + 2},  # there is no room for the gradients of two learners
    ],
    ids=str,
)
def test_else_gradients_are_received_in_turn_and_no_link_is_timed(changes: dict[str, Any]) -> None:
    assert chosen(**UNEVEN | changes | {"rates": None}) != GATHERED


ONE_NODE: list[dict[str, Any]] = [{}, {"evaluator": True}, {"clip_average": 1.0}]


@pytest.mark.parametrize(
    "changes", [*ONE_NODE, *({"protocol": AllreduceOptions(), "shards": 1} | each for each in ONE_NODE)], ids=str
)
def test_synchronous_learners_of_one_node_stay_in_place(changes: dict[str, Any]) -> None:
    assert chosen("aaaa", **changes) == chosen("aaaa", **changes, travel=IN_PLACE) == IN_PLACE
    assert chosen("aaaa", **changes, shares=()) == chosen("aaaa", **changes, travel=MESSAGES) == WHOLE


GPUS: dict[str, Any] = {"hosts": "aaaa", "device": "cuda", "shard_device": "cuda"}


@pytest.mark.parametrize("special", [{}, {"protocol": AllreduceOptions(), "shards": 1}], ids=str)
def test_on_gpus_that_reach_each_others_memory_they_stay_there(special: dict[str, Any]) -> None:
    gpus = GPUS | special
    assert chosen(**gpus) == chosen(**gpus, travel=ON_GPU) == ON_GPU
    assert chosen(**gpus, shares=(IN_PLACE,)) == chosen(**gpus, travel=IN_PLACE) == IN_PLACE
    assert chosen(**gpus | {"shard_device": "cpu"}) == chosen(**gpus | {"device": "cpu"}) == IN_PLACE
    assert chosen(**gpus, shares=()) == chosen(**gpus, travel=MESSAGES) == WHOLE


@pytest.mark.parametrize(
    "changes",
    [
        {"hosts": "aaab"},
        {"protocol": SoftsyncOptions(n=1)},
        {"per_layer": True},
        {"push_format": "bfloat16"},
        {"pull_format": "bfloat16"},
        {"accumulation": 2},
        {"local_steps": 2},
        {"aggregation": "node"},
        {"tolerant": True},
        {"shares": (ON_GPU,)},
        {"protocol": AllreduceOptions(), "shards": 1, "push_format": "bfloat16"},
        {"protocol": AllreduceOptions(), "shards": 1, "pull_format": "bfloat16"},
    ],
    ids=str,
)
def test_else_being_in_place_is_refused(changes: dict[str, Any]) -> None:
    assert chosen(**{"hosts": "aaaa", "rates": (1e8, 1e8), **changes}) != IN_PLACE
    with pytest.raises(ConfigError, match="MPISGD_TRAVEL = 'in-place': expected another way, or none: "):
        chosen(**{"hosts": "aaaa", **changes}, travel=IN_PLACE)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"size": 2 * BUCKET_NBYTES // 4},
        {"pull_format": "bfloat16"},
        {"clip_norm": 1.0},
        {"clip_average": 1.0},
        {"accumulation": 2},
        {"nonfinite": "drop"},
    ],
    ids=str,
)
def test_an_allreduce_goes_in_buckets_over_slow_links(changes: dict[str, Any]) -> None:
    assert chosen(**ALLREDUCE, rates=(SLOW, 9 * SLOW), **changes) == BUCKETS
    assert chosen(**ALLREDUCE, rates=(1.01 * SLOW, 9 * SLOW), **changes) == "whole"


@pytest.mark.parametrize(
    "changes",
    [
        {"size": 2 * BUCKET_NBYTES // 4 - 2},
        {"hosts": "aa", "shares": ()},
        {"push_format": "bfloat16"},  # the log has the rounded share of each bucket
        {"push_format": "topk"},
        {"device": "cuda"},
        {"micro_batches": 2},
    ],
    ids=str,
)
def test_else_an_allreduce_is_whole_and_no_link_is_timed(changes: dict[str, Any]) -> None:
    assert chosen(**{**ALLREDUCE, **changes}) == "whole"


@pytest.mark.parametrize(
    ("way", "changes"),
    [
        (WHOLE, {}),
        (STREAMED, {}),
        (STREAMED, {"hosts": "aaaa", "size": 100}),
        (GATHERED, {}),
        (GATHERED, {"protocol": SoftsyncOptions(n=1), "ahead": 2}),
        (GATHERED, {"per_layer": True}),
        (WHOLE, ALLREDUCE),
        (BUCKETS, ALLREDUCE),
        (BUCKETS, ALLREDUCE | {"hosts": "aa", "push_format": "bfloat16"}),
    ],
    ids=str,
)
def test_the_variable_names_a_possible_way(way: str, changes: dict[str, Any]) -> None:
    assert chosen(**changes, rates=(1e8, 1e8), travel=way) == way


@pytest.mark.parametrize(
    ("way", "changes", "why"),
    [
        ("layerwise", {}, "the ways are messages, whole, on-gpu, in-place, streamed, gathered, buckets"),
        (STREAMED, {"protocol": SoftsyncOptions(n=1)}, "updates do not wait for all begun pushes"),
        (STREAMED, {"nonfinite": "drop"}, "before the last have come"),
        (STREAMED, {"clip_average": 1.0}, "leave before the last"),
        (STREAMED, {"tolerant": True}, "a dying learner would leave a part of a gradient"),
        (STREAMED, {"shard_device": "cuda"}, "into the host's memory"),
        (STREAMED, ALLREDUCE, "all at once"),
        (ON_GPU, {"hosts": "aaaa", "device": "cuda"}, "learners or shards compute on the host"),
        (ON_GPU, GPUS | {"hosts": "aaab"}, "on several nodes"),
        (ON_GPU, GPUS | {"shares": (IN_PLACE,)}, "ranks cannot share memory here"),
        (GATHERED, ALLREDUCE, "all at once"),
        (GATHERED, {"tolerant": True}, "a hanging learner stays unseen"),
        (BUCKETS, {}, "shards are apart"),
        (BUCKETS, ALLREDUCE | {"push_format": "topk"}, "the whole slice is there"),
    ],
    ids=str,
)
def test_an_impossible_way_is_refused_with_its_reason(way: str, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=f"^MPISGD_TRAVEL = '{way}': expected another way, or none: .*{why}"):
        chosen(**changes, travel=way)


def test_a_chosen_way_stays() -> None:
    assert chosen("aaaa", way=WHOLE) == chosen("aaaa", way=WHOLE, travel=IN_PLACE) == WHOLE


def test_ways_whatever_the_ranks() -> None:
    """A log names none but these (`replay/checks/record.py`)."""
    ours, baseline = why_not(Config()), why_not(Config(protocol=AllreduceOptions()))
    assert [way for way, why in ours.items() if not why] == [WHOLE, IN_PLACE, STREAMED, GATHERED]
    assert [way for way, why in baseline.items() if not why] == [WHOLE, IN_PLACE, BUCKETS]
    assert [way for way, why in why_not(Config(protocol=SoftsyncOptions(), ahead=1)).items() if not why] == [WHOLE, GATHERED]
