"""One node with a slow link in virtual time: the report names it, and what protocols make of it.

Nodes of one rank each; 4 MB at 125 MB/s, 0.032 s each way, and ten times as long on the slow link.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpisgd.analysis import about
from mpisgd.analysis.tables import Table
from mpisgd.exchange.link_load import Carried
from mpisgd.plan.costs.observe import observe
from mpisgd.records.log.reader import Run
from mpisgd.report import link_speed, single
from tests.effort import spread
from tests.virtual.jobs import SIZES, simulated

FAST = 125e6


def scene(out: Path, slow: dict[int, float], learners: int = 5, **changes: Any) -> Run:
    """Shards first, then learners; without more, shard 0 is node 0's only rank, and learner l that of node l + 1."""
    changes["virtual"] = {"learners": learners, "parameters": 1_000_000, "train_samples": 600, **changes.get("virtual", {})}
    compute = {"name": "lognormal", "mean_s": 0.2}
    network = {"node_bandwidth": FAST, "bandwidth": FAST, "local_bandwidth": 1e10, "slow_links": slow}
    return simulated(out, SIZES, **{"compute": compute, "network": network, **changes})


def table(run: Run) -> Table:
    return link_speed.table(run, link_speed.links(run))


def test_the_report_names_a_slow_link(tmp_path: Path) -> None:
    run = scene(tmp_path / "run", {3: 10.0}, protocol={"name": "softsync", "n": 5})
    (found,) = (table for table in single._tables(run, about.status(run)) if table.key == "links")
    assert found.cells("node") == [f"node-{node}" for node in range(6)]
    assert found.cells("sends") == found.cells("receives") == pytest.approx([20.0, 4.0, 4.0, 4.0, 4.0, 4.0])
    assert found.cells("rate")[3] == pytest.approx(12.5, rel=0.01)
    assert found.cells("rate")[0] is None, "it has no learner that would tell"
    assert found.note.startswith("The link of node-3 is slow: 12.5 MB/s for a learner, others' ")
    assert found.note.count("is slow") == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"protocol": {"name": "hardsync"}},
        {"protocol": {"name": "softsync", "n": 5}},
        {"protocol": {"name": "hardsync"}, "straggler": {"slowdown": {"2": 10.0}}},  # always served last, alone
        {"shards": 3, "learners": 3, "placement": "spread", "virtual": {"ranks_per_node": 2}},
        {"learners": 6, "virtual": {"ranks_per_node": 3}},  # nodes have 2, 3 and 1 learners
    ],
)
def test_nobody_is_named_where_links_are_alike(changes: dict[str, Any], tmp_path: Path) -> None:
    assert link_speed.slow(link_speed.links(scene(tmp_path / "run", {}, **changes))) == {}


def test_where_shards_are_spread_only_the_slowest_is_named(tmp_path: Path) -> None:
    """Everybody's pulls cross the slow link, and who has shard 0 beside itself waits longest for the others."""
    spread = {"shards": 6, "placement": "spread", "virtual": {"ranks_per_node": 2}}
    run = scene(tmp_path / "run", {5: 10.0}, learners=6, protocol={"name": "softsync", "n": 6}, **spread)
    assert list(link_speed.slow(link_speed.links(run))) == ["node-5"]


def test_there_is_no_table_where_there_is_nothing_to_tell(tmp_path: Path) -> None:
    one_node = scene(tmp_path / "one", {}, virtual={"ranks_per_node": 6})
    doubled = scene(tmp_path / "doubled", {}, protocol={"name": "allreduce"})
    assert link_speed.links(one_node) == link_speed.links(doubled) == []
    small = scene(tmp_path / "small", {3: 10.0}, virtual={"parameters": 1000})
    assert table(small).cells("rate") == [None] * 6, "handling a message takes longer than its bytes"


def test_nodes_may_have_different_numbers_of_learners() -> None:
    """Four learners who share a link each get a quarter of it; one alone that gets a quarter has a slow link."""

    def link(host: str, learners: int, rate: float) -> link_speed.Link:
        return link_speed.Link(host, learners, Carried(learners, 0, 1.0, 1.0, 1.0, 1.0), 1.0, 1.0, rate, rate)

    assert link_speed.slow([link("a", 1, 100.0), link("b", 1, 100.0), link("c", 4, 25.0)]) == {}
    assert link_speed.slow([link("a", 1, 100.0), link("b", 1, 100.0), link("c", 1, 25.0)]) == {"c": 100.0}


def rate(out: Path, slow: dict[int, float], parameters: int = 100_000, **changes: Any) -> float:
    """Updates per second, where transfers are short beside mini-batches: 3.2 ms, and 32 ms behind the slow link."""
    sizes = {"parameters": parameters, "train_samples": 2400}
    compute = {"name": "lognormal", "mean_s": 0.2, "sigma": 0.05}
    found = observe(scene(out, slow, virtual=sizes, compute=compute, **changes))
    assert found is not None
    return found.updates_per_s


TIMEOUT = {"name": "timeout", "N_min": 4, "timeout_s": 0.25}
ABORT = {"name": "backup", "b": 1, "abort": True}


@pytest.mark.parametrize(
    ("protocol", "in_turn", "gathered"),
    spread(
        [
            ({"name": "hardsync"}, 0.80, 0.85),
            (TIMEOUT, 0.85, 0.90),
            ({"name": "backup", "b": 1}, 0.84, 0.97),
            ({"name": "softsync", "n": 5}, 0.84, 0.95),
            ({"name": "async"}, 0.84, 0.95),
            (ABORT, 0.96, 0.97),
        ],
        6,
        unpack=True,
    ),
)
def test_what_protocols_keep_of_their_rate(protocol: dict[str, Any], in_turn: float, gathered: float, tmp_path: Path) -> None:
    """In turn, a shard serves nobody else during a slow transfer, which only learners that give up before they push spare the
    others."""
    for way, kept in (("whole", in_turn), ("gathered", gathered)):
        slow, alike = (
            rate(tmp_path / f"{way}-{name}", links, protocol=protocol, way=way)
            for name, links in (("slow", {5: 10.0}), ("alike", {}))
        )
        assert slow >= kept * alike, way


@pytest.mark.parametrize(
    ("protocol", "in_turn", "gathered"),
    spread(
        [
            (ABORT, 0.70, 0.98),
            ({"name": "backup", "b": 1}, 0.45, 0.97),
            ({"name": "softsync", "n": 5}, 0.40, 0.83),
        ],
        3,
        unpack=True,
    ),
)
def test_a_transfer_of_a_mini_batch_and_a_half_hurts_nobody_else(
    protocol: dict[str, Any], in_turn: float, gathered: float, tmp_path: Path
) -> None:
    """0.32 s each way. Of five equal shares of the work, softsync loses most of one; backup loses one that it can do without."""
    kept = {
        way: rate(tmp_path / f"{way}-slow", {5: 10.0}, 1_000_000, protocol=protocol, way=way)
        / rate(tmp_path / f"{way}-alike", {}, 1_000_000, protocol=protocol, way=way)
        for way in ("whole", "gathered")
    }
    assert kept["whole"] < in_turn
    assert kept["gathered"] > gathered
