"""A run's directory, read: tables over all shards, configuration, books. Works on finished, running and killed runs."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mpisgd.base import contained
from mpisgd.base.errors import DataError
from mpisgd.base.speech import check_visible
from mpisgd.records.log import schema, sums
from mpisgd.records.log.counts import Counts
from mpisgd.records.log.layouts import Begins, Layout, begins
from mpisgd.records.log.rank_file import FILE, Rows, continued, read_summary, read_sums
from mpisgd.records.log.schema import LogRows

_COUNTED = 4096
"""Rows that are counted at a time: what is chosen of them is copied."""


_SUMS = ("nbytes", "crc32")


@dataclass(frozen=True)
class Books:
    """The account of gradients of one shard: pushed = applied + dropped + rejected + in flight (DESIGN 4, law 4)."""

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
    """What a run's directory says of it besides the log: config.toml, DONE, and which files are those of the last attempt.

    Raises DataError where the directory is no run, or something in it leads out of it (`contained`).
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        config = self.path / schema.CONFIG
        if not config.is_file():
            raise DataError(f"{self.path} is no run directory of mpisgd: it has no {schema.CONFIG}")
        contained.check_directory(self.path)
        try:
            text = config.read_text(encoding="utf-8")
            sums.check_text(str(config), text)
            self.config: dict[str, Any] = tomllib.loads(text)
        except (ValueError, RecursionError) as error:  # not TOML, or not even text
            raise DataError(f"{config} is damaged: {error}") from error
        if "environment" not in self.config:
            raise DataError(f"{config} was not written by a run: it has no [environment]")
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
        return int(self.told(self.attempt).get("learners", self.config["environment"]["learners"]))

    @property
    def teams(self) -> list[list[int]]:
        """The ranks that compute for each learner, where they sum their gradients on their node; else empty."""
        return [list(team) for team in self.config["environment"].get("teams", [])]

    @cached_property
    def shards(self) -> int:
        return int(self.told(self.attempt).get("shards", self.config["shards"]))

    def told(self, attempt: int) -> dict[str, Any]:
        """Entries of config.toml on one attempt: learners, shards, epochs ...; nothing where the run was never continued."""
        return self._attempts.get(attempt, {})

    def _newest_files(self) -> list[Path]:
        """Files of the last attempt for which all shards have begun a log, in the order of shards; then the evaluator's last."""
        found: dict[int, list[Path]] = {}
        for path in self.path.glob("*.h5"):
            match = FILE.match(path.name)
            if match:
                found.setdefault(int(match[3]), []).append(path)
        own = self.config["shards"]
        whole = [
            at
            for at, paths in found.items()
            if sum(path.name.startswith("shard-") for path in paths) == self.told(at).get("shards", own)
        ]
        self.attempt = max(whole, default=0)
        shards = sorted(path for path in found.get(self.attempt, []) if path.name.startswith("shard-"))
        evaluators = [self.path / schema.evaluator_file(at) for at in range(self.attempt, -1, -1)]
        return [*shards, *[path for path in evaluators if path.is_file()][:1]]

    @property
    def done(self) -> dict[str, Any] | None:
        """Entries of DONE; None while the run is under way or where it did not finish."""
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
    """A run's rows: the files that they lie in, joined over shards and attempts, and the coordinator's.

    Raises DataError also where a log file is missing, foreign, of another schema version, or shorter than it says.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._checked = False
        self._tables: dict[str, LogRows] = {}
        self._summaries: np.ndarray | None = None

    @cached_property
    def begins(self) -> Begins:
        """Begin of the tables' rows, but those of `evaluations`, which are all there."""
        return Begins() if not self._files else begins(self._files[0])

    @property
    def earlier(self) -> list[Layout]:
        """The layouts before: the parts of the run that had another number of learners or shards."""
        found: list[Layout] = []
        here = self.begins
        while here.before:
            last = max(attempt for _, attempt, _ in here.before)
            before = begins(self.path / schema.shard_file(0, last))
            learners = int(self.told(last).get("learners", self.lambda_))
            found.append(Layout(learners, before.clock, here.clock, here.rows_before(self.path)))
            here = before
        return found[::-1]

    def table(self, name: str) -> LogRows:
        """The rows of one table over all shards (shard by shard, each in its own order), dtype `schema.TABLES[name]`."""
        if name not in self._tables:
            parts = [each.rows(name) for each in self.parts]
            self._check_files()
            _ = self.begins  # what is read of a table may be asked about when its file is there no more
            self._tables[name] = schema.joined(name, parts)
        return self._tables[name]

    def chunks(self, name: str) -> Iterator[LogRows]:
        """Read the rows some at a time: there may be more than memory holds. Not of a run that is being written."""
        if name in self._tables:
            yield self._tables[name]
            return
        self._check_files()
        for each in self.parts:
            yield from each.chunks(name)

    @cached_property
    def parts(self) -> list[Rows]:
        """Of all files, attempt by attempt: what a file continues is written when it is made."""
        return [part for path in self._files for part in continued(path)]

    def parts_of(self, shard: int) -> list[Rows]:
        """The files of a shard, attempt by attempt, in the last layout."""
        return continued(self._files[shard])

    @property
    def summaries(self) -> np.ndarray:
        """Summaries, one row per shard, dtype `schema.SUMMARY`; `final_clock` is -1 where the shard did not leave in order.

        Read once, like the tables; of a run under way, read it before them: a shard that has left has written all its rows.
        """
        if self._summaries is None:
            self._check_files()
            rows = [read_summary(path) for path in self._files if path.name.startswith("shard-")]
            self._summaries = np.concatenate([np.empty(0, schema.SUMMARY), *rows])
        return self._summaries

    @cached_property
    def is_batch(self) -> bool:
        """Whether a coordinator has dealt portions of a batch."""
        return (self.path / schema.coordinator_file()).is_file()

    def of_coordinator(self, name: str) -> LogRows:
        """The rows of a table of the coordinator's, dtype `schema.COORDINATOR[name]`; none where there is no coordinator."""
        parts = [rows.rows(name) for rows in self.parts_of_coordinator]
        return np.concatenate([np.empty(0, schema.COORDINATOR[name]), *parts])

    @property
    def parts_of_coordinator(self) -> list[Rows]:
        """The coordinator's files, attempt by attempt, also before slices were cut anew; empty where there is no coordinator."""
        paths = (self.path / schema.coordinator_file(at) for at in range(self.attempt, -1, -1))
        return next((continued(path) for path in paths if path.is_file()), [])

    @property
    def _ended(self) -> bool:
        return bool((self.summaries["final_clock"] >= 0).all())

    def _check_files(self) -> None:
        present = {path.name for path in self._files}
        expected = {schema.shard_file(shard, self.attempt) for shard in range(self.shards)}
        if expected - present:
            raise DataError(f"{self.path} lacks {', '.join(sorted(expected - present))}: was the run started without a log?")
        self._check_sums()

    def _check_sums(self) -> None:
        """Raises DataError where a file of the log is not the one of which DONE tells."""
        if not self._checked:
            for name, told in dict((self.done or {}).get("files", {})).items():
                path = self.path / Path(name).name
                if not path.is_file() or read_sums(path) != told:
                    raise DataError(f"{path} is damaged, or was edited: its checksums are not those of which {schema.DONE} tells")
            self._checked = True


class Run(Tables):
    """Read access to a run: the tables of its log by name, and what they come to."""

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
        """The last clock of a shard, by its summary, or else its counts."""
        said = int(self.summaries["final_clock"][shard])
        return said if said >= 0 else max(self.begins.clock, self.counts[shard].updates.clock)

    @cached_property
    def counts(self) -> list[Counts]:
        """The sums of each shard's pushes and updates."""
        self._check_files()
        counts = [Counts() for path in self._files if path.name.startswith("shard-")]
        shards = set(range(len(counts)))
        for name in ("pushes", "updates"):
            # whoever writes the tables of a run that has not ended may be at it: they are read whole
            for rows in self.chunks(name) if self._ended else [self.table(name)]:
                for start in range(0, len(rows), _COUNTED):
                    some = rows[start : start + _COUNTED]
                    for shard in shards & set(np.unique(some["shard"]).tolist()):
                        getattr(counts[shard], name).add(some[some["shard"] == shard])
        return counts

    def ended(self, shard: int) -> tuple[np.void, Counts, Books]:
        """Read what the files of a shard that has left say, without those of other shards: summary, counts, account."""
        summary = read_summary(self._files[shard])[0]
        counts = Counts()
        for name in ("pushes", "updates"):
            for rows in (rows for part in self.parts_of(shard) for rows in part.chunks(name)):
                for start in range(0, len(rows), _COUNTED):
                    getattr(counts, name).add(rows[start : start + _COUNTED])
        return summary, counts, _account(summary, counts.pushes.books(int(summary["final_clock"])))

    def books(self) -> list[Books]:
        """The account of every shard; of an unfinished run, that of what was logged."""
        each = enumerate(zip(self.summaries, self.counts, strict=True))
        return [_account(summary, counts.pushes.books(self.final_clock(shard))) for shard, (summary, counts) in each]


def _account(summary: np.void, learners: np.ndarray) -> Books:
    """The account of a shard from those of its learners."""
    pushed, *others = learners.sum(axis=0).tolist()
    return Books(int(summary["shard"]), int(summary["pushed"]) if summary["final_clock"] >= 0 else pushed, *others)
