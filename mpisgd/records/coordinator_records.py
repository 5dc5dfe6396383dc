"""What the coordinator of a batch optimisation writes: its log, and its part of checkpoints (`sandblaster/`).

The log, of portions, iterations and commands, is in a file of its own (`log/schema.py`). What a checkpoint has of it are plain
numbers, in a file that is there before the shards are told to save: whichever shard writes the manifest puts them in there. So they
are complete, or there is no checkpoint.
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
    """Writes its tables; `path`: where they lie, None = nothing is kept."""

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

    def command(self, **fields: float) -> None:
        """One row of `commands`; the keywords are its columns."""
        self._file.append("commands", tuple(fields[name] for name in COMMANDS.names or ()))

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


class Coordinated:
    """What a coordinator saves.

    Args:
        every: updates from one checkpoint to the next, at least; 0 = one is written only where a signal comes.
        continues: rows before, as in the log file's attribute (`schema`).
        complain: is told where it cannot be written.
    """

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
        """The log so far, to be saved with what is known now."""
        return [*self._continues, [self._attempt, *self._log.rows()]]

    def due(self, before: int, clock: int) -> bool:
        """Whether one is to be written at this clock, where there was one, or none was due, until the clock before."""
        return self._every > 0 and clock // self._every > before // self._every

    def write(self, numbers: dict[str, Any]) -> bool:
        """Write them beside what the shards will write; whether that could be done."""
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
