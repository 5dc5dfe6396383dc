"""`mpisgd plan RUN ...`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import tyro

from mpisgd.base.errors import EXIT_OK
from mpisgd.config import hints


@dataclass(frozen=True)
class Options:
    """Predict from logs of runs, real or virtual: seconds per update and the best number of backup learners; staleness and
    throughput of n-softsync; useful shards. Costs are the first run's; all runs tell updates to a target. Written as CSV, Markdown
    and PNG, with assumptions."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Runs' directories; several of hardsync or backup, with different N, tell updates to the target over N."""
    out: Path | None = None
    """Folder for tables and figures; default: <first run>/plan."""
    target_error: float | None = None
    """Test error to reach, a share: 0.02 is 2 %; of thetabar if kept."""
    target_loss: float | None = None
    """Test loss to reach."""
    noise_samples: float | None = None
    """Gradient noise scale in samples, not the log's; inf: as many samples at any N."""
    learners: int | None = None
    """Most learners to plan shards for; default: four times the run's."""
    ranks_per_node: int | None = None
    """Ranks on each node; default: the run's."""
    bandwidth: float | None = None
    """Bytes per second into, and out of, a rank, not the log's."""
    node_bandwidth: float | None = None
    """Bytes per second into, and out of, a node, not the log's."""
    latency_s: float | None = None
    """Seconds of a message without bytes, not the log's."""
    pushes: int = 20_000
    """Pushes of each virtual run: more are slower and more precise."""
    from_log: bool = False
    """Fit a virtual run's costs from its log, as a real run's, not by its configuration."""
    trust: bool = False
    """Import and call the first run's own weights of stale gradients (protocol.modulation)."""


def main(argv: list[str]) -> int:
    hints.refuse_foreign(argv, {item.name for item in fields(Options)}, hints.PLAN)
    options = tyro.cli(Options, args=argv, prog="mpisgd plan")
    from mpisgd.plan import Wishes, plan
    from mpisgd.report.look import Look, applied

    network = {name: getattr(options, name) for name in ("bandwidth", "node_bandwidth", "latency_s")}
    wishes: dict[str, Any] = {each.name: getattr(options, each.name) for each in fields(Wishes) if each.name != "network"}
    wishes["network"] = {name: value for name, value in network.items() if value is not None}
    with applied(Look()):
        plan(options.runs, options.out, Wishes(**wishes))
    return EXIT_OK
