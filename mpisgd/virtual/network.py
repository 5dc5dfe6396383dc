"""What messages cost in virtual time: latency, overhead per message, bandwidth, and queues at the links of ranks and nodes.

A message's bytes occupy the sender's link out and the receiver's link in; between nodes also the sender's node's link out and
the receiver's node's link in (full duplex). A link serves one message after the other, in the order in which their transfers
begin; a message is slowed by the slowest link on its way, but holds each link only as long as that link needs. So two messages
into one shard take twice as long as one, and two into two shards of one node are slowed only by the node's link.

Sources: LogGP (Alexandrov et al. 1995) for latency, overhead and gap per byte; the queues are what [Zhang16 2.3] splits the
parameter server for.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpisgd.config_virtual import NetworkOptions

_NS = 10**9


class Network:
    """The links of all ranks and nodes, and until when each is busy.

    Args:
        nodes: the node of each rank.
    """

    def __init__(self, options: NetworkOptions, nodes: Sequence[int]) -> None:
        self.latency_ns = round(options.latency_s * _NS)
        self.overhead_ns = round(options.overhead_s * _NS)
        self._nodes = nodes
        self._rank_ns = _NS / options.bandwidth
        self._node_ns = _NS / options.node_bandwidth
        self._local_ns = max(_NS / options.local_bandwidth, self._rank_ns)
        self._between_ns = max(self._rank_ns, self._node_ns)
        self._shared = len(set(nodes)) < len(nodes)
        self._last_nbytes = self._last_ns = 0
        self._out = [0] * len(nodes)
        self._in = [0] * len(nodes)
        self._node_out = [0] * (max(nodes) + 1)
        self._node_in = [0] * (max(nodes) + 1)

    def transfer(self, source: int, dest: int, nbytes: int, begin_ns: int) -> int:
        """Occupy the links between two ranks from `begin_ns` on, or as soon as they are free; when the last byte is there.

        To be called in the order of `begin_ns`.
        """
        rank_out, rank_in = self._out, self._in
        if rank_out[source] > begin_ns:
            begin_ns = rank_out[source]
        if rank_in[dest] > begin_ns:
            begin_ns = rank_in[dest]
        if not self._shared:  # a node of its own for each rank: the node's links add no queue
            if nbytes != self._last_nbytes:
                self._last_nbytes, self._last_ns = nbytes, round(nbytes * self._between_ns)
            end_ns = begin_ns + self._last_ns
            rank_out[source] = rank_in[dest] = end_ns
            return end_ns
        nodes = self._nodes
        here, there = nodes[source], nodes[dest]
        if here == there:
            end_ns = begin_ns + round(nbytes * self._local_ns)
        else:
            node_out, node_in = self._node_out, self._node_in
            begin_ns = max(begin_ns, node_out[here], node_in[there])
            end_ns = begin_ns + round(nbytes * self._between_ns)
            node_out[here] = node_in[there] = begin_ns + round(nbytes * self._node_ns)
        rank_out[source] = rank_in[dest] = begin_ns + round(nbytes * self._rank_ns) if here != there else end_ns
        return end_ns
