"""The way in which vectors travel is the program's choice, where the user names none."""

from __future__ import annotations

from typing import Any

import pytest

from mpisgd.config import Config, replace
from mpisgd.exchange.roles import of_job
from mpisgd.exchange.ways import choose
from mpisgd.protocols import AllreduceOptions, HardsyncOptions, SoftsyncOptions

SIZE = 11_000_000
"""Slices of 22 MB."""


def chosen(hosts: str = "aabb", size: int = SIZE, *, tolerant: bool = False, **changes: Any) -> str:
    config = replace(Config(), **({"shards": 2, "protocol": HardsyncOptions()} | changes))
    roles = of_job(config, hosts)
    roles = roles.made_tolerant() if tolerant else roles
    return choose(config, roles, hosts, [(0, size // 2), (size // 2, size)]).exchange


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
        {"hosts": "aaaa"},
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


def test_an_allreduce_stays_whole() -> None:
    assert chosen("ab", protocol=AllreduceOptions(), shards=1) == "whole"


@pytest.mark.parametrize("named", ["whole", "streamed", "layerwise"])
def test_a_named_way_is_the_users(named: str) -> None:
    assert chosen(exchange=named) == named
    assert chosen("aaaa", exchange=named) == named
