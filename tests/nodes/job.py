"""A job on a cluster in a box."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from tests.faults import job
from tests.nodes.cluster import Cluster

ENVIRONMENT = {"MPISGD_WAIT": "polite", "MPISGD_START_S": "20"}
"""Each node believes that all of the machine's cores are its own. A node that cannot be reached is not waited for long."""
GONE_S = 20.0
"""On both sides of a link that is down: who ends a job leaves word to kill its launcher after 15 s."""
_LAUNCHERS = ("mpirun", "prted", "prterun")


class Job(job.Job):
    """`mpirun ... mpisgd train words...` on the first node, with `spread[k]` ranks on node k, one node's after the other's."""

    def __init__(
        self, cluster: Cluster, spread: Sequence[int], words: Sequence[str], options: Sequence[str] = (), **env: str
    ) -> None:
        self.cluster = cluster
        self.spread = spread
        all_options = [*options, *cluster.launching(spread)]
        super().__init__(sum(spread), words, all_options, inside=cluster.inside(0), **(ENVIRONMENT | env))

    def _is_rank(self, pid: int) -> bool:
        """A child of the launcher, or of its daemon on another node; a rank's own children have other parents."""
        comm = (Path("/proc") / str(job.parent(pid)) / "comm").read_text().strip()
        return comm in _LAUNCHERS and any(pid in self.cluster.processes(node) for node in self.cluster.nodes)

    def node_of(self, rank: int) -> int:
        """On which node a rank is."""
        return next(node for node in self.cluster.nodes if rank < sum(self.spread[: node + 1]))

    def left(self) -> dict[int, list[int]]:
        """What still runs on each node."""
        return {node: found for node in self.cluster.nodes if (found := self.cluster.processes(node))}

    stayed: str = ""
    """What had to be killed at the end."""

    def end(self, timeout_s: float) -> int | None:
        """The same; nothing is left on any node afterwards, and `left_s` is None where something had to be killed."""
        status = super().end(timeout_s)
        until_s = time.monotonic() + (GONE_S if status is not None else 0.0)
        while (left := self.left()) and time.monotonic() < until_s:
            time.sleep(0.1)
        if left:
            self.left_s = None
            self.stayed = "; ".join(f"node {node}: {', '.join(map(_words, pids))}" for node, pids in left.items())
        for pid in (pid for pids in left.values() for pid in pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return status


def _words(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:100]
    return "gone"
