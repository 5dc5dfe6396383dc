"""A timeline as a Chrome trace (JSON, Trace Event Format), for https://ui.perfetto.dev and chrome://tracing.

A host is a process (`pid`), a rank a thread (`tid`). Spans are `X`, moments `i`; arrows (`s`, `f`) lead from a push to its update;
counters (`C`) show clocks and staleness. `ts` and `dur` are microseconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mpisgd.analysis.cycles import ACTIVITIES, COMPUTE, PUSH
from mpisgd.analysis.timeline import Timeline
from mpisgd.base.errors import ConfigError
from mpisgd.config import Part
from mpisgd.records.log.schema import Event, LogRows, Reason, Verdict

_BLOCK = 8192
_NAMES = tuple("injected delay" if name == "delay" else name for name in ACTIVITIES)
_CATEGORIES = {"X": "span", "i": "instant", "C": "counter", "s": "gradient", "f": "gradient", "M": "__metadata"}

_Json = dict[str, Any]


def write(path: Path, timeline: Timeline, about: _Json) -> int:
    """Write the trace, with `about` as metadata; return the number of events. Raises ConfigError: an unwritable file."""
    events = 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            file.write(f'{{"displayTimeUnit":"ms","otherData":{json.dumps(about)},"traceEvents":[')
            for event in _Trace(timeline).events():
                file.write(f"{',' if events else ''}\n{json.dumps(event, separators=(',', ':'), allow_nan=False)}")
                events += 1
            file.write("\n]}\n")
    except OSError as error:
        raise ConfigError(f"--out {path}: expected a writable file: {error}") from error
    return events


class _Trace:
    def __init__(self, timeline: Timeline) -> None:
        self._of = timeline
        ranks, shown = timeline.ranks, timeline.ranks.learners[: timeline.learners]
        self._rows = timeline.names
        hosts = list(dict.fromkeys(ranks.host(rank) for rank in sorted(self._rows)))
        # above every tid: Perfetto shows a thread whose tid equals its pid first, as the main thread
        self._processes = {host: max(self._rows) + 1 + at for at, host in enumerate(hosts)}
        self._where = {rank: {"pid": self._processes[ranks.host(rank)], "tid": rank} for rank in self._rows}
        self._shard = [self._where[rank] for rank in ranks.shards]
        self._learner = [self._where[rank] for rank in shown]
        self._evaluator = self._where[ranks.evaluator]

    def events(self) -> Iterator[_Json]:
        """Yield slices before arrows, which bind to the slice open at their `ts`."""
        yield from self._metadata()
        yield from self._updates()
        yield from self._cycles()
        yield from self._evaluations()
        yield from self._arrivals()
        yield from self._answers()
        yield from self._happened()
        yield from self._arrows()

    def _metadata(self) -> Iterator[_Json]:
        first = {self._of.ranks.host(rank): rank for rank in sorted(self._rows, reverse=True)}
        for at, host in enumerate(self._processes):
            yield _event("M", "process_name", self._where[first[host]], args={"name": host})
            yield _event("M", "process_sort_index", self._where[first[host]], args={"sort_index": at})
        for at, (rank, name) in enumerate(self._rows.items()):
            yield _event("M", "thread_name", self._where[rank], args={"name": name})
            yield _event("M", "thread_sort_index", self._where[rank], args={"sort_index": at})

    def _cycles(self) -> Iterator[_Json]:
        cycles, names = self._of.cycles, ("seq", "timestamp", "samples", "loss")
        spans = cycles.edges[:, 0], cycles.edges[:, -1]
        columns = (cycles.learner_id, cycles.edges, cycles.known)
        for mini_batch, learner_id, edges, known in self._shown(spans, self._of.pushes, names, *columns, row=cycles.row):
            for activity, name in enumerate(_NAMES):
                start, end = edges[activity], edges[activity + 1]
                args = {"seq": mini_batch["seq"]}
                if activity in (COMPUTE, PUSH):
                    args = mini_batch | ({} if known or activity == COMPUTE else {"length": "not logged: at least"})
                elif start == end:
                    continue
                yield _event("X", name, self._learner[learner_id], start, end, args)

    def _updates(self) -> Iterator[_Json]:
        updates, names = self._of.updates, ("shard", "clock", "gradients", "samples", "learning_rate", "mean_loss")
        spans = updates.start, updates.end
        for args, start, end, staleness in self._shown(spans, updates.rows, names, *spans, updates.staleness):
            shard = args.pop("shard")
            where = self._shard[shard]
            yield _event("X", "update", where, start, end, args | {"mean_staleness": _number(staleness)})
            yield _event("C", f"shard {shard} clock", where, end, args={"updates": args["clock"]})
            if math.isfinite(staleness):
                yield _event("C", f"shard {shard} staleness", where, end, args={"mean": staleness})

    def _evaluations(self) -> Iterator[_Json]:
        evaluations, names = self._of.evaluations, ("snapshot", "epochs", "averaged", "train", "loss", "error")
        spans = evaluations.start, evaluations.end
        for args, start, end in self._shown(spans, evaluations.rows, names, *spans):
            args["weights"] = "thetabar" if args.pop("averaged") else "theta"
            args["data"] = str(Part(args.pop("train")))
            yield _event("X", "evaluate", self._evaluator, start, end, args)

    def _arrivals(self) -> Iterator[_Json]:
        names = ("shard", "learner_id", "seq", "timestamp", "clock", "staleness", "verdict", "reason", "weight", "loss")
        arrival = self._of.arrival
        for args, moment in self._shown((arrival, arrival), self._of.pushes, names, arrival):
            shard, verdict = args.pop("shard"), word_of(Verdict, args["verdict"])
            args |= {"verdict": verdict, "reason": word_of(Reason, args["reason"])}
            yield _event("i", f"{verdict} τ={args['staleness']}", self._shard[shard], moment, args=args)

    def _answers(self) -> Iterator[_Json]:
        answer = self._of.answer
        for args, moment in self._shown((answer, answer), self._of.pushes, ("shard", "learner_id"), answer):
            yield _event("i", "answer", self._shard[args.pop("shard")], moment, args=args)

    def _happened(self) -> Iterator[_Json]:
        moments, names = self._of.moment, ("shard", "clock", "kind", "learner_id", "value")
        for args, moment in self._shown((moments, moments), self._of.events, names, moments):
            shard, kind = args.pop("shard"), args.pop("kind")
            yield _event("i", word_of(Event, kind), self._shard[shard] if shard >= 0 else self._evaluator, moment, args=args)

    def _arrows(self) -> Iterator[_Json]:
        """Yield arrows from pushes to updates that both begin in the window."""
        window, applied = self._of.window, np.flatnonzero(self._of.update >= 0)
        begin = self._of.cycles.edges[self._of.cycle[applied], PUSH]
        end = self._of.updates.start[self._of.update[applied]]
        shown = (begin >= window.start) & (end <= window.end) & (begin <= end)
        for block in _blocks(np.flatnonzero(shown)):
            row = self._of.pushes[applied[block]]
            columns = (applied[block] + 1, begin[block], end[block], row["shard"], row["learner_id"])
            for number, start, stop, shard, learner_id in zip(*(column.tolist() for column in columns), strict=True):
                yield _event("s", "gradient", self._learner[learner_id], start, id=number)
                yield _event("f", "gradient", self._shard[shard], stop, id=number, bp="e")

    def _shown(
        self,
        spans: tuple[np.ndarray, np.ndarray],
        rows: LogRows,
        names: tuple[str, ...],
        *columns: np.ndarray,
        row: np.ndarray | None = None,
    ) -> Iterator[tuple[Any, ...]]:
        """Yield fields and columns of spans in the window; `row`: of each span."""
        for at in _blocks(self._of.window.of(*spans)):
            told = rows[at if row is None else row[at]]
            fields = zip(*(told[name].tolist() for name in names), strict=True)
            for values, *more in zip(fields, *(column[at].tolist() for column in columns), strict=True):
                yield dict(zip(names, map(_number, values), strict=True)), *more


def _event(
    phase: str, name: str, where: _Json, start: int = 0, end: int | None = None, args: _Json | None = None, **more: Any
) -> _Json:
    """Return an event; nanoseconds let touching spans agree to the last digit."""
    event = {"ph": phase, "name": name, "cat": _CATEGORIES[phase], **where, "ts": start / 1e3}
    if end is not None:
        event["dur"] = (end - start) / 1e3
    if phase == "i":
        event["s"] = "t"  # on its thread
    return event | more | ({"args": args} if args else {})


def _blocks(indices: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(indices), _BLOCK):
        yield indices[start : start + _BLOCK]


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def word_of(words: type[Verdict] | type[Reason] | type[Event], value: int) -> str:
    """Return a word; the number for a word of newer logs."""
    return words(value).name.lower() if value in set(words) else f"{words.__name__.lower()} {value}"
