"""Costs of messages in virtual time: latency, overhead per message, bandwidth, and queues at the links of ranks and nodes.

A message's bytes cross the sender's link out and the receiver's link in; between nodes also the sender's node's link out and the
receiver's node's link in (full duplex). Every link serves the messages in the order in which their transfers begin, and is busy
with each for bytes / bandwidth; a message is there when the last of its links has served it. So two messages into one shard take
twice as long as one, and two into two shards of one node are slowed only by the node's link. A link does not wait for another:
a message that queues at a busy receiver does not hold up those behind it at its sender. Where cores move the bytes, those of a node
are one more link, which serves what goes out, what comes in and what its ranks send each other alike.

Messages may also cross in turns (`turns.py`).

Sources: LogGP (Alexandrov et al. 1995) for latency, overhead and gap per byte; the queues are what [Zhang16 2.3] splits the
parameter server for.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpisgd.config.config_virtual import NetworkOptions

_NS = 10**9


class Network:
    """The links of all ranks and nodes, and until when each is busy.

    Args:
        nodes: the node of each rank.
    """

    def __init__(self, options: NetworkOptions, nodes: Sequence[int]) -> None:
        self.latency_ns: int = round(options.latency_s * _NS)
        self.overhead_ns: int = round(options.overhead_s * _NS)
        self.turn_nbytes: int = options.turn_nbytes
        self.nodes = list(nodes)
        self._rank_ns: float = _NS / options.bandwidth
        node_ns = _NS / options.node_bandwidth
        self._node_ns = [node_ns * options.slow_links.get(node, 1.0) for node in range(max(nodes) + 1)]
        self._local_ns: float = max(_NS / options.local_bandwidth, self._rank_ns)
        self._core_ns: float = _NS / options.core_bandwidth if options.core_bandwidth else 0.0
        self._apart = len(set(nodes)) == len(nodes) and not (options.slow_links or self._core_ns)
        self._apart_ns = max(self._rank_ns, node_ns)
        self._last_nbytes = self._last_ns = 0
        self._out = [0] * len(nodes)
        self._in = [0] * len(nodes)
        self._node_out = [0] * (max(nodes) + 1)
        self._node_in = [0] * (max(nodes) + 1)
        self._cores = [0] * (max(nodes) + 1)

    def transfer(self, source: int, dest: int, nbytes: int, begin_ns: int) -> int:
        """Let a message, or a turn's part of one, cross the links between two ranks, from `begin_ns` on; returns when all is there.

        To be called in the order of `begin_ns`.
        """
        rank_out, rank_in = self._out, self._in
        if self._apart:  # the links of a node are those of its only rank, and all are alike
            if nbytes != self._last_nbytes:
                self._last_nbytes, self._last_ns = nbytes, round(nbytes * self._apart_ns)
            out_ns, in_ns = rank_out[source], rank_in[dest]
            if out_ns <= begin_ns >= in_ns:  # both are free
                end_ns = rank_out[source] = rank_in[dest] = begin_ns + self._last_ns
                return end_ns
            rank_out[source] = out_ns = (out_ns if out_ns > begin_ns else begin_ns) + self._last_ns
            rank_in[dest] = in_ns = (in_ns if in_ns > begin_ns else begin_ns) + self._last_ns
            return out_ns if out_ns > in_ns else in_ns
        here, there = self.nodes[source], self.nodes[dest]
        local = here == there
        busy_ns = round(nbytes * (self._local_ns if local else self._rank_ns))
        ready_ns = rank_out[source]
        end_ns = rank_out[source] = (ready_ns if ready_ns > begin_ns else begin_ns) + busy_ns
        ready_ns = rank_in[dest]
        ready_ns = rank_in[dest] = (ready_ns if ready_ns > begin_ns else begin_ns) + busy_ns
        if ready_ns > end_ns:
            end_ns = ready_ns
        links_ns, core_ns = self._node_ns, self._core_ns
        if local:
            if not core_ns:
                return end_ns
            crossed = [(self._cores, here, self._local_ns)]
        else:
            crossed = [(self._node_out, here, links_ns[here]), (self._node_in, there, links_ns[there])]
            if core_ns:
                crossed += [(self._cores, here, core_ns), (self._cores, there, core_ns)]
        for links, node, ns in crossed:
            ready_ns = links[node]
            ready_ns = links[node] = (ready_ns if ready_ns > begin_ns else begin_ns) + round(nbytes * ns)
            if ready_ns > end_ns:
                end_ns = ready_ns
        return end_ns
