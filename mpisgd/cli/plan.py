"""`mpisgd plan RUN ...`: from the logs of runs, which N, b or n, and how many shards."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import tyro

from mpisgd.base.errors import EXIT_OK, ConfigError
from mpisgd.config import hints


@dataclass(frozen=True)
class Options:
    """Predict from the logs of runs, real or virtual: seconds per update and the best number of backup learners; staleness and
    throughput of n-softsync; how many shards pay. Costs are the first run's; the others tell how many updates a target takes.
    Written as CSV, Markdown and PNG, with what was assumed."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """The runs' directories; several of hardsync or backup, with different N, tell updates to the target as a function of N."""
    out: Path | None = None
    """Folder for tables and figures; default: <first run>/plan."""
    target_error: float | None = None
    """Test error to be reached, a share: 0.02 is 2 %; of thetabar where a run has it."""
    target_loss: float | None = None
    """Test loss to be reached."""
    noise_samples: float | None = None
    """Gradient noise scale in samples, in place of the log's; inf: as many samples whatever N is."""
    learners: int | None = None
    """Most learners for which shards are planned; default: four times the run's."""
    ranks_per_node: int | None = None
    """Ranks on each node; default: the run's."""
    bandwidth: float | None = None
    """Bytes per second into, and out of, one rank, instead of the log's."""
    node_bandwidth: float | None = None
    """Bytes per second into, and out of, one node, instead of the log's."""
    latency_s: float | None = None
    """Seconds of a message without bytes, instead of the log's."""
    pushes: int = 20_000
    """Pushes of each virtual run: more take longer and are more precise."""
    from_log: bool = False
    """Fit the costs of a virtual run from its log too, as those of a real one, instead of taking them from its configuration."""
    trust: bool = False
    """Import and call the weights of stale gradients (protocol.modulation) that the first run names, if they are its own code."""


def main(argv: list[str]) -> int:
    found = hints.foreign(argv, {item.name for item in fields(Options)}, hints.PLAN)
    if found is not None:
        raise ConfigError(f"unknown option {found[0]}: {found[1]}")
    options = tyro.cli(Options, args=argv, prog="mpisgd plan")
    from mpisgd.plan import Wishes, plan
    from mpisgd.report.look import Look, applied

    network = {name: getattr(options, name) for name in ("bandwidth", "node_bandwidth", "latency_s")}
    wishes: dict[str, Any] = {each.name: getattr(options, each.name) for each in fields(Wishes) if each.name != "network"}
    wishes["network"] = {name: value for name, value in network.items() if value is not None}
    with applied(Look()):
        plan(options.runs, options.out, Wishes(**wishes))
    return EXIT_OK
