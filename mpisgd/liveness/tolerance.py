"""Whether a run is fault-tolerant, and what it says of that when it starts."""

from __future__ import annotations

from mpisgd.base.checks import require
from mpisgd.comm.mpi import ulfm
from mpisgd.config import Config, FaultOptions, compatibility, replace


def of(config: Config) -> bool:
    """Whether the others are to go on when a learner dies.

    Raises ConfigError where that is asked for, and the launcher does not tell of failures.
    """
    mode = config.faults.mode
    if mode == "tolerant":
        needs = "'auto' or 'fail-fast': tolerant needs an MPI that tells of failures; Open MPI 5: mpirun --with-ft ulfm ..."
        require(ulfm.enabled(), "faults.mode", mode, needs)
    wanted = replace(config, faults=FaultOptions(mode="tolerant"))
    possible = not any("tolerant" in pair for pair in compatibility.refused(wanted))
    return mode != "fail-fast" and possible and ulfm.enabled()


def said(config: Config, tolerant: bool, beats: bool) -> str:
    """In the first line of a run; `beats`: whether it is noticed that a rank hangs (`pulse.py`)."""
    if tolerant:
        return f"fault-tolerant: learners may die, or hang for {config.faults.patience_s:g} s"
    return f"fail-fast{f': ends when a rank dies, or hangs for {config.faults.patience_s:g} s' * beats}"
