"""Links in virtual time: exact nanoseconds of a few messages, and what must hold of any."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpisgd.comm.virtual.network import Network
from mpisgd.config.config_virtual import NetworkOptions
from tests.effort import examples

#: One rank: 1 byte/ns; one node: 4 bytes/ns; within a node: 2 bytes/ns, which the rank's own link slows to 1.
LINKS = NetworkOptions(latency_s=2e-6, overhead_s=3e-7, bandwidth=1e9, node_bandwidth=4e9, local_bandwidth=2e9)
NARROW = NetworkOptions(bandwidth=1e9, node_bandwidth=0.5e9, local_bandwidth=0.25e9)


def ends(options: NetworkOptions, nodes: Sequence[int], *transfers: tuple[int, int, int, int]) -> list[int]:
    """When these transfers, (source, dest, bytes, begin), are over."""
    network = Network(options, nodes)
    return [network.transfer(*transfer) for transfer in transfers]


def test_latency_and_overhead_are_whole_nanoseconds() -> None:
    network = Network(LINKS, [0, 1])
    assert (network.latency_ns, network.overhead_ns) == (2000, 300)


# ---------------------------------------------------------------------------------------------------- a node for each rank

APART = range(4)


def test_bytes_take_their_time() -> None:
    assert ends(LINKS, APART, (0, 1, 1000, 50)) == [1050]
    assert ends(LINKS, APART, (0, 1, 0, 50)) == [50]
    assert ends(NARROW, APART, (0, 1, 1000, 50)) == [2050], "the node's link is the slowest"


def test_two_messages_into_one_rank_take_twice_as_long_as_one() -> None:
    assert ends(LINKS, APART, (0, 3, 1000, 0), (1, 3, 1000, 0), (2, 3, 500, 10)) == [1000, 2000, 2500]


def test_two_messages_out_of_one_rank_too() -> None:
    assert ends(LINKS, APART, (0, 1, 1000, 0), (0, 2, 1000, 400)) == [1000, 2000]


def test_different_pairs_do_not_slow_each_other() -> None:
    assert ends(LINKS, APART, (0, 1, 1000, 0), (2, 3, 1000, 0)) == [1000, 1000]


def test_full_duplex() -> None:
    """A rank sends and receives at once: an exchange takes as long as one message; so does a ring."""
    assert ends(LINKS, APART, (0, 1, 1000, 0), (1, 0, 1000, 0)) == [1000, 1000]
    assert ends(LINKS, APART, (0, 1, 1000, 0), (1, 2, 1000, 0), (2, 0, 1000, 0)) == [1000, 1000, 1000]


def test_a_link_that_has_become_free_is_used_at_once() -> None:
    assert ends(LINKS, APART, (0, 1, 1000, 0), (0, 1, 1000, 1500)) == [1000, 2500]


# -------------------------------------------------------------------------------------------------------------- nodes

#: Ranks 0 to 3 on one node, 4 to 7 each on its own; then two nodes of four.
CROWD = [0, 0, 0, 0, 1, 2, 3, 4]
FOURS = [0, 0, 0, 0, 1, 1, 1, 1]


def test_shards_of_one_node_share_its_link() -> None:
    """At 1 byte/ns each and 2 for the node, two messages pass at once, and a third when the node has served them."""
    two = NetworkOptions(bandwidth=1e9, node_bandwidth=2e9)
    assert ends(two, CROWD, (4, 0, 1000, 0), (5, 1, 1000, 0), (6, 2, 1000, 0)) == [1000, 1000, 1500]
    assert ends(two, APART, (0, 1, 1000, 0), (2, 3, 1000, 0)) == [1000, 1000], "on nodes of their own they do not"


def test_a_narrow_node_makes_a_queue_of_two_shards() -> None:
    assert ends(NARROW, CROWD, (4, 0, 1000, 0), (5, 1, 1000, 0)) == [2000, 4000]
    assert ends(NARROW, CROWD, (0, 4, 1000, 0), (1, 5, 1000, 0)) == [2000, 4000], "on the way out too"
    assert ends(NARROW, CROWD, (0, 4, 1000, 0), (5, 1, 1000, 0)) == [2000, 2000], "full duplex"


def test_within_a_node_no_node_link_is_used() -> None:
    assert ends(NARROW, FOURS, (0, 1, 1000, 0), (4, 2, 1000, 0)) == [4000, 2000]
    assert ends(LINKS, FOURS, (0, 1, 1000, 0)) == [1000], "the ranks' own links are the slower ones"
    assert ends(NARROW, FOURS, (0, 1, 1000, 0), (2, 1, 1000, 0), (1, 0, 1000, 0)) == [4000, 8000, 4000]


def test_a_busy_receiver_holds_up_nobody_else() -> None:
    """The third message queues at rank 4; the fourth, of the same sender and node, goes to an idle rank at once."""
    into_four = [(5, 4, 1000, 0), (6, 4, 1000, 0), (0, 4, 1000, 0)]
    assert ends(LINKS, CROWD, *into_four, (1, 7, 1000, 0)) == [1000, 2000, 3000, 1000]
    assert ends(LINKS, CROWD, *into_four, (0, 7, 1000, 0)) == [1000, 2000, 3000, 2000], "behind it on its sender's own link"


# ---------------------------------------------------------------------------------------------------------- whatever comes

Transfers = list[tuple[int, int, int, int]]
transfers = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 5000), st.integers(0, 20_000)).filter(lambda t: t[0] != t[1]),
    min_size=1,
    max_size=12,
).map(lambda some: sorted(some, key=lambda each: each[3]))
bandwidths = st.sampled_from([0.25e9, 1e9, 4e9])


@pytest.mark.parametrize("nodes", [APART, [0, 1, 1, 2]])
def test_a_slow_link_slows_both_directions_and_nobody_else(nodes: Sequence[int]) -> None:
    slow = NetworkOptions(bandwidth=1e9, node_bandwidth=1e9, local_bandwidth=1e9, slow_links={1: 10.0})
    assert ends(slow, nodes, (0, 1, 1000, 0)) == ends(slow, nodes, (1, 0, 1000, 0)) == [10000]
    assert ends(slow, nodes, (0, 3, 1000, 0), (3, 0, 1000, 0)) == [1000, 1000]
    assert ends(slow, nodes, (0, 1, 1000, 0), (0, 3, 1000, 0)) == [10000, 2000], "the sender is not held up"


@pytest.mark.parametrize("nodes", [APART, [0, 1, 2, 2]])
def test_cores_that_move_the_bytes_do_so_one_after_the_other(nodes: Sequence[int]) -> None:
    """What goes out and what comes in is one queue, where links are full duplex."""
    cores = NetworkOptions(bandwidth=1e9, node_bandwidth=1e9, local_bandwidth=1e9, core_bandwidth=0.5e9)
    assert ends(cores, nodes, (0, 1, 1000, 0), (1, 0, 1000, 0)) == [2000, 4000]
    assert ends(cores, nodes, (0, 1, 1000, 0), (2, 1, 1000, 0)) == [2000, 4000]
    assert ends(cores, [0, 0, 1, 1], (0, 1, 1000, 0), (2, 3, 1000, 0)) == [1000, 1000]
    assert ends(cores, nodes, (0, 1, 1000, 0)) == [2000]
    wide = NetworkOptions(bandwidth=1e9, node_bandwidth=1e9, local_bandwidth=1e9, core_bandwidth=2e9)
    assert ends(wide, nodes, (0, 1, 1000, 0), (1, 0, 1000, 0)) == [1000, 1000], "twice the link's rate hides it"


def test_cores_that_move_the_bytes_copy_those_within_their_node() -> None:
    """Copies take as long as the local bandwidth says; other nodes' cores, and nodes whose links need none, are not slowed."""
    cores = NetworkOptions(bandwidth=4e9, node_bandwidth=1e9, local_bandwidth=2e9, core_bandwidth=0.5e9)
    nodes = [0, 0, 0, 0, 1, 1]
    assert ends(cores, nodes, (0, 1, 1000, 0), (2, 3, 1000, 0), (4, 5, 1000, 0)) == [500, 1000, 500]
    assert ends(cores, nodes, (0, 1, 1000, 0), (2, 4, 1000, 0)) == [500, 2500]
    assert ends(cores, nodes, (2, 4, 1000, 0), (0, 1, 1000, 0)) == [2000, 2500]
    links = NetworkOptions(bandwidth=4e9, node_bandwidth=1e9, local_bandwidth=2e9)
    assert ends(links, nodes, (0, 1, 1000, 0), (2, 3, 1000, 0), (0, 4, 1000, 0)) == [500, 500, 1000]


networks = st.builds(
    NetworkOptions,
    bandwidth=bandwidths,
    node_bandwidth=bandwidths,
    local_bandwidth=bandwidths,
    core_bandwidth=st.sampled_from([0.0, 0.25e9, 4e9]),
)


@settings(max_examples=examples(300, of=4), deadline=None, derandomize=True)
@given(networks, st.lists(st.integers(0, 2), min_size=4, max_size=4), transfers)
def test_no_link_carries_more_than_it_can(options: NetworkOptions, nodes: list[int], some: Transfers) -> None:
    """From any message's begin to any later one's end, at no link do more bytes pass than it could carry meanwhile."""
    done = [(*each, end) for each, end in zip(some, ends(options, nodes, *some), strict=True)]
    for source, dest, nbytes, begin, end in done:
        wide = options.local_bandwidth if nodes[source] == nodes[dest] else options.node_bandwidth
        assert end - begin >= nbytes / min(wide, options.bandwidth) * 1e9 - 1
    out_of_node = [each for each in done if nodes[each[0]] != nodes[each[1]]]
    of_ranks = [[each for each in done if each[end] == rank] for rank in range(4) for end in (0, 1)]
    of_nodes = [[each for each in out_of_node if nodes[each[end]] == node] for node in range(3) for end in (0, 1)]
    rates = [*([options.bandwidth] * 8), *([options.node_bandwidth] * 6)]
    for rate, passing in zip(rates, of_ranks + of_nodes, strict=True):
        speed = rate * 1e-9
        for first in range(len(passing)):
            for last in range(first, len(passing)):
                meanwhile = passing[first : last + 1]
                until = max(end for *_, end in meanwhile)
                assert sum(nbytes for _, _, nbytes, _, _ in meanwhile) <= speed * (until - passing[first][3] + len(meanwhile))
    if options.core_bandwidth:
        for node in range(3):
            _cores_have_time(options, [each for each in done if node in (nodes[each[0]], nodes[each[1]])], nodes)


def _cores_have_time(options: NetworkOptions, passing: list[tuple[int, ...]], nodes: list[int]) -> None:
    """A node's cores copy, and move, one message after the other."""
    within = min(options.local_bandwidth, options.bandwidth)
    for first in range(len(passing)):
        busy_ns, until = 0.0, 0
        for source, dest, nbytes, _, end in passing[first:]:
            busy_ns += nbytes / (within if nodes[source] == nodes[dest] else options.core_bandwidth) * 1e9 - 1
            until = max(until, end)
            assert busy_ns <= until - passing[first][3]


@settings(max_examples=examples(200, of=5), deadline=None, derandomize=True)
@given(networks, transfers)
def test_nodes_of_one_rank_each_are_reckoned_alike(options: NetworkOptions, some: Transfers) -> None:
    """Alone, and beside two ranks that share a node and say nothing: to a nanosecond of rounding for each message."""
    alone, beside = ends(options, [0, 1, 2, 3], *some), ends(options, [0, 1, 2, 3, 4, 4], *some)
    assert alone == pytest.approx(beside, abs=len(some))


@settings(max_examples=examples(200, of=5), deadline=None, derandomize=True)
@given(networks, st.lists(st.integers(0, 2), min_size=4, max_size=4), transfers, st.integers(0, 10**6))
def test_later_is_the_same_later(options: NetworkOptions, nodes: list[int], some: Transfers, shift: int) -> None:
    moved = [(source, dest, nbytes, begin + shift) for source, dest, nbytes, begin in some]
    assert ends(options, nodes, *moved) == [end + shift for end in ends(options, nodes, *some)]
