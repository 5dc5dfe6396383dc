"""`mpisgd.open_run`: a run's directory as pandas tables, configuration and weights."""

from __future__ import annotations

from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpisgd.base.errors import ConfigError
from mpisgd.config import Config, config_file
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run

if TYPE_CHECKING:
    import pandas as pd

    from mpisgd.records.weights import State

_NAMED: dict[str, type[IntEnum]] = {"verdict": schema.Verdict, "reason": schema.Reason, "kind": schema.Event}


class OpenRun:
    """A run as it stands when first asked; open a running run again to see more.

    Tables are pandas DataFrames (columns: `docs/reference/log-format.md`); `verdict`, `reason` and `kind` are categories: APPLY,
    STALE, CHECKPOINT ...

    Raises DataError: no run, or a file missing or damaged; ConfigError, at the first table: no pandas.
    """

    def __init__(self, path: str | Path) -> None:
        self._run = Run(path)

    @property
    def path(self) -> Path:
        return self._run.path

    @cached_property
    def config(self) -> Config:
        """User's configuration with defaults; nothing named in it is imported."""
        return config_file.read(self.path / schema.CONFIG)

    @property
    def environment(self) -> dict[str, Any]:
        """[environment] of config.toml: learners, hosts, versions, sizes."""
        return self._run.environment

    @cached_property
    def pushes(self) -> pd.DataFrame:
        """A row per gradient received by a shard."""
        return self._table("pushes")

    @cached_property
    def updates(self) -> pd.DataFrame:
        """A row per update of a shard."""
        return self._table("updates")

    @cached_property
    def evaluations(self) -> pd.DataFrame:
        """A row per snapshot, data split and kind of weights; a column per own metric."""
        return self._table("evaluations")

    @cached_property
    def events(self) -> pd.DataFrame:
        """Snapshots, checkpoints, departures, faults ..."""
        return self._table("events")

    @property
    def done(self) -> dict[str, Any] | None:
        """Entries of DONE: clock, samples, diverged ...; None for an unfinished run."""
        return self._run.done

    @property
    def balanced(self) -> bool:
        """All books balance so far: pushed = applied + dropped + rejected + in flight."""
        return all(books.balanced for books in self._run.books())

    def weights(self, averaged: bool = False, best: bool = False) -> State:
        """Return the last weights as a state dict, their average, or the best (`evaluation.best`); imports torch.

        Raises CheckpointError: the run has not ended, did not average, or kept no best.
        """
        from mpisgd.records import weights

        if best:
            return weights.best_of_run(self._run)
        return weights.of_run(self._run, averaged=averaged)

    def _table(self, name: str) -> pd.DataFrame:
        try:
            import pandas as pd
        except ImportError as error:
            raise ConfigError("tables of open_run are pandas': pip install pandas, or mpisgd[pandas]") from error
        table = pd.DataFrame.from_records(self._run.table(name))
        for column, kinds in _NAMED.items():
            if column in table:
                names = {int(each): each.name for each in kinds}
                table[column] = pd.Categorical(table[column].map(names), categories=list(names.values()))
        return table


def open_run(path: str | Path) -> OpenRun:
    """Open a run's directory: real or virtual, finished, running or killed, of this or an earlier commit."""
    return OpenRun(path)
