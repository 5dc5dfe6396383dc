"""Costs of messages in virtual time: latency, overhead, bandwidth, and queues at links of ranks and nodes.

A message crosses its sender's link out and its receiver's link in, and between nodes the nodes' (full duplex). A link serves
messages in the order of their begins, each for bytes / bandwidth, and waits for no other link. Where cores move bytes, a node's
cores are one more link for all its traffic. Messages may also take turns (`fair_links.py`).

Sources: LogGP (Alexandrov et al. 1995) for latency, overhead and gap per byte.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpisgd.config.config_virtual import NetworkOptions

_NS = 10**9


class Network:
    """Links of ranks and nodes, each busy until some time."""

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

    def rates(self) -> tuple[float, float]:
        """Return bytes per second of the slowest and the fastest node's link."""
        slowest, fastest = (max(self._rank_ns, self._core_ns, of(self._node_ns)) for of in (max, min))
        return _NS / slowest, _NS / fastest

    def transfer(self, source: int, dest: int, nbytes: int, begin_ns: int) -> int:
        """Return when bytes that cross from `begin_ns` on are there; call in the order of `begin_ns`."""
        rank_out, rank_in = self._out, self._in
        if self._apart:  # each node has one rank, and all links are alike
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
