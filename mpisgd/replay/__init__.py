"""A log is a proof (DESIGN 4, law 6): a run computed again serially, in its log's order, to the same bits.

    from mpisgd import replay
    assert not replay.check("results/run")                          # "" = proven, else why not
    print(*replay.replay("results/run", until=100).lines(), sep="\\n")

1. Would the protocol, given these pushes, decide alike (`walk`, `learners`, `order`)?
2. Is each loss, computed from logged clocks in logged order, the recorded loss (`serial`)?
3. Are the last weights the saved weights (`difference`)?

Bits are the same only with the same libraries, kind of CPU and threads. A GPU's run is compared within a tolerance.
"""

from __future__ import annotations

from mpisgd.job.parts import UserObjects
from mpisgd.replay.proof import Proof
from mpisgd.replay.prove import check, replay

__all__ = ["Proof", "UserObjects", "check", "replay"]
