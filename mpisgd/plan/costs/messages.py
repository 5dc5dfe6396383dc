"""Costs of messages and of a shard's work, from a run's log.

On a free wire and shard, a push and the pull after it cost (o: overhead, L: latency, D: transfer of all slices, g: a gradient's
service, u: an update's)

    push_s                     2 o + L + D          header sent and taken, slices sent
    arrival to start of update D / shards + g       of the gradient that completes the update
    update_s                   u
    pull_s                     D                    from the first answer's header to the last weights

Of real columns, low quantiles are free of waits.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from mpisgd.analysis import arrivals
from mpisgd.analysis.timeline import ranks_of
from mpisgd.config import footprint
from mpisgd.config.config_virtual import NetworkOptions, ServiceOptions
from mpisgd.exchange.ways import IN_MEMORY, STREAMED, WHOLE
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import LogRows, Verdict
from mpisgd.report import link_speed

#: Quantile of a column free of waits; an odd row would decide the minimum.
LOW = 0.05
#: Least bytes of a message that tells a bandwidth: below, handling takes longer than bytes.
TELLING_NBYTES = 64 * 1024
#: Seconds of a shard's loop for a push or an update of a few bytes (this package, one 3 GHz core); any more is per byte.
HANDLING_S = 50e-6
TURN_NBYTES = 1_000_000
"""Bytes of a message's turn on shared links between nodes, as by TCP (`comm/virtual/fair_links.py`); of large slices, an eighth."""
_BESIDE = "bytes of a node's pushes or pulls over their seconds"


@dataclass(frozen=True)
class Cost:
    name: str
    value: float
    unit: str
    source: str


@dataclass(frozen=True)
class Wire:
    network: NetworkOptions
    service: ServiceOptions
    costs: tuple[Cost, ...]


def measured(run: Run) -> Wire:
    """Return the costs in a log."""
    nbytes = int(run.environment["parameter_nbytes"])
    network, network_costs = _network(run, nbytes)
    if len(set(run.environment.get("hosts", []))) > 1:
        network = dataclasses.replace(network, turn_nbytes=max(TURN_NBYTES, nbytes // run.shards // 8))
    service, service_costs = _service(run, nbytes / run.shards, network)
    return Wire(network, service, (*network_costs, *service_costs))


def _network(run: Run, nbytes: int) -> tuple[NetworkOptions, list[Cost]]:
    """Fit latency, and bandwidth within and between nodes."""
    rows = run.pushes[(run.pushes["shard"] == 0) & (run.pushes["seq"] > 1)]
    pushed, pulled = (nbytes * each / 4 for each in footprint.of_exchange(run.config))
    network, costs = _bandwidths(run, rows, pulled)
    latency_s, source = network.latency_s, "assumed: no push in the log tells the latency"
    if _beside(run) and costs[0].source == _BESIDE:
        source = "assumed: pushes to shards here and elsewhere, at once, do not tell the latency"
    elif len(rows):
        least_s = float(np.quantile(rows["push_s"], LOW))
        transfer_s = float(np.median(_transfers_s(run, network, pushed).sum(0)))
        latency_s = max(0.0, least_s - transfer_s - 2 * network.overhead_s)
        source = f"{100 * LOW:.0f} % quantile of push_s, without the transfer"
    costs.append(Cost("latency", latency_s, "s", source))
    return dataclasses.replace(network, latency_s=latency_s), costs


def _bandwidths(run: Run, rows: LogRows, nbytes: float) -> tuple[NetworkOptions, list[Cost]]:
    """Fit bandwidths; a node's link counts as fast as a rank's fastest transfer."""
    default = NetworkOptions()
    slice_nbytes = nbytes / run.shards
    if _way(run) in IN_MEMORY or slice_nbytes < TELLING_NBYTES:
        sent = "headers alone" if _way(run) in IN_MEMORY else f"messages of {slice_nbytes:.0f} bytes"
        source = f"assumed: {sent} do not tell the bandwidth"
        return default, [Cost("bandwidth", default.bandwidth, "bytes/s", source)]
    if _beside(run):
        return _bandwidth_between_nodes(run, rows, default)
    local, low, of_learners = ~_apart(run)[0][rows["learner_id"]], _low_share(run), _hosts_of_learners(run)
    streamed = _way(run) == STREAMED  # pushes and pulls go on together
    pull_s, name = (_streamed_s(rows), "backward_s + push_s + wait_s + pull_s") if streamed else (rows["pull_s"], "pull_s")
    here, there = (_rate(nbytes, pull_s[which], low) for which in (local, ~local))
    source = f"{100 * low:.2g} % quantile of {name}"
    seen = [
        Cost(f"bandwidth, {name}", rate, "bytes/s", source) for name, rate in (("one node", here), ("two nodes", there)) if rate
    ]
    slow_links = {}
    for host, node in _slow_nodes(run).items():
        there_s = pull_s[(of_learners == host)[rows["learner_id"]]]
        if there and (rate := _rate(nbytes, there_s, low)) and rate < there:
            slow_links[node] = there / rate
            seen.append(Cost(f"bandwidth, link of {host}", rate, "bytes/s", source))
    if here and there:
        return NetworkOptions(bandwidth=max(here, there), local_bandwidth=here, node_bandwidth=there, slow_links=slow_links), seen
    if here:
        return NetworkOptions(bandwidth=here, local_bandwidth=here), seen
    if there:
        return NetworkOptions(
            bandwidth=there, local_bandwidth=max(there, default.local_bandwidth), node_bandwidth=there, slow_links=slow_links
        ), seen
    return default, [Cost("bandwidth", default.bandwidth, "bytes/s", "assumed: no pull in the log tells the bandwidth")]


def _slow_nodes(run: Run) -> dict[str, int]:
    """Return slow hosts -> node; {} unless all nodes have as many, consecutive ranks."""
    hosts = [str(host) for host in run.environment.get("hosts", [])]
    order = list(dict.fromkeys(hosts))
    each = -(-len(hosts) // max(1, len(order)))
    if hosts != [order[rank // each] for rank in range(len(hosts))]:
        return {}
    return {host: order.index(host) for host in link_speed.slow(link_speed.links(run))}


def _bandwidth_between_nodes(run: Run, rows: LogRows, default: NetworkOptions) -> tuple[NetworkOptions, list[Cost]]:
    """Fit bandwidth where shards lie beside learners, and no single pull tells a link's.

    The median over nodes of learners' pushes or pulls, whichever is faster; pushes are sometimes alone.
    """
    rates, slow, of_learners = {}, _slow_nodes(run), _hosts_of_learners(run)
    streamed, parted = _way(run) == STREAMED, bool(run.config.get("ahead") or run.config.get("per_layer"))
    for link in link_speed.links(run):
        mine, push_s, pull_s = link.carried, link.push_s, link.pull_s
        own = rows[(of_learners == link.host)[rows["learner_id"]]]
        pushes, pulls = mine.pushed_by_each, mine.pulled_by_each
        if streamed or parted:  # push_s is of the beginning; a pull ends with both, or hides behind computing
            pushes, pulls = 0.0, 0.0 if run.config.get("ahead") == 2 else max(mine.sent, mine.received)
            if streamed:
                pull_s = float(np.median(_streamed_s(own))) if len(own) else None
        elif push_s:
            push_s = float(np.quantile(own["push_s"], LOW))
        found = [nbytes / took_s for nbytes, took_s in ((pushes, push_s), (pulls, pull_s)) if nbytes and took_s]
        if found:
            rates[link.host] = max(found)
    usual = [rate for host, rate in rates.items() if host not in slow]
    if not usual:
        return default, [Cost("bandwidth", default.bandwidth, "bytes/s", "assumed: no pull in the log tells the bandwidth")]
    there = float(np.median(usual))
    seen = [Cost("bandwidth, two nodes", there, "bytes/s", _BESIDE)]
    seen += [Cost(f"bandwidth, link of {host}", rates[host], "bytes/s", _BESIDE) for host in slow if host in rates]
    slow_links = {node: there / rates[host] for host, node in slow.items() if host in rates}
    return NetworkOptions(bandwidth=max(there, default.local_bandwidth), node_bandwidth=there, slow_links=slow_links), seen


def _streamed_s(rows: LogRows) -> np.ndarray:
    """Return the seconds from a streamed push's header to the weights."""
    return np.asarray(schema.backward_s(rows) + rows["push_s"] + rows["wait_s"] + rows["pull_s"])


def _way(run: Run) -> str:
    return str(run.environment.get("way", WHOLE))


def _transfers_s(run: Run, network: NetworkOptions, nbytes: float) -> np.ndarray:
    """Return seconds to transfer each slice of `nbytes`: (shards, learners)."""
    if _way(run) in IN_MEMORY:
        return np.zeros((run.shards, run.lambda_))
    rates = np.where(_apart(run), network.node_bandwidth, network.local_bandwidth)
    return np.asarray(nbytes / run.shards / np.minimum(network.bandwidth, rates))


def _apart(run: Run) -> np.ndarray:
    """Return whether shard and learner are on two nodes: bool, (shards, learners). Unknown hosts are one."""
    ranks = ranks_of(run)
    of_shards = np.array([ranks.host(rank) for rank in ranks.shards])
    return np.asarray(of_shards[:, None] != _hosts_of_learners(run))


def _beside(run: Run) -> bool:
    """Return whether a learner has shards on its own node and elsewhere."""
    apart = _apart(run)
    return bool((apart.any(0) & ~apart.all(0)).any())


def _hosts_of_learners(run: Run) -> np.ndarray:
    ranks = ranks_of(run)
    return np.array([ranks.host(rank) for rank in ranks.learners])


def _low_share(run: Run) -> float:
    """Return the quantile of unslowed pulls: a synchronous shard serves all learners at once, the first alone."""
    return min(LOW, 0.5 / run.lambda_) if arrivals.synchronous(run) else LOW


def _rate(nbytes: float, pull_s: np.ndarray, low: float) -> float | None:
    """Return bytes per second; None if pulls took no time."""
    least_s = float(np.quantile(pull_s, low)) if len(pull_s) else 0.0
    return nbytes / least_s if least_s > 0 else None


def _service(run: Run, slice_nbytes: float, network: NetworkOptions) -> tuple[ServiceOptions, list[Cost]]:
    """Fit the service of gradients and updates, fixed and per byte."""
    default = ServiceOptions()
    if _way(run) == STREAMED:
        source = "assumed: the defaults of [service]; a run with MPISGD_TRAVEL=whole tells"
        return default, [Cost("service", 0.0, "s", source)]
    updates = run.updates[run.updates["gradients"] > 0]
    transfers_s = _transfers_s(run, network, slice_nbytes * run.shards * footprint.of_exchange(run.config)[0] / 4)
    for host, node in _slow_nodes(run).items():
        transfers_s[:, _hosts_of_learners(run) == host] *= network.slow_links.get(node, 1.0)
    after_s = np.concatenate([_last_gradients(run, shard, transfers_s[shard]) for shard in range(run.shards)])
    if not len(updates) or not len(after_s):
        return default, [Cost("service", 0.0, "s", "assumed: the defaults of [service]; no update in the log tells the service")]
    gradient_s = float(np.median(after_s))
    update_s = float(np.median(updates["update_s"]))
    fixed = {"gradient_s": min(gradient_s, HANDLING_S), "update_s": min(update_s, HANDLING_S)}
    each = max(slice_nbytes, 1.0)
    service = ServiceOptions(
        **fixed,
        gradient_s_per_byte=(gradient_s - fixed["gradient_s"]) / each,
        update_s_per_byte=(update_s - fixed["update_s"]) / each,
    )
    why = "median from the arrival of an update's last gradient to the update's start, without the transfer"
    return service, [Cost("service of a gradient", gradient_s, "s", why), Cost("update", update_s, "s", "median of update_s")]


def _last_gradients(run: Run, shard: int, transfer_s: np.ndarray) -> np.ndarray:
    """Return seconds from the last gradient's arrival to the update, less transfer, per gradient summed; `transfer_s`: (learners,).

    In hardsync a completing gradient may release earlier arrivals, which stand after it.
    """
    rows = run.pushes[(run.pushes["shard"] == shard) & (run.pushes["verdict"] == Verdict.APPLY)]
    updates = run.updates[(run.updates["shard"] == shard) & (run.updates["gradients"] > 0)]
    starts, ends = (np.searchsorted(rows["clock"], updates["clock"] - 1, side=side) for side in ("left", "right"))
    whole = ends > starts
    updates, starts, ends = updates[whole], starts[whole], ends[whole]
    if not len(updates):
        return np.empty(0)
    arrival_s = rows["arrival_s"][: ends[-1]]
    last_s = np.maximum.reduceat(arrival_s, starts)
    update_of = np.repeat(np.arange(len(updates)), np.diff(np.append(starts, ends[-1])))
    place = np.flatnonzero(arrival_s == last_s[update_of])
    _, first = np.unique(update_of[place], return_index=True)
    seconds = updates["time_s"] - updates["update_s"] - last_s - transfer_s[rows["learner_id"][place[first]]]
    return np.asarray(np.maximum(seconds, 0.0) / (ends - place[first]))
