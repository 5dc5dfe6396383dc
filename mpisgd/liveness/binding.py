"""Are the ranks of a node bound to cores that they can use? Two classics: all on core 0, and two on one while others have none."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from mpisgd.liveness.guard import ranges

MEND = "undo the binding, mpirun --bind-to none or srun --cpu-bind=none, or ask for a core for each rank, --cpus-per-task"


def own_cores() -> frozenset[int]:
    """Cores on which this process may run: as the launcher and the batch system have bound it."""
    return frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def granted_cores(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """Number of cores that the job may use here, however its ranks are bound: its control group's, or else the machine's."""
    try:
        path = next(line[3:] for line in membership.read_text().splitlines() if line.startswith("0::"))
        granted = (root / path.strip("/") / "cpuset.cpus.effective").read_text().strip()
        count = sum(int(part.rpartition("-")[2]) - int(part.partition("-")[0]) + 1 for part in granted.split(",") if part)
    except (OSError, StopIteration, ValueError):
        count = 0
    return count or os.cpu_count() or 1


def complaint(hosts: Sequence[str], cores: Sequence[frozenset[int]], granted: Sequence[int]) -> str:
    """Say which ranks are bound to too few cores while others are idle; "" where none are.

    Of each rank its host, the cores that it may use, and how many the job may use there.
    """
    for host in dict.fromkeys(hosts):
        ranks = [rank for rank, each in enumerate(hosts) if each == host]
        every = frozenset[int]().union(*(cores[rank] for rank in ranks))
        most = max(granted[rank] for rank in ranks)
        if len(ranks) > len(every):
            if most > len(every):
                where = f"core{'s' * (len(every) > 1)} {ranges(sorted(every))} of {host}, where {most} may be used"
                return f"rank {ranges(ranks)}: all {len(ranks)} are bound to {where}"
            continue
        for bound in dict.fromkeys(cores[rank] for rank in ranks):
            alike = [rank for rank in ranks if cores[rank] == bound]
            if len(alike) > len(bound):
                where = f"core{'s' * (len(bound) > 1)} {ranges(sorted(bound))} of {host}"
                return f"rank {ranges(alike)} are bound to {where}, where {len(ranks)} ranks have {len(every)} cores"
    return ""
