"""The log of the coordinator of a batch optimisation: portions and iterations, in a file of its own (`log/schema.py`)."""

from __future__ import annotations

from typing import Any

from mpisgd.records.log.schema import ITERATIONS, Outcome
from mpisgd.records.log.writer import TableFile


class CoordinatorLog:
    """Writes its two tables."""

    def __init__(self, file: TableFile) -> None:
        self._file = file

    def portion(self, dealt: Any, outcome: Outcome, seq: int = -1) -> None:
        """What became of a portion (`sandblaster.coordinator.Dealt`); `seq`: of the push that it is in."""
        row = (dealt.clock, dealt.portion, dealt.learner_id, seq, dealt.samples, dealt.loss, dealt.dealt_s, dealt.done_s)
        self._file.append("portions", (*row, dealt.compute_s, dealt.delay_s, outcome, dealt.copy))

    def iteration(self, **fields: float) -> None:
        """One row of `iterations`; the keywords are its columns."""
        self._file.append("iterations", tuple(fields[name] for name in ITERATIONS.names or ()))

    def close(self) -> None:
        self._file.close()
