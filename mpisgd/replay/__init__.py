"""A log is a proof (DESIGN 4, law 6): the run's own loops, given messages in the log's order, write the same rows and weights.

    from mpisgd import replay
    assert not replay.check("results/run")                          # "" = proven, else why not
    print(*replay.replay("results/run", until=100).lines(), sep="\\n")

1. Can the log's numbers and seconds be (`checks`)?
2. Does each rank, run again, do what the log says (`rerun`)?
3. Does a virtual run take the same seconds, simulated again (`again`)?

Bits are the same only with the same libraries, kind of CPU or GPU, and threads.
"""

from __future__ import annotations

from mpisgd.job.parts import UserObjects
from mpisgd.replay.checks.proof import Proof
from mpisgd.replay.prove import check, replay

__all__ = ["Proof", "UserObjects", "check", "replay"]
