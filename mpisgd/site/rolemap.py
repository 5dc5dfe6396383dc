"""Roles, cores and GPUs of the doctor's ranks under a configuration. A check that does not apply returns None."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from mpisgd.base.errors import ConfigError
from mpisgd.config import Config
from mpisgd.exchange.roles import Roles
from mpisgd.job.placement import on_ranks
from mpisgd.liveness import tolerance
from mpisgd.liveness.cores import of_node
from mpisgd.liveness.guard import ranges
from mpisgd.site.facts import Finding, JobFacts, Survey

_GROUPS_SHOWN = 8
"""Groups listed, besides as many groups on several nodes."""


def with_job(survey: Survey, config: Config) -> Survey:
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
    tolerant, failures, intolerant = _failures(config)
    roles = roles.made_tolerant() if tolerant else roles
    gpus = tuple(_gpu(config, roles, survey, rank, hosts) for rank in range(len(hosts)))
    job = JobFacts(
        names=tuple(map(roles.describe, range(len(hosts)))),
        cores=tuple(cores),
        gpus=gpus,
        crowded=crowded,
        group_size=config.group_size,
        groups=roles.groups,
        failures=failures,
        intolerant=intolerant,
    )
    return dataclasses.replace(survey, job=job)


def _failures(config: Config) -> tuple[bool, str, str]:
    """Return whether a run outlives its learners, a description, and an error."""
    try:
        tolerant = tolerance.of(config)
        return tolerant, tolerance.said(config, tolerant, beats=False) + ": ends when a rank dies" * (not tolerant), ""
    except ConfigError as error:
        return False, "", str(error)


def _gpu(config: Config, roles: Roles, survey: Survey, rank: int, hosts: Sequence[str]) -> int | None:
    learners, shards = config.device == "cuda", config.shard_device == "cuda" and not config.stays_on_host
    computes = rank in roles.computing_ranks or roles.may_evaluate(rank)
    if not ((learners and computes) or (shards and rank in roles.shard_ranks)) or not survey.ranks[rank].gpus:
        return None
    return roles.turn_at_gpus(rank, hosts, learners=learners, shards=shards) % survey.ranks[rank].gpus


# ---------------------------------------------------------------------------------------------------------- findings


def check_roles(survey: Survey) -> Finding:
    job = survey.job
    if job is None:
        return Finding("roles", "ok", "not asked: mpisgd doctor job.toml shows the role, the cores and the GPU of each rank")
    if job.refused:
        return Finding("roles", "fault", job.refused, "mend the configuration, or start other ranks")
    text = _lines(survey, job)
    if job.crowded:
        text = f"binding = 'roles', but {job.crowded} has fewer cores than ranks: the ranks share all cores; {text}"
        return Finding("roles", "warning", text, "ask for a core for each rank, or start fewer ranks on a node")
    return Finding("roles", "ok", text)


def check_groups(survey: Survey) -> Finding | None:
    job = survey.job
    if job is None or not job.groups:
        return None
    hosts = [facts.host for facts in survey.ranks]
    apart = [index for index, group in enumerate(job.groups) if len({hosts[rank] for rank in group}) > 1]
    shown = sorted({*apart[:_GROUPS_SHOWN], *range(_GROUPS_SHOWN)} & {*range(len(job.groups))})
    each = "; ".join(f"learner {index} = rank {_placed(job.groups[index], hosts)}" for index in shown)
    more = f"; and {len(job.groups) - len(shown)} more" * (len(job.groups) > len(shown))
    where = f"{len(apart)} on several nodes, with passes across the network" if apart else "each on one node"
    text = f"{len(job.groups)} of {job.group_size} ranks, {where}: {each}{more}"
    if not apart:
        return Finding("groups", "ok", text)
    ranks = [sum(hosts[rank] == host for group in job.groups for rank in group) for host in dict.fromkeys(hosts)]
    counts = ", ".join(map(str, ranks[:_GROUPS_SHOWN]))
    mend = f"let each node have {job.group_size} ranks that compute, or a multiple: found {counts}"
    return Finding("groups", "warning", text, mend)


def check_failures(survey: Survey) -> Finding | None:
    job = survey.job
    if job is None or job.refused:
        return None
    if job.intolerant:
        return Finding("failures", "fault", job.intolerant, "start ranks by mpirun --with-ft ulfm, the doctor too")
    return Finding("failures", "ok", job.failures)


CHECKS = (check_roles, check_groups, check_failures)


def _placed(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Return e.g. `3-4 on n1, 7 on n2`."""
    places: dict[str, list[int]] = {}
    for rank in ranks:
        places.setdefault(hosts[rank], []).append(rank)
    return ", ".join(f"{ranges(own)} on {host}" for host, own in places.items())


def _lines(survey: Survey, job: JobFacts) -> str:
    """Return e.g. `n1: rank 0, shard 0, core 0; rank 1, learner 0, core 1-3, GPU 0 | n2: ...`."""

    def ranks_of(host: str) -> Iterator[str]:
        for rank, facts in enumerate(survey.ranks):
            if facts.host == host:
                gpu = job.gpus[rank]
                on = f", GPU {gpu}" if gpu is not None else ""
                yield f"rank {rank}, {job.names[rank]}, core {ranges(sorted(job.cores[rank]))}{on}"

    return survey.by_host(ranks_of)
