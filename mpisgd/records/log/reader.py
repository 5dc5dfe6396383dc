"""A run's directory, read: finished, running or killed."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mpisgd.base import safe_read
from mpisgd.base.errors import DataError
from mpisgd.base.terminal import check_visible
from mpisgd.config import Config, older
from mpisgd.records.log import schema, sums
from mpisgd.records.log.continuing import Begins, Layout, begins, continued
from mpisgd.records.log.counts import Counts
from mpisgd.records.log.rank_file import FILE, Rows, attempt_of, read_summary, read_sums
from mpisgd.records.log.schema import LogRows

_COUNTED = 4096
"""Rows counted at a time: chosen rows are copied."""


_SUMS = ("nbytes", "crc32")


@dataclass(frozen=True)
class Books:
    """Account of a shard's gradients: pushed = applied + dropped + rejected + in flight (DESIGN 4, law 4)."""

    shard: int
    pushed: int
    applied: int
    dropped: int
    rejected: int
    in_flight: int

    @property
    def balanced(self) -> bool:
        return self.pushed == self.applied + self.dropped + self.rejected + self.in_flight


class Directory:
    """A run's directory besides the tables: config.toml, DONE, files of the last attempt.

    Raises DataError if the directory is no run, or something leads out (`safe_read`).
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        config = self.path / schema.CONFIG
        if not config.is_file():
            raise DataError(f"{self.path} is no run directory of mpisgd: {schema.CONFIG} is missing")
        safe_read.check_directory(self.path)
        try:
            text = config.read_text(encoding="utf-8")
            sums.check_text(str(config), text)
            self.config = older.renewed(tomllib.loads(text))
        except (ValueError, RecursionError) as error:  # not TOML, or not even text
            raise DataError(f"{config} is damaged: {error}") from error
        except FileNotFoundError as error:
            raise DataError(f"{config} was removed meanwhile: another job may be replacing the run") from error
        if "environment" not in self.config:
            raise DataError(f"{config} was not written by a run: [environment] is missing")
        for table, size in ((self.config, "shards"), (self.config["environment"], "learners")):
            if not isinstance(table.get(size), int):
                raise DataError(f"{config} was not written by a run: {size} = {table.get(size)!r}, expected a number")
        check_visible(str(config), self.config, free="kwargs")
        attempts = self.config["environment"].get("attempts", [])
        self._attempts = {each["attempt"]: each for each in attempts if isinstance(each, dict) and "attempt" in each}
        self._files = self._newest_files()

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def environment(self) -> dict[str, Any]:
        return dict(self.config["environment"])

    @property
    def lambda_(self) -> int:
        return int(self.entries_of(self.attempt).get("learners", self.config["environment"]["learners"]))

    @property
    def teams(self) -> list[list[int]]:
        """Ranks that compute for each learner, if learners are teams; else empty."""
        return [list(team) for team in self.config["environment"].get("teams", [])]

    @cached_property
    def shards(self) -> int:
        return int(self.entries_of(self.attempt).get("shards", self.config["shards"]))

    def slices_of(self, attempt: int) -> tuple[int, ...]:
        """Return an attempt's sizes of slices; () = even. Raises DataError."""
        told = self.entries_of(attempt)
        sizes, shards = (told or self.environment).get("slices", []), told.get("shards", self.config["shards"])
        fit = isinstance(sizes, list) and all(type(each) is int and each > 0 for each in sizes)
        if not fit or len(sizes) not in (0, shards) or sum(sizes) not in (0, self.environment.get("parameters")):
            where = self.path / schema.CONFIG
            raise DataError(f"{where}: [environment] slices = {sizes!r}, expected {shards} sizes with the sum of all parameters")
        return tuple(sizes)

    def chunks_of(self, attempt: int) -> int:
        """Return an attempt's chunks of streamed slices. Raises DataError."""
        chunks = (self.entries_of(attempt) or self.environment).get("chunks", Config.chunks)
        if type(chunks) is not int or chunks < 1:
            where = self.path / schema.CONFIG
            raise DataError(f"{where}: [environment] chunks = {chunks!r}, expected an integer above 0")
        return chunks

    def entries_of(self, attempt: int) -> dict[str, Any]:
        """Return config.toml's entries on an attempt, if any."""
        return self._attempts.get(attempt, {})

    def _newest_files(self) -> list[Path]:
        """Return files of the last attempt with logs of all shards, in order; then the evaluator's last."""
        found: dict[int, list[Path]] = {}
        for path in self.path.glob("*.h5"):
            match = FILE.match(path.name)
            if match:
                found.setdefault(int(match[3]), []).append(path)
        own = self.config["shards"]
        whole = [
            at
            for at, paths in found.items()
            if sum(path.name.startswith("shard-") for path in paths) == self.entries_of(at).get("shards", own)
        ]
        self.attempt = max(whole, default=0)
        shards = sorted(path for path in found.get(self.attempt, []) if path.name.startswith("shard-"))
        evaluators = [self.path / schema.evaluator_file(at) for at in range(self.attempt, -1, -1)]
        return [*shards, *[path for path in evaluators if path.is_file()][:1]]

    @property
    def done(self) -> dict[str, Any] | None:
        """Entries of DONE; None if absent."""
        try:
            text = (self.path / schema.DONE).read_text(encoding="utf-8")
            done = dict(json.loads(text))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise DataError(f"{self.path / schema.DONE} is damaged: {error}") from error
        done = sums.checked(str(self.path / schema.DONE), done, schema.DONE_ENTRIES)
        for name, told in ((each, done[each]) for each in (*schema.SUMMED, "files") if each in done):
            known = _SUMS if name in schema.SUMMED else ()
            if not isinstance(told, dict) or not all(isinstance(told.get(each), int) for each in known):
                raise DataError(f"{self.path / schema.DONE} is damaged: {name} = {told!r}, expected checksums")
        return done


class Tables(Directory):
    """A run's rows, joined over shards and attempts.

    Raises DataError also for a log file missing, foreign, of another schema version, or too short.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._checked = False
        self._tables: dict[str, LogRows] = {}
        self._summaries: np.ndarray | None = None

    @cached_property
    def begins(self) -> Begins:
        return Begins() if not self._files else begins(self._files[0])

    @property
    def earlier(self) -> list[Layout]:
        """Layouts before, oldest first."""
        found: list[Layout] = []
        here = self.begins
        while here.before:
            last = max(attempt_of(rows.path) for shard in here.before for rows in shard)
            before = begins(self.path / schema.shard_file(0, last))
            learners = int(self.entries_of(last).get("learners", self.lambda_))
            found.append(Layout(learners, before.clock, here.clock, here.before))
            here = before
        return found[::-1]

    def table(self, name: str) -> LogRows:
        """Return a table's rows, shard by shard, each in its own order."""
        if name not in self._tables:
            parts = [each.rows(name) for each in self.parts]
            self._check_files()
            _ = self.begins  # may be asked for once the file is gone
            self._tables[name] = schema.joined(name, parts)
        return self._tables[name]

    def chunks(self, name: str) -> Iterator[LogRows]:
        """Yield rows in pieces: a table may exceed memory. Not while the run is written."""
        if name in self._tables:
            yield self._tables[name]
            return
        self._check_files()
        for each in self.parts:
            yield from each.chunks(name)

    @cached_property
    def parts(self) -> list[Rows]:
        """Rows of all files, by attempt; `continues` of a file never changes."""
        return [part for path in self._files for part in continued(path)]

    def parts_of(self, shard: int) -> list[Rows]:
        return continued(self._files[shard])

    @property
    def summaries(self) -> np.ndarray:
        """Summaries, one row per shard; `final_clock` = -1 if the shard did not leave in order.

        Of a run under way, read first: a shard that has left has written all its rows.
        """
        if self._summaries is None:
            self._check_files()
            rows = [read_summary(path) for path in self._files if path.name.startswith("shard-")]
            self._summaries = np.concatenate([np.empty(0, schema.SUMMARY), *rows])
        return self._summaries

    @cached_property
    def is_batch(self) -> bool:
        return (self.path / schema.coordinator_file()).is_file()

    def of_coordinator(self, name: str) -> LogRows:
        """Return a table of the coordinator's; empty without a coordinator."""
        return schema.joined(name, [rows.rows(name) for rows in self.parts_of_coordinator])

    @property
    def parts_of_coordinator(self) -> list[Rows]:
        """The coordinator's files over all layouts, by attempt."""
        paths = (self.path / schema.coordinator_file(at) for at in range(self.attempt, -1, -1))
        return next((continued(path) for path in paths if path.is_file()), [])

    @property
    def _ended(self) -> bool:
        return bool((self.summaries["final_clock"] >= 0).all())

    def _check_files(self) -> None:
        """Raise DataError if a log file is missing, or not as DONE says."""
        present = {path.name for path in self._files}
        expected = {schema.shard_file(shard, self.attempt) for shard in range(self.shards)}
        if expected - present:
            raise DataError(f"{self.path} lacks {', '.join(sorted(expected - present))}: was the run started without a log?")
        if not self._checked:
            for name, told in dict((self.done or {}).get("files", {})).items():
                path = self.path / Path(name).name
                if not path.is_file() or read_sums(path) != told:
                    raise DataError(f"{path} is damaged, or was edited: the checksums do not match {schema.DONE}")
            self._checked = True


class Run(Tables):
    @property
    def pushes(self) -> LogRows:
        return self.table("pushes")

    @property
    def updates(self) -> LogRows:
        return self.table("updates")

    @property
    def evaluations(self) -> LogRows:
        return self.table("evaluations")

    @property
    def events(self) -> LogRows:
        return self.table("events")

    def final_clock(self, shard: int) -> int:
        said = int(self.summaries["final_clock"][shard])
        return said if said >= 0 else max(self.begins.clock, self.counts[shard].updates.clock)

    @cached_property
    def counts(self) -> list[Counts]:
        self._check_files()
        counts = [Counts() for path in self._files if path.name.startswith("shard-")]
        shards = set(range(len(counts)))
        for name in ("pushes", "updates"):
            # a writer may be at the tables of a run under way: read whole
            for rows in self.chunks(name) if self._ended else [self.table(name)]:
                for start in range(0, len(rows), _COUNTED):
                    some = rows[start : start + _COUNTED]
                    for shard in shards & set(np.unique(some["shard"]).tolist()):
                        getattr(counts[shard], name).add(some[some["shard"] == shard])
        return counts

    def ended(self, shard: int) -> tuple[np.void, Counts, Books]:
        """Return summary, counts and account of a shard that has left, from its own files."""
        summary = read_summary(self._files[shard])[0]
        counts = Counts()
        for name in ("pushes", "updates"):
            for rows in (rows for part in self.parts_of(shard) for rows in part.chunks(name)):
                for start in range(0, len(rows), _COUNTED):
                    getattr(counts, name).add(rows[start : start + _COUNTED])
        return summary, counts, _account(summary, counts.pushes.books(int(summary["final_clock"])))

    def books(self) -> list[Books]:
        """Return every shard's account; of an unfinished run, as logged."""
        each = enumerate(zip(self.summaries, self.counts, strict=True))
        return [_account(summary, counts.pushes.books(self.final_clock(shard))) for shard, (summary, counts) in each]


def _account(summary: np.void, learners: np.ndarray) -> Books:
    pushed, *others = learners.sum(axis=0).tolist()
    return Books(int(summary["shard"]), int(summary["pushed"]) if summary["final_clock"] >= 0 else pushed, *others)
