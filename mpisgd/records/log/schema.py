"""Contents of a run's files: the dtype of every table, and the names of the files (DESIGN 6).

Every shard writes one HDF5 file per attempt, `shard-000.attempt-0.h5`, the evaluator `evaluator.attempt-0.h5`; `log.h5` has the
tables of all: copied, or, of a table above 1 GiB, a virtual data set over these files. A file holds the tables below as
one-dimensional compound data sets; `committed` (int64, in the order of `TABLES`: rows safely written; later rows may be torn); and
`summary` (one row, written when the rank leaves in order; `final_clock` = -1 before). Seconds count from the run's start barrier,
on the writing rank's clock; in a continued run from its checkpoint. In a fault-tolerant run shard 0 may follow a hung evaluator:
its file, with the attribute `appointed` = 1, replaces the evaluator's.

Under a coordinator (protocol sandblaster), `clock` counts evaluations of the whole batch. A push is the sum of the gradients of
`gradients` portions. A row of `updates` is an evaluation: `learning_rate` is the step length, `mean_loss` the batch's loss. The
coordinator's file, `coordinator.attempt-0.h5`, has `portions`, `iterations` and `commands`, continued as shards' files, also if
slices are cut anew.

Checksums: `sums`, int64 (tables, 2), the number of rows of each table, and the CRC-32 of their bytes with `answer_s`, set later, as
NaN; `closing`, int64 (3,), written when the file is closed: 1, the CRC-32 of the column `answer_s`, and of `summary`.

A killed and continued run has files of several *attempts*, each with the attribute `attempt`. Later files have the attributes
`continues_clock`, the checkpoint's clock, and `continues`, int64 (parts, 1 + tables): an attempt, then how many rows of each table,
in that attempt's file of the same rank, come before the rows here. Its other rows were done again: reader and `log.h5` omit them.

An attempt with another number of learners or shards begins a new *layout*: the run's tables are then of the last layout, but
`evaluations` has all rows; clocks and seconds go on. The shards' files of the layout's first attempt have the attributes
`begins_samples` and `begins_s`, samples applied and seconds at `continues_clock`; `begins_seq`, int64 (learners,), each learner's
next mini-batch; and `before`, int64 (parts, 2 + tables): a shard of the layout before, an attempt, and how many rows of each table
of that file belong to the run. `log.h5` has earlier layouts in groups `layouts/0`, `layouts/1` ..., with the attributes `learners`,
`shards`, `first_clock` and `last_clock`.

Earlier logs count a group's `neighbour_s` as computing, and have no `scale`. A file with the attribute `room`, or the data sets
`counts_0` and `counts_1`, was bounded by an earlier mpisgd, and is refused.

Each table's data set has attributes `units` ("" counts nothing, "1" is a ratio) and `meanings`, texts in the order of the columns.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpisgd.comm.messages import Op
from mpisgd.rules.verdict import Kind as Verdict
from mpisgd.rules.verdict import Reason

__all__ = ["EVALUATIONS", "EVENTS", "PUSHES", "SUMMARY", "TABLES", "UPDATES", "Event", "LogRows", "Reason", "Verdict"]

LogRows: TypeAlias = Any
"""Rows of a table: a one-dimensional array of a dtype of this module. mypy arrives at Any, too."""

SCHEMA_VERSION = 4

RULES = 9
"""Version of the rules of a run that neither configuration nor log names; `rules` in config.toml's [environment], 1 where missing.
Earlier rules: `docs/explanation/log-is-a-proof.md`."""


class Event(enum.IntEnum):
    STARTED = 0
    STOPPED = 1
    DEPARTED = 2
    NONFINITE = 3
    SNAPSHOT = 4
    TIMEOUT = 6  # an update was made, or may be made, with fewer gradients than wanted
    GAVE_UP = 7  # a learner gave up mini-batch `value`, to begin it anew
    CHECKPOINT = 8  # the slice was copied for a checkpoint of this clock, in `value` seconds
    SKIPPED = 9  # a checkpoint of this clock was due, but the one before was still being written
    RESUMED = 10  # another attempt goes on here, from the checkpoint of this clock
    INTERRUPTED = 11  # by the signal of number `value`: learners get no more weights
    UNSAVED = 12  # the checkpoint of clock `value` could not be written
    LOST = 13  # a learner is dead, or was missed and has not come back; its last weights had clock `value`, -1 = none
    MISSED = 14  # a learner was silent for `value` seconds: the others go on without it
    RETURNED = 15  # a missed learner is back
    STUCK = 16  # a transfer to or from a learner was given up
    PASSED = 17  # a learner asks for a later clock, reached by another shard: it will push nothing of this clock
    REFUSED = 18  # an impossible message from rank `value` was refused
    GOODBYE = 19  # a learner leaves: by its own count, it has pushed `value` gradients to this shard, in this attempt
    ENOUGH = 20  # evaluations are no better since snapshot `value`, or so others say (NaN): learners get no more weights


class Outcome(enum.IntEnum):
    """Outcome of a dealt portion."""

    COUNTED = 0  # in the sum
    DUPLICATE = 1  # another learner's result had come before, or the evaluation was over
    LATE = 2  # not computed: when its learner had pulled, the evaluation was over
    LOST = 3  # its learner left before all shards had been told to sum it; dealt again


class Why(enum.IntEnum):
    """Reason for which an iteration of L-BFGS was the last, if any."""

    GOES_ON = 0
    ITERATIONS = 1  # as many as the configuration allows
    GRADIENT = 2  # no element of the gradient is above tolerance_grad
    CHANGE = 3  # neither loss nor weights changed by more than tolerance_change
    DIRECTION = 4  # along the direction the loss does not fall: no step was made
    LINE_SEARCH = 5  # no lower loss was found


class Column(NamedTuple):
    """A column of a table: type, unit and meaning, in ASCII."""

    name: str
    type: type[np.generic]
    unit: str
    meaning: str


ABOUT: dict[str, str] = {}
COLUMNS: dict[str, tuple[Column, ...]] = {}


def _table(name: str, about: str, *columns: tuple[str, type[np.generic], str, str]) -> np.dtype:
    ABOUT[name], COLUMNS[name] = about, tuple(Column(*each) for each in columns)
    return np.dtype([(each.name, each.type) for each in COLUMNS[name]])


def _numbers(kinds: type[enum.IntEnum]) -> str:
    return ", ".join(f"{each.value} = {each.name}" for each in kinds)


def said(table: str, dtype: np.dtype) -> dict[str, np.ndarray]:
    known = {each.name: each for each in COLUMNS[table]}
    own = [known.get(name) or Column(name, np.float64, "", "metric of an own step") for name in dtype.names or ()]
    return {"units": np.array([each.unit for each in own], "S"), "meanings": np.array([each.meaning for each in own], "S")}


PUSHES = _table(
    "pushes",
    "One row per push received by a shard, in the order taken.",
    ("shard", np.int16, "", "index of the shard"),
    ("clock", np.int64, "updates", "the shard's clock when the gradient was added to the sum or refused"),
    ("timestamp", np.int64, "updates", "clock of the weights that the gradient was computed from"),
    ("staleness", np.int64, "updates", "clock - timestamp"),
    ("learner_id", np.int32, "", "index of the learner"),
    ("seq", np.int64, "", "the learner's own running number of the mini-batch"),
    ("samples", np.int32, "samples", "samples of the mini-batch, or of the sum"),
    ("gradients", np.int32, "gradients", "gradients in the sum: 1, or as many as the learner's team has ranks"),
    ("verdict", np.uint8, "", "of the protocol: " + _numbers(Verdict)),
    ("reason", np.uint8, "", "of the verdict: " + _numbers(Reason)),
    ("weight", np.float64, "1", "factor of the gradient in the sum, or, of `modulate = 'rate'`, for the rate: 1/tau or 1"),
    ("learning_rate", np.float64, "1", "of the optimiser when the gradient was taken, before `weight`"),
    ("arrival_s", np.float64, "s", "header received"),
    ("answer_s", np.float64, "s", "the learner's next pull was answered, with finished weights; NaN: not answered"),
    # Layerwise: compute_s and delay_s until this slice's gradient, push_s the part not hidden, the others sums.
    ("compute_s", np.float64, "s", "forward and backward, on the learner, without delay_s; of a team, until the sum is there"),
    ("delay_s", np.float64, "s", "straggler injection, on the learner; of a team, the ranks' delays are in compute_s"),
    ("push_s", np.float64, "s", "the learner's previous push to all shards (0 for the first)"),
    ("wait_s", np.float64, "s", "then, from the pull request until the first answer began"),
    ("pull_s", np.float64, "s", "then, until the weights of all shards were there"),
    ("rounded", np.float64, "1", "rounded off the gradient (by layers: off the slice), as a share of the norm; NaN: not finite"),
    ("loss", np.float64, "", "of the mini-batch; of a team, the mean over the ranks"),
)

_NEIGHBOUR = "only of groups: waiting for the ranks of the stages before and after; not in compute_s"
COLUMNS["pushes"] += (
    Column("portion", np.int64, "", "only where data are dealt: the gradient's portion"),
    Column("neighbour_s", np.float64, "s", _NEIGHBOUR),
    Column("scale", np.float64, "1", "only of float16: the factor of the loss in the last backward pass of the learner"),
    Column("backward_s", np.float64, "s", "only where streamed chunks leave during it: the part of compute_s after the header"),
)
_EXTRAS = ((), ("portion",), ("neighbour_s",), ("scale",), ("portion", "scale"), ("backward_s",))


UPDATES = _table(
    "updates",
    "One row per weight update of a shard.",
    ("shard", np.int16, "", "index of the shard"),
    ("clock", np.int64, "updates", "after the update: 1, 2, 3 ..."),
    ("gradients", np.int32, "gradients", "the counted divisor (0: all were dropped, the weights stayed)"),
    ("samples", np.int64, "samples", "applied up to and with this update"),
    ("learning_rate", np.float64, "1", "of this update; of `modulate = 'rate'`, times the mean weight of the gradients"),
    ("time_s", np.float64, "s", "update done"),
    ("update_s", np.float64, "s", "seconds of the optimiser; of chunks (`chunks.py`) with the sum's last gradient"),
    ("mean_loss", np.float64, "", "of the mini-batches in this update"),
    ("gradient_sq", np.float64, "", "of this slice: sum |w_i g_i|^2 / gradients over pushes g_i, weights w_i; NaN = not measured"),
    ("sum_sq", np.float64, "", "of this slice: |sum w_i g_i|^2, before the divisor; NaN = not measured, or one push"),
)

EVALUATIONS = _table(
    "evaluations",
    "One row per evaluated snapshot, data split and kind of weights; then a float64 column for each metric of a step.",
    ("snapshot", np.int32, "", "0 = initial weights, then 1, 2, ..."),
    ("clock_min", np.int64, "updates", "over the shards"),
    ("clock_max", np.int64, "updates", "the largest"),
    ("samples", np.int64, "samples", "applied on shard 0 when the snapshot was taken"),
    ("epochs", np.float64, "epochs", "the same as a number of epochs"),
    ("taken_s", np.float64, "s", "when shard 0 took the snapshot"),
    ("averaged", np.uint8, "", "0 = theta, 1 = thetabar"),
    ("train", np.uint8, "", "0 = test data, 1 = training data, 2 = validation data, samples set aside"),
    ("loss", np.float64, "", "mean loss of the split"),
    ("error", np.float64, "1", "share of wrong classes, 0 ... 1; or the metric `error` of an own step"),
    ("evaluate_s", np.float64, "s", "seconds of the evaluation"),
)

EVENTS = _table(
    "events",
    "Things that happened.",
    ("shard", np.int16, "", "-1 = evaluator"),
    ("clock", np.int64, "updates", "the shard's clock"),
    ("kind", np.uint8, "", "the event: a number of `Event`, in docs/reference/log-format.md"),
    ("learner_id", np.int32, "", "-1 = none"),
    ("value", np.float64, "", "a number whose meaning depends on `kind`"),
    ("time_s", np.float64, "s", "when"),
)

PORTIONS = _table(
    "portions",
    "One row per portion dealt to a learner; counted portions in the order of the sum.",
    ("clock", np.int64, "evaluations", "evaluations before this one"),
    ("portion", np.int64, "", "samples portion * mu ... of the batch's order"),
    ("learner_id", np.int32, "", "index of the learner"),
    ("seq", np.int64, "", "of the portion's push; -1 = none"),
    ("samples", np.int32, "samples", "samples of the portion"),
    ("loss", np.float64, "", "mean over the samples"),
    ("dealt_s", np.float64, "s", "when the coordinator dealt the portion"),
    ("done_s", np.float64, "s", "when the coordinator heard of the result; NaN: never"),
    ("compute_s", np.float64, "s", "forward and backward, on the learner, without delay_s"),
    ("delay_s", np.float64, "s", "straggler injection, on the learner"),
    ("outcome", np.uint8, "", "what became of the portion: " + _numbers(Outcome)),
    ("copy", np.uint8, "", "1 = another learner already had the portion"),
)

ITERATIONS = _table(
    "iterations",
    "One row per iteration of L-BFGS.",
    ("iteration", np.int64, "", "1, 2, 3 ..."),
    ("clock", np.int64, "evaluations", "evaluations up to and with this iteration"),
    ("loss", np.float64, "", "at the end: of the whole batch, with weight decay"),
    ("gradient_max", np.float64, "", "the greatest element of the gradient there, absolutely"),
    ("step", np.float64, "1", "length of the step, in directions; 0 = none was made"),
    ("evaluations", np.int32, "evaluations", "of the line search; in the first iteration, also of the start"),
    ("history", np.int32, "steps", "steps whose curvature made the direction"),
    ("why", np.uint8, "", "whether this was the last iteration: " + _numbers(Why)),
    ("time_s", np.float64, "s", "when it was over"),
    ("evaluating_s", np.float64, "s", "seconds of evaluations: the coordinator waited for learners"),
    ("commanding_s", np.float64, "s", "the other seconds: the coordinator commanded shards, and waited for answers"),
)

COMMANDS = _table(
    "commands",
    "One row per command of the optimiser to the shards, in their order; only with protocol.log_commands.",
    ("clock", np.int64, "evaluations", "evaluations before the command"),
    ("op", np.uint8, "", "the operation: " + _numbers(Op)),
    ("out", np.int64, "", "the slot made; -1 = none"),
    ("a", np.int64, "", "the command's first slot; slot 0 are the first weights"),
    ("b", np.int64, "", "the command's second slot; -1 = none"),
    ("alpha", np.float64, "", "the factor: ADD made a + alpha b, SCALE alpha a; NaN: none"),
    ("value", np.float64, "", "the answer of all shards together: a sum, or the largest; NaN: none"),
    ("took_s", np.float64, "s", "until the answer; where nobody answers, until the command was on the way"),
)
COORDINATOR = {"portions": PORTIONS, "iterations": ITERATIONS, "commands": COMMANDS}  # of the coordinator's file, if there is one
TABLES = {"pushes": PUSHES, "updates": UPDATES, "evaluations": EVALUATIONS, "events": EVENTS}
_PLAIN = {**TABLES, **COORDINATOR}


def wider(table: str, names: Sequence[str]) -> np.dtype:
    """Return a table's dtype with these columns more: of `_EXTRAS`, or metrics."""
    plain, types = _PLAIN[table], {each.name: each.type for each in COLUMNS[table]}
    more = [(name, types.get(name, np.float64)) for name in names]
    return np.dtype([*((name, plain[name]) for name in plain.names or ()), *more])


def extra(table: str, dtype: np.dtype) -> tuple[str, ...]:
    """Return the columns that only some runs have."""
    return (dtype.names or ())[len(_PLAIN[table].names or ()) :]


def fits(table: str, dtype: np.dtype) -> bool:
    names = extra(table, dtype)
    if table == "evaluations":  # any metrics
        known = not {*names} & {*(EVALUATIONS.names or ())}
    else:
        known = names in (_EXTRAS if table == "pushes" else ((),))
    return known and dtype == wider(table, names)


def tables_of(path: Path) -> dict[str, np.dtype]:
    return COORDINATOR if path.name.startswith("coordinator.") else TABLES


def tables_of_shard(sampling: str, *, in_groups: bool, scaled: bool = False, early: bool = False) -> dict[str, np.dtype]:
    there = {"portion": sampling == "dealt", "neighbour_s": in_groups, "scale": scaled, "backward_s": early}
    return {**TABLES, "pushes": wider("pushes", [name for name in there if there[name]])}


def backward_s(pushes: LogRows) -> np.ndarray:
    """Return seconds of computing behind each push's header; mostly 0."""
    there = "backward_s" in (pushes.dtype.names or ())
    return np.nan_to_num(pushes["backward_s"]) if there else np.zeros(len(pushes))


def place(table: str) -> int:
    return list(COORDINATOR if table in COORDINATOR else TABLES).index(table)


def common(table: str, dtypes: Iterable[np.dtype]) -> np.dtype:
    """Return the dtype with the columns of all files."""
    known = [dtype for dtype in dtypes if fits(table, dtype)]  # a foreign layout is refused where its rows are read
    return wider(table, list(dict.fromkeys(name for dtype in known for name in extra(table, dtype))))


def joined(table: str, parts: Sequence[LogRows]) -> LogRows:
    """Join rows of several files; a missing column (a metric, `neighbour_s`, `scale`) is NaN."""
    dtype = common(table, [part.dtype for part in parts])
    rows = [part for part in parts if len(part)]  # an evaluator's file has no pushes, in the plain layout
    return np.concatenate([np.empty(0, dtype), *rows]) if all(part.dtype == dtype for part in rows) else rows_as(dtype, rows)


def rows_as(dtype: np.dtype, parts: Sequence[LogRows]) -> LogRows:
    rows = np.empty(sum(map(len, parts)), dtype)
    for name in dtype.names or ():
        columns = [part[name] if name in (part.dtype.names or ()) else np.full(len(part), np.nan) for part in parts]
        rows[name] = np.concatenate(columns)
    return rows


SUMMARY = _table(
    "summary",
    "The last row of a shard, written on leaving in order.",
    ("shard", np.int16, "", "index of the shard"),
    ("final_clock", np.int64, "updates", "the shard's last clock"),
    ("samples", np.int64, "samples", "applied"),
    ("received", np.int64, "pushes", "pushes received by the shard"),
    ("pushed", np.int64, "pushes", "pushes to this shard, by the learners' goodbyes"),
    ("diverged", np.uint8, "", "1 = the run has diverged"),
)

STEP = 1 << 16  # rows read at a time: a table may exceed memory

LOG, CONFIG, DONE = "log.h5", "config.toml", "DONE"
DONE_ENTRIES = ("clock", "samples", "diverged", "seconds", "books_balanced")
WEIGHTS, BEST, LOCK = "weights.pt", "best.pt", "LOCK"
SUMMED = {"weights": WEIGHTS, "best": BEST, "log": LOG}
"""Entries of DONE with length and checksum of a file; `files` has each rank's checksum of checksums."""
RUNNING = "RUNNING"  # there while a job runs, fault-tolerant or on several nodes (`reaper.py`)
CHECKPOINTS = "checkpoint"
SPOOL = ".snapshots-"
ASIDE = ".*.h5.new"


def aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.new")


def shard_file(shard: int, attempt: int = 0) -> str:
    return f"shard-{shard:03d}.attempt-{attempt}.h5"


def spool_file(shard: int, layout: int = 0) -> str:
    """Return the file of snapshots; `layout`: first attempt with these slices."""
    return f"{SPOOL}{shard:03d}.layout-{layout}" if layout else f"{SPOOL}{shard:03d}"


def learner_file(learner_id: int, attempt: int) -> str:
    """Return the file of a learner's first state of an attempt."""
    return f"learner-{learner_id:03d}.attempt-{attempt}.pt"


def coordinator_file(attempt: int = 0) -> str:
    return f"coordinator.attempt-{attempt}.h5"


def evaluator_file(attempt: int = 0) -> str:
    return f"evaluator.attempt-{attempt}.h5"
