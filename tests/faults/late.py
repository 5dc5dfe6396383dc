"""`python -m tests.faults.late train ...`: mpisgd itself, but where ranks of a fault-tolerant run meet, the first one is slow.

It is slow to see that it was heard: whoever may leave has left by then. And MPI, to which a rank that has left has failed, tells it
of that first, as it may.
"""

from __future__ import annotations

import sys
import time
from typing import Any

LATE_S = 0.5


def main() -> int:
    from mpisgd.__main__ import main as mpisgd
    from mpisgd.comm.mpi import tolerant, ulfm, wire
    from mpisgd.comm.mpi.library import MPI

    until, settle = tolerant.TolerantWire._until, tolerant.TolerantWire.settle
    meeting: list[bool] = []

    def late_until(self: Any, request: Any, peer: int, *arguments: Any, **words: Any) -> bool:
        if meeting and self.rank == wire.HUB:
            time.sleep(LATE_S)
            if peer in ulfm.seen_failed(self._comm):
                self._learn(MPI.Exception(MPI.ERR_PROC_FAILED))
                return False
        return until(self, request, peer, *arguments, **words)

    def marked_settle(self: Any, *arguments: Any) -> Any:
        meeting.append(True)
        try:
            return settle(self, *arguments)
        finally:
            meeting.clear()

    tolerant.TolerantWire._until = late_until  # type: ignore[method-assign]
    tolerant.TolerantWire.settle = marked_settle  # type: ignore[method-assign,assignment]
    return mpisgd()


if __name__ == "__main__":
    sys.exit(main())
