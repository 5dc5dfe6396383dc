"""Binding of a node's ranks to cores. Classic errors: all on core 0, or two on a core while others idle."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from mpisgd.liveness.guard import ranges

MEND = "undo the binding, mpirun --bind-to none or srun --cpu-bind=none, or ask for a core for each rank, --cpus-per-task"


def own_cores() -> frozenset[int]:
    return frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def granted_cores(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """Return the number of the job's cores here, whatever the binding: its control group's, else the machine's."""
    try:
        path = next(line[3:] for line in membership.read_text().splitlines() if line.startswith("0::"))
        granted = (root / path.strip("/") / "cpuset.cpus.effective").read_text().strip()
        count = sum(int(part.rpartition("-")[2]) - int(part.partition("-")[0]) + 1 for part in granted.split(",") if part)
    except (OSError, StopIteration, ValueError):
        count = 0
    return count or os.cpu_count() or 1


def complaint(hosts: Sequence[str], cores: Sequence[frozenset[int]], granted: Sequence[int]) -> str:
    """Describe ranks bound to too few cores while others idle; "" = none.

    `granted`: number of the job's cores there.
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
