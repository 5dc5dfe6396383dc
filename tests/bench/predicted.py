"""Seconds of a round over links of a known rate, as the virtual cluster predicts them from another job's log.

Known are the rate and who is where; how many bytes per second raw MPI moves into and out of a node here, copies on it, and brings
over a link that is slower than cores, where all nodes exchange with each other (`exchanged.py`); and the log of an allreduce of
whole vectors, whose ranks compute while nothing is exchanged: what a mini-batch and an update take. So what is tried is the virtual
network, and who waits for whom. Where layers travel by themselves, the model says how large each is; all take as long.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import NamedTuple

from mpisgd.config import Config, config_file, replace
from mpisgd.config.config_virtual import EmpiricalComputeOptions, NetworkOptions, ServiceOptions
from mpisgd.exchange.link_load import GIGABIT
from mpisgd.plan.costs.messages import TURN_NBYTES
from mpisgd.plan.costs.predict import predict
from mpisgd.records.log.reader import Run

PAYLOAD = 1448 / 1514
"""Of what a link carries, what is not headers: full frames of TCP over Ethernet, as the shaper counts them."""
_GRADIENT_S_PER_BYTE = 1.5e-10
"""To check and add one: a pass over memory."""
_LATENCY_S, _OVERHEAD_S = 1e-4, 2e-5
"""To another namespace, of a message; both hardly count beside megabytes."""
_ROUNDS = 60


class Rates(NamedTuple):
    """Bytes per second of a node.

    Attributes:
        link: Gbit/s in each direction.
        share: of it, which raw MPI uses: several senders share a receiver's link, and TCP loses some of what it sends.
        moved: into and out of it together, by its cores.
        copied: from rank to rank on it.
    """

    link: float
    share: float
    moved: float
    copied: float


def share_of(gbit: float, user_objects: float) -> float:
    """The share of a link of so many Gbit/s that raw MPI uses, which brings so many bytes per second, both ways together."""
    return min(1.0, user_objects / (2 * gbit * GIGABIT * PAYLOAD))


def virtual(log: Run, costs: Run) -> Config:
    """The job of a log on virtual nodes; of `costs`, seconds of mini-batches are drawn, and an update's are the median.

    Args:
        log: of a job whose nodes are filled one after the other.
    """
    told = log.environment
    config, hosts = config_file.from_mapping(log.config), told["hosts"]
    cut = {"slices": log.slices_of(log.attempt), "chunks": log.chunks_of(log.attempt)}
    config, most = replace(config, way=told["way"], **cut), max(map(hosts.count, hosts))
    nodes = dataclasses.replace(
        config.virtual,
        learners=log.lambda_,
        parameters=0 if config.per_layer or config.in_buckets else int(told["parameters"]),
        ranks_per_node=most,
        spare_nodes=sum(hosts.count(host) == 1 < most for host in set(hosts)),
        gradients=False,
    )
    nbytes = 4 * int(costs.environment["parameters"]) / len(set(costs.updates["shard"].tolist()))
    update_s = statistics.median(costs.updates["update_s"].tolist())
    service = ServiceOptions(gradient_s_per_byte=_GRADIENT_S_PER_BYTE, update_s_per_byte=update_s / nbytes)
    compute = EmpiricalComputeOptions(run=str(costs.path.resolve()))
    return replace(config, virtual=nodes, service=service, compute=compute)


def round_s(config: Config, rates: Rates) -> float:
    """Seconds in which each learner of a `virtual` job computes and exchanges a mini-batch."""
    network = NetworkOptions(
        _LATENCY_S,
        _OVERHEAD_S,
        bandwidth=rates.copied,
        node_bandwidth=rates.link * GIGABIT * PAYLOAD * rates.share,
        local_bandwidth=rates.copied,
        core_bandwidth=rates.moved,
        turn_nbytes=TURN_NBYTES,
    )
    lambda_ = config.virtual.learners
    return lambda_ / predict(replace(config, network=network), _ROUNDS * lambda_).gradients_per_s
