"""Fault tolerance of a run."""

from __future__ import annotations

from mpisgd.base.checks import require
from mpisgd.comm.mpi import ulfm
from mpisgd.config import Config, FaultOptions, compatibility, replace


def of(config: Config) -> bool:
    """Return whether others go on when a learner dies. Raises ConfigError: asked for without failure reports."""
    mode = config.faults.mode
    if mode == "tolerant":
        needs = "'auto' or 'fail-fast': tolerant needs an MPI with reports of failures; Open MPI 5: mpirun --with-ft ulfm ..."
        require(ulfm.enabled(), "faults.mode", mode, needs)
    wanted = replace(config, faults=FaultOptions(mode="tolerant"))
    possible = not any("tolerant" in pair for pair in compatibility.refused(wanted))
    return mode != "fail-fast" and possible and ulfm.enabled()


def said(config: Config, tolerant: bool, beats: bool) -> str:
    """Return words for the first line; `beats`: whether hanging ranks are noticed."""
    if tolerant:
        return f"fault-tolerant: learners may die, or hang for {config.faults.patience_s:g} s"
    return f"fail-fast{f': ends when a rank dies, or hangs for {config.faults.patience_s:g} s' * beats}"
