"""A timeline as a Chrome trace: JSON in the Trace Event Format, which https://ui.perfetto.dev and chrome://tracing open.

A host is a process (`pid`), a rank a thread (`tid`). Spans are complete events (`X`), pushes and answers on the shards and
events of the log are instants (`i`), arrows (`s`, `f`) go from a learner's push to the update that its gradient is part of, and
counters (`C`) show each shard's clock and the mean staleness of each update. `ts` and `dur` are microseconds.

Events are written as they are made, block by block: a trace may be larger than memory. Viewers order them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpisgd.analysis.cycles import ACTIVITIES, COMPUTE, PUSH
from mpisgd.analysis.timeline import Timeline
from mpisgd.base.errors import ConfigError
from mpisgd.records.log.schema import Event, Reason, Verdict

_BLOCK = 8192
_NAMES = tuple("injected delay" if name == "delay" else name for name in ACTIVITIES)


def write(path: Path, timeline: Timeline, about: dict[str, Any]) -> int:
    """Write the trace, with `about` as its metadata; makes the folder; returns the number of events.

    Raises ConfigError where the file cannot be written.
    """
    events = 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            file.write(f'{{"displayTimeUnit":"ms","otherData":{json.dumps(about)},"traceEvents":[')
            for event in _Trace(timeline).events():
                file.write(f"{',' if events else ''}\n{event}")
                events += 1
            file.write("\n]}\n")
    except OSError as error:
        raise ConfigError(f"--out {path}: expected a file that can be written: {error}") from error
    return events


class _Trace:
    """The events of a timeline, each as one JSON object."""

    def __init__(self, timeline: Timeline) -> None:
        self._of = timeline
        ranks, shown = timeline.ranks, timeline.ranks.learners[: timeline.learners]
        evaluator = [ranks.evaluator] if ranks.dedicated_evaluator else []
        self._rows = {rank: f"shard {shard}" for shard, rank in enumerate(ranks.shards)}
        self._rows |= dict.fromkeys(evaluator, "evaluator")
        self._rows |= {rank: f"learner {learner_id}" for learner_id, rank in enumerate(shown)}
        hosts = list(dict.fromkeys(ranks.host(rank) for rank in sorted(self._rows)))
        # above every tid: Perfetto takes a thread whose tid is its pid for the main one, and shows it first
        self._processes = {host: max(self._rows) + 1 + at for at, host in enumerate(hosts)}
        where = {rank: f'"pid":{self._processes[ranks.host(rank)]},"tid":{rank}' for rank in self._rows}
        self._shard = [where[rank] for rank in ranks.shards]
        self._learner = [where[rank] for rank in shown]
        self._evaluator = where[ranks.evaluator]
        self._where = where

    def events(self) -> Iterator[str]:
        """Slices come before arrows, which bind to the slice that is open at their `ts`."""
        yield from self._metadata()
        yield from self._updates()
        yield from self._cycles()
        yield from self._evaluations()
        yield from self._arrivals()
        yield from self._answers()
        yield from self._happened()
        yield from self._arrows()

    def _metadata(self) -> Iterator[str]:
        first = {self._of.ranks.host(rank): rank for rank in sorted(self._rows, reverse=True)}
        for at, host in enumerate(self._processes):
            yield _line("M", "process_name", self._where[first[host]], args=f'{{"name":{json.dumps(host)}}}')
            yield _line("M", "process_sort_index", self._where[first[host]], args=f'{{"sort_index":{at}}}')
        for at, (rank, name) in enumerate(self._rows.items()):
            yield _line("M", "thread_name", self._where[rank], args=f'{{"name":"{name}"}}')
            yield _line("M", "thread_sort_index", self._where[rank], args=f'{{"sort_index":{at}}}')

    def _cycles(self) -> Iterator[str]:
        cycles, pushes = self._of.cycles, self._of.pushes
        for at in _blocks(self._of.window.of(cycles.edges[:, 0], cycles.edges[:, -1])):
            row = pushes[cycles.row[at]]
            columns = (cycles.learner_id[at], cycles.edges[at], cycles.known[at])
            told = (row[name] for name in ("seq", "timestamp", "samples", "loss"))
            for learner_id, edges, known, seq, timestamp, samples, loss in _lists(*columns, *told):
                mini_batch = f'{{"seq":{seq},"timestamp":{timestamp},"samples":{samples},"loss":{_number(loss)}'
                for activity, name in enumerate(_NAMES):
                    start, end = edges[activity], edges[activity + 1]
                    args = f'{{"seq":{seq}}}'
                    if activity in (COMPUTE, PUSH):
                        args = mini_batch + ("}" if known or activity == COMPUTE else ',"length":"not logged: at least"}')
                    elif start == end:
                        continue
                    yield _line("X", name, self._learner[learner_id], start, end, args)

    def _updates(self) -> Iterator[str]:
        updates = self._of.updates
        for at in _blocks(self._of.window.of(updates.start, updates.end)):
            row = updates.rows[at]
            told = (row[name] for name in ("shard", "clock", "gradients", "samples", "learning_rate", "mean_loss"))
            columns = (updates.start[at], updates.end[at], updates.staleness[at])
            for start, end, staleness, shard, clock, gradients, samples, learning_rate, loss in _lists(*columns, *told):
                args = (
                    f'{{"clock":{clock},"gradients":{gradients},"samples":{samples},"learning_rate":{_number(learning_rate)},'
                    f'"mean_loss":{_number(loss)},"mean_staleness":{_number(staleness)}}}'
                )
                yield _line("X", "update", self._shard[shard], start, end, args)
                yield _line("C", f"shard {shard} clock", self._shard[shard], end, args=f'{{"updates":{clock}}}')
                if math.isfinite(staleness):
                    yield _line("C", f"shard {shard} staleness", self._shard[shard], end, args=f'{{"mean":{staleness!r}}}')

    def _evaluations(self) -> Iterator[str]:
        evaluations = self._of.evaluations
        for at in _blocks(self._of.window.of(evaluations.start, evaluations.end)):
            row = evaluations.rows[at]
            told = (row[name] for name in ("snapshot", "epochs", "averaged", "train", "loss", "error"))
            for start, end, snapshot, epochs, averaged, train, loss, error in _lists(
                evaluations.start[at], evaluations.end[at], *told
            ):
                args = (
                    f'{{"snapshot":{snapshot},"epochs":{_number(epochs)},"weights":"{"thetabar" if averaged else "theta"}",'
                    f'"data":"{"training" if train else "test"}","loss":{_number(loss)},"error":{_number(error)}}}'
                )
                yield _line("X", "evaluate", self._evaluator, start, end, args)

    def _arrivals(self) -> Iterator[str]:
        for at in _blocks(self._of.window.of(self._of.arrival, self._of.arrival)):
            row = self._of.pushes[at]
            told = ("shard", "learner_id", "seq", "timestamp", "clock", "staleness", "verdict", "reason", "weight", "loss")
            for arrival, shard, learner_id, seq, timestamp, clock, staleness, verdict, reason, weight, loss in _lists(
                self._of.arrival[at], *(row[name] for name in told)
            ):
                args = (
                    f'{{"learner_id":{learner_id},"seq":{seq},"timestamp":{timestamp},"clock":{clock},"staleness":{staleness},'
                    f'"verdict":"{_word(Verdict, verdict)}","reason":"{_word(Reason, reason)}","weight":{_number(weight)},'
                    f'"loss":{_number(loss)}}}'
                )
                yield _line("i", f"{_word(Verdict, verdict)} τ={staleness}", self._shard[shard], arrival, args=args)

    def _answers(self) -> Iterator[str]:
        answer = self._of.answer
        for at in _blocks(self._of.window.of(answer, answer)):
            row = self._of.pushes[at]
            for moment, shard, learner_id in _lists(answer[at], row["shard"], row["learner_id"]):
                yield _line("i", "answer", self._shard[shard], moment, args=f'{{"learner_id":{learner_id}}}')

    def _happened(self) -> Iterator[str]:
        """Rows of `events`."""
        for at in _blocks(self._of.window.of(self._of.moment, self._of.moment)):
            row = self._of.events[at]
            told = (row[name] for name in ("shard", "clock", "kind", "learner_id", "value"))
            for moment, shard, clock, kind, learner_id, value in _lists(self._of.moment[at], *told):
                args = f'{{"clock":{clock},"learner_id":{learner_id},"value":{_number(value)}}}'
                where = self._shard[shard] if shard >= 0 else self._evaluator
                yield _line("i", _word(Event, kind), where, moment, args=args)

    def _arrows(self) -> Iterator[str]:
        """From the begin of a push to the begin of its update, where the window shows both."""
        window, applied = self._of.window, np.flatnonzero(self._of.update >= 0)
        begin = self._of.cycles.edges[self._of.cycle[applied], PUSH]
        end = self._of.updates.start[self._of.update[applied]]
        shown = (begin >= window.start) & (end <= window.end) & (begin <= end)
        for block in _blocks(np.flatnonzero(shown)):
            at = applied[block]
            row = self._of.pushes[at]
            for number, start, stop, shard, learner_id in _lists(at, begin[block], end[block], row["shard"], row["learner_id"]):
                yield _line("s", "gradient", self._learner[learner_id], start, extra=f',"id":{number + 1}')
                yield _line("f", "gradient", self._shard[shard], stop, extra=f',"id":{number + 1},"bp":"e"')


_CATEGORIES = {"X": "span", "i": "instant", "C": "counter", "s": "gradient", "f": "gradient", "M": "__metadata"}


def _line(phase: str, name: str, where: str, start: int = 0, end: int | None = None, args: str = "", extra: str = "") -> str:
    """Render one event; `start`, `end` in nanoseconds, so that spans that touch do so to the last digit."""
    length = "" if end is None else f',"dur":{(end - start) / 1e3:.3f}'
    scope = ',"s":"t"' if phase == "i" else ""  # on its thread
    told = f',"args":{args}' if args else ""
    head = f'"ph":"{phase}","name":"{name}","cat":"{_CATEGORIES[phase]}",{where},"ts":{start / 1e3:.3f}'
    return f"{{{head}{length}{scope}{extra}{told}}}"


def _blocks(indices: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(indices), _BLOCK):
        yield indices[start : start + _BLOCK]


def _lists(*columns: np.ndarray) -> Iterator[tuple[Any, ...]]:
    """Rows of plain Python numbers."""
    return zip(*(column.tolist() for column in columns), strict=True)


def _number(value: float) -> str:
    """JSON has no NaN and no infinity."""
    return repr(value) if math.isfinite(value) else "null"


def _word(words: type[Verdict] | type[Reason] | type[Event], value: int) -> str:
    """A newer log may know more words."""
    known: Sequence[int] = [word.value for word in words]
    return words(value).name.lower() if value in known else f"{words.__name__.lower()} {value}"
