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
_DAEMONS = ("prted", "sh", "nsenter")
"""Open MPI's, and what has started them; none of them is a rank, nor waited for by anybody."""


class Job(job.Job):
    """`mpirun ... mpisgd train words...` on the first node, with `spread[k]` ranks on node k, one node's after the other's."""

    def __init__(
        self,
        cluster: Cluster,
        spread: Sequence[int],
        words: Sequence[str],
        options: Sequence[str] = (),
        module: str = "mpisgd",
        **env: str,
    ) -> None:
        self.cluster = cluster
        self.spread = spread
        all_options = [*options, *cluster.launching(spread)]
        super().__init__(sum(spread), words, all_options, module, inside=cluster.inside(0), **(ENVIRONMENT | env))

    def _is_rank(self, pid: int) -> bool:
        """A child of the launcher, or of its daemon on another node; a rank's own children have other parents."""
        return _comm(job.parent(pid)) in _LAUNCHERS and any(pid in self.cluster.processes(node) for node in self.cluster.nodes)

    def node_of(self, rank: int) -> int:
        """On which node a rank is."""
        return next(node for node in self.cluster.nodes if rank < sum(self.spread[: node + 1]))

    def left(self) -> dict[int, list[int]]:
        """What still runs on each node."""
        return {node: found for node in self.cluster.nodes if (found := self.cluster.processes(node))}

    stayed: str = ""
    """What had to be killed at the end."""
    daemons_left: bool = False
    """Whether Open MPI's daemons were: behind a link that is down they wait as long as TCP does."""

    def end(self, timeout_s: float) -> int | None:
        """The same; nothing is left on any node afterwards, and `left_s` is None where more than daemons had to be killed."""
        status = super().end(timeout_s)
        until_s = time.monotonic() + (GONE_S if status is not None else 0.0)
        while (left := self.left()) and time.monotonic() < until_s:
            time.sleep(0.1)
        self.stayed = "; ".join(f"node {node}: {', '.join(map(_words, pids))}" for node, pids in left.items())
        stayed = [pid for pids in left.values() for pid in pids]
        if not all(_comm(pid) in _DAEMONS for pid in stayed):
            self.left_s = None
        self.daemons_left = bool(stayed) and self.left_s is not None
        for pid in stayed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return status


def _comm(pid: int) -> str:
    with contextlib.suppress(OSError):
        return (Path("/proc") / str(pid) / "comm").read_text().strip()
    return "sh"  # it has gone meanwhile


def _words(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:100]
    return "gone"
