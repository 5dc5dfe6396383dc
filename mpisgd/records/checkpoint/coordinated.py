"""A coordinator's part of a checkpoint: plain numbers, in a file that is there before the shards are told to save (`sandblaster/`).

Whichever shard writes the manifest puts it in there: so it is complete, or there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mpisgd.base import storage
from mpisgd.records.checkpoint import checkpoint as disk
from mpisgd.records.coordinator_log import CoordinatorLog


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
