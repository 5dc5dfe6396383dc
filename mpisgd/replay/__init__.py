"""A log is a proof (DESIGN 4, law 6): a run computed again, serially, in the order of its log, to the same bits.

    from mpisgd import replay
    assert not replay.check("results/run")                          # "" = proven, else why not
    print(*replay.replay("results/run", until=100).lines(), sep="\\n")

1. The log is checked without computing (`walk`, `learners`, `order`): would the protocol, fed these pushes, have decided so?
2. Each gradient is computed again from the weights of the clocks that its pushes name, with the draws that (seed, learner_id, seq)
   names; summed, weighted and applied by each shard in the order of its rows (`serial`). Each loss must be the recorded one.
3. The last weights must be those that the run saved (`difference`).

Bit for bit holds where the same libraries compute on the same kind of CPU with as many threads; a run that computed on a GPU is
computed again on the CPU and compared within a tolerance.
"""

from __future__ import annotations

from mpisgd.job.parts import Brought
from mpisgd.replay.proof import Proof
from mpisgd.replay.prove import check, replay

__all__ = ["Brought", "Proof", "check", "replay"]
