"""Seconds of a round over links of a known rate, as the virtual cluster predicts them, beside those that were measured.

Known are the rate and who is where, and how many bytes per second raw MPI moves between these namespaces (`exchanged.py`). From the
log of the measured job come the seconds of mini-batches, which ranks that share cores slow down. So what is tried is the virtual
network, and who waits for whom. Where layers travel by themselves, the model says how large each is; all take as long.
"""

from __future__ import annotations

import dataclasses

from mpisgd.config import config_file, replace
from mpisgd.config.config_virtual import EmpiricalComputeOptions, NetworkOptions, ServiceOptions
from mpisgd.exchange.links import GIGABIT
from mpisgd.plan.costs.predict import predict
from mpisgd.records.log.reader import Run

PAYLOAD = 1448 / 1514
"""Of what a link carries, what is not headers: full frames of TCP over Ethernet, as the shaper counts them."""
SERVICE = ServiceOptions(gradient_s_per_byte=1.5e-10, update_s_per_byte=6e-10)
"""Of a shard that shares two cores: a pass over memory, and the median of `update_s`."""
_LATENCY_S, _OVERHEAD_S = 1e-4, 2e-5
"""To another namespace, of a message; both hardly count beside megabytes."""
_LOCAL = 3e9
"""Bytes per second between ranks of one node."""
_ROUNDS = 60


def round_s(log: Run, gbit: float, core_bandwidth: float) -> float:
    """Seconds in which each learner computes and exchanges a mini-batch.

    Args:
        log: of a job whose nodes are filled one after the other.
        core_bandwidth: of a node, as `NetworkOptions` takes it.
    """
    config, hosts = config_file.from_mapping(log.config), log.environment["hosts"]
    virtual = dataclasses.replace(
        config.virtual,
        learners=log.lambda_,
        parameters=0 if config.exchange == "layerwise" else int(log.environment["parameters"]),
        ranks_per_node=max(map(hosts.count, hosts)),
        gradients=False,
    )
    network = NetworkOptions(
        _LATENCY_S,
        _OVERHEAD_S,
        bandwidth=_LOCAL,
        node_bandwidth=gbit * GIGABIT * PAYLOAD,
        local_bandwidth=_LOCAL,
        core_bandwidth=core_bandwidth,
    )
    compute = EmpiricalComputeOptions(run=str(log.path.resolve()))
    config = replace(config, virtual=virtual, network=network, service=SERVICE, compute=compute)
    return log.lambda_ / predict(config, _ROUNDS * log.lambda_).gradients_per_s
