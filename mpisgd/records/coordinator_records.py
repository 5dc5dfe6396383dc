"""Records of a batch optimisation's coordinator (`sandblaster/`): a log of its own, and a part of checkpoints.

The part is written before the shards are told to save, and goes into the manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mpisgd.base import durable, storage
from mpisgd.records.checkpoint import checkpoint as disk
from mpisgd.records.log.schema import COMMANDS, ITERATIONS, Outcome
from mpisgd.records.log.writer import TableFile


class CoordinatorLog:
    """Writer of the coordinator's tables; `path`: None = keep nothing."""

    def __init__(self, file: TableFile, path: Path | None = None) -> None:
        self._file = file
        self._path = path

    def portion(self, dealt: Any, outcome: Outcome, seq: int = -1) -> None:
        """Append a `sandblaster.evaluations.Dealt`; `seq`: of its push."""
        row = (dealt.clock, dealt.portion, dealt.learner_id, seq, dealt.samples, dealt.loss, dealt.dealt_s, dealt.done_s)
        self._file.append("portions", (*row, dealt.compute_s, dealt.delay_s, outcome, dealt.copy))

    def iteration(self, **fields: float) -> None:
        self._file.append("iterations", tuple(fields[name] for name in ITERATIONS.names or ()))

    def command(self, **fields: float) -> None:
        self._file.append("commands", tuple(fields[name] for name in COMMANDS.names or ()))

    def rows(self) -> list[int]:
        return self._file.rows()

    def sync(self) -> None:
        """Bring all rows to disk. Raises StorageError, OSError."""
        self._file.flush()
        if self._path is not None:
            durable.sync(self._path)

    def close(self) -> None:
        self._file.close()


class Coordinated:
    """A coordinator's part of checkpoints; `every`: least updates between checkpoints, 0 = only at a signal."""

    def __init__(
        self,
        run: Path,
        log: CoordinatorLog,
        *,
        attempt: int,
        every: int,
        continues: Sequence[Sequence[int]],
        complain: Callable[[str], None],
    ) -> None:
        self._run = run
        self._log = log
        self._attempt = attempt
        self._every = every
        self._continues = [list(rows) for rows in continues]
        self._complain = complain

    def rows(self) -> list[list[int]]:
        return [*self._continues, [self._attempt, *self._log.rows()]]

    def due(self, before: int, clock: int) -> bool:
        """Return whether a multiple of `every` lies after `before`, up to `clock`."""
        return self._every > 0 and clock // self._every > before // self._every

    def write(self, numbers: dict[str, Any]) -> bool:
        directory = disk.directory_of(self._run, numbers["clock"])
        try:
            self._log.sync()
            directory.parent.mkdir(exist_ok=True)
            directory.mkdir(exist_ok=True)
            disk.write_json(directory / disk.COORDINATOR, {"attempt": self._attempt, "numbers": numbers})
        except OSError as error:
            self._complain(
                f"the checkpoint of clock {numbers['clock']} could not be written: {error.filename or directory}:"
                f" {storage.cause(error)}; the run goes on, and tries again at the next"
            )
            return False
        return True
