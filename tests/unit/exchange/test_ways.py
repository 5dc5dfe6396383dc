"""The way in which vectors travel is the program's choice, where the user names none."""

from __future__ import annotations

from typing import Any

import pytest

from mpisgd.base.errors import ConfigError
from mpisgd.config import Config, replace
from mpisgd.exchange.roles import of_job
from mpisgd.exchange.ways import SLOW, alike, choose
from mpisgd.protocols import AllreduceOptions, HardsyncOptions, SoftsyncOptions
from mpisgd.vectors.buckets import BUCKET_NBYTES

SIZE = 11_000_000
"""Slices of 22 MB."""
ALLREDUCE: dict[str, Any] = {"hosts": "ab", "protocol": AllreduceOptions(), "shards": 1}


def chosen(
    hosts: str = "aabb",
    size: int = SIZE,
    *,
    tolerant: bool = False,
    rate: float | None = None,
    shares: bool = True,
    **changes: Any,
) -> str:
    """The exchange; `rate`: of links, None where nobody may ask."""

    def asked() -> float:
        assert rate is not None
        return rate

    config = replace(Config(), **({"shards": 2, "protocol": HardsyncOptions()} | changes))
    roles = of_job(config, hosts)
    roles = roles.made_tolerant() if tolerant else roles
    return choose(config, roles, hosts, [(0, size // 2), (size // 2, size)], asked, lambda: shares).exchange


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
    assert chosen(**changes) == "streamed"


@pytest.mark.parametrize(
    "changes",
    [
        {"size": 4_000_000},  # slices of 8 MB are less than four chunks
        {"protocol": SoftsyncOptions(n=1)},  # chunks are summed when all learners' are there
        {"receive": "gathered"},
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


@pytest.mark.parametrize("changes", [{}, {"evaluator": True}, {"clip_average": 1.0}], ids=str)
def test_hardsync_of_one_node_stays_in_place(changes: dict[str, Any]) -> None:
    assert chosen(**{"hosts": "aaaa", **changes}) == chosen(**{"hosts": "aaaa", **changes}, exchange="in-place") == "in-place"
    assert chosen(**{"hosts": "aaaa", **changes}, shares=False) == "whole"


@pytest.mark.parametrize(
    "changes",
    [
        {"hosts": "aaab"},
        {"protocol": SoftsyncOptions(n=1)},
        {"receive": "gathered"},
        {"push_format": "bfloat16"},
        {"pull_format": "bfloat16"},
        {"accumulation": 2},
        {"local_steps": 2},
        {"aggregation": "node"},
        {"tolerant": True},
    ],
    ids=str,
)
def test_else_being_in_place_is_refused(changes: dict[str, Any]) -> None:
    assert chosen(**{"hosts": "aaaa", **changes}) != "in-place"
    with pytest.raises(ConfigError, match="in-place"):
        chosen(**{"hosts": "aaaa", **changes}, exchange="in-place")


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
    assert chosen(**ALLREDUCE, rate=SLOW, **changes) == "layerwise"
    assert chosen(**ALLREDUCE, rate=1.01 * SLOW, **changes) == "whole"


@pytest.mark.parametrize(
    "changes",
    [
        {"size": 2 * BUCKET_NBYTES // 4 - 2},
        {"hosts": "aa"},
        {"push_format": "bfloat16"},  # the log has the rounded share of each bucket
        {"push_format": "topk"},
        {"aggregation": "node", "hosts": "aa"},
    ],
    ids=str,
)
def test_else_an_allreduce_is_whole_and_no_link_is_timed(changes: dict[str, Any]) -> None:
    assert chosen(**{**ALLREDUCE, **changes}) == "whole"


def test_exchanges_of_the_same_bits_may_take_each_others_place() -> None:
    ours, baseline = HardsyncOptions(), AllreduceOptions()
    expected = {"auto", "whole", "in-place", "streamed"}
    assert {*alike(Config(protocol=ours))} == {*alike(Config(protocol=ours, exchange="whole"))} == expected
    assert {*alike(Config(protocol=baseline, exchange="layerwise"))} == {"auto", "whole", "layerwise"}
    assert alike(Config(protocol=ours, exchange="layerwise", shards=2)) == ("layerwise",)
    assert alike(Config(protocol=SoftsyncOptions(), exchange="duplex")) == ("duplex",)


@pytest.mark.parametrize("named", ["whole", "streamed", "layerwise"])
def test_a_named_way_is_the_users(named: str) -> None:
    assert chosen(exchange=named) == named
    assert chosen("aaaa", exchange=named) == named
    assert named == "streamed" or chosen(**ALLREDUCE, exchange=named) == named
