"""The log of the coordinator of a batch optimisation: portions and iterations, in a file of its own (`log/schema.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mpisgd.base import durable
from mpisgd.records.log.schema import ITERATIONS, Outcome
from mpisgd.records.log.writer import TableFile


class CoordinatorLog:
    """Writes its two tables; `path`: where they lie, None = nothing is kept."""

    def __init__(self, file: TableFile, path: Path | None = None) -> None:
        self._file = file
        self._path = path

    def portion(self, dealt: Any, outcome: Outcome, seq: int = -1) -> None:
        """What became of a portion (`sandblaster.coordinator.Dealt`); `seq`: of the push that it is in."""
        row = (dealt.clock, dealt.portion, dealt.learner_id, seq, dealt.samples, dealt.loss, dealt.dealt_s, dealt.done_s)
        self._file.append("portions", (*row, dealt.compute_s, dealt.delay_s, outcome, dealt.copy))

    def iteration(self, **fields: float) -> None:
        """One row of `iterations`; the keywords are its columns."""
        self._file.append("iterations", tuple(fields[name] for name in ITERATIONS.names or ()))

    def rows(self) -> list[int]:
        """Rows of each table, so far."""
        return self._file.rows()

    def sync(self) -> None:
        """What it has is on the disk. Raises StorageError, OSError."""
        self._file.flush()
        if self._path is not None:
            durable.sync(self._path)

    def close(self) -> None:
        self._file.close()
