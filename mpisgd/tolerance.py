"""Whether a run is fault-tolerant, and what it says of that when it starts."""

from __future__ import annotations

from mpisgd import ulfm
from mpisgd.checks import require
from mpisgd.config import AllreduceOptions, Config


def of(config: Config) -> bool:
    """Whether the others are to go on when a learner dies.

    Raises ConfigError where that is asked for, and cannot be.
    """
    mode = config.faults.mode
    possible = not isinstance(config.protocol, AllreduceOptions) and config.aggregation == "none"
    if mode == "tolerant":
        needs = "'auto' or 'fail-fast': tolerant needs"
        require(possible, "faults.mode", mode, f"{needs} learners that are neither shards (allreduce) nor in teams (aggregation)")
        require(
            ulfm.enabled(), "faults.mode", mode, f"{needs} an MPI that tells of failures; Open MPI 5: mpirun --with-ft ulfm ..."
        )
    return mode != "fail-fast" and possible and ulfm.enabled()


def said(config: Config, tolerant: bool) -> str:
    """In the first line of a run."""
    if tolerant:
        return f"fault-tolerant: learners may die, or hang for {config.faults.patience_s:g} s"
    return "fail-fast"
