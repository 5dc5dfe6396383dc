"""Which rank does what, on which cores and which GPU: what a configuration means for the ranks that the doctor found."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mpisgd.base.errors import ConfigError
from mpisgd.config import Config
from mpisgd.exchange.roles import Roles
from mpisgd.job.placement import on_ranks
from mpisgd.liveness.cores import of_node
from mpisgd.liveness.guard import ranges
from mpisgd.site.facts import JobFacts, Survey


def with_job(survey: Survey, config: Config) -> Survey:
    """The survey of ranks that `train` would give these roles."""
    hosts = [facts.host for facts in survey.ranks]
    try:
        roles, _ = on_ranks(config, hosts)
    except ConfigError as error:
        return dataclasses.replace(survey, job=JobFacts(refused=str(error)))
    cores, crowded = [facts.cores for facts in survey.ranks], ""
    if config.binding == "roles":
        for host in dict.fromkeys(hosts):
            ranks = [rank for rank, name in enumerate(hosts) if name == host]
            allowed = frozenset[int]().union(*(cores[rank] for rank in ranks))
            for rank, share in of_node(allowed, ranks, roles).items():
                cores[rank] = frozenset[int]().union(*share) if share else allowed
                crowded = crowded or ("" if share else host)
    gpus = tuple(_gpu(config, roles, survey, rank, hosts) for rank in range(len(hosts)))
    job = JobFacts(names=tuple(map(roles.describe, range(len(hosts)))), cores=tuple(cores), gpus=gpus, crowded=crowded)
    return dataclasses.replace(survey, job=job)


def _gpu(config: Config, roles: Roles, survey: Survey, rank: int, hosts: Sequence[str]) -> int | None:
    """As `train` deals them out."""
    learners, shards = config.device == "cuda", config.shard_device == "cuda"
    computes = rank in {*roles.computing_ranks, *roles.spare_ranks, roles.evaluator_rank}
    if not ((learners and computes) or (shards and rank in roles.shard_ranks)) or not survey.ranks[rank].gpus:
        return None
    return roles.turn_at_gpus(rank, hosts, learners=learners, shards=shards) % survey.ranks[rank].gpus


def lines(survey: Survey, job: JobFacts, hosts_shown: int) -> str:
    """`n1: rank 0, shard 0, core 0; rank 1, learner 0, core 1-3, GPU 0 | n2: ...`."""
    parts = []
    names = list(dict.fromkeys(facts.host for facts in survey.ranks))
    for host in names[:hosts_shown]:
        each = []
        for rank, facts in enumerate(survey.ranks):
            if facts.host == host:
                gpu = job.gpus[rank]
                on = f", GPU {gpu}" if gpu is not None else ""
                each.append(f"rank {rank}, {job.names[rank]}, core {ranges(sorted(job.cores[rank]))}{on}")
        parts.append(f"{host}: {'; '.join(each)}")
    more = f" | and {len(names) - hosts_shown} more hosts" if len(names) > hosts_shown else ""
    return " | ".join(parts) + more
